"""Pairs of runs to an effect with an interval. Pure; SciPy is imported where it is needed.

The run is the unit: a pair is (baseline, candidate), one figure per run, of two runs that lie next to each other. Steps
of one run depend on each other, so counting them as samples finds differences where there are none;
`benchmarks/statistics.py` shows how often.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

from stepscope.comparison.thresholds import CONFIDENCE, INTERVAL_PAIRS
from stepscope.model.comparison import Effect

_MOST = 1_000  # pairs; nobody runs more, and the search ends


def effect(pairs: Sequence[tuple[float, float]]) -> Effect | None:
    """Candidate over baseline: the geometric mean of the ratios, with Student's interval on their logs.

    Limits and p-value are None below `INTERVAL_PAIRS` pairs. None without pairs, and where a figure is not positive and
    finite, because it has no logarithm.
    """
    if not pairs or not all(_is_usable(figure) for pair in pairs for figure in pair):
        return None
    logs = [math.log(candidate) - math.log(baseline) for baseline, candidate in pairs]
    middle = statistics.fmean(logs)
    spread = statistics.stdev(logs) if len(logs) > 1 else None
    found = Effect(exp(middle), None, None, len(logs), spread)
    half = half_width(found)
    if half is None:
        return found
    low, high = exp(middle - half), exp(middle + half)
    return Effect(found.ratio, low, high, found.pairs, spread, p_value(found))


def half_width(found: Effect, confidence: float = CONFIDENCE) -> float | None:
    """Of the interval, on logs (about a fraction); None without one."""
    if found.spread is None or found.pairs < INTERVAL_PAIRS:
        return None
    return student(confidence, found.pairs - 1) * found.spread / math.sqrt(found.pairs)


def p_value(found: Effect) -> float | None:
    """Two-sided, that the ratio is 1, for this effect alone; None without an interval."""
    if found.spread is None or found.pairs < INTERVAL_PAIRS:
        return None
    size = math.inf if found.ratio <= 0 else abs(math.log(found.ratio))
    if size == 0:
        return 1.0
    if found.spread == 0 or math.isinf(size):
        return 0.0
    from scipy import special

    return float(2 * special.stdtr(found.pairs - 1, -size / (found.spread / math.sqrt(found.pairs))))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """P-values corrected for how many were asked for; None stays None and does not count."""
    known = sorted((value, index) for index, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (value, index) in enumerate(known):
        highest = max(highest, min(1.0, value * (len(known) - rank)))
        corrected[index] = highest
    return corrected


def pairs_needed(spread: float, half_width: float, *, confidence: float = CONFIDENCE) -> int:
    """The least number of pairs whose interval is as narrow, if the spread stays what it is; at most 1,000."""
    if half_width <= 0:
        return INTERVAL_PAIRS if spread == 0 else _MOST
    for count in range(INTERVAL_PAIRS, _MOST):
        if student(confidence, count - 1) * spread / math.sqrt(count) <= half_width:
            return count
    return _MOST


@functools.lru_cache(maxsize=4_096)
def student(confidence: float, freedom: int) -> float:
    """How many standard errors a two-sided interval reaches to either side."""
    from scipy import special

    return float(special.stdtrit(freedom, (1 + confidence) / 2))


def _is_usable(figure: float) -> bool:
    return math.isfinite(figure) and figure > 0


def exp(value: float) -> float:
    """Infinite where a float cannot hold it."""
    return math.inf if value > 709 else math.exp(value)
