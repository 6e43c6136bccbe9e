"""When enough pairs were run. The rule looks at how narrow the interval is, never at whether it excludes 1.

Stopping as soon as a difference shows finds one in the end whatever is compared; stopping at a width does not. It is
not free either: of the looks it takes the first whose spread came out small, so that intervals are a little too narrow.
With p < 0.05 for the mean alone and the worst spread between pairs (3 to 3.5 %), 9.0 % of verdicts on equal programs
are false when the first look is after three pairs, 6.9 % after five. So the first look is after five (`LEAST_PAIRS`),
and where pairs end by this rule a verdict needs less of a p-value (`LOOKING_ALPHA`). It looks at the mean alone, though
the median may decide in the end: a median that is looked at once is not chosen by its looks. Either figure then finds a
difference between equal programs in at most 5.7 %, with runs that differ by 1 to 2 % and spikes of 30 to 200 ms;
`benchmarks/statistics.py` simulates it.
"""

from __future__ import annotations

from stepscope.comparison import estimates
from stepscope.comparison.thresholds import FIXED_ALPHA, LOOKING_ALPHA, Alpha
from stepscope.model.comparison import Effect


def enough(effect: Effect | None, *, least: int, most: int, width: float) -> bool:
    """Whether the pairs of `effect` suffice: `most` of them, or at least `least` with a half-width of at most `width`.

    False for None (nothing could be measured yet): who runs pairs bounds how often they try.
    """
    if effect is None:
        return False
    if effect.pairs >= most:
        return True
    half = estimates.half_width(effect)
    return effect.pairs >= least and half is not None and half <= width


def alpha(*, least: int, most: int) -> Alpha:
    """The p-values below which a verdict is certain, after pairs by this rule; with `least` = `most` nobody looked."""
    return FIXED_ALPHA if least == most else LOOKING_ALPHA
