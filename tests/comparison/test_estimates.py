"""Pairs to an effect with an interval: Student's figures, odd numbers, Holm's correction, pairs needed."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.comparison.estimates import effect, half_width, holm, p_value, pairs_needed

figures = st.floats(min_value=1e-6, max_value=1e9)
anything = st.floats(allow_nan=True, allow_infinity=True)


def test_student_by_hand() -> None:
    """Logs 0, 0.02, 0.04: mean 0.02, deviation 0.02, two degrees of freedom: 4.3027."""
    found = effect([(100.0, 100.0 * math.exp(value)) for value in (0.0, 0.02, 0.04)])
    assert found is not None
    half = 4.302653 * 0.02 / math.sqrt(3)
    assert found.ratio == pytest.approx(math.exp(0.02))
    assert found.low == pytest.approx(math.exp(0.02 - half))
    assert found.high == pytest.approx(math.exp(0.02 + half))
    assert found.spread == pytest.approx(0.02)
    assert half_width(found) == pytest.approx(half)
    # t = 0.02 / (0.02 / sqrt 3) = 1.732 with two degrees: p = 1 - t / sqrt(t^2 + 2)
    assert found.p_value == pytest.approx(1 - math.sqrt(3) / math.sqrt(5))


def test_a_pair_or_two_have_no_interval() -> None:
    one, two = effect([(100, 90)]), effect([(100, 90), (100, 92)])
    assert one is not None
    assert two is not None
    assert one.ratio == pytest.approx(0.9)
    assert (one.low, one.high, one.spread, one.p_value, one.pairs) == (None, None, None, None, 1)
    assert (two.low, two.high, two.p_value) == (None, None, None)
    assert two.spread == pytest.approx(statistics.stdev([math.log(0.9), math.log(0.92)]))


def test_pairs_that_agree_to_the_bit() -> None:
    same, half = effect([(4.0, 4.0)] * 4), effect([(4.0, 2.0)] * 4)
    assert same is not None
    assert half is not None
    assert (same.ratio, same.low, same.high, same.spread, same.p_value) == (1, 1, 1, 0, 1)
    assert half.low == half.high == pytest.approx(0.5)
    assert half.p_value == 0


@pytest.mark.parametrize("odd", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_figure_without_a_logarithm_gives_no_effect(odd: float) -> None:
    assert effect([(1.0, 1.0), (1.0, odd), (1.0, 1.0)]) is None
    assert effect([(odd, 1.0)]) is None


def test_no_pairs_no_effect() -> None:
    assert effect([]) is None


@given(st.lists(st.tuples(anything, anything), max_size=8))
def test_odd_numbers_never_raise(pairs: list[tuple[float, float]]) -> None:
    found = effect(pairs)
    if found is not None:
        assert found.pairs == len(pairs)
        assert found.ratio >= 0


@given(st.lists(st.tuples(figures, figures), min_size=3, max_size=10))
def test_swapped_sides_give_the_inverse(pairs: list[tuple[float, float]]) -> None:
    one, other = effect(pairs), effect([(after, before) for before, after in pairs])
    assert one is not None
    assert other is not None
    assert one.low is not None
    assert one.high is not None
    assert one.low <= one.ratio <= one.high
    assert math.log(other.ratio) == pytest.approx(-math.log(one.ratio), abs=1e-9)
    assert other.p_value == pytest.approx(one.p_value, abs=1e-6)


@given(st.lists(st.floats(min_value=-0.5, max_value=0.5), min_size=3, max_size=10), st.floats(0.01, 1e4))
def test_the_unit_does_not_matter(logs: list[float], unit: float) -> None:
    one = effect([(1.0, math.exp(value)) for value in logs])
    other = effect([(unit, unit * math.exp(value)) for value in logs])
    assert one is not None
    assert other is not None
    assert other.ratio == pytest.approx(one.ratio)
    assert other.spread == pytest.approx(one.spread, abs=1e-9)


def test_the_interval_excludes_one_exactly_when_p_is_below_5_percent() -> None:
    for shift in (0.0, 0.01, 0.015, 0.02, 0.03, 0.1):
        found = effect([(1.0, math.exp(value + shift)) for value in (-0.02, 0.0, 0.005, 0.02)])
        assert found is not None
        assert found.low is not None
        assert found.p_value is not None
        assert (found.low > 1) == (found.p_value < 0.05)
        assert found.p_value == p_value(found)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([None, 0.02]) == [None, pytest.approx(0.02)]
    assert holm([]) == []


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=8))
def test_holm_only_raises_and_keeps_the_order(values: list[float | None]) -> None:
    after = holm(values)
    pairs = [(before, late) for before, late in zip(values, after, strict=True) if before is not None]
    assert [late is None for late in after] == [before is None for before in values]
    assert all(late is not None and before <= late <= 1 for before, late in pairs)
    ordered = [late for _, late in sorted(pairs)]
    assert ordered == sorted(ordered)


def test_as_many_pairs_as_are_needed_are_narrow_enough() -> None:
    for spread in (0.001, 0.01, 0.02, 0.05):
        count = pairs_needed(spread, 0.02)
        logs = [spread * sign * math.sqrt((count - 1) / count) for sign in (1, -1)] * count
        found = effect([(1.0, math.exp(value)) for value in logs[:count]])
        assert found is not None
        if count % 2 == 0:
            assert found.spread == pytest.approx(spread)
            assert half_width(found) <= 0.02 + 1e-12
    assert pairs_needed(0.0, 0.02) == 3
    assert pairs_needed(0.02, 0.02) == 7
    assert pairs_needed(1.0, 0.0) == pairs_needed(1e9, 0.02) == 1000
