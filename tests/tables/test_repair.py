"""Impossible durations, and plausible ones that must be left alone."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.tables.ingest import LONGEST_NS, repair

MS = 1_000_000


def repaired(*slices: tuple[int, int], tracks: str = "", host: bool = False) -> tuple[list[int], int]:
    """Durations after repair of slices (start, duration) in ms, and how many were wrong."""
    count = len(slices)
    duration = np.array([length * MS for _, length in slices], np.int64)
    changed = repair(
        np.array([ord(c) for c in tracks or "a" * count], np.int32),
        np.array([start * MS for start, _ in slices], np.int64),
        duration,
        is_device=np.full(count, not host),
    )
    return (duration // MS).tolist(), changed


def test_overflow_ends_at_the_next_slice_of_the_track_or_at_once():
    week = LONGEST_NS // MS
    assert repaired((0, week + 1), (30, 5), (10, 2), (40, week * 9), tracks="aabb", host=True) == ([30, 5, 2, 0], 2)
    assert repaired((0, week), host=True) == ([week], 0)


def test_end_that_came_late_is_cut_where_the_next_work_of_the_stream_begins():
    assert repaired((0, 500), (20, 5), (40, 5), (900, 3)) == ([20, 5, 5, 3], 1)
    assert repaired((40, 5), (900, 3), (0, 500), (20, 5)) == ([5, 3, 20, 5], 1)


@pytest.mark.parametrize(
    "slices",
    [
        [(0, 50), (20, 100)],  # the next begins while this one drains
        [(0, 50), (20, 5), (60, 5)],  # one alone may be a clock's error
        [(0, 9), (2, 1), (4, 1)],  # too small to matter
        [(0, 500), (500, 5), (510, 5)],
    ],
)
def test_overlaps_that_prove_nothing(slices: list[tuple[int, int]]):
    assert repaired(*slices) == ([length for _, length in slices], 0)


def test_absurd_starts_do_not_overflow():
    start = np.array([2**63 - 1, -(2**63)], np.int64)
    duration = np.array([5, 5], np.int64)
    repair(np.zeros(2, np.int32), start, duration, is_device=np.array([True, True]))
    assert (start + duration > start).all()
