"""From sampled rows to the paths of one tree: equal boxes merged, direct recursion folded, waiting marked.

A function's box shows the line that was sampled most in it, and a box is a wait when most of what ends in it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.flame.builder import Paths, depths, merged, summed, totals
from stepscope.analyze.flame.names import NO_FRAME, Names
from stepscope.analyze.flame.rows import SampleRows
from stepscope.analyze.flame.trace_leaves import OperatorLeaves
from stepscope.engine.call_tree import CallTree
from stepscope.model.sampled import FlameFrame
from stepscope.tables.arrays import NONE, Bools, Floats, Int32

Leaves = Callable[[CallTree, Floats], OperatorLeaves]

FOLD = 8  # direct recursion deeper than this is drawn as one box


class Boxes(Struct, frozen=True):
    """Paths of boxes: `key` numbers boxes of `Names`, which two sides of a difference share; `frame` is as drawn."""

    parent: Int32
    key: Int32
    frame: Int32
    own: Floats

    def paths(self) -> Paths:
        """For a tree."""
        return Paths(self.parent, self.frame, self.own)


class Painter:
    """Makes the boxes of trees out of rows of one run. `frames` are its distinct frames as they are drawn."""

    def __init__(self, rows: SampleRows, frames: Sequence[FlameFrame], names: Names) -> None:
        self._rows = rows
        self._names = names
        self._frames: list[FlameFrame] = []
        self._keys = np.zeros(0, dtype=np.int32)
        self._add([NO_FRAME, *frames])
        self._numbers: dict[tuple[int, bool], int] = {}  # (frame, waits) -> number of the frame as drawn

    def _add(self, frames: Sequence[FlameFrame]) -> None:
        self._frames += frames
        self._keys = np.concatenate([self._keys, self._names.keys(frames)]).astype(np.int32)

    def boxes(self, chosen: Bools, worth: Floats, leaves: Leaves | None = None) -> Boxes:
        """The rows in `chosen`, a sample of which counts for `worth`; with the operators that `leaves` finds."""
        rows, calls = self._rows, self._rows.calls
        count = len(calls) + 1  # a stack without frames is a node of its own behind all others
        value = rows.samples[chosen] * worth[chosen]
        node = np.where(rows.node[chosen] < 0, len(calls), rows.node[chosen]).astype(np.int32)
        own = summed(node, value, count)
        waits = np.divide(summed(node, value * rows.waiting[chosen], count), own, out=np.zeros(count), where=own > 0)
        parent = np.append(calls.parent, NONE).astype(np.int32)
        frame = np.append(calls.frame + 1, 0).astype(np.int32)  # NO_FRAME comes first
        if leaves is not None:
            found = leaves(calls, own[:-1])
            above = np.where(found.parent < len(calls), found.parent, found.parent + 1)
            parent = np.concatenate([parent, above]).astype(np.int32)
            frame = np.concatenate([frame, found.frame + len(self._frames)]).astype(np.int32)
            self._add(found.frames)
            own = np.concatenate([found.own, own[-1:], found.value])
            waits = np.concatenate([waits, np.zeros(len(found.value))])
        return self._merged(parent, frame, own, waits)

    def _merged(self, parent: Int32, frame: Int32, own: Floats, waits: Floats) -> Boxes:
        """Nodes of sampled frames as boxes. `waits` is the share of `own` that waits."""
        total = totals(parent, depths(parent), own)
        used = total > 0
        number = (np.cumsum(used) - 1).astype(np.int32)
        above = np.where(parent[used] < 0, NONE, number[parent[used]]).astype(np.int32)
        up, key, group = merged(above, self._keys[frame[used]], fold=FOLD)
        own_of = summed(group, own[used], len(up))
        wait_of = summed(group, (waits * own)[used], len(up))
        shown = _most(group, frame[used], total[used], len(up))
        return Boxes(up, key, self._drawn(shown, wait_of > own_of / 2), own_of)

    def grouped(self, groups: Sequence[tuple[str, Boxes]]) -> Boxes:
        """Boxes below one more box for each group; a single group needs none."""
        filled = [(label, boxes) for label, boxes in groups if len(boxes.own)]
        if len(filled) <= 1:
            return filled[0][1] if filled else groups[0][1]
        return beside([self._below(label, boxes) for label, boxes in filled])

    def _below(self, label: str, boxes: Boxes) -> Boxes:
        top = FlameFrame(label, "", None, "root")
        one = np.zeros(1, dtype=np.int32)
        return Boxes(
            parent=np.concatenate([one + NONE, np.where(boxes.parent < 0, 0, boxes.parent + 1)]).astype(np.int32),
            key=np.concatenate([one + self._names.key(top), boxes.key]).astype(np.int32),
            frame=np.concatenate([one + self._names.frames.number(top), boxes.frame]).astype(np.int32),
            own=np.concatenate([np.zeros(1), boxes.own]),
        )

    def _drawn(self, frame: Int32, waiting: Bools) -> Int32:
        """The numbers of frames as they are drawn."""
        pairs, which = np.unique(frame.astype(np.int64) * 2 + waiting, return_inverse=True)
        numbers = [self._drawn_one(int(pair) // 2, bool(pair % 2)) for pair in pairs]
        return np.asarray(numbers, dtype=np.int32)[which]

    def _drawn_one(self, frame: int, waits: bool) -> int:
        if (frame, waits) not in self._numbers:
            drawn = self._frames[frame]
            self._numbers[frame, waits] = self._names.frames.number(replace(drawn, kind="wait") if waits else drawn)
        return self._numbers[frame, waits]


def _most(group: Int32, frame: Int32, weight: Floats, count: int) -> Int32:
    """The frame of each group with the most weight."""
    span = int(frame.max(initial=0)) + 1
    distinct, which = np.unique(group.astype(np.int64) * span + frame, return_inverse=True)
    sums = summed(which, weight, len(distinct))
    order = np.lexsort((sums, distinct // span))
    best = np.zeros(count, dtype=np.int32)
    best[(distinct // span)[order]] = (distinct % span)[
        order
    ]  # of several assignments the last one, the heaviest, stays
    return best


def beside(parts: Sequence[Boxes]) -> Boxes:
    """Several below one root; boxes that are equal become one, drawn as in the first part that has it."""
    parent, key, frame, own = stacked(parts)
    up, keys, group = merged(parent, key)
    shown = np.zeros(len(up), dtype=np.int32)
    shown[group[::-1]] = frame[::-1]
    return Boxes(up, keys, shown, summed(group, own, len(up)))


def stacked(parts: Sequence[Boxes]) -> tuple[Int32, Int32, Int32, Floats]:
    """(parent, key, frame, own) of all parts one behind the other, below one root."""
    starts = np.cumsum([0, *(len(part.own) for part in parts[:-1])])
    parent = [np.where(part.parent < 0, NONE, part.parent + at) for part, at in zip(parts, starts, strict=True)]
    return (
        np.concatenate(parent).astype(np.int32),
        np.concatenate([part.key for part in parts]).astype(np.int32),
        np.concatenate([part.frame for part in parts]).astype(np.int32),
        np.concatenate([part.own for part in parts]),
    )
