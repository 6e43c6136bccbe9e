"""Nesting of slices: trees, overlaps, and sums that hold whatever the input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.tables.arrays import NONE
from stepscope.tables.nesting import Nesting, nest


def nested(*slices: tuple[int, int], functions: str = "", annotations: str = "", tracks: str = "") -> Nesting:
    """Slices as (start, duration); the letters `x` in `functions` and `annotations` mark slices by position."""
    count = len(slices)
    return nest(
        np.array([ord(c) for c in tracks] or [0] * count, dtype=np.int64),
        np.array([start for start, _ in slices], dtype=np.int64),
        np.array([duration for _, duration in slices], dtype=np.int64),
        is_function=np.array([c == "x" for c in functions.ljust(count)], dtype=bool),
        is_annotation=np.array([c == "x" for c in annotations.ljust(count)], dtype=bool),
        precedence=np.zeros(count, dtype=np.int64),
    )


@pytest.mark.parametrize(
    ("slices", "marks", "parents", "self_ns"),
    [
        ([(0, 100), (90, 12)], {}, [NONE, 0], [90, 10]),  # a child that reaches over the end is cut
        ([(0, 100), (90, 200), (95, 3)], {}, [NONE, NONE, 0], [97, 190, 3]),  # mostly outside it is a sibling
        # __enter__ [0, 50), its helper [42, 48), the annotation [40, 70), an operator inside the annotation
        (
            [(0, 50), (42, 6), (40, 30), (55, 10)],
            {"functions": "xx", "annotations": "  x"},
            [NONE, 0, NONE, 2],
            [44, 6, 10, 10],
        ),
    ],
)
def test_slices_that_do_not_nest(slices: Any, marks: dict[str, str], parents: list[int], self_ns: list[int]):
    result = nested(*slices, **marks)
    assert (result.parent.tolist(), result.self_ns.tolist(), result.clipped) == (parents, self_ns, 1)
    assert not marks or result.frame.tolist() == [NONE, 0, NONE, NONE]


slices = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.booleans(), st.booleans()), max_size=30)


@given(slices)
def test_self_times_add_up_to_the_roots(rows: list[tuple[int, int, bool, bool]]):
    flags = ["".join("x" if row[column] else " " for row in rows) for column in (2, 3)]
    result = nested(*[row[:2] for row in rows], functions=flags[0], annotations=flags[1])
    roots = result.parent == NONE
    assert result.self_ns.sum() == result.extent_ns[roots].sum()
    assert (result.self_ns >= 0).all()
    assert (result.extent_ns <= [row[1] for row in rows]).all()
    for i, parent in enumerate(result.parent.tolist()):
        assert result.depth[i] == (0 if parent == NONE else result.depth[parent] + 1)
        if parent != NONE:
            assert result.extent_ns[i] <= result.extent_ns[parent]
            assert result.frame[i] == (parent if rows[parent][2] else result.frame[parent])


@given(slices)
def test_slices_that_nest_are_left_alone(rows: list[tuple[int, int, bool, bool]]):
    # Laid out as equal halves of halves, nothing overlaps partially.
    laid = [(start % 8 * 64 >> (depth % 4), 64 >> (depth % 4)) for start, depth, _, _ in rows]
    laid = [(start // length * length, length) for start, length in laid]
    result = nested(*laid)
    assert result.clipped == 0
    assert (result.extent_ns == [length for _, length in laid]).all()
