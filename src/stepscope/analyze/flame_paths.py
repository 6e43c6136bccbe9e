"""From sampled rows to the paths of one tree: equal boxes merged, direct recursion folded, waiting marked.

A function's box shows the line that was sampled most in it, and a box is a wait when most of what ends in it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stepscope.analyze.call_tree import NONE
from stepscope.analyze.flame_builder import Bools, Floats, Int32, Paths, merged, summed, totals
from stepscope.analyze.flame_names import NO_FRAME, Names
from stepscope.analyze.flame_rows import SampleRows
from stepscope.model.views.flame import FlameFrame

FOLD = 8  # direct recursion deeper than this is drawn as one box


@dataclass(frozen=True)
class Boxes:
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
        self._frames = (*frames, NO_FRAME)
        self._key = names.keys(self._frames)
        self._plain = np.full(len(self._frames), NONE, dtype=np.int32)  # numbers of drawn frames, made when needed
        self._waiting = self._plain.copy()

    def boxes(self, chosen: Bools, worth: Floats) -> Boxes:
        """The rows in `chosen`, a sample of which counts for `worth`."""
        rows, calls = self._rows, self._rows.calls
        value = rows.samples[chosen] * worth[chosen]
        # a stack without frames is a node of its own behind all others
        node = np.where(rows.node[chosen] < 0, len(calls), rows.node[chosen])
        own = summed(node, value, len(calls) + 1)
        waits = summed(node, value * rows.waiting[chosen], len(calls) + 1)
        parent = np.append(calls.parent, NONE).astype(np.int32)
        total = totals(parent, self._depth, own)
        used = total > 0
        number = (np.cumsum(used) - 1).astype(np.int32)
        above = np.where(parent[used] < 0, NONE, number[parent[used]]).astype(np.int32)
        frame = np.append(calls.frame, len(self._frames) - 1).astype(np.int32)[used]
        up, key, group = merged(above, self._key[frame], fold=FOLD)
        own_of = summed(group, own[used], len(up))
        wait_of = summed(group, waits[used], len(up))
        shown = _most(group, frame, total[used], len(up))
        return Boxes(up, key, self._numbers(shown, wait_of > own_of / 2), own_of)

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

    @cached_property
    def _depth(self) -> Int32:
        return np.append(self._rows.calls.depth, 0).astype(np.int32)

    def _numbers(self, frame: Int32, waiting: Bools) -> Int32:
        """The numbers of drawn frames."""
        for marked, table in ((False, self._plain), (True, self._waiting)):
            for each in np.unique(frame[waiting == marked]).tolist():
                if table[each] < 0:
                    drawn = self._frames[each]
                    table[each] = self._names.frames.number(replace(drawn, kind="wait") if marked else drawn)
        return np.where(waiting, self._waiting[frame], self._plain[frame]).astype(np.int32)


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
