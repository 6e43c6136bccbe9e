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
from numpy.typing import NDArray

from stepscope.comparison import thresholds
from stepscope.comparison.verdicts import percent, student
from stepscope.model.comparison import Equivalence
from stepscope.model.counted import things

Losses = Sequence[tuple[int, float]]  # (step, value); a step may have several, of accumulated batches
Floats = NDArray[np.float64]


def equivalence(
    baseline: Sequence[Losses], candidate: Sequence[Losses], band: float = thresholds.LOSS_BAND
) -> Equivalence:
    """Of the losses of each run on either side. `band` is a fraction; runs without losses are left aside."""
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
        return _judge(before, after, band)


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


def _judge(before: Floats, after: Floats, band: float) -> Equivalence:
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
