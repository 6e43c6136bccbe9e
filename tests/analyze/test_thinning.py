"""Long series are shown with fewer points, and no stall is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analyze.pictures.series import pick, positions

NUMBERS = st.one_of(st.none(), st.floats(-1e9, 1e9), st.just(float("nan")))


def test_one_slow_step_among_a_million_stays_where_it_was() -> None:
    values = [10.0] * 1_000_000
    values[654_321] = 300.0
    values[123_456] = 2.0

    kept = positions(values, 1_000)

    assert len(kept) <= 1_000
    assert {654_321, 123_456} <= set(kept)
    assert 300.0 in pick(values, kept)


@given(st.lists(NUMBERS, max_size=300), st.integers(4, 60))
def test_ends_and_extremes_stay_in_order_within_the_limit(values: list[float | None], limit: int) -> None:
    kept = positions(values, limit)

    assert kept == sorted(set(kept))
    assert len(kept) <= max(limit, 0)
    if values:
        assert (kept[0], kept[-1]) == (0, len(values) - 1)
    known = [value for value in values if value is not None and value == value]
    if known:
        shown = [value for value in pick(values, kept) if value is not None and value == value]
        assert (min(shown), max(shown)) == (min(known), max(known))


@pytest.mark.parametrize("limit", [4, 5, 17])
def test_nothing_but_missing_values_can_be_thinned_too(limit: int) -> None:
    kept = positions([None] * 100, limit)
    assert 2 <= len(kept) <= limit
