"""Whether a comparison shows that the candidate is slower by a given fraction: the check of `--fail-on slower=3%`."""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from stepscope.comparison import estimates
from stepscope.comparison.thresholds import INTERVAL_PAIRS, MOST_PAIRS_WORTH_NAMING
from stepscope.comparison.verdicts import percent
from stepscope.model.comparison import FASTER, SLOWER, VOID, Comparison, Effect, Outcome

STEP_TIME = "step time"


class Gate(Struct, frozen=True):
    """`slower` is None where it cannot be judged; `text` says what was seen."""

    slower: bool | None
    text: str


def slower(comparison: Comparison, by: float) -> Gate:
    """Whether the candidate is slower by the fraction `by` or more.

    True with a verdict "slower" and an effect of that size: of the mean where the mean is certain, else of the median
    that the verdict rests on. False where the interval ends below it, or the verdict is
    "faster". None otherwise: there is no interval, or `by` lies in it.
    """
    outcome = comparison.outcome
    if outcome is None:
        return Gate(None, comparison.absent.get(STEP_TIME, "no step time is known of both sides"))
    effect = outcome.effects.get(outcome.headline)
    if outcome.verdict.word == VOID or effect is None:
        return Gate(None, outcome.verdict.text)
    if outcome.headline == "samples_per_second":
        effect = _of_time(effect)
    if effect.low is None or effect.high is None:
        needed = max(1, INTERVAL_PAIRS - effect.pairs)
        pairs = "1 pair gives" if effect.pairs == 1 else f"{effect.pairs} pairs give"
        return Gate(None, f"{_sign(effect.ratio)}, but {pairs} no interval; {_more(needed)}")
    seen = f"{_sign(effect.ratio)} (95 %: {_sign(effect.low)} to {_sign(effect.high)}), {effect.pairs} pairs"
    limit = 1 + by
    if outcome.verdict.word == SLOWER and effect.ratio >= limit and _borne_out(outcome, effect, limit):
        return Gate(True, seen)
    if effect.high < limit or outcome.verdict.word == FASTER:
        return Gate(False, seen)
    return Gate(None, f"{seen}: {percent(by)} % lies in the interval; {_more(_pairs_needed(effect, limit))}")


def _borne_out(outcome: Outcome, effect: Effect, limit: float) -> bool:
    """Whether what is certain is as large: a noisy mean beside a median that grew by less says nothing of the limit."""
    if effect.low is not None and effect.low > 1:
        return True
    median = outcome.effects.get("median_ms")
    return median is not None and median.ratio >= limit


def _of_time(effect: Effect) -> Effect:
    """The effect on time per sample, of one on samples per second."""
    if effect.low is None or effect.high is None:
        return replace(effect, ratio=1 / effect.ratio)
    return replace(effect, ratio=1 / effect.ratio, low=1 / effect.high, high=1 / effect.low)


def _pairs_needed(effect: Effect, limit: float) -> int:
    """Until the interval ends before `limit`, if effect and spread stay what they are."""
    if effect.spread is None:
        return 1
    return max(1, estimates.pairs_needed(effect.spread, abs(math.log(limit / effect.ratio))) - effect.pairs)


def _more(pairs: int) -> str:
    if pairs > MOST_PAIRS_WORTH_NAMING:
        return f"over {MOST_PAIRS_WORTH_NAMING} more pairs would be needed"
    return f"about {pairs} more pair{'' if pairs == 1 else 's'} needed"


def _sign(ratio: float) -> str:
    return f"{percent(ratio - 1, sign=True)} %"
