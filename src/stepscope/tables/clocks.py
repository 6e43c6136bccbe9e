"""How far a trace's clock is from the journal's.

The journal runs on the monotonic clock plus one offset per run; the profiler converts its own clock to time of day
when a window opens. After hours, or when time of day was corrected, the two differ. Both see the same moments: an
optimizer's step (its annotation ends where the journal's step ends) and the marks of a profiler schedule. The median
difference of those moments is the offset; without enough of them, or when it is implausible, it is zero.

The last step of a window tells nothing: the profiler is stopped inside its optimizer's step, whose annotation then
lasts as long as stopping takes, 150 ms and more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.read.raw import RawRank
from stepscope.tables.categories import OPTIMIZER

MAX_OFFSET_NS = 2_000_000_000  # further apart than this is another run's trace, not a clock that drifted
MIN_ANCHORS = 2
# The journal's boundary lies before the annotation's end by what a profiler with stacks makes of leaving the optimizer
# step: 0.3 to 0.5 ms were seen on the same clock. Less than this is no sign of drift.
NEGLIGIBLE_NS = 1_000_000


def offset_ns(marks: pl.DataFrame, rank: RawRank) -> int:
    """What to add to the times of a trace with these `marks` to get the journal's."""
    seen = _optimizer_ends(marks)
    if len(seen) < MIN_ANCHORS:
        return 0
    medians = [_median(ends, seen) for ends in _windows(rank) if len(ends) >= MIN_ANCHORS]
    if not medians:
        return 0
    median = min(medians, key=abs)  # the trace is that of the window it lies nearest to
    return median if NEGLIGIBLE_NS < abs(median) <= MAX_OFFSET_NS else 0


def _windows(rank: RawRank) -> list[npt.NDArray[np.int64]]:
    """Ends of the steps of each window: steps that follow each other."""
    steps = [row for row in rank.steps if row["in_window"] and row["signal"] == "optimizer"]
    ends = np.array([row["start_ns"] + row["wall_ns"] for row in steps], dtype=np.int64)
    numbers = np.array([row["step"] for row in steps], dtype=np.int64)
    return np.split(ends, np.flatnonzero(np.diff(numbers) != 1) + 1)


def _median(ends: npt.NDArray[np.int64], seen: npt.NDArray[np.int64]) -> int:
    """The median distance from what the trace saw to the ends of a window's steps."""
    if len(ends) == len(seen):
        differences = ends - seen
    else:
        # Several optimizer calls a step, or a step only partly traced: each end belongs to the nearest annotation.
        right = np.clip(np.searchsorted(seen, ends), 1, len(seen) - 1)
        left = right - 1
        nearest = np.where(np.abs(ends - seen[left]) <= np.abs(ends - seen[right]), seen[left], seen[right])
        differences = ends - nearest
    return int(np.median(differences[:-1]))


def _optimizer_ends(marks: pl.DataFrame) -> npt.NDArray[np.int64]:
    of_host = pl.col("name").str.starts_with(OPTIMIZER) & ~pl.col("category").str.starts_with("gpu_")
    return np.sort(marks.filter(of_host).select(pl.col("start_ns") + pl.col("duration_ns")).to_series().to_numpy())
