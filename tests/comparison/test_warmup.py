"""How many first steps are dropped: enough where there is warm-up, few where there is none, never more than allowed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.comparison.measured_steps import warmup_end
from stepscope.comparison.thresholds import WARMUP_WINDOW

walls = st.lists(st.floats(min_value=0.001, max_value=1e6), max_size=200)


def noisy(count: int, seed: int, noise: float = 0.03) -> list[float]:
    rng = np.random.default_rng(seed)
    return list(100 * (1 + noise * rng.standard_normal(count)))


def test_two_compilations_with_steps_between() -> None:
    """The second one, at a new shape, is no stall of the run: it never comes again."""
    run = [100.0] * 120
    run[0], run[15] = 9_000.0, 4_000.0
    assert warmup_end(run) == 16


def test_slow_first_steps_that_settle() -> None:
    run = [100 + 80 * math.exp(-step / 8) for step in range(300)]
    assert 15 <= warmup_end(run) <= 35


def test_fast_first_steps_from_a_full_queue_are_warm_up_too() -> None:
    assert 10 <= warmup_end([*[40.0] * 14, *[100.0] * 150]) <= 14


@pytest.mark.parametrize(
    ("every", "first"), [(2, 0), (2, 1), *((every, first) for every in (3, 4, 5, 10) for first in (0, 1, 3))]
)
def test_stalls_that_return_are_how_the_run_is(every: int, first: int) -> None:
    run = [100.0] * 240
    for step in range(first, 240, every):
        run[step] = 400.0
    assert warmup_end(run) == 0


@pytest.mark.parametrize("growth", [0.04, 0.5, 2.0, -0.04, -0.5])
def test_a_drifting_run_is_taken_as_it_is(growth: float) -> None:
    assert warmup_end([100 * (1 + growth * step / 300) for step in range(300)]) == 0


def test_noise_alone_drops_next_to_nothing() -> None:
    dropped = [warmup_end(noisy(320, seed)) for seed in range(200)]
    assert np.mean(dropped) < 1
    assert np.quantile(dropped, 0.95) <= WARMUP_WINDOW


@pytest.mark.parametrize("slow", [1, 4, 12, 30])
def test_slow_steps_in_noise_are_found(slow: int) -> None:
    for seed in range(20):
        run = noisy(200, seed)
        run[:slow] = [time * 1.6 for time in run[:slow]]
        assert slow <= warmup_end(run) <= slow + WARMUP_WINDOW


def test_numbers_that_are_none() -> None:
    assert warmup_end([*[100.0] * 30, math.nan, math.inf]) == 0
    assert warmup_end([math.nan] * 9) == 0
    assert warmup_end([]) == 0
    assert warmup_end([5.0]) == 0


@given(walls, st.one_of(st.none(), st.integers(-3, 300)))
def test_never_more_than_the_limit_or_a_third(run: list[float], limit: int | None) -> None:
    dropped = warmup_end(run, limit=limit)
    assert 0 <= dropped <= len(run) / 3
    if limit is not None:
        assert dropped <= max(0, limit)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=100), st.sampled_from([0.25, 4.0, 1024.0]))
def test_the_unit_does_not_matter(run: list[int], unit: float) -> None:
    """Powers of two, so that nothing is rounded."""
    assert warmup_end([float(time) for time in run]) == warmup_end([time * unit for time in run])


@given(st.integers(1, 30), st.floats(5.0, 500.0))
def test_compilation_before_a_steady_run_is_dropped_and_no_more(steps: int, factor: float) -> None:
    assert warmup_end([100.0 * factor] * steps + [100.0] * 100) == steps
