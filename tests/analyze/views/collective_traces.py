"""Traces of ranks that talk to each other, as files a profiler would write; times are µs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope import api
from stepscope.analyze.context import Context
from stepscope.engine import spans as base

BASE_NS = 1_750_000_000_000_000_000
US = 1000
COMPUTE_STREAM, COMMUNICATION_STREAM = 7, 13
Rows = list[dict[str, Any]]


class Rank:
    """What one rank writes. `size` None: nothing in the file says which rank of how many it is."""

    def __init__(self, rank: int = 0, size: int | None = None, *, shift_us: float = 0) -> None:
        self.rank = rank
        self.size = size
        self.events: Rows = []
        self.shift_us = shift_us
        self._correlation = 0

    def slice(
        self, category: str, name: str, start: float, length: float, *, thread: int | str = 1, **args: Any
    ) -> None:
        """Any slice; of a device where `thread` names a stream."""
        process: int | str = 0 if category in ("kernel", "gpu_memcpy", "gpu_memset") else 100
        row = {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "dur": length, "args": args}
        self.events.append({**row, "ts": start + self.shift_us})

    def step(self, number: int, start: float, length: float) -> None:
        self.slice("user_annotation", f"ProfilerStep#{number}", start, length)

    def kernel(self, name: str, start: float, length: float, *, at: float | None = None, **args: Any) -> None:
        """A kernel, launched at `at` (just before it by default)."""
        self._correlation += 1
        stream = COMMUNICATION_STREAM if "nccl" in name.lower() else COMPUTE_STREAM
        launch = start - 2 if at is None else at
        self.slice("cuda_runtime", "cudaLaunchKernel", launch, 1, correlation=self._correlation)
        known = {"device": 0, "stream": stream, "correlation": self._correlation}
        self.slice("kernel", name, start, length, thread=stream, **known, **args)

    def collective(
        self,
        start: float,
        length: float,
        kind: str = "allreduce",
        *,
        group: str = "0",
        ranks: Sequence[int] | None = (0, 1),
        sequence: int | None = None,
        at: float | None = None,
    ) -> None:
        """A kernel of NCCL with the arguments that newer writers give it; `ranks` None leaves them out."""
        args: dict[str, Any] = {}
        if ranks is not None:
            named = {"Process Group Name": group, "Process Group Ranks": str(list(ranks)), "Group size": len(ranks)}
            count = {"In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float"}
            args = {"Collective name": kind, **count, **named}
        if sequence is not None:
            args["Seq"] = sequence
        self.kernel(f"ncclDevKernel_{kind}(ncclDevKernelArgsStorage<4096ul>)", start, length, at=at, **args)

    def compute(self, start: float, length: float, *, at: float | None = None) -> None:
        self.kernel("gemm", start, length, at=at)

    def write(self, path: Path) -> Path:
        """To a file, packed where its name says so."""
        head: dict[str, Any] = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS}
        if self.size is not None:
            head["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": self.size}
        data = json.dumps({**head, "traceEvents": self.events}).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
        return path


def opened(*paths: Path) -> base.Base:
    """What the views start from, of traces or a run folder."""
    return Context(api.open_run(*paths, options=api.ReadOptions(cache=False)).tables).base


def written(folder: Path, *ranks: Rank) -> base.Base:
    """The ranks in files of one folder, opened."""
    for number, rank in enumerate(ranks):
        rank.write(folder / f"worker{number if rank.size is None else rank.rank}.pt.trace.json")
    return opened(folder)
