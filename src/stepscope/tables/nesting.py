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
        starts, durations = start_ns[rows], duration_ns[rows]
        order = _outer_first(starts, durations, precedence[rows])
        rows, starts, durations = rows[order], starts[order], durations[order]
        tree = _Track(starts, durations, is_function[rows], is_annotation[rows])
        del starts, durations, order  # of a large track, what is not needed any more is worth freeing
        tree.solve()
        result.clipped += tree.clipped
        # positions among the sorted slices of a track as positions among all slices
        result.parent[rows] = np.where(tree.parent < 0, NONE, rows[tree.parent])
        result.frame[rows] = np.where(tree.frame < 0, NONE, rows[tree.frame])
        result.depth[rows] = tree.depth
        result.extent_ns[rows] = tree.ends - tree.starts
        result.self_ns[rows] = tree.self_ns()
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


class _Track:
    """The slices of one track, outer first; `solve` fills `parent`, `depth`, `frame` and cuts `starts` and `ends`."""

    def __init__(self, starts: Int64, durations: Int64, functions: Bools, annotations: Bools) -> None:
        count = len(starts)
        self.starts, self.ends = starts, starts + durations
        self.functions, self.annotations = functions, annotations
        self.parent = np.full(count, NONE, np.int32)
        self.depth = np.zeros(count, np.int32)
        self.frame = np.full(count, NONE, np.int32)
        self.clipped = 0

    def solve(self) -> None:
        if not self._count():
            self._sweep()
        for level in by_value(self.depth)[1:]:
            above = self.parent[level]
            self.frame[level] = np.where(self.functions[above], above, self.frame[above])

    def self_ns(self) -> Int64:
        extent = self.ends - self.starts
        child = self.parent >= 0
        # Sums of nanoseconds in floats are exact up to 104 days.
        inside = np.bincount(self.parent[child], weights=extent[child], minlength=len(extent))
        return extent - inside.astype(np.int64)

    def _count(self) -> bool:
        """Whether the slices nest perfectly; `parent` and `depth` are right if so.

        A slice's depth is the number of slices that came before it and have not ended. Its parent is the last one
        before it that is one level up. Both hold up to the first slice that reaches over its parent's end, so that one
        is found.
        """
        starts, ends = self.starts, self.ends
        count = len(starts)
        ended = np.searchsorted(np.sort(ends), starts, side="right")
        empty = ends == starts
        if empty.any():
            # Empty slices end where they start: those behind a slice with the same start have not come yet.
            before = np.concatenate(([0], np.cumsum(empty)))
            ended -= before[np.searchsorted(starts, starts, side="right")] - before[:-1]
        depth = np.arange(count)
        depth -= ended
        del ended
        if depth.max() > _DEEPEST:
            return False
        levels = by_value(depth)
        for number, level in enumerate(levels):
            if depth[level[0]] != number:
                return False
            if number == 0:
                continue
            outer = levels[number - 1]
            places = np.searchsorted(outer, level) - 1
            if places[0] < 0:
                return False
            above = outer[places]
            if (ends[level] > ends[above]).any():
                return False
            self.parent[level] = above
        self.depth[:] = depth
        return True

    def _sweep(self) -> None:
        sweep = _Sweep(self.functions, self.annotations)
        for first in range(0, len(self.starts), _BLOCK):
            block = slice(first, first + _BLOCK)
            parent, depth = sweep.run(first, self.starts[block].tolist(), self.ends[block].tolist())
            self.parent[block] = parent
            self.depth[block] = depth
        sweep.finish()
        for i, (start, end, parent_of, level) in sweep.cut.items():
            self.starts[i], self.ends[i] = start, end
            self.parent[i], self.depth[i] = parent_of, level
        self.clipped = len(sweep.cut)


class _Sweep:
    """One pass over a track's slices, outer first, with the open slices on a stack."""

    def __init__(self, functions: Bools, annotations: Bools) -> None:
        self._functions, self._annotations = functions, annotations
        self.cut: dict[int, tuple[int, int, int, int]] = {}  # slice -> start, end, parent, depth
        self._open = [NONE]
        self._open_ends = [_ENDLESS]
        self._late: list[tuple[int, int, int]] = []  # (start, -end, slice): those that wait for the end of another

    def run(self, first: int, starts: list[int], ends: list[int]) -> tuple[list[int], list[int]]:
        """Parents and depths of the slices from `first` on; those of slices in `cut` do not count."""
        parents: list[int] = []
        depths: list[int] = []
        stack, stack_ends, late = self._open, self._open_ends, self._late
        for i, (start, end) in enumerate(zip(starts, ends, strict=True), first):
            while late and late[0][:2] <= (start, -end):
                self._place_late()
            while stack_ends[-1] <= start:
                stack_ends.pop()
                stack.pop()
            if end <= stack_ends[-1]:
                parents.append(stack[-1])
                depths.append(len(stack) - 1)
                stack.append(i)
                stack_ends.append(end)
            else:
                parents.append(NONE)
                depths.append(0)
                self._place(i, start, end)
        return parents, depths

    def finish(self) -> None:
        while self._late:
            self._place_late()

    def _place_late(self) -> None:
        start, negative_end, i = heapq.heappop(self._late)
        self._place(i, start, -negative_end)

    def _place(self, i: int, start: int, end: int) -> None:
        stack, stack_ends = self._open, self._open_ends
        while stack_ends[-1] <= start:
            stack_ends.pop()
            stack.pop()
        above, last = stack[-1], stack_ends[-1]
        if end > last:
            if last - start < end - last or (self._annotations[i] and self._functions[above]):
                # What else begins before that end still belongs to the slices now open, so this one waits its turn.
                heapq.heappush(self._late, (last, -end, i))
                return
            end = last
        self.cut[i] = (start, end, above, len(stack) - 1)
        stack.append(i)
        stack_ends.append(end)
