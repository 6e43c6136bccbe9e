"""Steady step time: pure functions over wall times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepscope.record.agent import window_plan

MS = 1_000_000


def walls(*milliseconds: float) -> list[int]:
    return [int(value * MS) for value in milliseconds]


def test_equal_steps_are_steady_from_the_fifth_on() -> None:
    assert not window_plan.is_steady(walls(10, 10, 10, 10))
    assert window_plan.is_steady(walls(10, 10, 10, 10, 10))


def test_falling_step_time_is_not_steady() -> None:
    assert not window_plan.is_steady(walls(50, 30, 20, 15, 12, 11))


def test_only_the_newest_steps_count() -> None:
    assert window_plan.is_steady(walls(900, 400, 10, 10.5, 10.2, 9.9, 10.1))


def test_rare_stalls_do_not_hide_a_steady_loop() -> None:
    assert window_plan.is_steady(walls(10, 10, 10, 40, 10, 10, 10, 40, 10, 10, 10, 40))


def test_noise_with_a_drift_is_not_steady() -> None:
    assert not window_plan.is_steady(walls(14, 14, 14, 40, 14, 14, 12, 40, 12, 12, 12, 40))


def test_three_steps_agree_within_a_quarter() -> None:
    assert window_plan.agree(walls(99, 10, 11, 12))
    assert not window_plan.agree(walls(10, 11, 13))
    assert not window_plan.agree(walls(10, 10))


def test_outlier_needs_something_to_compare_with() -> None:
    assert window_plan.is_outlier(16 * MS, walls(10, 10, 10))
    assert not window_plan.is_outlier(15 * MS, walls(10, 10, 10))
    assert not window_plan.is_outlier(1000 * MS, walls(10, 10))


@given(st.lists(st.integers(0, 10**12), max_size=20))
def test_any_walls_get_an_answer(values: list[int]) -> None:
    assert isinstance(window_plan.is_steady(values), bool)
    assert isinstance(window_plan.agree(values), bool)
    assert isinstance(window_plan.is_outlier(10**9, values), bool)


@given(st.lists(st.integers(1000, 10**12), min_size=5, max_size=12), st.integers(2, 1000))
def test_steadiness_does_not_depend_on_the_unit(values: list[int], factor: int) -> None:
    assert window_plan.spread(values) == window_plan.spread([value * factor for value in values])
    assert window_plan.is_steady(values) == window_plan.is_steady([value * factor for value in values])
