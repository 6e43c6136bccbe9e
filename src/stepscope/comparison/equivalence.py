"""Whether a candidate trains like the baseline, by the losses of the same steps.

Compared is the mean loss of the later half of the steps, so that one batch or another augmentation does not decide,
relative to the mean size of the baseline's loss over all compared steps, so that a loss near zero at the end does not
blow a small difference up. Two tests can fail: the means differ by more than the band, which is widened by what equal
runs differ (among the baselines, by the noise from step to step, and by what the pairs differ among each other: where
seeds differ from pair to pair that is what chance does); or the baseline learns and the candidate misses
most of that, even where it is little. Fewer steps than a few hundred show defects, not a slightly worse convergence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from stepscope.comparison import estimates
from stepscope.comparison.thresholds import (
    INTERVAL_PAIRS,
    LEAST_LOSSES,
    LOSS_BAND,
    LOSS_CONFIDENCE,
    LOSS_NOISE,
    LOSS_PROGRESS,
    LOSS_SPREADS,
    LOSS_WIDEST_BAND,
)
from stepscope.comparison.verdicts import percent
from stepscope.model.comparison import Equivalence

Losses = Sequence[tuple[int, float]]  # (step, value); a step may have several, of accumulated batches
Floats = NDArray[np.float64]


def equivalence(baseline: Sequence[Losses], candidate: Sequence[Losses], band: float = LOSS_BAND) -> Equivalence:
    """Of the losses of each run on either side. `band` is a fraction; runs without losses are left aside."""
    ours, theirs = ([_by_step(run) for run in side if run] for side in (baseline, candidate))
    if not ours or not theirs:
        return not_judged("no losses are known of either side" if not ours and not theirs else _one_side(ours), band)
    steps = sorted(set.intersection(*(set(run) for run in (*ours, *theirs))))
    if not steps:
        return not_judged("no step has a loss on both sides", band)
    before, after = (np.array([[run[step] for step in steps] for run in side]) for side in (ours, theirs))
    if _same(before, after):
        text = f"the losses of {len(steps)} steps are the same bit for bit"
        return Equivalence(True, True, True, 0.0, band, len(steps), text)
    lost = _lost(before, after, steps, band)
    if lost is not None:
        return lost
    if len(steps) < LEAST_LOSSES:
        text = f"only {len(steps)} steps have a loss on both sides, {LEAST_LOSSES} are needed"
        return not_judged(text, band, len(steps))
    return _judge(before, after, band)


def not_judged(why: str, band: float, steps: int = 0) -> Equivalence:
    """Nothing is said of how the candidate trains; `why` goes on from "not judged:"."""
    return Equivalence(False, None, False, None, band, steps, f"not judged: {why}")


def _one_side(ours: Sequence[object]) -> str:
    return f"no losses are known of the {'candidate' if ours else 'baseline'}"


def _by_step(run: Losses) -> dict[int, float]:
    """The mean of a step's losses; one value stays what it is, bit for bit."""
    values: dict[int, list[float]] = {}
    for step, value in run:
        values.setdefault(step, []).append(value)
    return {step: sum(of) / len(of) if len(of) > 1 else of[0] for step, of in values.items()}


def _same(before: Floats, after: Floats) -> bool:
    if len(before) == len(after):  # pairs, each of its own seed
        return bool(np.all((before == after) | (np.isnan(before) & np.isnan(after))))
    runs = np.vstack([before, after])
    return bool(np.all((runs == runs[0]) | (np.isnan(runs) & np.isnan(runs[0]))))


def _lost(before: Floats, after: Floats, steps: Sequence[int], band: float) -> Equivalence | None:
    """What losses that are no numbers say; None where there are none."""
    bad_before, bad_after = (~np.isfinite(side).all(axis=0) for side in (before, after))
    if not bad_before.any() and not bad_after.any():
        return None
    if bad_before.any() and bad_after.any():
        return not_judged("neither side's loss stays a finite number", band, len(steps))
    side, bad = ("candidate", bad_after) if bad_after.any() else ("baseline", bad_before)
    text = f"the {side}'s loss is no finite number at step {steps[int(np.argmax(bad))]}, the other's always is"
    return Equivalence(True, False, False, None, band, len(steps), text)


class _Means(Struct, frozen=True):
    """Mean losses; `noise` is what the later means may differ by chance."""

    early: float  # baseline, first quarter
    before: float  # baseline, later half
    after: float  # candidate, later half
    size: float  # of the baseline's loss
    noise: float


def _judge(before: Floats, after: Floats, band: float) -> Equivalence:
    steps = before.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):
        means = _means(before, after)
        if not means.size or not math.isfinite(means.size):
            return not_judged("the baseline's loss has no size to compare with", band, steps)
        difference = (means.after - means.before) / means.size
        among = _chance(before, after) / means.size
    accepted = max(band, among, means.noise / means.size)
    figures = f"the mean loss of the later {steps - steps // 2} steps differs by {percent(difference, sign=True)} %"
    if not abs(difference) <= accepted:
        text = f"{figures}, more than the {percent(accepted)} % accepted"
        return Equivalence(True, False, False, _finite(difference), accepted, steps, text)
    if _learns_less(means, among * means.size):
        missed = (means.after - means.before) / (means.early - means.before)
        text = f"the baseline's loss falls from {means.early:.4g} to {means.before:.4g}; the candidate's misses "
        return Equivalence(True, False, False, difference, accepted, steps, f"{text}{percent(missed)} % of that")
    if accepted > LOSS_WIDEST_BAND:
        return not_judged(f"equal runs' losses may differ by {percent(accepted)} %", accepted, steps)
    return Equivalence(True, True, False, difference, accepted, steps, f"{figures}, accepted: {percent(accepted)} %")


def _means(before: Floats, after: Floats) -> _Means:
    ours, theirs = before.mean(axis=0), after.mean(axis=0)
    half, quarter = len(ours) // 2, max(1, len(ours) // 4)
    return _Means(
        early=float(ours[:quarter].mean()),
        before=float(ours[half:].mean()),
        after=float(theirs[half:].mean()),
        size=float(np.abs(ours).mean()),
        noise=LOSS_NOISE * _standard_error(ours, theirs, len(ours) - half),
    )


def _chance(before: Floats, after: Floats) -> float:
    """How far the means of runs that train alike may be apart: by how much pairs differ among each other, or, where
    there are too few, by how much the baselines do."""
    half = before.shape[1] // 2
    ours, theirs = before[:, half:].mean(axis=1), after[:, half:].mean(axis=1)
    if len(ours) != len(theirs) or len(ours) < INTERVAL_PAIRS:
        return LOSS_SPREADS * float(np.ptp(ours))
    differences = theirs - ours
    count, spread = len(differences), float(differences.std(ddof=1))
    # A script that seeds torch itself gives a loader's workers the same numbers in every pair: then all candidates are
    # one draw, whose own chance no number of pairs averages out.
    one_draw = not np.ptp(ours) or not np.ptp(theirs)
    part = math.sqrt(1 + 1 / count) if one_draw else math.sqrt(1 / count)
    return estimates.student(LOSS_CONFIDENCE, count - 1) * spread * part


def _standard_error(ours: Floats, theirs: Floats, count: int) -> float:
    """Of the difference of two means of `count` steps, from the noise between neighbouring steps: a trend is none.

    With the same batches on both sides most of the noise is common to them and the differences are quiet; a candidate
    that diverges makes the differences loud. So the quieter way counts.
    """
    apart = math.sqrt(2) * _step_noise(ours)
    return min(apart, _step_noise(theirs - ours)) / math.sqrt(count)


def _step_noise(values: Floats) -> float:
    return float(np.sqrt(np.mean(np.diff(values) ** 2) / 2))


def _learns_less(means: _Means, among: float) -> bool:
    progress = means.early - means.before
    missed = means.after - means.before
    unsure = max(means.noise, among)
    return progress > unsure and missed > unsure and missed > LOSS_PROGRESS * progress


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
