"""All chunks of a trace as plain lists, and small traces to read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.read.kineto import KinetoTrace
from stepscope.read.streams import Limits
from stepscope.read.trace import MISSING, Text, TraceSummary

SHARED = Path(__file__).parents[2] / ".." / "shared" / "traces"
BASE = 1_790_857_026_000_000_000


class Collected:
    """Columns of a whole trace: `slices["name"]` is a list; missing values are None."""

    def __init__(self, path: Path, limits: Limits | None = None) -> None:
        source = KinetoTrace(path, limits=limits)
        chunks = list(source.chunks())
        self.summary: TraceSummary = source.summary()
        self.quality = self.summary.quality
        self.slices = _columns(chunk.slices for chunk in chunks)
        self.flows = _columns(chunk.flows for chunk in chunks)
        self.memory = _columns(chunk.memory for chunk in chunks)
        self.chunks = len(chunks)

    @property
    def names(self) -> list[str]:
        return self.slices["name"]

    @property
    def starts(self) -> list[int]:
        """On the epoch clock."""
        return [start + self.summary.base_ns for start in self.slices["start_ns"]]


def _columns(parts: Iterable[Any]) -> dict[str, list[Any]]:
    result: dict[str, list[Any]] = {}
    for part in parts:
        for name in part.__struct_fields__:
            values = _plain(getattr(part, name))
            assert len(values) == len(part)
            result.setdefault(name, []).extend(values)
    return result


def _plain(column: Any) -> list[Any]:
    if isinstance(column, Text):
        assert len(set(column.values)) == len(column.values)
        assert column.codes.dtype == np.int32
        return [None if code < 0 else column.values[code] for code in column.codes.tolist()]
    if column.dtype == np.float64:
        return [None if value != value else value for value in column.tolist()]
    return [None if value == MISSING else value for value in column.tolist()]


def event(name: Any = "aten::add", ts: Any = 1.5, dur: Any = 2, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, **more}


def kernel(name: str = "gemm", ts: Any = 5, dur: Any = 3, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}


def written(folder: Path, content: Any, name: str = "trace.json") -> Path:
    path = folder / name
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") and not data.startswith(b"\x1f\x8b") else data)
    return path


def read(folder: Path, content: Any, name: str = "trace.json", limits: Limits | None = None) -> Collected:
    return Collected(written(folder, content, name), limits)
