"""Whether a candidate trains alike: other rounding and augmentation pass, what diverges or is stuck does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.comparison.outcomes import equivalence

Run = list[tuple[int, float]]


def learning(
    seed: int = 0, *, steps: int = 200, first: float = 2.3, last: float = 1.2, pace: float = 60.0, noise: float = 0.08
) -> Run:
    """A loss that falls from `first` towards `last`, with a noise that follows the seed of the batches."""
    rng = np.random.default_rng(seed)
    fall = last + (first - last) * np.exp(-np.arange(steps) / pace)
    return list(enumerate((fall * (1 + noise * rng.standard_normal(steps))).tolist()))


def test_equal_to_the_bit() -> None:
    found = equivalence([learning(), learning()], [learning()])
    assert (found.judged, found.within, found.equal, found.difference, found.steps) == (True, True, True, 0.0, 200)
    assert found.text == "the losses of 200 steps are the same bit for bit"


@pytest.mark.parametrize("last", [1.2, 2.15])
def test_stuck_fails_even_where_there_is_little_to_learn(last: float) -> None:
    """With the batches of the baseline and 200 steps; a fall from 2.3 to 2.15 is 7 %, of which the band is most."""
    rng = np.random.default_rng(5)
    for seed in range(20):
        baseline = learning(seed, last=last, noise=0.02)
        stuck = [(step, 2.3 * (1 + 0.02 * float(rng.standard_normal()))) for step, _ in baseline]
        found = equivalence([baseline], [stuck])
        assert found.within is False, seed
        assert found.judged


def test_little_missed_progress_is_named() -> None:
    baseline = [(step, 2.3 - 0.08 * min(1, step / 50)) for step in range(200)]
    stuck = [(step, 2.3) for step in range(200)]
    found = equivalence([baseline], [stuck])
    assert found.within is False
    assert found.difference == pytest.approx(0.035, abs=0.003)
    assert "misses" in found.text


@pytest.mark.parametrize("start", [20, 150, 185])
def test_diverging_fails_however_late(start: int) -> None:
    baseline = learning()
    diverging = [(step, value * (1 if step < start else 1.5 ** min(step - start, 100))) for step, value in baseline]
    assert equivalence([baseline], [diverging]).within is False


def test_a_loss_near_zero_at_the_end_does_not_blow_a_difference_up() -> None:
    baseline = learning(first=2.0, last=0.002, pace=15)
    other = [(step, value * 1.5 if step > 120 else value) for step, value in learning(first=2.0, last=0.002, pace=15)]
    assert equivalence([baseline], [other]).within is True


def test_the_band_is_as_wide_as_baselines_differ() -> None:
    """Runs of this script end 15 % apart by themselves; a candidate that is 12 % off says nothing."""
    flat = [(step, 1.0) for step in range(100)]
    high, between = ([(step, value) for step, _ in flat] for value in (1.15, 1.12))
    assert equivalence([flat], [between]).within is False
    found = equivalence([flat, high], [between])
    assert found.within is True
    assert found.band > 0.15


def drifted(seed: int) -> Run:
    """A training whose augmentation leads somewhat elsewhere, throughout: noise that no mean over steps removes."""
    shift = 1 + 0.15 * float(np.random.default_rng(seed).standard_normal())
    return [(step, value * shift) for step, value in learning(seed)]


def test_what_chance_does_between_pairs_is_accepted_of_a_candidate() -> None:
    failed = 0
    for first in range(0, 1000, 10):
        seeds = range(first, first + 5)
        found = equivalence([drifted(seed) for seed in seeds], [drifted(5_000 + seed) for seed in seeds])
        failed += found.within is False
    assert failed <= 3


def test_a_candidate_that_draws_the_same_numbers_in_every_pair_is_one_draw() -> None:
    failed = 0
    for first in range(0, 1000, 10):
        baselines = [drifted(seed) for seed in range(first, first + 6)]
        failed += equivalence(baselines, [drifted(5_000 + first)] * 6).within is False
    assert failed <= 3


def test_pairs_of_different_seeds_are_equal_where_each_pair_is() -> None:
    seeds = range(3)
    found = equivalence([learning(seed) for seed in seeds], [learning(seed) for seed in seeds])
    assert found.equal
    assert not equivalence([learning(0), learning(1)], [learning(1), learning(0)]).equal


def odd(at: int, value: float) -> Run:
    return [(step, value if step == at else usual) for step, usual in learning()]


@pytest.mark.parametrize(
    ("baseline", "candidate", "within", "words"),
    [
        (learning(), odd(17, math.nan), False, "the candidate's loss is no finite number at step 17"),
        (odd(17, math.nan), learning(), False, "the baseline's loss is no finite number at step 17"),
        (odd(3, math.inf), odd(5, math.inf), None, "neither side's loss stays a finite number"),
        (odd(3, math.inf), odd(3, math.inf), True, "bit for bit"),
        (None, None, None, "no losses are known of either side"),
        (learning(), None, None, "no losses are known of the candidate"),
        ([], learning(), None, "no losses are known of the baseline"),
        (learning(steps=6), learning(3, steps=6), None, "only 6 steps"),
        ([(1, 1.0)], [(2, 1.0)], None, "no step has a loss on both sides"),
    ],
)
def test_odd_losses_and_too_few(baseline: Run | None, candidate: Run | None, within: bool | None, words: str) -> None:
    found = equivalence(*([] if run is None else [run] for run in (baseline, candidate)))
    assert (found.judged, found.within) == (within is not None, within)
    assert within or found.difference is None
    assert found.text.startswith("not judged: ") == (within is None)
    assert words in found.text


numbers = st.floats(allow_nan=True, allow_infinity=True)
runs = st.lists(st.lists(st.tuples(st.integers(0, 30), numbers), max_size=40), max_size=3)


@given(runs, runs)
def test_odd_numbers_never_raise(baseline: list[Run], candidate: list[Run]) -> None:
    found = equivalence(baseline, candidate)
    assert (found.within is None) == (not found.judged)
    assert found.text
