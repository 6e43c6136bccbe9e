"""Slices of a track as a tree: parent, depth, self time, and the Python function around each.

Recorded slices do not always nest: clocks are rounded, and device slices may overlap. A slice that reaches over its
parent's end by less than it lies inside is taken as cut off there; one that lies mostly outside is a sibling that
begins at that end. Both are counted. Self times of a track therefore always add up to its roots' times.
An annotation opened by a context manager begins inside Python's `__enter__` and outlives it: it begins at that end.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
NONE = -1


@dataclass(frozen=True)
class Nesting:
    """One entry per slice, in the order given; `NONE` where there is no parent or frame.

    `extent_ns` is the slice's duration after cutting, `clipped` counts the slices that were cut.
    """

    parent: Int64
    depth: Int64
    self_ns: Int64
    frame: Int64
    extent_ns: Int64
    clipped: int


def nest(
    track: npt.NDArray[np.integer],
    start_ns: Int64,
    duration_ns: Int64,
    *,
    is_function: npt.NDArray[np.bool_],
    is_annotation: npt.NDArray[np.bool_],
    precedence: npt.NDArray[np.integer],
) -> Nesting:
    """Nest slices of equal `track` by time. Of slices with equal times the one with the lower `precedence` is outer.

    `is_function` marks the slices that can be another's `frame` (the innermost of them around it), `is_annotation`
    those that a function may open and leave open.
    """
    count = len(start_ns)
    order = np.lexsort((np.arange(count), precedence, -duration_ns, start_ns, track))
    tracks, starts = track[order].tolist(), start_ns[order].tolist()
    durations, functions = duration_ns[order].tolist(), is_function[order].tolist()
    swept = _Sweep(starts, durations, functions, is_annotation[order].tolist())
    swept.run(tracks)
    back = np.empty(count, dtype=np.int64)
    back[order] = np.arange(count)

    def unsorted(values: list[int]) -> Int64:
        return np.array(values, dtype=np.int64)[back]

    def unsorted_ids(values: list[int]) -> Int64:
        positions = np.array(values, dtype=np.int64)
        ids = np.where(positions < 0, NONE, order[positions]) if count else positions
        return np.asarray(ids[back], dtype=np.int64)

    return Nesting(
        parent=unsorted_ids(swept.parent),
        depth=unsorted(swept.depth),
        self_ns=unsorted(swept.self_ns),
        frame=unsorted_ids(swept.frame),
        extent_ns=unsorted(swept.extent),
        clipped=len(swept.cut),
    )


class _Sweep:
    """One pass over slices sorted by track and start, with the open slices on a stack."""

    def __init__(
        self,
        starts: Sequence[int],
        durations: Sequence[int],
        functions: Sequence[bool],
        annotations: Sequence[bool],
    ) -> None:
        count = len(starts)
        self.starts, self.durations, self.functions, self.annotations = starts, durations, functions, annotations
        self.parent = [NONE] * count
        self.depth = [0] * count
        self.self_ns = [0] * count
        self.frame = [NONE] * count
        self.extent = [0] * count
        self.cut: set[int] = set()
        self._open: list[tuple[int, int, int]] = []  # (slice, end, innermost function up to it)
        self._late: list[tuple[int, int, int]] = []  # (start, -end, slice): those that wait for the end of another

    def run(self, tracks: Sequence[int]) -> None:
        current = None
        late = self._late
        for i, start in enumerate(self.starts):
            if tracks[i] != current:
                self._finish_track()
                current = tracks[i]
            key = (start, -start - self.durations[i])
            while late and late[0][:2] <= key:
                self._place_late()
            self._place(start, i)
        self._finish_track()

    def _finish_track(self) -> None:
        while self._late:
            self._place_late()
        self._open.clear()

    def _place_late(self) -> None:
        start, _, i = heapq.heappop(self._late)
        self._place(start, i)

    def _place(self, start: int, i: int) -> None:
        end = self.starts[i] + self.durations[i]
        stack = self._open
        while stack:
            above, last, _ = stack[-1]
            if last <= start:
                stack.pop()
            elif end <= last:
                break
            elif last - start >= end - last and not (self.annotations[i] and self.functions[above]):
                self.cut.add(i)
                end = last
                break
            else:
                # What else begins before that end still belongs to the slices now open, so this one waits its turn.
                self.cut.add(i)
                heapq.heappush(self._late, (last, -end, i))
                return
        function = NONE
        if stack:
            above, _, function = stack[-1]
            self.parent[i], self.frame[i], self.depth[i] = above, function, len(stack)
            self.self_ns[above] -= end - start
        self.extent[i] = end - start
        self.self_ns[i] += end - start
        stack.append((i, end, i if self.functions[i] else function))
