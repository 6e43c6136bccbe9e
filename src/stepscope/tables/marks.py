"""Slices that mark a step: annotations of a profiler's schedule and of optimizers. Steps and clocks stand on them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import polars as pl

from stepscope.tables.columns import Int64, decode
from stepscope.tables.taken import Taken

STEP = "ProfilerStep#"
OPTIMIZER = "Optimizer.step#"


def marks_frame(taken: Taken, start_ns: Int64, duration_ns: Int64, base_ns: int) -> pl.DataFrame:
    """Category, name, start and duration of the slices whose names begin like a mark, in the order of the trace.

    `base_ns` is added to the starts.
    """
    wanted = [name.startswith((STEP, OPTIMIZER)) for name in taken.texts["name"].values]
    name = taken.whole("name", np.int32)
    rows = np.flatnonzero(np.array([*wanted, False])[name])
    return pl.DataFrame(
        {
            "category": decode(taken.texts["category"].series(), taken.whole("category", np.int32)[rows]),
            "name": decode(taken.texts["name"].series(), name[rows]),
            "start_ns": start_ns[rows] + base_ns,
            "duration_ns": duration_ns[rows],
        }
    )


def each(marks: pl.DataFrame) -> Iterable[tuple[str, str, int, int]]:
    """Category, name, start and duration of each mark that has a category."""
    return (row for row in marks.iter_rows() if row[0] is not None)
