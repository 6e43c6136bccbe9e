"""The tree of sampled call paths as arrays, and the questions every view of stacks asks of it.

A node is a frame below the path that called it, so what depends on the path alone (the innermost frame of the user's
code, the totals of a flame graph) is computed once per node, level by level, however often a path was sampled.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from stepscope.tables.arrays import NONE, Bools, Floats, Int32, Int64
from stepscope.tables.schema import Tables


class CallFrame(NamedTuple):
    """A distinct frame; `file` may be empty and `line` None where the sampler could not tell."""

    function: str
    file: str
    line: int | None


class CallTree(Struct, frozen=True, dict=True):
    """`parent` (-1 at roots), `depth` and `frame` by node, parents before children; `frames` by frame number."""

    parent: Int32
    depth: Int32
    frame: Int32
    frames: tuple[CallFrame, ...]

    def __len__(self) -> int:
        return len(self.parent)

    @cached_property
    def levels(self) -> list[Int64]:
        """The nodes of each depth, the roots first."""
        order = np.argsort(self.depth, kind="stable")
        ends = np.searchsorted(self.depth[order], np.arange(int(self.depth.max(initial=-1)) + 2))
        return [order[first:last] for first, last in pairwise(ends)]

    def by_node(self, of_frame: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """What is known per distinct frame, for every node."""
        return of_frame[self.frame]

    def innermost(self, marked: Bools) -> Int32:
        """For every node the nearest node on its path, itself included, that is `marked`; -1 for none."""
        found = np.where(marked, np.arange(len(self), dtype=np.int32), np.int32(NONE))
        for level in self.levels[1:]:
            above = found[self.parent[level]]
            own = found[level]
            found[level] = np.where(own >= 0, own, above)
        return found

    def outermost(self, marked: Bools) -> Int32:
        """For every node the node nearest to the root on its path, itself included, that is `marked`; -1 for none."""
        found = np.where(marked, np.arange(len(self), dtype=np.int32), np.int32(NONE))
        for level in self.levels[1:]:
            above = found[self.parent[level]]
            found[level] = np.where(above >= 0, above, found[level])
        return found

    def totals(self, own: Floats) -> Floats:
        """The sum of `own` over every node and all below it."""
        total = own.astype(np.float64, copy=True)
        for level in reversed(self.levels[1:]):
            np.add.at(total, self.parent[level], total[level])
        return total

    def path(self, node: int) -> list[CallFrame]:
        """The frames from the root to `node`."""
        found: list[CallFrame] = []
        while node >= 0:
            found.append(self.frames[self.frame[node]])
            node = int(self.parent[node])
        return found[::-1]


def call_tree(tables: Tables) -> CallTree:
    """The tree of the tables `nodes` and `frames`."""
    nodes, frames = tables.nodes, tables.frames
    return CallTree(
        parent=nodes["parent"].fill_null(NONE).to_numpy().astype(np.int32),
        depth=nodes["depth"].to_numpy().astype(np.int32),
        frame=nodes["frame"].to_numpy().astype(np.int32),
        frames=tuple(CallFrame(f or "?", file or "", line) for _, f, file, line in frames.iter_rows()),
    )
