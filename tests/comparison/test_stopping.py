"""When pairs are enough: by width and number alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.comparison.estimates import effect
from stepscope.comparison.stopping import alpha, enough
from stepscope.model.comparison import Effect


def spread_over(count: int, spread: float, shift: float = 0.0) -> Effect:
    return Effect(math.exp(shift), 0.0, 0.0, count, spread)


def test_narrow_enough() -> None:
    assert enough(spread_over(5, 0.01), least=5, most=10, width=0.02)
    assert not enough(spread_over(5, 0.02), least=5, most=10, width=0.02)


def test_never_before_the_least_number_however_narrow() -> None:
    assert not enough(spread_over(4, 0.0), least=5, most=10, width=0.02)
    assert enough(spread_over(5, 0.0), least=5, most=10, width=0.02)


def test_always_at_the_most() -> None:
    assert enough(spread_over(10, 5.0), least=5, most=10, width=0.02)
    assert enough(effect([(1.0, 2.0)]), least=1, most=1, width=0.02)


@pytest.mark.parametrize("pairs", [[], [(1.0, 0.0)] * 12])
def test_without_an_effect_there_is_never_enough(pairs: list[tuple[float, float]]) -> None:
    assert not enough(effect(pairs), least=3, most=10, width=0.02)


@given(st.lists(st.floats(-0.1, 0.1), min_size=1, max_size=12), st.floats(-0.5, 0.5))
def test_the_size_of_the_effect_does_not_matter(logs: list[float], shift: float) -> None:
    """Shifting all pairs alike changes the effect and its p-value, not its width."""
    one = effect([(1.0, math.exp(value)) for value in logs])
    other = effect([(1.0, math.exp(value + shift)) for value in logs])
    assert one is not None
    assert other is not None
    width = 0.02 if one.spread is None or abs((one.spread or 0) - 0.02) > 1e-6 else 0.03
    assert enough(one, least=3, most=10, width=width) == enough(other, least=3, most=10, width=width)


def test_looking_costs_some_certainty() -> None:
    fixed, looking = alpha(least=6, most=6), alpha(least=5, most=10)
    assert looking.mean < fixed.mean
    assert looking.median < fixed.median


def test_two_figures_share_the_certainty_of_one() -> None:
    fixed = alpha(least=6, most=6)
    assert max(fixed.mean, fixed.median) < 0.05 < fixed.mean + fixed.median
