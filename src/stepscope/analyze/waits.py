"""The main process's time in its loader taken apart: what workers and helper threads did meanwhile.

A moment in which the main thread waits belongs to what is nearest to its end: pinning, else a batch on its way between
processes, else workers that make batches (in equal parts), else workers that start, else nothing (workers idle). Where the
sampler told times, worker and main process are compared at the same moments. Elsewhere the workers' samples of the same
period stand for them, each thread taken as independent of the others: n of which each is busy a share b of the time leave
(1 - b)^n of it to idleness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from stepscope.analyze import loader_states as states
from stepscope.analyze import steps
from stepscope.analyze.context import Context
from stepscope.analyze.intervals import Intervals, covered, intersect, merge, subtract, total, union
from stepscope.analyze.loader_states import LoaderStates
from stepscope.analyze.sampled_loop import SampledLoop
from stepscope.analyze.user_paths import UserPaths, at, rows_of
from stepscope.model.views.waits import LoaderWait, WaitPart
from stepscope.tables.phases import DATA_WAIT

MAX_LINES = 4  # named in a wait; the rest is one part
KINDS = {
    states.HERE: "loading_here",
    states.TRANSFER: "transfer",
    states.PINNING: "pinning",
    states.BUSY: "worker_busy",
    states.START: "worker_start",
    states.IDLE: "workers_idle",
    states.NOTHING: "unknown",
}
_BY_LINE = (states.HERE, states.BUSY)
_SEGMENT = ["process", "host", "file"]
_PARTS = {"process": pl.String, "state": pl.Int8, "line": pl.Int32, "weight": pl.Float64}


@dataclass(frozen=True)
class _Threads:
    """Rows with `state` and `line`: `mains` of ranks in their loop (`state` null outside the loader), `others` beside."""

    mains: pl.DataFrame
    others: pl.DataFrame


def facts(context: Context, loop: SampledLoop, users: UserPaths, idle: bool | None) -> tuple[LoaderWait, ...]:
    """One per rank that was sampled in a loader, by rank; empty without any. `idle`: whether waiting was sampled."""
    by_path = LoaderStates(users)
    counted = _threads(loop.rows, _beside(context.tables.stacks, loop.rows), by_path)
    waiting = counted.mains.filter(pl.col("state").is_not_null())
    if waiting.is_empty():
        return ()
    timed = _timed(context, loop, by_path)
    parts = pl.concat([found for found in (timed, _apportioned(counted, timed["process"])) if found.height])
    leaves = _leaves(counted, users)
    samples = dict(waiting.group_by("process").agg(pl.col("samples").sum()).iter_rows())
    rows = counted.mains.group_by("process").agg(
        pl.col("rank").first(), loop_samples=pl.col("samples").sum(), share=pl.lit(None, pl.Float64)
    )
    found = []
    for process, rank, loop_samples, _ in rows.sort("rank", "process").iter_rows():
        if not samples.get(process):
            continue
        own = parts.filter(pl.col("process") == process)
    return tuple(found)
