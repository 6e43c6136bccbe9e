"""Loader workers that ended while their siblings went on, by telemetry of processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from stepscope.analyze.windows import event_data
from stepscope.comparison.measured import MeasuredSteps
from stepscope.comparison.thresholds import WORKER_ALONE_S, WORKERS_START_S
from stepscope.model.comparison import Flag
from stepscope.tables.schema import Tables

_Row = dict[str, Any]


def dead(tables: Tables, measured: MeasuredSteps) -> Iterator[Flag]:
    """A flag for each training process that lost workers in the measured part and went on without them.

    Workers of one iterator start together and end together. Those of a data set without a length end when their part
    of it is over, which may be at any time: the flag then withholds nothing.
    """
    workers = tables.processes.filter((pl.col("role") == "loader_worker") & pl.col("start_ns").is_not_null())
    for process, (start, end) in measured.spans.items():
        pids = [rank.pid for rank in tables.ranks if rank.process == process]
        own = workers.filter(pl.col("ppid").is_in(pids)).sort("start_ns", "pid")
        count, sized = _loaders(tables, process)
        for together in _generations(own.to_dicts()):
            if not 2 <= len(together) <= count:
                continue  # none to compare with, or workers of several iterators at once
            last = max(row["end_ns"] if row["end_ns"] is not None else end for row in together)
            gone = [
                row["end_ns"]
                for row in together
                if row["end_ns"] is not None
                and start < row["end_ns"] < end
                and min(last, end) - row["end_ns"] >= WORKER_ALONE_S * 1e9
            ]
            if gone:
                text = (
                    f"{len(gone)} of {len(together)} loader workers ended "
                    f"{(min(last, end) - min(gone)) / 1e9:.0f} s before the others"
                )
                yield Flag("dead_workers", text, "processes.jsonl", withholds=sized)
                break


def _loaders(tables: Tables, process: str) -> tuple[int, bool]:
    """(the most workers of a loader of the process, whether all of its loaders have a length)."""
    most, sized = 0, True
    for row, data in event_data(tables, "loader"):
        workers = data.get("num_workers")
        if row["process"] == process and isinstance(workers, int) and workers > 0:
            most = max(most, workers)
            sized = sized and isinstance(data.get("length"), int)
    return most, sized


def _generations(rows: list[_Row]) -> Iterator[list[_Row]]:
    """Workers that started one right after the other."""
    together: list[_Row] = []
    for row in rows:
        if together and row["start_ns"] - together[-1]["start_ns"] > WORKERS_START_S * 1e9:
            yield together
            together = []
        together.append(row)
    if together:
        yield together
