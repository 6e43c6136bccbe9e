"""Runs of a candidate beside runs of the baseline to one outcome. Pure: measures in, `Outcome` out.

What makes a timing doubtful comes before what the timing says: a run that a flag withholds is left out of the pairs, a
knob that was not applied or a loss that goes another way makes the outcome void, whatever the effect.

The headline is the mean step; the verdict rests on it or on the median step, as `verdicts.step_verdict` says, each with
its own p-value corrected for the candidates. Where the batch size differs, samples per second alone decide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from stepscope.comparison import estimates
from stepscope.comparison.equivalence import equivalence, not_judged
from stepscope.comparison.thresholds import (
    ANOTHER_BATCH,
    CONFIDENCE,
    FIXED_ALPHA,
    INTERVAL_PAIRS,
    LOSS_BAND,
    THRESHOLD,
    WIDTH,
    Alpha,
)
from stepscope.comparison.verdicts import step_verdict, verdict
from stepscope.model.comparison import (
    UNDECIDED,
    VOID,
    Effect,
    Equivalence,
    Flag,
    Measure,
    Outcome,
    PhaseEffect,
    PhaseTime,
    Verdict,
)
from stepscope.schema import Knob

MEAN, MEDIAN, RATE = "mean_ms", "median_ms", "samples_per_second"
FIGURES = (MEAN, MEDIAN, "p95_ms", RATE, "fixed_cost_s")
FORWARD, OTHER, FORWARD_OR_OTHER = "forward", "other", "forward_or_other"
NOT_APPLIED = "knob_not_applied"  # the flag that makes an outcome void in whatever run it stands

Pairs = Sequence[tuple[Measure, Measure]]


def outcome(
    knobs: Sequence[Knob],
    pairs: Pairs,
    *,
    threshold: float = THRESHOLD,
    width: float = WIDTH,
    loss_band: float = LOSS_BAND,
    candidates: int = 1,
    alpha: Alpha = FIXED_ALPHA,
) -> Outcome:
    """What `pairs` of (baseline, candidate) say of `knobs`. Fractions as in `thresholds`.

    `alpha` is `LOOKING_ALPHA` where pairs are run until the interval is narrow.
    Until `corrected` has seen all `candidates` of an experiment, p-values are multiplied by their number, which is what
    Holm's correction asks of the smallest.
    """
    clean = [pair for pair in pairs if not any(_withholding(measure) for measure in pair)]
    measures = _distinct(measure for pair in pairs for measure in pair)
    headline = RATE if _another_batch(clean) else MEAN
    effects = _effects(clean)
    for figure in _deciding(headline):
        if figure in effects:
            effects[figure] = _with_p(effects[figure], candidates)
    found = Outcome(
        knobs=tuple(knobs),
        verdict=Verdict(UNDECIDED, ""),
        effects=effects,
        phases=_phases(clean),
        pairs=tuple(clean),
        left_out=tuple(measure for measure in measures if _withholding(measure)),
        flags=_flags(measures),
        equivalence=_equivalence(clean, headline, loss_band),
        headline=headline,
    )
    judge = _Judge(threshold, width, candidates, alpha)
    return judge.judged(found, len(pairs))


def corrected(
    outcomes: Sequence[Outcome], *, threshold: float = THRESHOLD, width: float = WIDTH, alpha: Alpha = FIXED_ALPHA
) -> list[Outcome]:
    """The outcomes of one experiment judged together: p-values of each figure after Holm, verdicts by them.

    It starts from each effect alone, so it may be called again whenever a pair has come. Void outcomes are not counted.
    """
    counted = [one.verdict.word != VOID and one.headline in one.effects for one in outcomes]
    headlines = [one.headline if count else None for one, count in zip(outcomes, counted, strict=True)]
    medians = [
        MEDIAN if headline == MEAN and MEDIAN in one.effects else None
        for one, headline in zip(outcomes, headlines, strict=True)
    ]
    again = _after_holm(_after_holm(outcomes, headlines), medians)
    family = sum(
        headline is not None and one.effects[headline].p_value is not None
        for one, headline in zip(again, headlines, strict=True)
    )
    judge = _Judge(threshold, width, max(1, family), alpha)
    return [
        judge.judged(one, len(one.pairs) + len(one.left_out)) if count else one
        for one, count in zip(again, counted, strict=True)
    ]


def _after_holm(outcomes: Sequence[Outcome], figures: Sequence[str | None]) -> list[Outcome]:
    """With the p-value of one figure of each outcome corrected for all of them; None for one that does not count."""
    alone = [
        None if figure is None else estimates.p_value(one.effects[figure])
        for one, figure in zip(outcomes, figures, strict=True)
    ]
    return [
        one
        if figure is None
        else replace(one, effects={**one.effects, figure: replace(one.effects[figure], p_value=value)})
        for one, figure, value in zip(outcomes, figures, estimates.holm(alone), strict=True)
    ]


def _deciding(headline: str) -> tuple[str, ...]:
    """The figures that a verdict may rest on."""
    return (MEAN, MEDIAN) if headline == MEAN else (headline,)


class _Judge(Struct, frozen=True):
    """What a verdict is given by."""

    threshold: float
    width: float
    candidates: int
    alpha: Alpha

    def judged(self, found: Outcome, tried: int) -> Outcome:
        """`found` with its verdict; `tried` pairs were run, some of which may be left out."""
        return replace(found, verdict=_void(found) or self._word(found, tried))

    def _word(self, found: Outcome, tried: int) -> Verdict:
        said = self._by_rate(found) if found.headline == RATE else self._by_step(found)
        flag = next((flag for flag in found.flags if flag.withholds), None)
        if flag and said.word == UNDECIDED and len(found.pairs) < min(tried, INTERVAL_PAIRS):
            said = replace(said, text=f"{said.text}; other runs are left out: {flag.text}")
        return said

    def _by_step(self, found: Outcome) -> Verdict:
        return step_verdict(
            found.effects.get(MEAN),
            found.effects.get(MEDIAN),
            threshold=self.threshold,
            width=self.width,
            candidates=self.candidates,
            alpha=self.alpha,
        )

    def _by_rate(self, found: Outcome) -> Verdict:
        said = verdict(
            found.effects.get(RATE),
            threshold=self.threshold,
            width=self.width,
            more_is_better=True,
            candidates=self.candidates,
            alpha=self.alpha.mean,
        )
        return replace(said, text=f"{said.text}; the batch size differs: convergence is not judged")


def _void(found: Outcome) -> Verdict | None:
    refused = next((flag for flag in found.flags if flag.name == NOT_APPLIED), None)
    text = refused.text if refused else _never_applied(found)
    if text is None and not found.pairs:
        withheld = next((flag for flag in found.flags if flag.withholds), None)
        text = f"no pair is left: {withheld.text}" if withheld else "no pair of runs was measured"
    if text is None and found.equivalence is not None and found.equivalence.within is False:
        text = f"its loss goes another way: {found.equivalence.text}"
    return None if text is None else Verdict(VOID, f"void: {text}")


def _never_applied(found: Outcome) -> str | None:
    """Of a knob that every process of a candidate's run reported as not applied."""
    for knob in found.knobs:
        for _, candidate in found.pairs:
            told = [one for one in candidate.knobs if (one.knob, one.value) == (knob.knob, knob.value)]
            if told and not any(one.applied for one in told):
                return f"{knob.knob}={knob.value} was not applied: {told[0].reason or 'no reason is known'}"
    return None


def _effects(pairs: Pairs) -> dict[str, Effect]:
    found: dict[str, Effect] = {}
    for figure in FIGURES:
        values = [(getattr(baseline, figure), getattr(candidate, figure)) for baseline, candidate in pairs]
        if any(value is None for pair in values for value in pair):
            continue
        effect = estimates.effect(values)
        if effect is not None:
            found[figure] = effect
    return found


def _with_p(effect: Effect, candidates: int) -> Effect:
    if effect.p_value is None:
        return effect
    return replace(effect, p_value=min(1.0, effect.p_value * max(1, candidates)))


def _phases(pairs: Pairs) -> tuple[PhaseEffect, ...]:
    """All phases sum to the mean step, so a phase that a run has none of took 0 ms there. Odd figures are left out."""
    pairs = _told_apart(pairs)
    names = dict.fromkeys(part.category for pair in pairs for measure in pair for part in measure.phases)
    found = []
    for name in names:
        before, after = ([_phase(pair[side], name) for pair in pairs] for side in (0, 1))
        differences = [late - early for early, late in zip(before, after, strict=True)]
        if not all(map(math.isfinite, differences)):
            continue
        middle, half = statistics.fmean(differences), _half(differences)
        low, high = (None, None) if half is None else (middle - half, middle + half)
        found.append(PhaseEffect(name, statistics.fmean(before), statistics.fmean(after), middle, low, high))
    return tuple(found)


def _told_apart(pairs: Pairs) -> Pairs:
    """With the forward pass and all else as one phase where one side cannot tell them apart: nothing marks where a
    compiled model's forward pass begins in a loop without a loader."""
    known = [any(_phase(pair[side], FORWARD) > 0 for pair in pairs) for side in (0, 1)]
    if known[0] == known[1]:
        return pairs
    return [(_joined(before), _joined(after)) for before, after in pairs]


def _joined(measure: Measure) -> Measure:
    others = tuple(part for part in measure.phases if part.category not in (FORWARD, OTHER))
    both = PhaseTime(FORWARD_OR_OTHER, _phase(measure, FORWARD) + _phase(measure, OTHER))
    return replace(measure, phases=(*others, both))


def _phase(measure: Measure, category: str) -> float:
    return sum(part.ms for part in measure.phases if part.category == category)


def _half(differences: Sequence[float]) -> float | None:
    """Half of Student's interval of the mean; None with too few."""
    count = len(differences)
    if count < INTERVAL_PAIRS:
        return None
    return estimates.student(CONFIDENCE, count - 1) * statistics.stdev(differences) / math.sqrt(count)


def _another_batch(pairs: Pairs) -> bool:
    """Whether a step of the candidate holds another number of samples, so that step times say little."""
    sizes = [(baseline.samples_per_step, candidate.samples_per_step) for baseline, candidate in pairs]
    known = [(before, after) for before, after in sizes if before and after]
    if not known or any(not side.samples_per_second for pair in pairs for side in pair):
        return False
    ratio = statistics.fmean(after for _, after in known) / statistics.fmean(before for before, _ in known)
    return abs(ratio - 1) > ANOTHER_BATCH


def _equivalence(pairs: Pairs, headline: str, band: float) -> Equivalence:
    if headline == RATE:
        return not_judged("the batch size differs, and with it the way of the loss", band)
    baseline, candidate = (_distinct(pair[side] for pair in pairs) for side in (0, 1))
    return equivalence([one.losses for one in baseline], [one.losses for one in candidate], band)


def _withholding(measure: Measure) -> bool:
    return any(flag.withholds for flag in measure.flags)


def _distinct(measures: Iterable[Measure]) -> list[Measure]:
    """Each run once; a baseline may stand in several pairs."""
    found: list[Measure] = []
    for one in measures:
        if one not in found:
            found.append(one)
    return found


def _flags(measures: Sequence[Measure]) -> tuple[Flag, ...]:
    """One of each name, those that withhold first, with the number of runs that have it."""
    by_name: dict[str, list[Flag]] = {}
    for measure in measures:
        for name, flag in {flag.name: flag for flag in reversed(measure.flags)}.items():
            by_name.setdefault(name, []).append(flag)
    first = [_strictest(found, len(measures)) for found in by_name.values()]
    return tuple(sorted(first, key=lambda flag: not flag.withholds))


def _strictest(found: Sequence[Flag], runs: int) -> Flag:
    flag = next((flag for flag in found if flag.withholds), found[0])
    return replace(flag, text=flag.text + (f" (in {len(found)} of {runs} runs)" if found[1:] else ""))
