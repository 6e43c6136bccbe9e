"""From sampled rows to the paths of one tree: workers cut at their fork, equal boxes merged, waiting marked.

A forked loader worker carries its parent's frames; its own begin at `_worker_loop`. A function's box shows the line
that was sampled most in it, and a box is a wait when most of what ends in it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stepscope.analyze.call_tree import NONE, CallTree
from stepscope.analyze.flame_builder import Bools, Floats, Int32, Paths, depths, merged, totals
from stepscope.analyze.flame_names import NO_FRAME, Names
from stepscope.analyze.flame_rows import WORKERS, SampleRows
from stepscope.model.views.flame import FlameFrame

FOLD = 8  # direct recursion deeper than this is drawn as one box
_FORK_POINT = "_worker_loop"


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
        """The rows in `chosen`, a sample of which counts for `worth`. Loader workers begin at their own frames."""
        worker = self._rows.kind == WORKERS
        parts = [self._one(chosen & ~worker, worth, cut=False), self._one(chosen & worker, worth, cut=True)]
        found = [part for part in parts if len(part.own)] or parts[:1]
        return found[0] if len(found) == 1 else _beside(found)

    def grouped(self, groups: Sequence[tuple[str, Boxes]]) -> Boxes:
        """Boxes below one more box for each group; a single group needs none."""
        filled = [(label, boxes) for label, boxes in groups if len(boxes.own)]
        if len(filled) <= 1:
            return filled[0][1] if filled else groups[0][1]
        return _beside([self._below(label, boxes) for label, boxes in filled])

    def _below(self, label: str, boxes: Boxes) -> Boxes:
        top = FlameFrame(label, "", None, "root")
        one = np.zeros(1, dtype=np.int32)
        return Boxes(
            parent=np.concatenate([one + NONE, np.where(boxes.parent < 0, 0, boxes.parent + 1)]).astype(np.int32),
            key=np.concatenate([one + self._names.key(top), boxes.key]).astype(np.int32),
            frame=np.concatenate([one + self._names.frames.number(top), boxes.frame]).astype(np.int32),
            own=np.concatenate([np.zeros(1), boxes.own]),
        )

    def _one(self, chosen: Bools, worth: Floats, *, cut: bool) -> Boxes:
        rows, calls = self._rows, self._rows.calls
        value = rows.samples[chosen] * worth[chosen]
        # a stack without frames is a node of its own behind all others
        node = np.where(rows.node[chosen] < 0, len(calls), rows.node[chosen])
        own = np.bincount(node, value, minlength=len(calls) + 1)
        waits = np.bincount(node, value * rows.waiting[chosen], minlength=len(calls) + 1)
        parent, depth = self._cut if cut else self._whole
        total = totals(parent, depth, own)
        used = total > 0
        number = (np.cumsum(used) - 1).astype(np.int32)
        above = parent[used]
        above = np.where(above < 0, NONE, number[above]).astype(np.int32)
        frame = self._frame_of_node[used]
        up, key, group = merged(above, self._key[frame], fold=FOLD)
        count = len(up)
        own_of = np.bincount(group, own[used], minlength=count)
        wait_of = np.bincount(group, waits[used], minlength=count)
        shown = _most(group, frame, total[used], count)
        return Boxes(up, key, self._numbers(shown, wait_of > own_of / 2), own_of)

    @cached_property
    def _frame_of_node(self) -> Int32:
        return np.append(self._rows.calls.frame, len(self._frames) - 1).astype(np.int32)

    @cached_property
    def _whole(self) -> tuple[Int32, Int32]:
        """(parent, depth) of all nodes, and of one more for stacks without frames."""
        calls = self._rows.calls
        return np.append(calls.parent, NONE).astype(np.int32), np.append(calls.depth, 0).astype(np.int32)

    @cached_property
    def _cut(self) -> tuple[Int32, Int32]:
        """The same with the frames of forked workers' parents cut off."""
        parent = self._whole[0].copy()
        parent[:-1][_forks(self._rows.calls)] = NONE
        return parent, depths(parent)

    def _numbers(self, frame: Int32, waiting: Bools) -> Int32:
        """The numbers of drawn frames."""
        for marked, table in ((False, self._plain), (True, self._waiting)):
            for each in np.unique(frame[waiting == marked]).tolist():
                if table[each] < 0:
                    drawn = self._frames[each]
                    table[each] = self._names.frames.number(replace(drawn, kind="wait") if marked else drawn)
        return np.where(waiting, self._waiting[frame], self._plain[frame]).astype(np.int32)


def _forks(calls: CallTree) -> Bools:
    """Nodes at which a forked worker's own frames begin."""
    fork = np.asarray([frame.function.rsplit(".", 1)[-1] == _FORK_POINT for frame in calls.frames], dtype=np.bool_)
    return calls.by_node(fork).astype(np.bool_) if len(fork) else np.zeros(len(calls), dtype=np.bool_)


def _most(group: Int32, frame: Int32, weight: Floats, count: int) -> Int32:
    """The frame of each group with the most weight."""
    pairs = group.astype(np.int64) * (int(frame.max(initial=0)) + 1) + frame
    distinct, which = np.unique(pairs, return_inverse=True)
    sums = np.bincount(which, weight, minlength=len(distinct))
    owner = distinct // (int(frame.max(initial=0)) + 1)
    order = np.lexsort((sums, owner))
    best = np.zeros(count, dtype=np.int32)
    best[owner[order]] = (distinct % (int(frame.max(initial=0)) + 1))[order]  # the last assignment, the heaviest, stays
    return best


def _beside(parts: Sequence[Boxes]) -> Boxes:
    """Several below one root; equal boxes of two of them stay apart only where they were in one of them."""
    offsets = np.cumsum([0, *(len(part.own) for part in parts[:-1])])
    parent = np.concatenate(
        [np.where(part.parent < 0, NONE, part.parent + offset) for part, offset in zip(parts, offsets, strict=True)]
    ).astype(np.int32)
    key, frame, own = (np.concatenate([getattr(part, name) for part in parts]) for name in ("key", "frame", "own"))
    up, keys, group = merged(parent, key.astype(np.int32))
    shown = np.zeros(len(up), dtype=np.int32)
    shown[group[::-1]] = frame[::-1]  # of the first part that has the box
    return Boxes(up, keys, shown, np.bincount(group, own, minlength=len(up)))
