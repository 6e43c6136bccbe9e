"""The word for an effect, and the sentence that says it in full.

Faster and slower need both an interval that excludes 1 (after the correction for how many candidates were tried) and an
effect that matters to the user. An interval that is as narrow as was asked for, around an effect that does not matter,
is "no difference larger than X". Everything else is undecided, with the number of pairs that would decide it.

Two figures of a step may decide: its mean, which is what is paid, and its median, the typical step. Rare stalls make
the mean of a run noisy and leave the median as it is, so the median shows small effects that the mean cannot. It
decides only where the mean points the same way by an amount that matters; where both are certain and disagree, the mean
does.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from stepscope.comparison import estimates
from stepscope.comparison.thresholds import BLURRED, FIXED_ALPHA, INTERVAL_PAIRS, MOST_PAIRS_WORTH_NAMING, Alpha
from stepscope.model.comparison import (
    FASTER,
    NO_DIFFERENCE,
    SLOWER,
    UNDECIDED,
    VOID,
    Comparison,
    Effect,
    Outcome,
    Verdict,
)


def verdict(
    effect: Effect | None,
    *,
    threshold: float,
    width: float,
    more_is_better: bool = False,
    candidates: int = 1,
    alpha: float = FIXED_ALPHA.mean,
    at_most: int | None = None,
) -> Verdict:
    """What `effect` shows by itself: faster, slower, no_difference or undecided.

    `effect.p_value` is taken as corrected for the `candidates`; below `alpha` it is certain. `threshold` and `width`
    are fractions. A time is better when it shrinks; `more_is_better` is for samples per second. `at_most` is after how
    many more pairs another figure would decide.
    """
    if effect is None:
        return Verdict(UNDECIDED, "undecided: there is no step time to compare on both sides")
    if effect.low is None or effect.high is None or effect.spread is None:
        return _too_few(effect)
    excluded = effect.low > 1 or effect.high < 1
    certain = excluded and (effect.p_value is None or effect.p_value < alpha)
    if certain and abs(effect.ratio - 1) >= threshold:
        better = (effect.ratio > 1) == more_is_better
        return Verdict(FASTER if better else SLOWER, _difference(effect, more_is_better))
    resolution = max(abs(effect.low - 1), abs(effect.high - 1))
    # As wide as the interval may be when pairs end, plus as far off as its middle may be and still not matter.
    if resolution <= width + threshold and not (excluded and abs(effect.ratio - 1) >= threshold):
        text = f"no difference larger than {_at_most(resolution)} %, {_pairs(effect.pairs)}"
        return Verdict(NO_DIFFERENCE, text, resolution=resolution)
    more = _more_pairs(effect, threshold, width, 1 - alpha / max(1, candidates))
    more = more if at_most is None else min(more, at_most)
    among = f"one of {candidates} candidates may show that by chance" if candidates > 1 else "that may be chance"
    return _undecided(
        effect, more, _difference(effect, more_is_better) + f", by itself, but {among}" if excluded else ""
    )


def step_verdict(
    mean: Effect | None,
    median: Effect | None,
    *,
    threshold: float,
    width: float,
    candidates: int = 1,
    alpha: Alpha = FIXED_ALPHA,
) -> Verdict:
    """What the mean step and the median step show together; as `verdict`, and the text names the median if it decided.

    The median decides where it is certain, and the mean, which is not, has an effect of at least `threshold` in the
    same direction. No difference is said by the mean alone.
    """
    sooner = _pairs_by_median(mean, median, threshold, 1 - alpha.median / max(1, candidates))
    said = verdict(mean, threshold=threshold, width=width, candidates=candidates, alpha=alpha.mean, at_most=sooner)
    if mean is None or median is None or median.low is None:
        return said
    typical = verdict(median, threshold=threshold, width=width, candidates=candidates, alpha=alpha.median)
    if typical.word not in {FASTER, SLOWER} or typical.word == said.word:
        return said
    if said.word in {FASTER, SLOWER}:
        return replace(
            said, text=f"{said.text}; the typical step went the other way: the median step is {typical.text}"
        )
    if _supports(mean, median, threshold):
        return Verdict(typical.word, _by_median(mean, median), figure="median_ms")
    if said.word == UNDECIDED:
        return replace(said, text=f"{said.text}; the median step is {typical.text}, which the mean does not bear out")
    return said


def percent(fraction: float, *, sign: bool = False) -> str:
    """A fraction as a figure in percent to two digits or so: 28, 1.8, 0.04; with its sign where asked for."""
    value = fraction * 100
    if not math.isfinite(value):
        return ("+" if sign and value > 0 else "") + str(value)
    digits = 0 if abs(value) >= 9.95 else 1 if abs(value) >= 0.095 or value == 0 else 2
    text = f"{value:.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    text = "0" if text in {"-0", ""} else text
    return f"+{text}" if sign and value > 0 and text != "0" else text


def _difference(effect: Effect, more_is_better: bool) -> str:
    """Of a certain effect: "faster by 28 % (95 %: 25 to 31 %), 5 pairs"."""
    assert effect.low is not None
    assert effect.high is not None
    grew = effect.ratio > 1
    sizes = sorted(abs(limit - 1) for limit in (effect.low, effect.high))
    span = f"(95 %: {percent(sizes[0])} to {percent(sizes[1])} %), {_pairs(effect.pairs)}"
    size = f"{percent(abs(effect.ratio - 1))} %"
    if more_is_better:
        return f"{'faster' if grew else 'slower'}: {size} {'more' if grew else 'fewer'} samples per second {span}"
    return f"{'slower' if grew else 'faster'} by {size} {span}"


def _by_median(mean: Effect, median: Effect) -> str:
    """Both in the median's direction, so that limits of the mean beyond "no change" are negative."""
    slower = median.ratio > 1
    blurred = (mean.spread or 0.0) > BLURRED * (median.spread or 0.0)
    which = "which stalls blur" if blurred else "which is less certain"
    (size, span), (others, other_span) = (_towards(effect, slower=slower) for effect in (median, mean))
    return (
        f"{'slower' if slower else 'faster'} by {size} % by the median step (95 %: {span} %), {_pairs(median.pairs)}; "
        f"the mean, {which}, says {others} % ({other_span} %)"
    )


def _towards(effect: Effect, *, slower: bool) -> tuple[str, str]:
    """Size and limits of an effect on time in percent, positive in the direction that is asked for."""
    sign = 1 if slower else -1
    limits = sorted(sign * (limit - 1) for limit in (effect.low or 0.0, effect.high or 0.0))
    return percent(sign * (effect.ratio - 1)), " to ".join(map(percent, limits))


def _supports(mean: Effect, median: Effect, threshold: float) -> bool:
    """Whether the mean's estimate, certain or not, points where the median does, by an amount that matters."""
    return (mean.ratio > 1) == (median.ratio > 1) and abs(mean.ratio - 1) >= threshold


def _too_few(effect: Effect) -> Verdict:
    change = f"{percent(effect.ratio - 1, sign=True)} %"
    needed = max(1, INTERVAL_PAIRS - effect.pairs)
    if effect.pairs == 1:
        text = f"undecided: {change} in one run each; how much runs of the same program differ is not known"
    else:
        text = f"undecided: {change} in {_pairs(effect.pairs)}; an interval needs {INTERVAL_PAIRS}"
    return Verdict(UNDECIDED, text, pairs_needed=needed)


def _undecided(effect: Effect, more: int, alone: str) -> Verdict:
    """`alone`: what an interval that excludes 1 would say if it were certain enough."""
    if more > MOST_PAIRS_WORTH_NAMING:
        outlook = f"runs differ so much that over {MOST_PAIRS_WORTH_NAMING} more pairs are needed"
    else:
        outlook = f"about {more} more {'pair' if more == 1 else 'pairs'} needed"
    if not alone:
        limits = (effect.ratio, effect.low or 0.0, effect.high or 0.0)
        change, low, high = (percent(value - 1, sign=True) for value in limits)
        alone = f"{change} % (95 %: {low} to {high} %), {_pairs(effect.pairs)}"
    return Verdict(UNDECIDED, f"undecided: {alone}; {outlook}", pairs_needed=more)


def _more_pairs(effect: Effect, threshold: float, width: float, confidence: float) -> int:
    """Until the interval excludes 1 with `confidence`, or is narrow enough for "no difference": what comes first."""
    if effect.spread is None or not 0 < effect.ratio < math.inf:
        return 1
    size = abs(math.log(effect.ratio))
    counts = []
    if width + threshold > size:
        counts.append(estimates.pairs_needed(effect.spread, width + threshold - size))
    if abs(effect.ratio - 1) >= threshold and size > 0:
        counts.append(estimates.pairs_needed(effect.spread, size, confidence=confidence))
    return max(1, min(counts, default=1) - effect.pairs)


def _pairs_by_median(mean: Effect | None, median: Effect | None, threshold: float, confidence: float) -> int | None:
    """More pairs until the median is certain, if estimates and spreads stay; None where it would not decide then."""
    if mean is None or median is None or median.spread is None or not 0 < median.ratio < math.inf:
        return None
    if abs(median.ratio - 1) < threshold or not _supports(mean, median, threshold):
        return None
    needed = estimates.pairs_needed(median.spread, abs(math.log(median.ratio)), confidence=confidence)
    return max(1, needed - median.pairs)


def _at_most(fraction: float) -> str:
    """Rounded up, so that what is said to be no larger is not."""
    value = fraction * 100
    step = 1.0 if value >= 10 else 0.1 if value >= 0.1 else 0.01
    return percent(max(step, math.ceil(value / step - 1e-9) * step) / 100)


def _pairs(count: int) -> str:
    return f"{count} {'pair' if count == 1 else 'pairs'}"


class SlowerCheck(Struct, frozen=True):
    """The check of `--fail-on slower=3%`. `slower` is None where it cannot be judged; `text` says what was seen."""

    slower: bool | None
    text: str


def slower_by(comparison: Comparison, by: float) -> SlowerCheck:
    """Whether the candidate is slower by the fraction `by` or more.

    True with a verdict "slower" and an effect of that size: of the mean where the mean is certain, else of the median
    that the verdict rests on. False where the interval ends below it, or the verdict is
    "faster". None otherwise: there is no interval, or `by` lies in it.
    """
    outcome = comparison.outcome
    if outcome is None:
        return SlowerCheck(None, comparison.absent.get("step time", "no step time is known of both sides"))
    effect = outcome.effects.get(outcome.headline)
    if outcome.verdict.word == VOID or effect is None:
        return SlowerCheck(None, outcome.verdict.text)
    if outcome.headline == "samples_per_second":
        effect = _of_time(effect)
    if effect.low is None or effect.high is None:
        needed = max(1, INTERVAL_PAIRS - effect.pairs)
        pairs = "1 pair gives" if effect.pairs == 1 else f"{effect.pairs} pairs give"
        return SlowerCheck(None, f"{_sign(effect.ratio)}, but {pairs} no interval; {_outlook(needed)}")
    seen = f"{_sign(effect.ratio)} (95 %: {_sign(effect.low)} to {_sign(effect.high)}), {effect.pairs} pairs"
    limit = 1 + by
    if outcome.verdict.word == SLOWER and effect.ratio >= limit and _borne_out(outcome, effect, limit):
        return SlowerCheck(True, seen)
    if effect.high < limit or outcome.verdict.word == FASTER:
        return SlowerCheck(False, seen)
    return SlowerCheck(None, f"{seen}: {percent(by)} % lies in the interval; {_outlook(_pairs_needed(effect, limit))}")


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


def _outlook(pairs: int) -> str:
    if pairs > MOST_PAIRS_WORTH_NAMING:
        return f"over {MOST_PAIRS_WORTH_NAMING} more pairs would be needed"
    return f"about {pairs} more pair{'' if pairs == 1 else 's'} needed"


def _sign(ratio: float) -> str:
    return f"{percent(ratio - 1, sign=True)} %"
