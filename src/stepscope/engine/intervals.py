"""Sets of time intervals as arrays: union, intersection, difference, covered length, and the one partition engine.

Intervals are half open, [start, end), in integer ns; one that ends where it starts, or before, is empty. A set is
`Intervals`: ascending, disjoint, not touching. All work is on whole arrays, so millions of intervals take a second;
where there are many windows (steps, buckets) or many keys, all of them are answered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from stepscope.tables import arrays
from stepscope.tables.arrays import Bools, Int64, Rows, window_at


class Intervals(NamedTuple):
    """A set of times: [starts[i], ends[i]), ascending, disjoint and not touching."""

    starts: Int64
    ends: Int64


EMPTY = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def union(starts: Int64, ends: Int64) -> Intervals:
    """The set of times that any of these intervals covers; they may overlap and come in any order."""
    if not len(starts):
        return EMPTY
    if not (starts[1:] >= starts[:-1]).all():
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    if not (ends > starts).all():
        lasting = ends > starts
        starts, ends = starts[lasting], ends[lasting]
        if not len(starts):
            return EMPTY
    reached = np.maximum.accumulate(ends)
    first = np.empty(len(starts), bool)
    first[0] = True
    np.greater(starts[1:], reached[:-1], out=first[1:])
    return Intervals(starts[first], reached[np.append(first[1:], True)])


def merge(*sets: Intervals) -> Intervals:
    filled = [one for one in sets if len(one.starts)]
    if len(filled) < 2:
        return filled[0] if filled else EMPTY
    return union(np.concatenate([one.starts for one in filled]), np.concatenate([one.ends for one in filled]))


def intersect(one: Intervals, other: Intervals) -> Intervals:
    if not len(one.starts) or not len(other.starts):
        return EMPTY
    # every piece of both begins at a start of either and ends at the first end of either behind it
    begins = np.concatenate([one.starts, other.starts])
    begins.sort(kind="stable")  # what is nearly in order is sorted more quickly than hashed
    begins = begins[np.append(True, begins[1:] != begins[:-1])]
    begins = begins[inside(one, begins) & inside(other, begins)]
    ends = np.minimum(_end_after(one, begins), _end_after(other, begins))
    return Intervals(begins, ends)


def subtract(one: Intervals, other: Intervals) -> Intervals:
    if not len(one.starts) or not len(other.starts):
        return one
    return intersect(one, complement(other, int(one.starts[0]), int(one.ends[-1])))


def complement(one: Intervals, start: int, end: int) -> Intervals:
    """What of [start, end) the set does not cover."""
    if end <= start:
        return EMPTY
    inner = clip(one, start, end)
    starts, ends = np.concatenate([[start], inner.ends]), np.concatenate([inner.starts, [end]])
    gaps = ends > starts
    return Intervals(starts[gaps].astype(np.int64), ends[gaps].astype(np.int64))


def clip(one: Intervals, start: int, end: int) -> Intervals:
    """What of the set lies in [start, end)."""
    first = int(np.searchsorted(one.ends, start, side="right"))
    last = int(np.searchsorted(one.starts, end, side="left"))
    if last <= first or end <= start:
        return EMPTY
    return Intervals(np.maximum(one.starts[first:last], start), np.minimum(one.ends[first:last], end))


def total(one: Intervals) -> int:
    """Length of the set, ns."""
    return int((one.ends - one.starts).sum())


def covered_before(one: Intervals, times: Int64) -> Int64:
    """For each of `times`, what the set covers before it, ns."""
    return arrays.covered_before(*one, times)


def covered(one: Intervals, starts: Int64, ends: Int64) -> Int64:
    """For each window [starts[i], ends[i]), what the set covers of it, ns. Windows may overlap."""
    return arrays.covered_before(*one, np.maximum(ends, starts)) - arrays.covered_before(*one, starts)


def partition_lengths(starts: Int64, ends: Int64, sets: Sequence[Intervals]) -> Int64:
    """Windows taken apart: to each set what no earlier one covers of a window, and last what none covers.

    ns, shape (windows, len(sets) + 1); rows sum to the window. Windows may overlap.
    """
    reached = [np.zeros(len(starts), np.int64)]
    so_far = EMPTY
    for one in sets:
        so_far = merge(so_far, one)
        reached.append(covered(so_far, starts, ends))
    reached.append(np.maximum(ends - starts, 0))
    edges = np.stack(reached, axis=1)
    return edges[:, 1:] - edges[:, :-1]


def union_by(keys: Rows, starts: Int64, ends: Int64) -> tuple[Int64, Int64]:
    """For each distinct key (ascending) the length of the union of its intervals, ns."""
    reached = pl.max_horizontal("start", pl.col("end").cum_max().shift(1).over("key"))  # by the intervals before
    lengths = (
        pl.DataFrame({"key": keys, "start": starts, "end": ends})
        .sort("key", "start")
        .with_columns(added=(pl.col("end") - reached).clip(0))
        .group_by("key", maintain_order=True)
        .agg(pl.col("added").sum())
    )
    return lengths["key"].to_numpy(), lengths["added"].to_numpy()


def inside(one: Intervals, times: Int64) -> Bools:
    """Which of `times` the set covers."""
    return window_at(*one, times) >= 0


def _end_after(one: Intervals, times: Int64) -> Int64:
    return one.ends[np.searchsorted(one.starts, times, side="right") - 1]
