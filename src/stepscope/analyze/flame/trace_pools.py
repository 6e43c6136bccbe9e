"""Which recorded call paths a sampled call path is compared with: those that share the longest end with it.

All paths are compared at once, frame by frame from the innermost on: paths that agreed so far share a group.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import Struct

from stepscope.tables.arrays import NONE, Bools, Int64

MAX_LENGTH = 256  # frames that are compared


class Side(NamedTuple):
    """Paths of one recorder: by node its key and the node above it (-1 for none), and the nodes in question."""

    key: Int64
    above: Int64
    nodes: Int64


class Pools(Struct, frozen=True):
    """`of_node` gives for each sampled node its pool, -1 where nothing matches. Pool `pool[i]` holds recorded node
    `owner[i]`; a node may be in several. `count` is how many pools there are.
    """

    of_node: Int64
    pool: Int64
    owner: Int64
    count: int


def pools(sampled: Side, recorded: Side) -> Pools:
    """The pools of the sampled nodes."""
    race = _Race(sampled, recorded)
    for length in range(MAX_LENGTH):
        if not race.step(first=length == 0):
            break
    return race.result()


class _Race:
    """Paths that are still compared: `at` is the frame that comes next in each, `group` what they agreed on so far."""

    def __init__(self, sampled: Side, recorded: Side) -> None:
        first = len(sampled.key)
        self._outside = first + len(recorded.key)  # stands for what is above a root
        self._key = np.concatenate([sampled.key, recorded.key, [NONE]])
        shifted = np.where(recorded.above >= 0, recorded.above + first, NONE)
        joined = np.append(np.concatenate([sampled.above, shifted]), NONE)
        self._above = np.where(joined >= 0, joined, self._outside)
        self._first = first
        self._node = np.concatenate([sampled.nodes, recorded.nodes + first])
        self._sampled = np.arange(len(self._node)) < len(sampled.nodes)
        self._at = self._node.copy()
        self._group = np.zeros(len(self._node), np.int64)
        self._racing = np.arange(len(self._node))
        self._of_node = np.full(len(self._node), NONE, np.int64)
        self._parts: list[tuple[Int64, Int64]] = []
        self._count = 0

    def step(self, *, first: bool) -> bool:
        """Compare one more frame; False when no sampled path is left."""
        racing = self._racing
        before, at = self._group[racing], self._at[racing]
        after = np.unique(np.stack([before, self._key[at]], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
        is_sampled = self._sampled[racing]
        matched = self._in_both(after, is_sampled)
        if not first:
            self._stop(is_sampled & ~matched, before)
        ended = at == self._outside
        self._stop(is_sampled & matched & ended, after)
        going = matched & ~ended
        self._racing = racing[going]
        self._group[self._racing] = after[going]
        self._at[self._racing] = self._above[at[going]]
        return bool((is_sampled & going).any())

    def result(self) -> Pools:
        """The pools of all that stopped."""
        nothing = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        pool, owner = (np.concatenate(found) for found in zip(nothing, *self._parts, strict=True))
        return Pools(self._of_node[self._sampled], pool, owner, self._count)

    def _stop(self, stopping: Bools, group: Int64) -> None:
        """Sampled paths whose longest common end is found, with what they agreed on: the group of each racing path."""
        distinct = np.unique(group[stopping])
        if not len(distinct):
            return
        racing = self._racing
        self._of_node[racing[stopping]] = self._count + np.searchsorted(distinct, group[stopping])
        member = ~self._sampled[racing] & np.isin(group, distinct)
        owner = self._node[racing[member]] - self._first
        self._parts.append((self._count + np.searchsorted(distinct, group[member]), owner))
        self._count += len(distinct)

    @staticmethod
    def _in_both(group: Int64, is_sampled: Bools) -> Bools:
        """Paths whose group holds sampled and recorded ones."""
        count = int(group.max(initial=-1)) + 1
        sampled = np.bincount(group[is_sampled], minlength=count) > 0
        recorded = np.bincount(group[~is_sampled], minlength=count) > 0
        both: Bools = (sampled & recorded)[group]
        return both
