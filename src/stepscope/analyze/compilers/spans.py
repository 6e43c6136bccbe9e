"""How long compiling took: unions of spans, never sums of rows that lie in one another.

A row that stands for one event and has a time and a duration is a span. Rows without a time, or of several events
together, are lengths only: they count in the step they name, at most its wall time. Compilations of one process that
overlap count once; processes are summed.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.analyze.compilers.constants import TIMED
from stepscope.analyze.compilers.prepared import Prepared
from stepscope.engine import intervals
from stepscope.engine.intervals import Intervals
from stepscope.tables.arrays import Int64


def durations(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows that say how long compiling took."""
    return rows.filter(pl.col("kind").is_in(TIMED) & (pl.col("duration_ns") >= 0))


def total_ns(rows: pl.DataFrame) -> int | None:
    """Time spent on compiling in all processes; None where no row has a duration."""
    told = durations(rows)
    if told.is_empty():
        return None
    spans, lengths = _split(told)
    return sum(intervals.total(one) for one in unions(spans).values()) + int(lengths["duration_ns"].sum())


def unions(spans: pl.DataFrame) -> dict[str, Intervals]:
    """process -> when it compiled."""
    parts = spans.partition_by("process", as_dict=True)
    return {str(key[0]): intervals.union(*_edges(part)) for key, part in parts.items()}


def per_step_ns(prepared: Prepared) -> Int64:
    """For each row of `prepared.steps` the time compiling took of it, between 0 and its wall time."""
    steps = prepared.steps
    walls: Int64 = steps["wall_ns"].to_numpy()
    found = np.zeros(steps.height, np.int64)
    spans, lengths = _split(durations(prepared.rows))
    timed = steps.drop_nulls("start_ns")
    for process, busy in unions(spans).items():
        own = timed.filter(pl.col("process") == process)
        starts = own["start_ns"].to_numpy()
        found[own["row"].to_numpy()] += intervals.covered(busy, starts, starts + own["wall_ns"].to_numpy())
    untimed = set(steps.filter(pl.col("start_ns").is_null())["row"].to_list())
    loose = pl.concat([lengths, spans.filter(pl.col("at").is_in(untimed))]).drop_nulls("at")
    np.add.at(found, loose["at"].to_numpy(), loose["duration_ns"].to_numpy())
    return np.minimum(found, walls)


def by_group(rows: pl.DataFrame, groups: Int64, steps: pl.DataFrame) -> tuple[dict[int, int], dict[int, int]]:
    """Of each group of rows (`groups` is one number per row) the time in all, and the time inside steps, ns.

    Spans of a group and process that overlap count once. Groups without any duration are missing. Where a process has
    no measured steps, what names its step counts as inside, and of the rest nothing is known.
    """
    numbered = rows.with_columns(pl.Series("group", groups, dtype=pl.Int64))
    spans, lengths = _split(durations(numbered))
    whole: dict[int, int] = {}
    inside: dict[int, int] = {}
    measured = set(steps["process"].unique().to_list())
    for group, duration, at, step, process in lengths.select(
        "group", "duration_ns", "at", "step", "process"
    ).iter_rows():
        whole[group] = whole.get(group, 0) + duration
        if process in measured or step is not None:
            within = at is not None if process in measured else True
            inside[group] = inside.get(group, 0) + (duration if within else 0)
    for (process,), own in spans.partition_by("process", as_dict=True).items():
        starts, ends = _edges(own)
        keys = own["group"].to_numpy()
        timed = steps.filter(pl.col("process") == process).drop_nulls("start_ns")
        begins = timed["start_ns"].to_numpy()
        ran = intervals.union(begins, begins + timed["wall_ns"].to_numpy())
        _add(whole, keys, starts, ends)
        # on an axis that holds the time in steps alone, what a span covers is what it has inside steps
        if process not in measured:
            continue
        _add(inside, keys, intervals.covered_before(ran, starts), intervals.covered_before(ran, ends))
    return whole, inside


def _add(sums: dict[int, int], keys: Int64, starts: Int64, ends: Int64) -> None:
    for key, length in zip(*intervals.union_by(keys, starts, ends), strict=True):
        sums[int(key)] = sums.get(int(key), 0) + int(length)


def _split(told: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows that are spans, and rows that are lengths only."""
    spans = pl.col("time_ns").is_not_null() & (pl.col("count") == 1)
    return told.filter(spans), told.filter(~spans)


def _edges(spans: pl.DataFrame) -> tuple[Int64, Int64]:
    starts = spans["time_ns"].to_numpy()
    return starts, starts + spans["duration_ns"].to_numpy()
