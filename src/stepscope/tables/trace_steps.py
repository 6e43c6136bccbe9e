"""Steps of a trace that comes without a journal: the `ProfilerStep#N` annotations of the host.

The copy of an annotation on a device's track is none. The writer numbers steps anew in every cycle of a schedule that
a new profiler begins, so N may repeat within a rank. Nothing is known of their phases.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from stepscope.tables.categories import ANNOTATION, OPERATORS
from stepscope.tables.marks import STEP, each

SIGNAL = "profiler_step"
_NAME = re.compile(rf"{STEP}([0-9]{{1,18}})")
_HOST = OPERATORS | {ANNOTATION}


def trace_steps(marks: pl.DataFrame) -> list[dict[str, Any]]:
    """Rows of the steps table in order of time; one that reaches into the next ends where that begins."""
    found = [
        (start, duration, int(name[1]))
        for category, text, start, duration in each(marks)
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
            "signal": SIGNAL,
        }
        for number, start, end in zip(numbers, starts.tolist(), ends.tolist(), strict=True)
        if end > start
    ]


def missing_steps(rows: list[dict[str, Any]]) -> int:
    """Numbers left out between one step and the next of the same cycle."""
    numbers = [row["step"] for row in rows]
    return sum(after - before - 1 for before, after in pairwise(numbers) if after > before + 1)
