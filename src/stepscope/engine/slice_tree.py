"""Ways through the tree of slices, `parent` being the row around each row: from all rows or from a few, up and down.

`climb` goes up from a few rows, `nearest` and `nearest_around` from all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepscope.tables.arrays import MAX_DEPTH, NONE, Bools, Int32, Int64, Rows, climb

DOUBLINGS = 20  # a million slices around each other; a broken (cyclic) tree ends there too


def nearest_ancestor(parent: Int64, wanted: Bools) -> Int64:
    """For each row the innermost wanted row around it, not itself, `NONE` without one."""
    return np.where(parent >= 0, self_or_ancestor(parent, wanted)[parent], NONE).astype(np.int64)


def self_or_ancestor(parent: Int64, stop: Bools) -> Int32:
    """For each row the first row that `stop` marks on the way up, itself included; `NONE` without any."""
    count = len(parent)
    ends = np.append(stop, True)  # the last entry stands for the outside
    hop = np.full(count + 1, count, np.int32)
    np.copyto(hop[:-1], parent, where=parent >= 0, casting="same_kind")
    own = np.flatnonzero(ends).astype(np.int32)
    hop[own] = own
    for _ in range(DOUBLINGS):  # each doubles how far a hop leads
        further = hop[hop]
        if np.array_equal(further, hop):
            break
        hop = further
    hop[(hop == count) | ~ends[hop]] = NONE
    return hop[:-1]


def has_ancestor(parent: Int64, rows: Int64, wanted: Bools) -> Bools:
    """Which of `rows` are wanted or lie below a wanted row; `NONE` among them is none."""
    return climb(parent, rows, wanted) >= 0


def ancestors(parent: Rows, rows: Int64, wanted: Bools | None = None) -> Bools:
    """By row, whether it lies around one of `rows`; with `wanted` each way ends before the first that is not."""
    met = np.zeros(len(parent), bool)
    while len(rows):
        rows = np.unique(parent[rows]).astype(np.int64)
        rows = rows[(rows >= 0) & ~met[rows]]
        rows = rows if wanted is None else rows[wanted[rows]]
        met[rows] = True
    return met


def self_and_ancestors(parent: Int64, start: Int64) -> Iterator[tuple[Int64, Int64]]:
    """(positions in `start`, rows): first each row itself, then the one around it, and so on to the outermost."""
    left = np.flatnonzero(start >= 0)
    at = start[left]
    for _ in range(MAX_DEPTH):
        if not len(left):
            return
        yield left, at
        at = parent[at]
        left, at = left[at >= 0], at[at >= 0]
