"""The sampled time of the training loop on the main threads of ranks, and the user's lines on call paths.

Where steps are known, the loop is the segments of sampling that steady steps fill. Where they are not (files that others
recorded), it is the user's function in which both a batch is fetched and a model is called, forwards, backwards or by an
optimizer, from the line of the fetch on; without a loader, the innermost function that calls them all. What is imported or
compiled belongs to no loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analyze.call_tree import NONE, Bools, CallTree, Int32, Int64
from stepscope.analyze.context import Context
from stepscope.analyze.places import UserCode
from stepscope.model import Place
from stepscope.read.raw import Frame
from stepscope.tables import phases

STEADY, CALLER = "steady steps", "the function of the loop"
_WORKER_LOOP = "torch/utils/data/_utils/worker.py"


class UserPaths:
    """The user's frames on the paths of a call tree. Arrays are by node; -1 means none."""

    def __init__(self, tree: CallTree, code: UserCode) -> None:
        self.tree = tree
        self._files = [code.resolve(frame.file) for frame in tree.frames]

    @cached_property
    def innermost(self) -> Int32:
        """The user's innermost frame on the path, as a node. A worker's path counts from its loop on."""
        found = self.tree.innermost(self.user)
        fork = self.nearest(worker_loop)
        return np.where(self._depth(found) > self._depth(fork), found, np.int32(NONE))

    @cached_property
    def user(self) -> Bools:
        """Whether the frame is the user's own code."""
        return self._by_node(np.array([file is not None for file in self._files], bool))

    @cached_property
    def line(self) -> Int32:
        """The number of the user's innermost line on the path; see `place`."""
        own = np.where(self.innermost >= 0, self.tree.frame[self.innermost], NONE) if len(self.tree) else self.innermost
        numbers = np.append(self._line_of_frame, np.int32(NONE))
        found: Int32 = numbers[own]
        return found

    @cached_property
    def function(self) -> Int32:
        """The number of the function of the frame itself, where it is the user's."""
        return self._by_node(self._numbered([(file, frame.function) for file, frame in self._own_frames()]))

    @cached_property
    def leaf_name(self) -> list[str]:
        """"file:function" of every frame, by frame number."""
        return [f"{frame.file or '?'}:{frame.function}" for frame in self.tree.frames]

    def place(self, line: int) -> Place:
        """The place of a line by its number."""
        file, number, function = self._places[line]
        return Place(file, number, function)

    def nearest(self, mark: Callable[[Frame], bool]) -> Int32:
        """The innermost frame on the path that `mark` says yes to."""
        return self.tree.innermost(self.marked(mark))

    def marked(self, mark: Callable[[Frame], bool]) -> Bools:
        """Whether `mark` says yes to the frame itself."""
        return self._by_node(np.array([mark(Frame(*frame)) for frame in self.tree.frames], bool))

    def below(self, node: Int32, above: Int32) -> Bools:
        """Whether `node` is there and deeper than `above`, both by node."""
        found: Bools = (node >= 0) & (self._depth(node) > self._depth(above))
        return found
