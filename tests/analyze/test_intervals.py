"""The interval algebra against sets of single time points, for any intervals."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepscope.engine import intervals
from stepscope.engine.intervals import Intervals
from stepscope.tables.arrays import Int64

POINTS = 60

times = st.integers(0, POINTS)
pairs = st.lists(st.tuples(times, times), max_size=12)
window = st.tuples(times, times)


def arrays(found: list[tuple[int, int]]) -> tuple[Int64, Int64]:
    table = np.asarray(found, np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


def set_of(found: list[tuple[int, int]]) -> Intervals:
    return intervals.union(*arrays(found))


def points(found: list[tuple[int, int]]) -> set[int]:
    return {point for start, end in found for point in range(start, end)}


def points_of(found: Intervals) -> set[int]:
    """The points of a set, which must be in its normal form."""
    starts, ends = found.starts.tolist(), found.ends.tolist()
    assert all(start < end for start, end in zip(starts, ends, strict=True))
    assert all(end < start for end, start in zip(ends[:-1], starts[1:], strict=True))
    return points(list(zip(starts, ends, strict=True)))


@given(pairs)
def test_a_union_covers_what_any_interval_covers(one: list[tuple[int, int]]) -> None:
    assert points_of(set_of(one)) == points(one)
    assert intervals.total(set_of(one)) == len(points(one))


@given(pairs, pairs)
def test_two_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    first, second = set_of(one), set_of(other)
    assert points_of(intervals.merge(first, second)) == points(one) | points(other)
    assert points_of(intervals.intersect(first, second)) == points(one) & points(other)
    assert points_of(intervals.subtract(first, second)) == points(one) - points(other)


@given(pairs, window)
def test_within_a_window(one: list[tuple[int, int]], limits: tuple[int, int]) -> None:
    start, end = limits
    inside = points(one) & set(range(start, end))
    assert points_of(intervals.clip(set_of(one), start, end)) == inside
    assert points_of(intervals.complement(set_of(one), start, end)) == set(range(start, end)) - inside


@given(pairs, pairs)
def test_covered_lengths_of_many_windows(one: list[tuple[int, int]], windows: list[tuple[int, int]]) -> None:
    found = intervals.covered(set_of(one), *arrays(windows))
    assert found.tolist() == [len(points(one) & set(range(start, end))) for start, end in windows]


@given(st.lists(pairs, max_size=5), pairs)
def test_a_partition_is_exclusive_in_order_and_complete(
    sets: list[list[tuple[int, int]]], windows: list[tuple[int, int]]
) -> None:
    lengths = intervals.partition_lengths(*arrays(windows), [set_of(one) for one in sets])
    assert lengths.shape == (len(windows), len(sets) + 1)
    for row, (start, end) in zip(lengths.tolist(), windows, strict=True):
        left = set(range(start, end))
        for one, length in zip(sets, row, strict=False):
            assert length == len(points(one) & left)
            left -= points(one)
        assert row[-1] == len(left)
        assert sum(row) == max(end - start, 0)


@given(st.lists(st.tuples(st.integers(-3, 3), times, times), max_size=20))
def test_unions_by_key(rows: list[tuple[int, int, int]]) -> None:
    table = np.asarray(rows, np.int64).reshape(-1, 3)
    keys, lengths = intervals.union_by(table[:, 0], table[:, 1], table[:, 2])
    expected: dict[int, set[int]] = {}
    for key, start, end in rows:
        expected.setdefault(key, set()).update(range(start, end))
    assert keys.tolist() == sorted(expected)
    assert lengths.tolist() == [len(expected[key]) for key in sorted(expected)]
