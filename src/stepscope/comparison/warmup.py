"""How many first steps of a run are warm-up: compilation, allocators that grow, caches that fill, clocks that settle.

The later part of the run says what its level is and how much that moves by itself, so a run that drifts or stalls every
tenth step is taken as it is. From the front, steps are dropped while their moving median is off that level, then while
single steps among the next ones are slower than later steps are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepscope.comparison.thresholds import (
    WARMUP_EXTREME_STEP,
    WARMUP_LEAST_CHANGE,
    WARMUP_SHARE,
    WARMUP_SLOW_STEP,
    WARMUP_SPREADS,
    WARMUP_WINDOW,
)

_MAD = 1.4826  # makes the median absolute deviation a standard deviation, for normal noise
_ORDINARY = 0.95  # of the later steps are ordinary; the rest are stalls


def end(walls: Sequence[float], *, limit: int | None = None) -> int:
    """How many first steps to drop: at most `limit`, and never more than a third of the run.

    `walls` are the wall times of all steps in order, in any unit. One that is no finite number counts as the slowest.
    """
    most = int(len(walls) * WARMUP_SHARE)
    if limit is not None:
        most = min(most, max(0, limit))
    if most == 0:
        return 0
    times = np.asarray(walls, dtype=np.float64)
    known = times[np.isfinite(times)]
    if not len(known):
        return 0
    times = np.where(np.isfinite(times), times, known.max())
    later = times[most:]
    with np.errstate(over="ignore", invalid="ignore"):
        usual = _usual(later)
        dropped = _slow_steps(times, later, usual, _off_level(times, usual, most), most)
        extreme = np.flatnonzero(times[:most] > WARMUP_EXTREME_STEP * later.max())
    return max(dropped, int(extreme[-1]) + 1) if len(extreme) else dropped


def _usual(later: NDArray[np.float64]) -> tuple[float, float] | None:
    """The level of the later steps and how far from it is still on it; None if they are few."""
    if len(later) < 2 * WARMUP_WINDOW:
        return None
    levels = _moving_median(later)
    level = float(np.median(levels))
    spread = _MAD * float(np.median(np.abs(levels - level)))
    return level, max(WARMUP_SPREADS * spread, WARMUP_LEAST_CHANGE * abs(level))


def _off_level(times: NDArray[np.float64], usual: tuple[float, float] | None, most: int) -> int:
    """The first step from which a moving median is on the level; 0 where none is known."""
    if usual is None:
        return 0
    level, off = usual
    front = _moving_median(times[: most + WARMUP_WINDOW])
    reached = np.flatnonzero(np.abs(front - level) <= off)
    return int(reached[0]) if len(reached) else most


def _slow_steps(
    times: NDArray[np.float64], later: NDArray[np.float64], usual: tuple[float, float] | None, start: int, most: int
) -> int:
    """Goes on from `start` to the last slow step, as long as the next slow one is near."""
    slow = WARMUP_SLOW_STEP * float(np.quantile(later, _ORDINARY))
    if usual is not None:  # of a run that gets faster throughout, the first steps are slower than any later one
        slow = max(slow, sum(usual))
    dropped = start
    for index in np.flatnonzero(times[start:most] > slow) + start:
        if index >= dropped + WARMUP_WINDOW:
            break
        dropped = int(index) + 1
    return dropped


def _moving_median(times: NDArray[np.float64]) -> NDArray[np.float64]:
    windows = np.lib.stride_tricks.sliding_window_view(times, WARMUP_WINDOW)
    return np.asarray(np.median(windows, axis=1), dtype=np.float64)
