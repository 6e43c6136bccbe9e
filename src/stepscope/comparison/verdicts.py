"""Pairs of runs to an effect with an interval, the word for it, and the sentence that says it in full. Pure.

The run is the unit: a pair is (baseline, candidate), one figure per run, of two runs that lie next to each other. Steps
of one run depend on each other, so counting them as samples finds differences where there are none;
`benchmarks/statistics.py` shows how often.

Faster and slower need both an interval that excludes 1 (after the correction for how many candidates were tried) and an
effect that matters to the user. Two figures of a step may decide: its mean, which is what is paid, and its median:
rare stalls make the mean noisy, so that the median shows small effects that the mean cannot. It decides only where the
mean points the same way by an amount that matters; where both are certain and disagree, the mean does.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

from msgspec.structs import replace

from stepscope.comparison import thresholds
from stepscope.comparison.thresholds import Alpha, Limits
from stepscope.model.comparison import FASTER, NO_DIFFERENCE, SLOWER, UNDECIDED, VOID, Comparison, Effect, Verdict
from stepscope.model.counted import things

_MOST = 1_000  # pairs; nobody runs more, and the search ends


def effect_of(pairs: Sequence[tuple[float, float]]) -> Effect | None:
    """Candidate over baseline: the geometric mean of the ratios, with Student's interval on their logs.

    Limits and p-value are None below `INTERVAL_PAIRS` pairs. None without pairs, and where a figure is not positive and
    finite, because it has no logarithm.
    """
    if not pairs or not all(math.isfinite(figure) and figure > 0 for pair in pairs for figure in pair):
        return None
    logs = [math.log(candidate) - math.log(baseline) for baseline, candidate in pairs]
    middle = statistics.fmean(logs)
    found = Effect(exp(middle), None, None, len(logs), statistics.stdev(logs) if len(logs) > 1 else None)
    half = half_width(found)
    if half is None:
        return found
    return replace(found, low=exp(middle - half), high=exp(middle + half), p_value=p_value(found))


def half_width(found: Effect) -> float | None:
    """Of the interval, on logs (about a fraction); None without one."""
    return None if found.spread is None else margin(found.spread, found.pairs)


def margin(spread: float, count: int, confidence: float = thresholds.CONFIDENCE) -> float | None:
    """Half of Student's interval of a mean of `count` values with this standard deviation; None with too few."""
    return None if count < thresholds.INTERVAL_PAIRS else student(confidence, count - 1) * spread / math.sqrt(count)


def p_value(found: Effect) -> float | None:
    """Two-sided, that the ratio is 1, for this effect alone; None without an interval."""
    if half_width(found) is None or found.spread is None:
        return None
    size = math.inf if found.ratio <= 0 else abs(math.log(found.ratio))
    return two_sided(size, found.spread / math.sqrt(found.pairs), found.pairs - 1)


def two_sided(size: float, error: float, freedom: int) -> float:
    """The probability of a log ratio of `size` or more if there were no effect; `error` is its standard error."""
    if size == 0:
        return 1.0
    if error == 0 or math.isinf(size):
        return 0.0
    from scipy import special

    return float(2 * special.stdtr(freedom, -abs(size) / error))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """P-values corrected for how many were asked for; None stays None and does not count."""
    known = sorted((value, index) for index, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (value, index) in enumerate(known):
        highest = max(highest, min(1.0, value * (len(known) - rank)))
        corrected[index] = highest
    return corrected


def pairs_needed(spread: float, half_width: float, confidence: float = thresholds.CONFIDENCE) -> int:
    """The least number of pairs whose interval is as narrow, if the spread stays what it is; at most 1,000."""
    if half_width <= 0:
        return thresholds.INTERVAL_PAIRS if spread == 0 else _MOST
    enough = (
        n for n in range(thresholds.INTERVAL_PAIRS, _MOST) if (margin(spread, n, confidence) or 0.0) <= half_width
    )
    return next(enough, _MOST)


@functools.lru_cache(maxsize=4_096)
def student(confidence: float, freedom: int) -> float:
    """How many standard errors a two-sided interval reaches to either side."""
    from scipy import special

    return float(special.stdtrit(freedom, (1 + confidence) / 2))


def exp(value: float) -> float:
    """Infinite where a float cannot hold it."""
    return math.inf if value > 709 else math.exp(value)


def _further(effect: Effect, half_width: float, confidence: float = thresholds.CONFIDENCE) -> int:
    """How many more pairs until the interval is as narrow, if effect and spread stay; at least one."""
    return max(1, pairs_needed(effect.spread or 0.0, half_width, confidence) - effect.pairs)


def verdict(
    effect: Effect | None,
    limits: Limits,
    *,
    more_is_better: bool = False,
    candidates: int = 1,
    alpha: float = thresholds.FIXED_ALPHA.mean,
    at_most: int | None = None,
    nouns: tuple[str, str] = (FASTER, SLOWER),
) -> Verdict:
    """What `effect` shows by itself: faster, slower, no_difference or undecided.

    `effect.p_value` is taken as corrected for the `candidates`; below `alpha` it is certain. A time is better when it
    shrinks; `more_is_better` is for samples per second. `at_most` is after how many more pairs another figure would
    decide. `nouns` are what the sentence calls less of the figure and more of it.
    """
    if effect is None:
        return Verdict(UNDECIDED, "undecided: there is no step time to compare on both sides")
    low, high = effect.low, effect.high
    threshold, size, pairs = limits.threshold, abs(effect.ratio - 1), things(effect.pairs, "pair")
    change = f"{percent(effect.ratio - 1, sign=True)} %{' samples per second' if more_is_better else ''}"
    if low is None or high is None:
        said = f"{change} in {pairs}; an interval needs {thresholds.INTERVAL_PAIRS}"
        if effect.pairs == 1:
            said = f"{change} in one run each; how much runs of the same program differ is not known"
        return Verdict(UNDECIDED, f"undecided: {said}", pairs_needed=max(1, thresholds.INTERVAL_PAIRS - effect.pairs))
    excluded = low > 1 or high < 1
    slower = (effect.ratio > 1) != more_is_better
    distances = sorted(abs(limit - 1) for limit in (low, high))
    span = f"(95 %: {percent(distances[0])} to {percent(distances[1])} %), {pairs}"
    said = f"{nouns[slower]} by {percent(size)} % {span}"
    if more_is_better:
        said = f"{'slower' if slower else 'faster'}: {percent(size)} % {'fewer' if slower else 'more'} "
        said += f"samples per second {span}"
    if excluded and size >= threshold and (effect.p_value is None or effect.p_value < alpha):
        return Verdict(SLOWER if slower else FASTER, said)
    # As wide as the interval may be when pairs end, plus as far off as its middle may be and still not matter.
    if distances[1] <= limits.width + threshold and not (excluded and size >= threshold):
        # rounded up, so that what is said to be no larger is not
        value = distances[1] * 100
        step = 1.0 if value >= 10 else 0.1 if value >= 0.1 else 0.01
        text = f"no difference larger than {percent(max(step, math.ceil(value / step - 1e-9) * step) / 100)} %, {pairs}"
        return Verdict(NO_DIFFERENCE, text, resolution=distances[1])
    more = _more_pairs(effect, limits, 1 - alpha / max(1, candidates))
    more = more if at_most is None else min(more, at_most)
    if excluded:
        said += f", by itself, but {f'one of {candidates} candidates' if candidates > 1 else 'that'} may "
        said += "show that by chance" if candidates > 1 else "be chance"
    else:
        said = f"{change} (95 %: {percent(low - 1, sign=True)} to {percent(high - 1, sign=True)} %), {pairs}"
    outlook = _outlook(more)
    if more > thresholds.MOST_PAIRS_WORTH_NAMING:
        outlook = f"runs differ so much that over {thresholds.MOST_PAIRS_WORTH_NAMING} more pairs are needed"
    return Verdict(UNDECIDED, f"undecided: {said}; {outlook}", pairs_needed=more)


def step_verdict(
    mean: Effect | None,
    median: Effect | None,
    limits: Limits,
    *,
    candidates: int = 1,
    alpha: Alpha = thresholds.FIXED_ALPHA,
) -> Verdict:
    """What the mean step and the median step show together; as `verdict`, and the text names the median if it decided.

    The median decides where it is certain, and the mean, which is not, has an effect of at least the threshold in the
    same direction. No difference is said by the mean alone.
    """
    if mean is None or median is None or median.spread is None:
        return verdict(mean, limits, candidates=candidates, alpha=alpha.mean)
    threshold, sooner = limits.threshold, None
    borne_out = (mean.ratio > 1) == (median.ratio > 1) and abs(mean.ratio - 1) >= threshold
    if borne_out and 0 < median.ratio < math.inf and abs(median.ratio - 1) >= threshold:
        sooner = _further(median, abs(math.log(median.ratio)), 1 - alpha.median / max(1, candidates))
    said = verdict(mean, limits, candidates=candidates, alpha=alpha.mean, at_most=sooner)
    if median.low is None:
        return said
    typical = verdict(median, limits, candidates=candidates, alpha=alpha.median)
    if typical.word not in {FASTER, SLOWER} or typical.word == said.word:
        return said
    if said.word in {FASTER, SLOWER}:
        return replace(
            said, text=f"{said.text}; the typical step went the other way: the median step is {typical.text}"
        )
    if borne_out:
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


def _by_median(mean: Effect, median: Effect) -> str:
    """Both in the median's direction, so that limits of the mean beyond "no change" are negative."""
    slower = median.ratio > 1
    direction = 1 if slower else -1
    sizes = [percent(direction * (effect.ratio - 1)) for effect in (median, mean)]
    ends = [sorted(direction * ((end or 0.0) - 1) for end in (effect.low, effect.high)) for effect in (median, mean)]
    spans = [" to ".join(map(percent, each)) for each in ends]
    blurred = (mean.spread or 0.0) > thresholds.BLURRED * (median.spread or 0.0)
    return (
        f"{'slower' if slower else 'faster'} by {sizes[0]} % by the median step (95 %: {spans[0]} %), "
        f"{things(median.pairs, 'pair')}; the mean, which {'stalls blur' if blurred else 'is less certain'}, says "
        f"{sizes[1]} % ({spans[1]} %)"
    )


def _more_pairs(effect: Effect, limits: Limits, confidence: float) -> int:
    """Until the interval excludes 1 with `confidence`, or is narrow enough for "no difference": what comes first."""
    if not 0 < effect.ratio < math.inf:
        return 1
    size, widest = abs(math.log(effect.ratio)), limits.width + limits.threshold
    counts = [_further(effect, widest - size)] if widest > size else []
    if abs(effect.ratio - 1) >= limits.threshold and size > 0:
        counts.append(_further(effect, size, confidence))
    return min(counts, default=1)


def slower_by(comparison: Comparison, by: float) -> tuple[bool | None, str]:
    """(whether the candidate is slower by the fraction `by` or more, what was seen).

    True with a verdict "slower" and an effect of that size: of the mean where the mean is certain, else of the median
    that the verdict rests on; a noisy mean beside a median that grew by less says nothing of the limit. False where the
    interval ends below it, or the verdict is "faster". None otherwise: there is no interval, or `by` lies in it.
    """
    outcome = comparison.outcome
    if outcome is None:
        return None, comparison.absent.get("step time", "no step time is known of both sides")
    effect, word = outcome.effects.get(outcome.headline), outcome.verdict.word
    if word == VOID or effect is None:
        return None, outcome.verdict.text
    ratio, low, high = effect.ratio, effect.low, effect.high
    if outcome.headline == "samples_per_second":  # the effect on the time per sample
        ratio, low, high = 1 / ratio, high and 1 / high, low and 1 / low
    if low is None or high is None:
        pairs = "1 pair gives" if effect.pairs == 1 else f"{effect.pairs} pairs give"
        needed = _outlook(max(1, thresholds.INTERVAL_PAIRS - effect.pairs))
        return None, f"{percent(ratio - 1, sign=True)} %, but {pairs} no interval; {needed}"
    change, *ends = (f"{percent(value - 1, sign=True)} %" for value in (ratio, low, high))
    seen = f"{change} (95 %: {' to '.join(ends)}), {things(effect.pairs, 'pair')}"
    limit, median = 1 + by, outcome.effects.get("median_ms")
    if word == SLOWER and ratio >= limit and (low > 1 or (median is not None and median.ratio >= limit)):
        return True, seen
    if high < limit or word == FASTER:
        return False, seen
    needed = _outlook(_further(effect, abs(math.log(limit / ratio))))
    return None, f"{seen}: {percent(by)} % lies in the interval; {needed}"


def _outlook(pairs: int) -> str:
    if pairs > thresholds.MOST_PAIRS_WORTH_NAMING:
        return f"over {thresholds.MOST_PAIRS_WORTH_NAMING} more pairs would be needed"
    return f"about {pairs} more pair{'' if pairs == 1 else 's'} needed"
