"""Whether a level grows steadily with the steps: in every part of the run, and by a straight line.

A cache that fills up rises less and less, a profiler's window or an evaluation makes one jump; neither rises in every
part by a fair share. The line is that of Theil and Sen, the median of the slopes between pairs of readings.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl
from msgspec import Struct

PARTS = 5
MIN_READINGS = 10  # two in each part
POINTS = 240  # of the line; its pairs fit into memory at any length
FAIR_SHARE = 1 / 3  # of the mean rise from part to part: what each must rise by; a jump alone leaves the others flat


class Trend(Struct, frozen=True):
    """A straight line through readings, as levels at the first and the last of them."""

    readings: int
    first_step: int
    last_step: int
    seconds: float
    early_bytes: float
    late_bytes: float
    rising: bool

    @property
    def bytes_per_step(self) -> float:
        return (self.late_bytes - self.early_bytes) / max(1, self.last_step - self.first_step)


def trend(rows: pl.DataFrame) -> Trend | None:
    """Of (time_ns, step, bytes) in order of steps, each once; None with too few of them."""
    if rows.height < MIN_READINGS:
        return None
    steps, values = rows["step"].to_numpy(), rows["bytes"].to_numpy()
    kept = np.unique(np.linspace(0, rows.height - 1, min(POINTS, rows.height)).astype(np.int64))
    x, y = steps[kept].astype(np.float64), values[kept].astype(np.float64)
    first, second = np.triu_indices(len(x), 1)
    slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
    start = float(np.median(y - slope * (x - x[0])))
    times = rows["time_ns"]
    return Trend(
        readings=rows.height,
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        seconds=(int(times[-1]) - int(times[0])) / 1e9,
        early_bytes=start,
        late_bytes=start + slope * float(x[-1] - x[0]),
        rising=_rises(steps, values),
    )


def _rises(steps: np.ndarray, values: np.ndarray) -> bool:
    """Every part, of equally many steps, lies above the one before by a fair share of the mean rise."""
    edges = np.linspace(steps[0], steps[-1] + 1, PARTS + 1)
    part = np.searchsorted(edges, steps, side="right") - 1
    medians = [float(np.median(values[part == number])) for number in range(PARTS) if (part == number).any()]
    if len(medians) < PARTS:
        return False
    mean = (medians[-1] - medians[0]) / (PARTS - 1)
    return mean > 0 and all(after - before >= FAIR_SHARE * mean for before, after in pairwise(medians))
