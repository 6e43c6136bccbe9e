"""The table of steps, the steps of a trace that comes without a journal, and the step each moment falls into."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from stepscope.read.raw import RawRank
from stepscope.read.text import integer, length_ns
from stepscope.tables.arrays import NONE, Int64
from stepscope.tables.categories import ANNOTATION, OPERATORS, STEP
from stepscope.tables.schema import SCHEMAS

_NAME = re.compile(rf"{STEP}([0-9]{{1,18}})")
_HOST = OPERATORS | {ANNOTATION}


def steps_table(ranks: Iterable[RawRank]) -> pl.DataFrame:
    """All steps; `device_ns` also from `device_step` events, which arrive after the step's row was written."""
    rows: list[dict[str, Any]] = []
    for rank in ranks:
        on_device = _device_steps(rank)
        for step in rank.steps:
            row = {**step, "rank": rank.rank, "process": rank.name}
            if row["device_ns"] is None:
                row["device_ns"] = on_device.get(row["step"])
            rows.append(row)
    schema = SCHEMAS["steps"]
    return pl.DataFrame([{name: row.get(name) for name in schema} for row in rows], schema=schema)


def _device_steps(rank: RawRank) -> dict[int, int]:
    found: dict[int, int] = {}
    for event in rank.journal:
        if event["kind"] != "device_step":
            continue
        step = integer(event.get("step"))
        duration = length_ns(event.get("device_ns"))
        duration = event["duration_ns"] if duration is None else duration
        if step is not None and duration is not None:
            found[step] = duration
    return found


def step_at(times_ns: Int64, starts_ns: Int64, walls_ns: Int64, numbers: Int64) -> Int64:
    """The number of the step whose [start, start + wall) holds each time, else `NONE`; `starts_ns` is sorted."""
    if not len(starts_ns):
        return np.full(len(times_ns), NONE, dtype=np.int64)
    index = np.searchsorted(starts_ns, times_ns, side="right") - 1
    index = np.maximum(index, 0)
    inside = (times_ns >= starts_ns[index]) & (times_ns < starts_ns[index] + walls_ns[index])
    return np.where(inside, numbers[index], NONE)


def trace_steps(marks: pl.DataFrame) -> list[dict[str, Any]]:
    """Rows of the steps table of the host's `ProfilerStep#N` annotations; one that reaches into the next ends there.

    They are in order of time. The copy of an annotation on a device's track is none. The writer numbers steps anew
    in every cycle of a schedule that a new profiler begins, so N may repeat within a rank. Nothing is known of their
    phases.
    """
    found = [
        (start, duration, int(name[1]))
        for category, text, start, duration in marks.iter_rows()
        if category in _HOST and (name := _NAME.fullmatch(text))
    ]
    found.sort(key=lambda step: step[0])
    starts, durations = (np.array([step[column] for step in found], np.int64) for column in (0, 1))
    numbers = [step[2] for step in found]
    ends = starts + durations
    if len(ends) > 1:
        ends[:-1] = np.minimum(ends[:-1], starts[1:])
    return [
        {
            "step": number,
            "kind": "train",
            "start_ns": start,
            "wall_ns": end - start,
            "first_batch": False,
            "in_window": True,
            "signal": "profiler_step",
        }
        for number, start, end in zip(numbers, starts.tolist(), ends.tolist(), strict=True)
        if end > start
    ]


def missing_steps(rows: list[dict[str, Any]]) -> int:
    """Numbers left out between one step and the next of the same cycle."""
    numbers = [row["step"] for row in rows]
    return sum(after - before - 1 for before, after in pairwise(numbers) if after > before + 1)
