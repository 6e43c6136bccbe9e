"""Ways up the tree of slices: from rows to the first one around them that is wanted, for all rows or for few."""

from __future__ import annotations

import numpy as np

from stepscope.engine.arrays import NONE, Bools, Int32, Int64
from stepscope.engine.origins import MAX_DEPTH

DOUBLINGS = 20  # a million slices around each other; a broken (cyclic) tree ends there too


def nearest_around(parent: Int64, wanted: Bools) -> Int64:
    """For each row the innermost wanted row around it, not itself, `NONE` without one."""
    around: Int64 = parent.copy()
    left = np.flatnonzero(around >= 0)
    for _ in range(DOUBLINGS):  # each pass doubles the way
        left = left[~wanted[around[left]]]
        if not len(left):
            break
        around[left] = around[around[left]]
        left = left[around[left] >= 0]
    return around


def nearest(parent: Int64, stop: Bools) -> Int32:
    """For each row the first row that `stop` marks on the way up, itself included; `NONE` without any."""
    count = len(parent)
    ends = np.append(stop, True)  # the last entry stands for the outside
    hop = np.append(np.where(parent >= 0, parent, count), count).astype(np.int32)
    own = np.flatnonzero(ends).astype(np.int32)
    hop[own] = own
    for _ in range(DOUBLINGS):  # each doubles how far a hop leads
        further = hop[hop]
        if np.array_equal(further, hop):
            break
        hop = further
    found = hop[:-1]
    return np.where(ends[found] & (found < count), found, NONE).astype(np.int32)


def climb(parent: Int64, start: Int64, stop: Bools) -> Int64:
    """For each of `start` the first row that `stop` marks on the way up, itself included; for few rows."""
    found = np.full(len(start), NONE, np.int64)
    active = np.flatnonzero(start >= 0)
    at = start[active]
    for _ in range(MAX_DEPTH):
        if not len(active):
            break
        hit = stop[at]
        found[active[hit]] = at[hit]
        active, at = active[~hit], parent[at[~hit]]
        inside = at >= 0
        active, at = active[inside], at[inside]
    return found
