"""Paired measurements to a median, an interval and a verdict. Standard library only.

The interval is the sign test's: two order statistics of the pairs that hold the median with at least 95 %, whatever
the distribution. Too few pairs for that give no interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """Median of the pairs, and the interval that holds it (None with fewer than six pairs)."""

    median: float
    low: float | None
    high: float | None
    pairs: int

    def widest(self, neutral: float) -> float:
        """The largest distance of the interval from `neutral`; infinite without an interval."""
        if self.low is None or self.high is None:
            return math.inf
        return max(abs(self.low - neutral), abs(self.high - neutral))


def estimate(pairs: Sequence[float]) -> Estimate:
    """Median and sign interval of `pairs` (at least one)."""
    ordered = sorted(pairs)
    outside = _ranks_outside(len(ordered))
    low = ordered[outside - 1] if outside else None
    high = ordered[-outside] if outside else None
    return Estimate(statistics.median(ordered), low, high, len(ordered))


def _ranks_outside(count: int) -> int:
    """The largest k for which [x_k, x_(n+1-k)] (1-based) still covers the median with `CONFIDENCE`; 0 if none does."""
    k, tail = 0, 0.0
    while k < count // 2:
        tail += math.comb(count, k) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        k += 1
    return k


def verdict(effect: Estimate, control: Estimate, *, limit: float, neutral: float) -> str:
    """Whether `effect` stays within `limit` (above `neutral`); undecided where A against A is itself wider."""
    if effect.low is None or effect.high is None:
        return f"undecided: {effect.pairs} pairs are too few"
    if control.widest(neutral) > limit:
        return "undecided: A against A spreads wider than the limit"
    if effect.high - neutral <= limit:
        return "holds"
    if effect.low - neutral > limit:
        return "exceeds the limit"
    return "undecided: the interval crosses the limit"
