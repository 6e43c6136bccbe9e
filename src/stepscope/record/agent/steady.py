"""Is step time steady? Pure functions: wall times of steps in, an answer out.

The walls given here are those of comparable steps only: training steps, without the first batch of an epoch, without
compilation, without steps a profiler was on. All times are integer nanoseconds; nothing here reads a clock.
"""

from __future__ import annotations

from typing import Sequence

# Five steps are the fewest in which one odd step cannot hide a trend: a median of five has two neighbours on each side.
STEADY_STEPS = 5
# Two-thread hosts show 5 to 15 % between equal steps; warm-up (allocator, autotuning, page cache) shows 50 % and more.
STEADY_SPREAD = 0.20
# A loop with stalls never has five quiet steps in a row. Over twelve, the middle half must agree and the newer half
# must not differ from the older one.
NOISY_STEPS = 12
NOISY_QUARTILE_SPREAD = 0.20
NOISY_DRIFT = 0.10
# Few steps that agree this well are worth a look when there may be no more of them.
AGREEING_STEPS = 3
AGREEING_SPREAD = 0.25
# Logging and checkpoint steps take visibly longer than their neighbours.
OUTLIER_RATIO = 1.5


def median(values: Sequence[int]) -> int:
    """The middle value (the lower one of two), without floating point. `values` must not be empty."""
    return sorted(values)[(len(values) - 1) // 2]


def spread(walls: Sequence[int]) -> float:
    """(largest - smallest) / median; infinite for nothing or for a median of zero."""
    if not walls:
        return float("inf")
    middle = median(walls)
    return (max(walls) - min(walls)) / middle if middle > 0 else float("inf")


def is_steady(walls: Sequence[int]) -> bool:
    """True when the newest steps agree, or when many noisy ones show no drift. `walls` is oldest first."""
    if len(walls) < STEADY_STEPS:
        return False
    if spread(walls[-STEADY_STEPS:]) <= STEADY_SPREAD:
        return True
    return _steady_but_noisy(walls[-NOISY_STEPS:])


def _steady_but_noisy(walls: Sequence[int]) -> bool:
    if len(walls) < NOISY_STEPS:
        return False
    ordered = sorted(walls)
    quarter = len(ordered) // 4
    middle = median(walls)
    if middle <= 0 or (ordered[-1 - quarter] - ordered[quarter]) / middle > NOISY_QUARTILE_SPREAD:
        return False
    half = len(walls) // 2
    return abs(median(walls[half:]) - median(walls[:half])) / middle <= NOISY_DRIFT


def agree(walls: Sequence[int]) -> bool:
    """True when the newest `AGREEING_STEPS` steps agree within `AGREEING_SPREAD`."""
    return len(walls) >= AGREEING_STEPS and spread(walls[-AGREEING_STEPS:]) <= AGREEING_SPREAD


def is_outlier(wall_ns: int, walls: Sequence[int]) -> bool:
    """True when a step took much longer than the others in `walls` (at least three are needed to say so)."""
    return len(walls) >= AGREEING_STEPS and wall_ns > OUTLIER_RATIO * median(walls)
