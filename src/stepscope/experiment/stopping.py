"""When enough pairs were run: the stopping rule. By width it looks at how narrow the interval is, never at whether it
excludes 1.

Stopping as soon as a difference shows finds one in the end whatever is compared; stopping at a width does not. It is
not free either: of the looks it takes the first whose spread came out small, so that intervals are a little too narrow.
With p < 0.05 for the mean alone and the worst spread between pairs (3 to 3.5 %), 9.0 % of verdicts on equal programs
are false when the first look is after three pairs, 6.9 % after five. So the first look is after five (`LEAST_PAIRS`),
and where pairs end by this rule a verdict needs less of a p-value (`LOOKING_ALPHA`). It looks at the mean alone, though
the median may decide in the end: a median that is looked at once is not chosen by its looks. Either figure then finds a
difference between equal programs in at most 5.7 %, with runs that differ by 1 to 2 % and spikes of 30 to 200 ms;
`benchmarks/statistics.py` simulates it.

Two ends come sooner: a loss that goes another way (by more than chance does between pairs), and an effect so far from
none that a wider interval does as well. The second does look at the effect, so it asks for four half-widths between the
effect and none, and for a p-value that holds among all candidates. Of 40,000 simulated comparisons of equal programs,
with runs that differ by 0.5 to 5 %, at most 0.35 % more end in a false verdict for it; an effect of 10 % in runs that
differ by 2 % then takes 7 pairs and no more 8.4, one of 20 % takes 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stepscope.comparison import estimates
from stepscope.comparison.outcomes import outcome
from stepscope.comparison.thresholds import FIXED_ALPHA, LOOKING_ALPHA, Alpha
from stepscope.experiment.schedule import Pair
from stepscope.model.comparison import Effect, Outcome
from stepscope.model.experiment import Candidate, Protocol

CLEAR = 4.0  # half-widths
CLEAR_PAIRS = 3
OTHER_WAY_PAIRS = 2


class StoppingRule:
    """Judges the pairs of one of so many `candidates` by `protocol`; remembers what it has judged."""

    def __init__(self, protocol: Protocol, candidates: int = 1) -> None:
        self._protocol, self._candidates = protocol, max(1, candidates)
        self._known: dict[object, tuple[bool, int]] = {}

    def enough(self, candidate: Candidate, pairs: Sequence[Pair]) -> bool:
        """Whether the candidate needs no further pair."""
        return self._enough_and_wanted(candidate, pairs)[0]

    def wanted(self, candidate: Candidate, pairs: Sequence[Pair]) -> int:
        """About how many more pairs there will be, if their spread stays what it is."""
        return self._enough_and_wanted(candidate, pairs)[1]

    def _enough_and_wanted(self, candidate: Candidate, pairs: Sequence[Pair]) -> tuple[bool, int]:
        flags = tuple(flag.name for pair in pairs for side in pair for flag in side.flags if flag.withholds)
        key = candidate.name, flags, tuple((baseline.path, other.path) for baseline, other in pairs)
        if key not in self._known:
            self._known[key] = self._judge(candidate, pairs)
        return self._known[key]

    def _judge(self, candidate: Candidate, pairs: Sequence[Pair]) -> tuple[bool, int]:
        protocol = self._protocol
        found = outcome(
            candidate.knobs, pairs, threshold=protocol.threshold, width=protocol.width, loss_band=protocol.loss_band
        )
        effect = found.effects.get(found.headline)
        if effect is None:
            return False, protocol.least_pairs
        if _is_enough(effect, found, protocol, self._candidates):
            return True, 0
        expected = protocol.least_pairs
        if effect.spread is not None and effect.pairs >= CLEAR_PAIRS:
            expected = max(expected, estimates.pairs_needed(effect.spread, protocol.width))
        return False, max(1, min(expected, protocol.most_pairs) - effect.pairs)


def _is_enough(effect: Effect, found: Outcome, protocol: Protocol, candidates: int) -> bool:
    same = found.equivalence
    if same is not None and same.judged and same.within is False and effect.pairs >= OTHER_WAY_PAIRS:
        return True
    least, most = protocol.least_pairs, protocol.most_pairs
    if narrow_enough(effect, least=least, most=most, width=protocol.width):
        return True
    return least < most and is_clear(effect, alpha_after(least=least, most=most).mean / candidates)


def is_clear(effect: Effect, alpha: float) -> bool:
    """Whether the effect is so large beside its interval that a narrower one would say the same, with `alpha` to spare
    for its p-value."""
    half, p_value = estimates.half_width(effect), estimates.p_value(effect)
    if half is None or p_value is None or effect.pairs < CLEAR_PAIRS or effect.ratio <= 0:
        return False
    return p_value < alpha and abs(math.log(effect.ratio)) >= CLEAR * half


def narrow_enough(effect: Effect | None, *, least: int, most: int, width: float) -> bool:
    """Whether the pairs of `effect` suffice: `most` of them, or at least `least` with a half-width of at most `width`.

    False for None (nothing could be measured yet): who runs pairs bounds how often they try.
    """
    if effect is None:
        return False
    if effect.pairs >= most:
        return True
    half = estimates.half_width(effect)
    return effect.pairs >= least and half is not None and half <= width


def alpha_after(*, least: int, most: int) -> Alpha:
    """The p-values below which a verdict is certain, after pairs by this rule; with `least` = `most` nobody looked."""
    return FIXED_ALPHA if least == most else LOOKING_ALPHA
