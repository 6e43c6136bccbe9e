"""Slices of a track as a tree: parent, depth, self time, and the Python function around each.

A slice that reaches over its parent's end by less than it lies inside is cut off there; one that lies mostly outside is
a sibling that begins at that end, as is an annotation that outlives the `__enter__` it began in. Both are counted, so
self times of a track add up to its roots' times.

A track that nests perfectly is a matter of sorting and counting; others are swept slice by slice, a block at a time.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from stepscope.tables.arrays import NONE, Bools, Int32, Int64

_BLOCK = 1 << 15
_DEEPEST = 2000  # levels up to which counting is quicker than sweeping
_ENDLESS = 2**63 - 1


class Nesting(Struct):
    """One entry per slice, in the order given; `NONE` where there is no parent or frame.

    `extent_ns` is the slice's duration after cutting, `clipped` counts the slices that were cut.
    """

    parent: Int32
    depth: Int32
    self_ns: Int64
    frame: Int32
    extent_ns: Int64
    clipped: int


def nest(
    track: npt.NDArray[np.integer],
    start_ns: Int64,
    duration_ns: Int64,
    *,
    is_function: Bools,
    is_annotation: Bools,
    precedence: npt.NDArray[np.integer],
) -> Nesting:
    """Nest slices of equal `track` by time. Of slices with equal times the one with the lower `precedence` is outer.

    `is_function` marks the slices that can be another's `frame` (the innermost of them around it), `is_annotation`
    those that a function may open and leave open.
    """
    count = len(start_ns)
    result = Nesting(
        parent=np.full(count, NONE, np.int32),
        depth=np.zeros(count, np.int32),
        self_ns=np.zeros(count, np.int64),
        frame=np.full(count, NONE, np.int32),
        extent_ns=np.zeros(count, np.int64),
        clipped=0,
    )
    for rows in by_value(track):
        if len(rows) == 1:
            result.self_ns[rows] = result.extent_ns[rows] = duration_ns[rows]
            continue
        rows = rows[_outer_first(start_ns[rows], duration_ns[rows], precedence[rows])]
        starts, functions = start_ns[rows], is_function[rows]
        ends = starts + duration_ns[rows]
        parent, depth, clipped = _counted(starts, ends) or _swept(starts, ends, functions, is_annotation[rows])
        frame = np.full(len(rows), NONE, np.int32)
        for level in by_value(depth)[1:]:
            above = parent[level]
            frame[level] = np.where(functions[above], above, frame[above])
        extent, inner = ends - starts, parent >= 0
        # Sums of nanoseconds in floats are exact up to 104 days.
        inside = np.bincount(parent[inner], weights=extent[inner], minlength=len(extent)).astype(np.int64)
        # positions among the sorted slices of a track as positions among all slices
        result.parent[rows] = np.where(inner, rows[parent], NONE)
        result.frame[rows] = np.where(frame >= 0, rows[frame], NONE)
        result.depth[rows], result.extent_ns[rows], result.self_ns[rows] = depth, extent, extent - inside
        result.clipped += clipped
    return result


def by_value(codes: npt.NDArray[np.integer]) -> list[Int64]:
    """The positions of each distinct value of small non-negative `codes`, ascending; values without any left out."""
    if not len(codes):
        return []
    low, high = int(codes.min()), int(codes.max())
    # 16-bit integers sort by radix, in time proportional to their number.
    keys = (codes - low).astype(np.uint16) if high - low < 1 << 16 else codes
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order])) + 1
    return np.split(order, bounds)


def _outer_first(starts: Int64, durations: Int64, precedence: npt.NDArray[np.integer]) -> Int64:
    order = np.argsort(starts, kind="stable")
    in_order = starts[order]
    same = in_order[1:] == in_order[:-1]
    if same.any():
        tied = np.zeros(len(starts), dtype=bool)
        tied[1:] |= same
        tied[:-1] |= same
        places = np.flatnonzero(tied)
        rows = order[places]
        order[places] = rows[np.lexsort((precedence[rows], -durations[rows], in_order[places]))]
    return order


def _counted(starts: Int64, ends: Int64) -> tuple[Int32, Int32, int] | None:
    """Parents and depths of slices, outer first, that nest perfectly; None where they do not.

    A slice's depth is the number of slices that came before it and have not ended. Its parent is the last one before it
    that is one level up. Both hold up to the first slice that reaches over its parent's end, so that one is found.
    """
    ended = np.searchsorted(np.sort(ends), starts, side="right")
    empty = ends == starts
    if empty.any():
        # Empty slices end where they start: those behind a slice with the same start have not come yet.
        before = np.concatenate(([0], np.cumsum(empty)))
        ended -= before[np.searchsorted(starts, starts, side="right")] - before[:-1]
    depth = np.arange(len(starts))
    depth -= ended
    del ended
    if depth.max() > _DEEPEST:
        return None
    parent = np.full(len(starts), NONE, np.int32)
    levels = by_value(depth)
    for number, level in enumerate(levels):
        if depth[level[0]] != number:
            return None
        if number:
            places = np.searchsorted(levels[number - 1], level) - 1
            above = levels[number - 1][places]
            if places[0] < 0 or (ends[level] > ends[above]).any():
                return None
            parent[level] = above
    return parent, depth.astype(np.int32), 0


def _swept(starts: Int64, ends: Int64, functions: Bools, annotations: Bools) -> tuple[Int32, Int32, int]:
    """Parents, depths and how many were cut, in `starts` and `ends`: one pass with the open slices on a stack."""
    parent, depth = np.full(len(starts), NONE, np.int32), np.zeros(len(starts), np.int32)
    stack, stack_ends = [NONE], [_ENDLESS]
    late: list[tuple[int, int, int]] = []  # (start, -end, slice): those that wait for the end of another
    cut: dict[int, tuple[int, int, int, int]] = {}  # slice -> start, end, parent, depth

    def place(start: int, negative_end: int, i: int) -> None:
        end = -negative_end
        while stack_ends[-1] <= start:
            stack_ends.pop()
            stack.pop()
        above, last = stack[-1], stack_ends[-1]
        if end > last:
            if last - start < end - last or (annotations[i] and functions[above]):
                # What else begins before that end still belongs to the slices now open, so this one waits its turn.
                heapq.heappush(late, (last, -end, i))
                return
            end = last
        cut[i] = (start, end, above, len(stack) - 1)
        stack.append(i)
        stack_ends.append(end)

    for first in range(0, len(starts), _BLOCK):
        block = slice(first, first + _BLOCK)
        parents, depths = list[int](), list[int]()
        for i, (start, end) in enumerate(zip(starts[block].tolist(), ends[block].tolist(), strict=True), first):
            while late and late[0][:2] <= (start, -end):
                place(*heapq.heappop(late))
            while stack_ends[-1] <= start:
                stack_ends.pop()
                stack.pop()
            whole = end <= stack_ends[-1]
            parents.append(stack[-1] if whole else NONE)
            depths.append(len(stack) - 1)
            if whole:
                stack.append(i)
                stack_ends.append(end)
            else:
                place(start, -end, i)
        parent[block], depth[block] = parents, depths
    while late:
        place(*heapq.heappop(late))
    for i, known in cut.items():
        starts[i], ends[i], parent[i], depth[i] = known
    return parent, depth, len(cut)
