"""Reduced runs for tests, written as `stepscope reduce` writes them: some hosts, one of their ranks late on purpose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.schema import REDUCED_SCHEMA
from stepscope.tables.reduced import LABELS, Group, Index, ReducedRank, group_id, write_host
from tests.builders import T0

LINE = {"file": "/home/user/project/data.py", "line": 12, "function": "decode"}
RUN = {"name": "train", "cwd": "/home/user/project", "command": ["python", "train.py"], "world_size": None}
SLURM = {"kind": "slurm", "job_id": "17", "step_id": "0", "identity": ["slurm", "17", "0", "0"]}


class Made(Struct, frozen=True, kw_only=True):
    """What a reduced run is made of. Times are ms; a late rank waits `excess_ms` longer for its data at `LINE`.

    stages: pipeline stages, if more than one: rank r is in stage (r // per_host) % stages, and `windows` are recorded.
    """

    ranks: int = 32
    per_host: int = 8
    steps: int = 60
    late: Collection[int] = (13,)
    excess_ms: float = 20.0
    missing: Collection[int] = ()
    stages: int = 1
    windows: int = 0  # the last steps
    hosts: Sequence[str] = ()
    telemetry: Sequence[dict[str, Any]] = ()
    left_out: tuple[str, ...] = ()

    def host(self, number: int) -> str:
        return self.hosts[number] if number < len(self.hosts) else f"node{number + 1}"


def reduced_run(run: Path, made: Made | None = None) -> Path:
    """Write RUN/reduced of `made`; returns RUN. A host all ranks of which are missing has no folder."""
    made = Made() if made is None else made
    for number in range(-(-made.ranks // made.per_host)):
        numbers = range(number * made.per_host, min((number + 1) * made.per_host, made.ranks))
        here = [rank for rank in numbers if rank not in made.missing]
        if here:
            _host(run, made, number, here)
    return run


def _host(run: Path, made: Made, number: int, ranks: Sequence[int]) -> None:
    stage = [(rank // made.per_host) % made.stages for rank in ranks]
    everyone = Group(group_id(range(made.ranks), "default_pg"), tuple(range(made.ranks)), "default_pg")
    index = Index(
        schema=REDUCED_SCHEMA,
        version="0",
        host=made.host(number),
        world_size=made.ranks,
        ranks=tuple(
            ReducedRank(
                rank=rank,
                process=f"rank-{rank}",
                pid=1000 + rank,
                device="cuda:0",
                exchange=("backward",),
                exchange_source="hooks of DistributedDataParallel",
                samples_per_second=100.0,
                **({"dp": rank // made.per_host // made.stages, "pp": at, "tp": rank % made.per_host}
                   if made.stages > 1 else {}),
            )
            for rank, at in zip(ranks, stage, strict=True)
        ),
        groups=(everyone,),
        tables={},
        source="made up",
        run={**RUN, "world_size": made.ranks, "started_ns": T0, "ended_ns": T0 + 10**10, "scheduler": SLURM},
        left_out=made.left_out,
    )  # fmt: skip
    frames = {"steps": _steps(made, ranks), "lines": _lines(made, ranks)}
    if made.telemetry:
        frames["telemetry"] = pl.DataFrame(list(made.telemetry))
    write_host(run, index, frames)


def _steps(made: Made, ranks: Sequence[int]) -> pl.DataFrame:
    step, rank = np.meshgrid(np.arange(made.steps), np.array(ranks), indexing="ij")
    step, rank = step.ravel(), rank.ravel()
    noise = np.random.default_rng(7 + ranks[0]).normal(0, 200, (3, len(step))).astype(np.int64)
    late = np.isin(rank, list(made.late))
    excess_us, whole_us = int(made.excess_ms * 1000), 100_000 + int(made.excess_ms * 1000) * bool(made.late)
    data, forward, optimizer = 2_000 + late * excess_us, 30_000 + noise[0], 8_000 + noise[1]
    windowed = step >= made.steps - made.windows
    return pl.DataFrame(
        {
            "rank": rank,
            "step": step,
            "start_us": T0 // 1000 + step * whole_us,
            "wall_us": np.full(len(step), whole_us),
            "data_wait_us": data,
            "before_forward_us": np.zeros(len(step), np.int64),
            "forward_us": forward,
            "backward_us": whole_us - data - forward - optimizer,
            "optimizer_us": optimizer,
            "other_us": np.zeros(len(step), np.int64),
            "gc_us": np.zeros(len(step), np.int64),
            "device_us": pl.Series([None] * len(step), dtype=pl.UInt32),
            "compute_us": pl.Series(np.where(windowed, 60_000 + noise[2], 0)).set(pl.Series(~windowed), None),
            "collective_us": pl.Series([None] * len(step), dtype=pl.UInt32),
            "samples": np.full(len(step), 32),
            "tokens": pl.Series([None] * len(step), dtype=pl.UInt32),
            "label": np.where(windowed, LABELS.index("window"), LABELS.index("steady")),
        }
    ).sort("step", "rank")


def _lines(made: Made, ranks: Sequence[int]) -> pl.DataFrame:
    """A hundred samples of a rank's loop a second: the late one stands at `LINE` in its data wait."""
    rows: list[dict[str, Any]] = []
    for rank in ranks:
        late = 150 if rank in made.late else 0
        rest = {"phase": "forward", "leaf": "linear (torch/nn/functional.py)", "waiting": False, "samples": 600 - late}
        rows.append({"rank": rank, "file": "/home/user/project/train.py", "line": 40, "function": "main", **rest})
        if late:
            where = {"phase": "data_wait", "leaf": "open (PIL/Image.py)", "waiting": False, "samples": late}
            rows.append({"rank": rank, **LINE, **where})
    return pl.DataFrame(rows)
