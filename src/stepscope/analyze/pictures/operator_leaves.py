"""The operators in which samples stand, estimated from traces: leaf frames below sampled Python frames.

A sampler sees the Python function that called an operator, not the operator. Where a trace recorded the same call path,
the samples of the function itself are split as its time in the trace is: between Python and the operators called there.
Paths match by the longest common end of (function, file), so that it does not matter where a recording began. On a line
whose operators are known, samples go to these. What no trace explains stays the frame's own; sums stay exact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from stepscope.analyze.pictures.flame_tree import Paths, depths, merged, summed, totals
from stepscope.analyze.pictures.trace_paths import FUNCTION, OPERATOR, TraceFrame
from stepscope.engine.call_tree import CallTree
from stepscope.engine.user_code import UserCode
from stepscope.model.sampled import FlameFrame
from stepscope.tables.arrays import NONE, Bools, Floats, Int32, Int64

MIN_SHARE = 0.01  # of the operators of a path: what costs less counts for the operator, or function, around it
_EXACT_BITS = 40  # leaves are whole multiples of a 2**-40th of the largest value, so that their sums are exact
_INSTALLED = re.compile(r"^.*/(?:site-packages|dist-packages)/|^.*/lib(?:64)?/python\d+(?:\.\d+)?t?/")
_MODULE_FILE = "torch/nn/modules/module.py"
_MODULE_CALLS = ("_wrapped_call_impl", "_call_impl")  # traces name the module in their place, samplers do not
_SKIP, _NO_PYTHON = -2, -3


class OperatorLeaves(Struct, frozen=True):
    """Leaves to be added below the nodes of a `CallTree`, and what then remains of the nodes' own values.

    `parent` is a node of the tree or, from `len(tree)` on, the leaf of that number; parents come before children.
    `frame` counts in `frames`. `value` is each leaf's own: for every node, `own` and the values of all leaves below it
    add up to what its own value was. `absent` gives the reason where there are none.
    """

    parent: Int32
    frame: Int32
    value: Floats
    own: Floats
    frames: tuple[FlameFrame, ...]
    source: str
    absent: str | None


class _Calls(Struct, frozen=True):
    """What a trace knows of each of its functions: `python_ns` spent in Python itself, by node of its paths, and the
    operators it calls: the function `owner`, the operator around each (position here, -1) and own ns.

    `key` numbers (function, file) by node, `above` is the function around it, `line` that of the call, -1 unknown.
    """

    is_function: Bools
    key: Int64
    above: Int64
    line: Int64
    python_ns: Floats
    owner: Int64
    around: Int64
    own_ns: Floats
    frame: Int32


class _Keys:
    """Numbers for (last part of the function's name, file), the same for samples and traces."""

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._numbers: dict[tuple[str, str], int] = {}

    def number(self, function: str, file: str) -> int:
        """`_NO_PYTHON` for native frames, `_SKIP` for those that one of the two recorders does not name."""
        if not file.endswith((".py", ">")):
            return _NO_PYTHON
        name = function.rpartition(".")[2] or function
        if name in _MODULE_CALLS and file.replace("\\", "/").endswith(_MODULE_FILE):
            return _SKIP
        path = self._code.resolve(file) or _INSTALLED.sub("", file, count=1)
        return self._numbers.setdefault((name, path), len(self._numbers))


def split(
    tree: CallTree,
    own: Floats,
    paths: Paths,
    frames: Sequence[TraceFrame],
    code: UserCode,
    absent: str | None,
    named: str,
) -> OperatorLeaves:
    """The leaves of `tree`, whose nodes hold `own`.

    Args:
        paths: host time of traces in ns; their frames are numbers of `frames`.
        absent: why there are no paths, if so.
        named: the traces, for people.
    """
    if absent is not None:
        none = np.zeros(0, np.int32)
        return OperatorLeaves(none, none, np.zeros(0), own.astype(np.float64), (), "", absent)
    keys = _Keys(code)
    calls = _calls(paths, frames, keys)
    key = np.asarray([keys.number(frame.function, frame.file) for frame in tree.frames] or [0], np.int64)[tree.frame]
    nodes = np.flatnonzero((own > 0) & (key >= 0))
    above = _above(tree, key >= 0)
    recorded = np.flatnonzero((calls.key >= 0) & calls.is_function)
    found = match_paths(RecordedPaths(key, above, nodes), RecordedPaths(calls.key, calls.above, recorded))
    leaves = _Split(calls, found, tree, nodes, own)
    used, frame = np.unique(leaves.frame, return_inverse=True)
    if not len(used):
        absent = "no sampled function calls operators in the recorded windows"
    return OperatorLeaves(
        parent=leaves.parent,
        frame=frame.astype(np.int32),
        value=leaves.value,
        own=own - summed(leaves.node.astype(np.int32), leaves.value, len(own)),
        frames=tuple(FlameFrame(frames[number].name, "", None, "operator") for number in used.tolist()),
        source=f"operators below sampled functions are estimated: split like the functions' time in {named}",
        absent=absent,
    )


def _above(tree: CallTree, marked: Bools) -> Int64:
    """By node the nearest marked node around it, not itself."""
    inner = tree.innermost(marked)
    return np.where(tree.parent >= 0, inner[tree.parent], NONE).astype(np.int64)


def _calls(paths: Paths, frames: Sequence[TraceFrame], keys: _Keys) -> _Calls:
    """The functions and operators of a trace's paths."""
    count = len(paths)
    tree = CallTree(paths.parent, depths(paths.parent), paths.frame, ())
    kind = np.asarray([frame.kind for frame in frames] or [NONE], np.int64)[paths.frame]
    numbers = [keys.number(each.name, each.file) if each.kind == FUNCTION else _NO_PYTHON for each in frames]
    key = np.asarray(numbers or [NONE], np.int64)[paths.frame]
    line = np.asarray([each.line if each.exact and each.line else NONE for each in frames] or [NONE], np.int64)
    function, operator = tree.innermost(kind == FUNCTION), tree.innermost(kind == OPERATOR)
    depth = np.append(tree.depth, NONE)  # the last stands for no node
    inside = depth[operator] > depth[function]  # an operator stands between the function and the node
    has_owner = function >= 0
    operators = np.flatnonzero((kind == OPERATOR) & has_owner)
    place = np.full(count + 1, NONE, np.int64)
    place[operators] = np.arange(len(operators))
    outer = paths.parent[operators]
    around = np.where((outer >= 0) & inside[outer], place[operator[outer]], NONE)
    in_python, in_operator = has_owner & ~inside, has_owner & inside
    return _Calls(
        is_function=kind == FUNCTION,
        key=key,
        above=_above(tree, key >= 0),
        line=line[paths.frame],
        python_ns=summed(function[in_python], paths.own[in_python], count),
        owner=function[operators].astype(np.int64),
        around=around,
        own_ns=summed(operator[in_operator], paths.own[in_operator], count)[operators],
        frame=paths.frame[operators],
    )


class _Split:
    """The leaves of all sampled nodes: `node` is the sampled one, the rest as in `OperatorLeaves`."""

    def __init__(self, calls: _Calls, found: PathMatches, tree: CallTree, nodes: Int64, own: Floats) -> None:
        group, forest, own_ns = _by_line(calls, found)
        total = totals(forest.parent, depths(forest.parent), own_ns)
        pool_python, pool_operators = _sums(calls, found)
        top = _tops(forest.parent)
        kept, moved = _without_small(forest.parent, top, total, own_ns)
        line = np.asarray([each.line or NONE for each in tree.frames] or [NONE], np.int64)[tree.frame][nodes]
        chosen = _chosen(found.of_node, line, np.where(total[:, None] > 0, group, NONE))
        mine = np.flatnonzero(chosen >= 0)
        pool = found.of_node[mine]
        share = pool_operators[pool] / np.maximum(pool_operators[pool] + pool_python[pool], 1.0)
        per_ns = own[nodes[mine]] * share / np.maximum(total[chosen[mine]], 1.0)
        # what is kept of each group, its group's node left out, one behind the other
        members = np.flatnonzero(kept & (forest.parent >= 0))
        members = members[np.argsort(top[members], kind="stable")]
        first = np.searchsorted(top[members], chosen[mine], side="left")
        width = np.searchsorted(top[members], chosen[mine], side="right") - first
        at = np.repeat(np.cumsum(width) - width, width)  # the first leaf of the same node
        offset = np.arange(len(at)) - at
        leaf = members[np.repeat(first, width) + offset]
        self.node = np.repeat(nodes[mine], width)
        self.frame = forest.frame[leaf]
        value = moved[leaf] * np.repeat(per_ns, width)
        quantum = 2.0 ** (np.floor(np.log2(own.max(initial=1.0))) - _EXACT_BITS)
        self.value = np.floor(value / quantum) * quantum
        place = np.zeros(len(forest.parent), np.int64)
        place[members] = np.arange(len(members)) - np.searchsorted(top[members], top[members], side="left")
        up = forest.parent[leaf]
        below_node = forest.parent[up] < 0
        self.parent = np.where(below_node, self.node, len(tree) + at + place[up]).astype(np.int32)


def _by_line(calls: _Calls, found: PathMatches) -> tuple[Int64, Paths, Floats]:
    """Operators by pool and line: a forest whose roots stand for a pool and a line; (pool, line) of the roots, -1 where
    the line is unknown; and own ns."""
    pool, owner = found.pool, found.owner
    order = np.argsort(calls.owner, kind="stable")
    first = np.searchsorted(calls.owner[order], owner, side="left")
    width = np.searchsorted(calls.owner[order], owner, side="right") - first
    at = np.repeat(np.cumsum(width) - width, width)
    operator = order[np.repeat(first, width) + np.arange(len(at)) - at]
    rank = np.zeros(len(order), np.int64)
    rank[order] = np.arange(len(order)) - np.searchsorted(calls.owner[order], calls.owner[order], side="left")
    line = calls.line[owner]
    groups, group = np.unique(np.stack([pool, line], axis=1), axis=0, return_inverse=True)
    around = calls.around[operator]
    count = len(groups)
    parent = np.where(around >= 0, count + at + rank[around], np.repeat(group.reshape(-1), width))
    no_frame = int(calls.frame.max(initial=0)) + 1
    up, what, became = merged(
        np.concatenate([np.full(count, NONE), parent]).astype(np.int32),
        np.concatenate([no_frame + np.arange(count), calls.frame[operator]]).astype(np.int32),
    )
    own_ns = summed(became, np.concatenate([np.zeros(count), calls.own_ns[operator]]), len(up))
    of_root = np.full((len(up), 2), NONE, np.int64)
    of_root[became[:count]] = groups
    return of_root, Paths(up, what, own_ns), own_ns


def _sums(calls: _Calls, found: PathMatches) -> tuple[Floats, Floats]:
    """By pool: ns in Python itself, and in operators."""
    operators = summed(calls.owner.astype(np.int32), calls.own_ns, len(calls.key))
    return (
        summed(found.pool.astype(np.int32), calls.python_ns[found.owner], found.count),
        summed(found.pool.astype(np.int32), operators[found.owner], found.count),
    )


def _tops(parent: Int32) -> Int64:
    """By node the root above it, itself included."""
    top = np.where(parent >= 0, parent, np.arange(len(parent))).astype(np.int64)
    while not np.array_equal(further := top[top], top):
        top = further
    return top


def _without_small(parent: Int32, top: Int64, total: Floats, own_ns: Floats) -> tuple[Bools, Floats]:
    """Which nodes are large enough, and own ns with those of small nodes moved to the nearest one above that is."""
    kept: Bools = (parent < 0) | ((total > 0) & (total >= MIN_SHARE * total[top]))
    nearest = np.where(kept, np.arange(len(parent)), parent).astype(np.int64)
    while not np.array_equal(further := nearest[nearest], nearest):
        nearest = further
    return kept, summed(nearest.astype(np.int32), own_ns, len(parent))


def _chosen(pool: Int64, line: Int64, groups: Int64) -> Int64:
    """For each sampled node the root of its pool and line, else that of operators whose line is unknown, else -1.

    Roots without operators are -1 in `groups`.
    """
    roots = np.flatnonzero(groups[:, 0] >= 0)
    known = {(int(p), int(n)): int(root) for root, (p, n) in zip(roots, groups[roots], strict=True)}
    pairs = zip(pool.tolist(), line.tolist(), strict=True)
    found = [known.get((p, n), known.get((p, NONE), NONE)) if p >= 0 else NONE for p, n in pairs]
    return np.asarray(found, np.int64)


MAX_LENGTH = 256  # frames that are compared


class RecordedPaths(NamedTuple):
    """Paths of one recorder: by node its key and the node above it (-1 for none), and the nodes in question."""

    key: Int64
    above: Int64
    nodes: Int64


class PathMatches(Struct, frozen=True):
    """`of_node` gives for each sampled node its pool, -1 where nothing matches. Pool `pool[i]` holds recorded node
    `owner[i]`; a node may be in several. `count` is how many pools there are.
    """

    of_node: Int64
    pool: Int64
    owner: Int64
    count: int


def match_paths(sampled: RecordedPaths, recorded: RecordedPaths) -> PathMatches:
    """The pools of the sampled nodes."""
    race = _Matching(sampled, recorded)
    for length in range(MAX_LENGTH):
        if not race.step(first=length == 0):
            break
    return race.result()


class _Matching:
    """Paths that are still compared: `at` is the frame that comes next in each, `group` what they agreed on so far."""

    def __init__(self, sampled: RecordedPaths, recorded: RecordedPaths) -> None:
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

    def result(self) -> PathMatches:
        """The pools of all that stopped."""
        nothing = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        pool, owner = (np.concatenate(found) for found in zip(nothing, *self._parts, strict=True))
        return PathMatches(self._of_node[self._sampled], pool, owner, self._count)

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
