"""Training runs that were never run: step times with the noise of a shared machine, and ways to compare them.

A step takes 100 ms. Within a run its noise (3 %) is autocorrelated, one step in 50 has a spike, the first steps are
warm-up; runs differ by 1 %, and the machine slows down by 4 % in the time of twelve runs. Where the truth is known, a
way of comparing can be counted wrong. Ours is the code that `stepscope experiment` uses, from step times to the word.

The noise is that of a survey of comparisons which gives no length of the spikes. What can be found depends on it more
than on anything else, so several lengths are simulated; that of a whole step in the mean is the default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from stepscope.comparison.measured_steps import warmup_end
from stepscope.comparison.outcomes import outcome
from stepscope.comparison.thresholds import LEAST_PAIRS, MOST_PAIRS, WIDTH, Limits
from stepscope.comparison.verdicts import effect_of
from stepscope.experiment.schedule import alpha_after, is_clear, narrow_enough
from stepscope.model.comparison import FASTER, SLOWER, Effect, Measure, Outcome

Floats = NDArray[np.float64]

WARMUP_STEPS = 20  # at most are dropped; as many more than those asked for are run
AT_ONCE = 50  # sessions simulated together: some ten megabytes


@dataclass(frozen=True)
class Machine:
    """Noise. Shares are of the step; `spike_ms` is the mean of exponential spikes."""

    step_ms: float = 100.0
    noise: float = 0.03
    correlation: float = 0.8
    spike_share: float = 0.02
    spike_ms: float = 100.0
    run_to_run: float = 0.01
    drift: float = 0.04
    drift_runs: int = 12


@dataclass(frozen=True)
class Change:
    """What a candidate differs by: a share of every step, and a stall in every tenth."""

    share: float = 0.0
    stall_ms: float = 0.0
    stall_every: int = 10


def order(pairs: int, *, blocks: bool = True) -> str:
    """ABBA blocks, or all baselines before all candidates."""
    return ("ABBA" * pairs)[: 2 * pairs] if blocks else "A" * pairs + "B" * pairs


def sessions(
    rng: np.random.Generator, count: int, sides: str, steps: int, machine: Machine, change: Change
) -> Iterator[Floats]:
    """So many sessions, each the step times in ms of its runs: [run, step]. Warm-up comes before the `steps`."""
    while count > 0:
        yield from _some(rng, min(count, AT_ONCE), sides, steps + WARMUP_STEPS, machine, change)
        count -= AT_ONCE


def _some(rng: np.random.Generator, count: int, sides: str, steps: int, machine: Machine, change: Change) -> Floats:
    runs = len(sides)
    candidate = np.array([side == "B" for side in sides])
    times = machine.step_ms * (1 + _autocorrelated(rng, (steps, count, runs), machine))
    clock = np.arange(runs)[None, :] + (np.arange(steps) / steps)[:, None]
    times *= (1 + machine.drift * clock / (machine.drift_runs - 1))[:, None, :]
    times *= np.exp(machine.run_to_run * rng.standard_normal((1, count, runs)))
    times *= np.where(candidate, 1 + change.share, 1.0)
    times += (rng.random(times.shape) < machine.spike_share) * rng.exponential(machine.spike_ms, times.shape)
    times[change.stall_every - 1 :: change.stall_every] += np.where(candidate, change.stall_ms, 0.0)
    times += (machine.step_ms * _warmup(steps))[:, None, None]
    return np.moveaxis(times, 0, -1)


def _autocorrelated(rng: np.random.Generator, shape: tuple[int, ...], machine: Machine) -> Floats:
    """Along the first axis, with the standard deviation `noise` at every step."""
    values = machine.noise * rng.standard_normal(shape)
    rest = np.sqrt(1 - machine.correlation**2)
    for step in range(1, shape[0]):
        values[step] = machine.correlation * values[step - 1] + rest * values[step]
    return values


def _warmup(steps: int) -> Floats:
    """Extra steps' time: a first step that compiles, then caches that fill."""
    extra = 0.5 * np.exp(-np.arange(steps) / 3.0)
    extra[0] = 20.0
    return extra


def _measure(label: str, run: Floats) -> Measure:
    """Warm-up dropped by detection, the rest as it is."""
    dropped = warmup_end(run, limit=WARMUP_STEPS)
    kept = run[dropped:]
    median, p95 = np.quantile(kept, (0.5, 0.95))
    return Measure(
        label=label,
        path=label,
        steps=len(kept),
        dropped=dropped,
        mean_ms=float(kept.mean()),
        median_ms=float(median),
        p95_ms=float(p95),
        samples_per_step=None,
        samples_per_second=None,
        fixed_cost_s=None,
        phases=(),
    )


def judge(session: Floats, sides: str, *, least: int = LEAST_PAIRS, most: int = MOST_PAIRS) -> Outcome:
    """Our way: pair after pair until there are enough, then the outcome. The first baseline goes with the first
    candidate, and so on."""
    ours, theirs = ([index for index, each in enumerate(sides) if each == side] for side in "AB")
    pairs: list[tuple[Measure, Measure]] = []
    for before, after in zip(ours, theirs, strict=True):
        pairs.append((_measure(f"run {before}", session[before]), _measure(f"run {after}", session[after])))
        effect = effect_of([(one.mean_ms, other.mean_ms) for one, other in pairs])
        if enough(effect, least=least, most=most):
            break
    return outcome((), pairs, Limits(), alpha=alpha_after(least=least, most=most))


def enough(effect: Effect | None, *, least: int, most: int) -> bool:
    """As an experiment decides: by the width, or because the effect is clear."""
    level = alpha_after(least=least, most=most).mean
    clear = effect is not None and least < most and is_clear(effect, level)
    return clear or (effect is not None and narrow_enough(effect, least=least, most=most, width=WIDTH))


def by_median(found: Outcome) -> bool:
    """Whether the verdict rests on the median step, because the mean alone shows no difference."""
    return found.verdict.word in {FASTER, SLOWER} and " by the median step" in found.verdict.text


def excludes_one(effect: Effect) -> bool:
    """Whether the interval of a figure says that it differs."""
    return effect.low is not None and effect.high is not None and (effect.low > 1 or effect.high < 1)


# The naive ways: each takes the step times of all runs of either side, [run, step], and says whether they differ.


def welch_on_steps(baseline: Floats, candidate: Floats, _: np.random.Generator) -> bool:
    """Student's test for unequal variances, every step a sample."""
    return bool(stats.ttest_ind(baseline.ravel(), candidate.ravel(), equal_var=False).pvalue < 0.05)


def mann_whitney_on_steps(baseline: Floats, candidate: Floats, _: np.random.Generator) -> bool:
    """The rank test, every step a sample."""
    return bool(stats.mannwhitneyu(baseline.ravel(), candidate.ravel(), method="asymptotic").pvalue < 0.05)


def bootstrap_of_median(baseline: Floats, candidate: Floats, rng: np.random.Generator, resamples: int = 200) -> bool:
    """Steps drawn anew from either side; whether 95 % of the differences of medians lie on one side of 0."""
    medians = []
    for side in (baseline, candidate):
        steps = side.ravel()
        drawn = steps[rng.integers(0, len(steps), (resamples, len(steps)))]
        drawn.partition(len(steps) // 2, axis=1)
        medians.append(drawn[:, len(steps) // 2])
    low, high = np.quantile(medians[1] - medians[0], (0.025, 0.975))
    return bool(low > 0 or high < 0)


def welch_on_runs(baseline: Floats, candidate: Floats, _: np.random.Generator) -> bool:
    """What hyperfine's script does with whole executions: one time per run, the order ignored."""
    return bool(stats.ttest_ind(baseline.mean(axis=1), candidate.mean(axis=1), equal_var=False).pvalue < 0.05)


NAIVE = {
    "Welch's test on steps": welch_on_steps,
    "Mann-Whitney on steps": mann_whitney_on_steps,
    "bootstrap of the median, steps": bootstrap_of_median,
    "Welch's test on runs (as hyperfine's script)": welch_on_runs,
}


def without_warmup(session: Floats, sides: str) -> tuple[Floats, Floats]:
    """The measured steps of the baselines and of the candidates, for the naive ways: they get warm-up cut off."""
    kept = session[:, WARMUP_STEPS:]
    candidate = np.array([side == "B" for side in sides])
    return kept[~candidate], kept[candidate]
