"""The tree of sampled call paths as arrays, and the questions every view of stacks asks of it.

A node is a frame below the path that called it, so what depends on the path alone (the innermost frame of the user's
code, the totals of a flame graph) is computed once per node, level by level, however often a path was sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from stepscope.engine.user_code import UserCode
from stepscope.model import Place
from stepscope.read.raw import Frame
from stepscope.tables.arrays import NONE, Bools, Floats, Int32, Int64, Numbers
from stepscope.tables.phases import in_file, last_part
from stepscope.tables.schema import Tables

_T = TypeVar("_T", bound=np.generic)


class CallTree(Struct, frozen=True, dict=True):
    """`parent` (-1 at roots), `depth` and `frame` by node, parents before children; `frames` by frame number."""

    parent: Int32
    depth: Int32
    frame: Int32
    frames: tuple[Frame, ...]

    def __len__(self) -> int:
        return len(self.parent)

    @cached_property
    def levels(self) -> list[Int64]:
        order = np.argsort(self.depth, kind="stable")
        ends = np.searchsorted(self.depth[order], np.arange(int(self.depth.max(initial=-1)) + 2))
        return [order[first:last] for first, last in pairwise(ends)]

    def by_node(self, of_frame: npt.NDArray[_T]) -> npt.NDArray[_T]:
        return of_frame[self.frame] if len(self) else of_frame[:0]

    def innermost(self, marked: Bools) -> Int32:
        """For every node the nearest node on its path, itself included, that is `marked`; -1 for none."""
        found = np.where(marked, np.arange(len(self), dtype=np.int32), np.int32(NONE))
        for level in self.levels[1:]:
            found[level] = np.where(found[level] >= 0, found[level], found[self.parent[level]])
        return found

    def outermost(self, marked: Bools) -> Int32:
        """As `innermost`, the one nearest to the root."""
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

    def path(self, node: int) -> list[Frame]:
        found: list[Frame] = []
        while node >= 0:
            found.append(self.frames[self.frame[node]])
            node = int(self.parent[node])
        return found[::-1]


def call_tree(tables: Tables) -> CallTree:
    nodes, frames = tables.nodes, tables.frames
    return CallTree(
        parent=nodes["parent"].fill_null(NONE).to_numpy().astype(np.int32),
        depth=nodes["depth"].to_numpy().astype(np.int32),
        frame=nodes["frame"].to_numpy().astype(np.int32),
        frames=tuple(Frame(f or "?", file or "", line) for _, f, file, line in frames.iter_rows()),
    )


_WORKER_LOOP = "torch/utils/data/_utils/worker.py"


class UserPaths:
    """Arrays are by node; -1 means none."""

    def __init__(self, tree: CallTree, code: UserCode) -> None:
        self.tree = tree
        self.code = code
        self.files = [code.resolve(frame.file) for frame in tree.frames]  # the user's by frame, None for all others

    @property
    def nodes(self) -> Int32:
        return np.arange(len(self.tree), dtype=np.int32)

    @cached_property
    def user(self) -> Bools:
        return self.tree.by_node(np.array([file is not None for file in self.files], bool))

    @cached_property
    def innermost(self) -> Int32:
        found = self.tree.innermost(self.user)
        return np.where(self.is_below(found, self.innermost_of(is_worker_loop)), found, np.int32(NONE))

    @cached_property
    def line(self) -> Int32:
        return self.tree.by_node(self._lines[1])

    @cached_property
    def function(self) -> Int32:
        known: Numbers[tuple[str, str]] = Numbers()
        numbers = [
            NONE if file is None else known[file, frame.function]
            for file, frame in zip(self.files, self.tree.frames, strict=True)
        ]
        return self.tree.by_node(np.array(numbers, np.int32))

    @cached_property
    def source_line(self) -> Int64:
        lines = [NONE if frame.line is None else frame.line for frame in self.tree.frames]
        return self.tree.by_node(np.array(lines, np.int64))

    def place(self, line: int) -> Place | None:
        return Place(*self._lines[0][line]) if line >= 0 else None

    def leaf_names(self, nodes: pl.Series) -> pl.Series:
        """ "file:function" of the innermost frames of these nodes; null where there is none."""
        names = pl.Series([f"{frame.file or '?'}:{frame.function}" for frame in self.tree.frames], dtype=pl.String)
        frame = pl.Series(at(self.tree.frame, rows_of(nodes), NONE))
        return names.gather(frame.set(frame < 0, None))

    def marked(self, mark: Callable[[Frame], bool]) -> Bools:
        """Whether `mark` says yes to the frame itself."""
        return self.tree.by_node(np.array([mark(frame) for frame in self.tree.frames], bool))

    def innermost_of(self, mark: Callable[[Frame], bool]) -> Int32:
        """The innermost frame on the path that `mark` says yes to, as a node."""
        return self.tree.innermost(self.marked(mark))

    def passes(self, mark: Callable[[Frame], bool]) -> Bools:
        """Whether any frame on the path is one that `mark` says yes to."""
        return self.innermost_of(mark) >= 0

    def is_below(self, node: Int32, above: Int32) -> Bools:
        """Whether `node` is one and deeper than `above`; every node is deeper than none."""
        return (node >= 0) & (at(self.tree.depth, node, NONE) > at(self.tree.depth, above, NONE))

    @cached_property
    def _lines(self) -> tuple[list[tuple[str, int | None, str]], Int32]:
        """The user's lines by number, and the number of the line of each frame."""
        known: Numbers[tuple[str, int | None, str]] = Numbers()
        numbers = [
            NONE if file is None else known[file, frame.line, frame.function]
            for file, frame in zip(self.files, self.tree.frames, strict=True)
        ]
        return list(known), np.array(numbers, np.int32)


def at(values: npt.NDArray[_T], nodes: npt.NDArray[np.integer], none: object) -> npt.NDArray[_T]:
    """`values` of these nodes, `none` where a node is -1."""
    found: npt.NDArray[_T] = np.append(values, np.array([none], values.dtype))[nodes]
    return found


def rows_of(nodes: pl.Series) -> Int64:
    """A column of nodes as an array in which null is -1."""
    return nodes.fill_null(NONE).to_numpy().astype(np.int64)


def is_worker_loop(frame: Frame) -> bool:
    """Whether a loader worker's own path begins here."""
    return last_part(frame.function) == "_worker_loop" and in_file(frame.file, _WORKER_LOOP)
