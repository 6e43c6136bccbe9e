"""Steps of a trace that comes without a journal: the `ProfilerStep#N` annotations of the host.

The copy of an annotation on a device's track is none. The writer numbers steps anew in every cycle of a schedule that
a new profiler begins, so N may repeat within a rank. Nothing is known of their phases.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from stepscope.tables.categories import ANNOTATION, OPERATORS

SIGNAL = "profiler_step"
_NAME = r"^ProfilerStep#(\d{1,18})$"


def trace_steps(events: pl.LazyFrame) -> list[dict[str, Any]]:
    """Rows of the steps table in order of time; one that reaches into the next ends where that begins."""
    marks = (
        events.filter(
            pl.col("name").str.starts_with("ProfilerStep#") & pl.col("category").is_in([ANNOTATION, *OPERATORS])
        )
        .select("start_ns", "duration_ns", pl.col("name").str.extract(_NAME).cast(pl.Int64, strict=False).alias("step"))
        .drop_nulls()
        .sort("start_ns")
        .collect()
    )
    starts, durations = marks["start_ns"].to_numpy(), marks["duration_ns"].to_numpy()
    numbers = marks["step"].to_list()
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
