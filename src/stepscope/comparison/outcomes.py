"""Runs of a candidate beside runs of the baseline to one outcome. Pure: measures in, `Outcome` out.

What makes a timing doubtful comes before what the timing says: a run that a flag withholds is left out of the pairs, a
knob that was not applied or a loss that goes another way makes the outcome void, whatever the effect. The headline is
the mean step; the verdict rests on it or on the median step, as `verdicts.step_verdict` says, each with its own p-value
corrected for the candidates. Where the batch size differs, samples per second alone decide.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from stepscope.comparison import thresholds
from stepscope.comparison.thresholds import ANOTHER_BATCH, FIXED_ALPHA, INTERVAL_PAIRS, Alpha, Limits
from stepscope.comparison.verdicts import effect_of, holm, margin, p_value, percent, step_verdict, student, verdict
from stepscope.model.comparison import (
    FASTER,
    LESS,
    MORE,
    NO_DIFFERENCE,
    SLOWER,
    UNDECIDED,
    VOID,
    Effect,
    Equivalence,
    Flag,
    Measure,
    Outcome,
    PhaseEffect,
    Verdict,
)
from stepscope.model.counted import things
from stepscope.schema import Knob

MEAN, MEDIAN, RATE = "mean_ms", "median_ms", "samples_per_second"
FIGURES = (MEAN, MEDIAN, "p95_ms", RATE, "fixed_cost_s")
DECIDING = {MEAN: (MEAN, MEDIAN), RATE: (RATE,)}  # headline -> the figures that a verdict may rest on
PER_SAMPLE, PER_STEP, COST = "joules_per_sample", "joules_per_step", "cost_per_1000_steps"
ENERGY = {PER_SAMPLE: "a sample", PER_STEP: "a step"}  # the first that all runs have is compared
FORWARD, OTHER, FORWARD_OR_OTHER = "forward", "other", "forward_or_other"
NOT_APPLIED = "knob_not_applied"  # the flag that makes an outcome void in whatever run it stands

Pairs = Sequence[tuple[Measure, Measure]]
Losses = Sequence[tuple[int, float]]  # (step, value); a step may have several, of accumulated batches
Floats = NDArray[np.float64]


def outcome(
    knobs: Sequence[Knob], pairs: Pairs, limits: Limits, *, candidates: int = 1, alpha: Alpha = FIXED_ALPHA
) -> Outcome:
    """What `pairs` of (baseline, candidate) say of `knobs`.

    `alpha` is `LOOKING_ALPHA` where pairs are run until the interval is narrow.
    Until `corrected` has seen all `candidates` of an experiment, p-values are multiplied by their number, which is what
    Holm's correction asks of the smallest.
    """
    clean = [pair for pair in pairs if not any(withholding(measure) for measure in pair)]
    measures = _distinct(measure for pair in pairs for measure in pair)
    headline = MEAN
    sized = [pair for pair in clean if all(side.samples_per_step for side in pair)]
    if sized and all(side.samples_per_second for pair in clean for side in pair):
        before, after = (statistics.fmean(pair[side].samples_per_step or 0.0 for pair in sized) for side in (0, 1))
        if abs(after / before - 1) > ANOTHER_BATCH:
            headline = RATE  # a step of the candidate holds another number of samples, so that step times say little
    effects: dict[str, Effect] = {}
    energy, _ = _energy_figure(clean)
    for figure in (*FIGURES, *((energy, COST) if energy is not None else ())):
        values = [(getattr(baseline, figure), getattr(candidate, figure)) for baseline, candidate in clean]
        effect = None if any(None in pair for pair in values) else effect_of(values)
        if effect is not None:
            if figure in (*DECIDING[headline], energy) and effect.p_value is not None:
                effect = replace(effect, p_value=min(1.0, effect.p_value * max(1, candidates)))
            effects[figure] = effect
    if headline == RATE:
        same = not_judged("the batch size differs, and with it the way of the loss", limits.loss_band)
    else:
        ours, theirs = ([one.losses for one in _distinct(pair[side] for pair in clean)] for side in (0, 1))
        same = equivalence(ours, theirs, limits.loss_band)
    found = Outcome(
        knobs=tuple(knobs),
        verdict=Verdict(UNDECIDED, ""),
        effects=effects,
        phases=_phases(clean),
        pairs=tuple(clean),
        left_out=tuple(measure for measure in measures if withholding(measure)),
        flags=_flags(measures),
        equivalence=same,
        headline=headline,
    )
    return _judged(found, len(pairs), limits, candidates, alpha)


def corrected(outcomes: Sequence[Outcome], limits: Limits, alpha: Alpha = FIXED_ALPHA) -> list[Outcome]:
    """The outcomes of one experiment judged together: p-values of each figure after Holm, verdicts by them.

    It starts from each effect alone, so it may be called again whenever a pair has come. Void outcomes are not counted.
    """
    found = list(outcomes)
    deciding = {
        number: [figure for figure in DECIDING[one.headline] if figure in one.effects]
        for number, one in enumerate(outcomes)
        if one.verdict.word != VOID and one.headline in one.effects
    }
    for rank in range(2):  # the headline of each, then the other figure
        figures = {number: of[rank] for number, of in deciding.items() if rank < len(of)}
        values = holm([p_value(found[number].effects[figure]) for number, figure in figures.items()])
        for (number, figure), value in zip(figures.items(), values, strict=True):
            effects = found[number].effects
            found[number] = replace(found[number], effects={**effects, figure: replace(effects[figure], p_value=value)})
    family = sum(found[number].effects[found[number].headline].p_value is not None for number in deciding)
    for number in deciding:
        one = found[number]
        for figure in ENERGY.keys() & one.effects.keys():  # beside the step time: each for all candidates
            alone = p_value(one.effects[figure])
            if alone is not None:
                effect = replace(one.effects[figure], p_value=min(1.0, alone * max(1, family)))
                one = replace(one, effects={**one.effects, figure: effect})
        found[number] = _judged(one, len(one.pairs) + len(one.left_out), limits, max(1, family), alpha)
    return found


def _judged(found: Outcome, tried: int, limits: Limits, candidates: int, alpha: Alpha) -> Outcome:
    """`found` with its verdict; `tried` pairs were run, some of which may be left out."""
    void = _void(found)
    if void is not None:
        return replace(found, verdict=Verdict(VOID, f"void: {void}"))
    if found.headline == RATE:
        effect = found.effects.get(RATE)
        said = verdict(effect, limits, more_is_better=True, candidates=candidates, alpha=alpha.mean)
        said = replace(said, text=f"{said.text}; the batch size differs: convergence is not judged")
    else:
        mean, median = found.effects.get(MEAN), found.effects.get(MEDIAN)
        said = step_verdict(mean, median, limits, candidates=candidates, alpha=alpha)
    flag = next((flag for flag in found.flags if flag.withholds), None)
    if flag and said.word == UNDECIDED and len(found.pairs) < min(tried, INTERVAL_PAIRS):
        said = replace(said, text=f"{said.text}; other runs are left out: {flag.text}")
    return replace(found, verdict=said, energy=_energy(found, said.word, limits, candidates, alpha))


def _energy_figure(pairs: Pairs) -> tuple[str | None, str | None]:
    """(the figure of energy that all runs have, why there is none); two None where no run has any."""
    runs = [measure for pair in pairs for measure in pair]
    if all(measure.joules_per_step is None for measure in runs):
        return None, None
    lacking = next((measure for measure in runs if measure.joules_per_step is None), None)
    if lacking is not None:
        return None, f"{lacking.label}: {lacking.energy_absent or 'no energy is known'}"
    sources = dict.fromkeys(measure.energy_sources for measure in runs)
    if len(sources) > 1:
        return None, f"not all runs tell of the same: {' against '.join(', '.join(each) for each in sources)}"
    return next(name for name in ENERGY if all(getattr(measure, name) is not None for measure in runs)), None


def _energy(found: Outcome, time: str, limits: Limits, candidates: int, alpha: Alpha) -> Verdict | None:
    """What the pairs say of energy; `time` is the word for the step time."""
    figure, why = _energy_figure(found.pairs)
    if figure is None:
        return None if why is None else Verdict(UNDECIDED, f"energy is not compared: {why}")
    effect, of = found.effects.get(figure), ENERGY[figure]
    if effect is None:
        return Verdict(UNDECIDED, f"energy is not compared: a run drew nothing {of}")
    nouns = f"less energy {of}", f"more energy {of}"
    said = verdict(effect, limits, candidates=candidates, alpha=alpha.mean, nouns=nouns)
    word = {FASTER: LESS, SLOWER: MORE}.get(said.word, said.word)
    text = said.text if word in (LESS, MORE) else f"energy {of}: {said.text}"
    if time == FASTER and word in (MORE, NO_DIFFERENCE):
        text = f"{text}; time falls but energy does not"
    cost = found.effects.get(COST)
    if cost is not None:
        more = "more" if cost.ratio > 1 else "less"
        text = f"{text}; at your prices 1,000 steps cost {percent(abs(cost.ratio - 1))} % {more}"
    return replace(said, word=word, text=text, figure=figure)


def _void(found: Outcome) -> str | None:
    """Why no timing counts; None where it does."""
    flagged = (flag.text for flag in found.flags if flag.name == NOT_APPLIED)
    refused = ((knob, refusal(knob, candidate)) for knob in found.knobs for _, candidate in found.pairs)
    said = (f"{knob.knob}={knob.value} was not applied: {reason}" for knob, reason in refused if reason is not None)
    not_applied = next(itertools.chain(flagged, said), None)
    if not_applied is not None:
        return not_applied
    if not found.pairs:
        withheld = next((flag for flag in found.flags if flag.withholds), None)
        return f"no pair is left: {withheld.text}" if withheld else "no pair of runs was measured"
    if found.equivalence is not None and found.equivalence.within is False:
        return f"its loss goes another way: {found.equivalence.text}"
    return None


def refusal(knob: Knob, measure: Measure) -> str | None:
    """Why no process of a run has applied the knob; None where one has, or none said."""
    told = [one for one in measure.knobs if (one.knob, one.value) == (knob.knob, knob.value)]
    return (told[0].reason or "no reason is known") if told and not any(one.applied for one in told) else None


def _phases(pairs: Pairs) -> tuple[PhaseEffect, ...]:
    """All phases sum to the mean step, so a phase that a run has none of took 0 ms there. Odd figures are left out.

    Where one side cannot tell the forward pass from all else, both are one phase: nothing marks where a compiled
    model's forward pass begins in a loop without a loader.
    """
    sides = [[_by_phase(pair[side]) for pair in pairs] for side in (0, 1)]
    if len({any(one.get(FORWARD, 0.0) > 0 for one in side) for side in sides}) > 1:
        for one in (*sides[0], *sides[1]):
            one[FORWARD_OR_OTHER] = one.pop(FORWARD, 0) + one.pop(OTHER, 0)
    found = []
    for name in dict.fromkeys(name for pair in zip(*sides, strict=True) for one in pair for name in one):
        before, after = ([one.get(name, 0) for one in side] for side in sides)
        differences = [late - early for early, late in zip(before, after, strict=True)]
        if not all(map(math.isfinite, differences)):
            continue
        middle = statistics.fmean(differences)
        half = margin(statistics.stdev(differences), len(differences)) if len(differences) > 1 else None
        low, high = (None, None) if half is None else (middle - half, middle + half)
        found.append(PhaseEffect(name, statistics.fmean(before), statistics.fmean(after), middle, low, high))
    return tuple(found)


def _by_phase(measure: Measure) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in measure.phases:
        found[part.category] = found.get(part.category, 0) + part.ms
    return found


def withholding(measure: Measure) -> bool:
    """Whether no verdict may rest on the run."""
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
    found = []
    for flags in by_name.values():
        strictest = next((flag for flag in flags if flag.withholds), flags[0])
        runs = f" (in {len(flags)} of {len(measures)} runs)" if len(flags) > 1 else ""
        found.append(replace(strictest, text=strictest.text + runs))
    return tuple(sorted(found, key=lambda flag: not flag.withholds))


# ------------------------------------------------------------------------------------- whether both train alike


def equivalence(
    baseline: Sequence[Losses], candidate: Sequence[Losses], band: float = thresholds.LOSS_BAND
) -> Equivalence:
    """Of the losses of each run on either side. `band` is a fraction; runs without losses are left aside.

    Compared is the mean loss of the later half of the steps, so that one batch or another augmentation does not
    decide, relative to the mean size of the baseline's loss over all compared steps, so that a loss near zero at
    the end does not blow a small difference up. Two tests can fail: the means differ by more than the band, which
    is widened by what equal runs differ (among the baselines, by the noise from step to step, and by what the pairs
    differ among each other: where seeds differ from pair to pair that is what chance does); or the baseline learns
    and the candidate misses most of that, even where it is little. Fewer steps than a few hundred show defects, not
    a slightly worse convergence.
    """
    ours, theirs = ([_by_step(run) for run in side if run] for side in (baseline, candidate))
    if not ours or not theirs:
        lacking = "either side" if not ours and not theirs else "the candidate" if ours else "the baseline"
        return not_judged(f"no losses are known of {lacking}", band)
    steps = sorted(set.intersection(*(set(run) for run in (*ours, *theirs))))
    if not steps:
        return not_judged("no step has a loss on both sides", band)
    before, after = (np.array([[run[step] for step in steps] for run in side]) for side in (ours, theirs))
    if _same(before, after):
        text = f"the losses of {things(len(steps), 'step')} are the same bit for bit"
        return Equivalence(True, True, True, 0.0, band, len(steps), text)
    bad_before, bad_after = (~np.isfinite(side).all(axis=0) for side in (before, after))
    if bad_before.any() and bad_after.any():
        return not_judged("neither side's loss stays a finite number", band, len(steps))
    for side, bad in (("candidate", bad_after), ("baseline", bad_before)):
        if bad.any():
            text = f"the {side}'s loss is no finite number at step {steps[int(np.argmax(bad))]}, the other's always is"
            return Equivalence(True, False, False, None, band, len(steps), text)
    if len(steps) < thresholds.LEAST_LOSSES:
        text = f"only {things(len(steps), 'step')} have a loss on both sides, {thresholds.LEAST_LOSSES} are needed"
        return not_judged(text, band, len(steps))
    with np.errstate(over="ignore", invalid="ignore"):
        return _alike(before, after, band)


def not_judged(why: str, band: float, steps: int = 0) -> Equivalence:
    """Nothing is said of how the candidate trains; `why` goes on from "not judged:"."""
    return Equivalence(False, None, False, None, band, steps, f"not judged: {why}")


def _by_step(run: Losses) -> dict[int, float]:
    """The mean of a step's losses; one value stays what it is, bit for bit."""
    values: dict[int, list[float]] = {}
    for step, value in run:
        values.setdefault(step, []).append(value)
    return {step: sum(of) / len(of) if len(of) > 1 else of[0] for step, of in values.items()}


def _same(before: Floats, after: Floats) -> bool:
    if len(before) == len(after):  # pairs, each of its own seed
        return np.array_equal(before, after, equal_nan=True)
    runs = np.vstack([before, after])
    return np.array_equal(runs, np.broadcast_to(runs[0], runs.shape), equal_nan=True)


def _alike(before: Floats, after: Floats, band: float) -> Equivalence:
    """By the mean losses of finite ones: of the later half, and of the baseline's first quarter."""
    steps = before.shape[1]
    half = steps // 2
    ours, theirs = before.mean(axis=0), after.mean(axis=0)
    size = float(np.abs(ours).mean())
    if not size or not math.isfinite(size):
        return not_judged("the baseline's loss has no size to compare with", band, steps)
    first, last, candidate = (float(part.mean()) for part in (ours[: max(1, steps // 4)], ours[half:], theirs[half:]))
    missed = candidate - last
    # With the same batches on both sides most of the noise is common to them and the differences are quiet; a candidate
    # that diverges makes the differences loud. So the quieter way counts.
    quieter = min(math.sqrt(2) * _step_noise(ours), _step_noise(theirs - ours))
    noise = thresholds.LOSS_NOISE * quieter / math.sqrt(steps - half)
    among = _chance(before[:, half:].mean(axis=1), after[:, half:].mean(axis=1))
    difference = missed / size
    accepted = max(band, among / size, noise / size)
    figures = f"the mean loss of the later {steps - half} steps differs by {percent(difference, sign=True)} %"
    if not abs(difference) <= accepted:
        text = f"{figures}, more than the {percent(accepted)} % accepted"
        finite = difference if math.isfinite(difference) else None
        return Equivalence(True, False, False, finite, accepted, steps, text)
    progress, unsure = first - last, max(noise, among)
    if progress > unsure and missed > unsure and missed > thresholds.LOSS_PROGRESS * progress:
        text = f"the baseline's loss falls from {first:.4g} to {last:.4g}; the candidate's misses "
        text += f"{percent(missed / progress)} % of that"
        return Equivalence(True, False, False, difference, accepted, steps, text)
    if accepted > thresholds.LOSS_WIDEST_BAND:
        return not_judged(f"equal runs' losses may differ by {percent(accepted)} %", accepted, steps)
    return Equivalence(True, True, False, difference, accepted, steps, f"{figures}, accepted: {percent(accepted)} %")


def _chance(ours: Floats, theirs: Floats) -> float:
    """How far the means of runs that train alike may be apart: by how much pairs differ among each other, or, where
    there are too few, by how much the baselines do."""
    if len(ours) != len(theirs) or len(ours) < thresholds.INTERVAL_PAIRS:
        return thresholds.LOSS_SPREADS * float(np.ptp(ours))
    differences = theirs - ours
    count, spread = len(differences), float(differences.std(ddof=1))
    # A script that seeds torch itself gives a loader's workers the same numbers in every pair: then all candidates are
    # one draw, whose own chance no number of pairs averages out.
    one_draw = not np.ptp(ours) or not np.ptp(theirs)
    part = math.sqrt(1 + 1 / count) if one_draw else math.sqrt(1 / count)
    return student(thresholds.LOSS_CONFIDENCE, count - 1) * spread * part


def _step_noise(values: Floats) -> float:
    """Standard deviation by what neighbouring steps differ, so that a trend is none."""
    return float(np.sqrt(np.mean(np.diff(values) ** 2) / 2))
