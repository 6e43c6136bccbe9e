"""The operators in which samples stand, estimated from traces: leaf frames below sampled Python frames.

A sampler sees the Python function that called an operator, not the operator. Where a trace recorded the same call path,
the samples of the function itself are split as its time in the trace is: between Python and the operators called there.
Paths match by the longest common end of (function, file), so that it does not matter where a recording began. On a line
whose operators are known, samples go to these. What no trace explains stays the frame's own; sums stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from stepscope.analyze.pictures.flame_tree import Paths, merged, nested, summed
from stepscope.analyze.pictures.trace_paths import FUNCTION, OPERATOR, TraceFrame
from stepscope.analyze.views.operators import settled
from stepscope.engine.call_tree import CallTree
from stepscope.engine.user_code import INSTALLED, UserCode
from stepscope.model.sampled import FlameFrame
from stepscope.tables.arrays import NONE, Bools, Floats, Int32, Int64, Numbers, expanded, place_among_equals

MIN_SHARE = 0.01  # of the operators of a path: what costs less counts for the operator, or function, around it
_EXACT_BITS = 40  # leaves are whole multiples of a 2**-40th of the largest value, so that their sums are exact
_MODULE_FILE = "torch/nn/modules/module.py"
_MODULE_CALLS = ("_wrapped_call_impl", "_call_impl")  # traces name the module in their place, samplers do not


class OperatorLeaves(Struct, frozen=True):
    """Leaves to be added below the nodes of a `CallTree`, and what then remains of the nodes' own values.

    `parent` is a node of the tree or, from `len(tree)` on, the leaf of that number; parents come before children.
    `frame` counts in `frames`, which are none where no sampled function calls operators in the recorded windows.
    `value` is each leaf's own: for every node, `own` and the values of all leaves below it add up to what its own
    value was.
    """

    parent: Int32
    frame: Int32
    value: Floats
    own: Floats
    frames: tuple[FlameFrame, ...]


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
        self._numbers: Numbers[tuple[str, str]] = Numbers()

    def number(self, function: str, file: str) -> int:
        """`NONE` for native frames, and for those that one of the two recorders does not name."""
        name = function.rpartition(".")[2] or function
        unnamed = name in _MODULE_CALLS and file.replace("\\", "/").endswith(_MODULE_FILE)
        if unnamed or not file.endswith((".py", ">")):
            return NONE
        return self._numbers[name, self._code.resolve(file) or INSTALLED.sub("", file, count=1)]


def split(tree: CallTree, own: Floats, paths: Paths, frames: Sequence[TraceFrame], code: UserCode) -> OperatorLeaves:
    """The leaves of `tree`, whose nodes hold `own`.

    Args:
        paths: host time of traces in ns; their frames are numbers of `frames`.
    """
    keys = _Keys(code)
    calls = _calls(paths, frames, keys)
    key = np.asarray([*(keys.number(frame.function, frame.file) for frame in tree.frames), NONE])[tree.frame]
    nodes = np.flatnonzero((own > 0) & (key >= 0))
    recorded = np.flatnonzero((calls.key >= 0) & calls.is_function)
    sampled = RecordedPaths(key, _above(tree, key >= 0), nodes)
    found = match_paths(sampled, RecordedPaths(calls.key, calls.above, recorded))
    forest, pool_line = _by_line(calls, found)
    total = nested(forest.parent).totals(forest.own)
    top = settled(np.where(forest.parent >= 0, forest.parent, np.arange(len(forest.parent))))
    # own ns of small nodes go to the nearest one above that is large enough
    kept = (forest.parent < 0) | ((total > 0) & (total >= MIN_SHARE * total[top]))
    moved = summed(settled(np.where(kept, np.arange(len(kept)), forest.parent)), forest.own, len(kept))
    line = np.asarray([*(each.line or NONE for each in tree.frames), NONE])[tree.frame][nodes]
    chosen = _chosen(found.of_node, line, np.where(total[:, None] > 0, pool_line, NONE))
    mine = np.flatnonzero(chosen >= 0)
    pool = found.of_node[mine]
    in_operators = summed(calls.owner, calls.own_ns, len(calls.key))
    operators, python = (
        summed(found.pool, ns[found.owner], found.count)[pool] for ns in (in_operators, calls.python_ns)
    )
    share = operators / np.maximum(operators + python, 1.0)
    per_ns = own[nodes[mine]] * share / np.maximum(total[chosen[mine]], 1.0)
    # what is kept of each group, its group's node left out, one behind the other
    members = np.flatnonzero(kept & (forest.parent >= 0))
    members = members[np.argsort(top[members], kind="stable")]
    first, last = (np.searchsorted(top[members], chosen[mine], side=side) for side in ("left", "right"))
    at, begins = expanded(first, last - first)
    leaf, node = members[at], np.repeat(nodes[mine], last - first)
    quantum = 2.0 ** (np.floor(np.log2(own.max(initial=1.0))) - _EXACT_BITS)
    value = np.floor(moved[leaf] * np.repeat(per_ns, last - first) / quantum) * quantum
    place = np.zeros(len(kept), np.int64)
    place[members] = place_among_equals(top[members], np.arange(len(members)))
    up = forest.parent[leaf]
    used, frame = np.unique(forest.frame[leaf], return_inverse=True)
    return OperatorLeaves(
        parent=np.where(forest.parent[up] < 0, node, len(tree) + begins + place[up]).astype(np.int32),
        frame=frame.astype(np.int32),
        value=value,
        own=own - summed(node, value, len(own)),
        frames=tuple(FlameFrame(frames[number].name, "", None, "operator") for number in used.tolist()),
    )


def _above(tree: CallTree, marked: Bools) -> Int64:
    """By node the nearest marked node around it, not itself."""
    inner = tree.innermost(marked)
    return np.where(tree.parent >= 0, inner[tree.parent], NONE).astype(np.int64)


def _calls(paths: Paths, frames: Sequence[TraceFrame], keys: _Keys) -> _Calls:
    count = len(paths)
    tree = nested(paths.parent)
    kind, key, line = (
        np.asarray([*values, NONE], np.int64)[paths.frame]
        for values in (
            [each.kind for each in frames],
            [keys.number(each.name, each.file) if each.kind == FUNCTION else NONE for each in frames],
            [each.line if each.exact and each.line else NONE for each in frames],
        )
    )
    function, operator = tree.innermost(kind == FUNCTION), tree.innermost(kind == OPERATOR)
    depth = np.append(tree.depth, NONE)  # the last stands for no node
    inside = depth[operator] > depth[function]  # an operator stands between the function and the node
    has_owner = function >= 0
    operators = np.flatnonzero((kind == OPERATOR) & has_owner)
    place = np.full(count + 1, NONE, np.int64)
    place[operators] = np.arange(len(operators))
    outer = paths.parent[operators]
    in_python, in_operator = has_owner & ~inside, has_owner & inside
    return _Calls(
        is_function=kind == FUNCTION,
        key=key,
        above=_above(tree, key >= 0),
        line=line,
        python_ns=summed(function[in_python], paths.own[in_python], count),
        owner=function[operators].astype(np.int64),
        around=np.where((outer >= 0) & inside[outer], place[operator[outer]], NONE),
        own_ns=summed(operator[in_operator], paths.own[in_operator], count)[operators],
        frame=paths.frame[operators],
    )


def _by_line(calls: _Calls, found: PathMatches) -> tuple[Paths, Int64]:
    """Operators by pool and line: a forest with own ns, whose roots stand for a pool and a line, and both of these by
    root, -1 where the line is unknown."""
    order = np.argsort(calls.owner, kind="stable")
    first, last = (np.searchsorted(calls.owner[order], found.owner, side=side) for side in ("left", "right"))
    at, begins = expanded(first, last - first)
    operator = order[at]
    groups, group = np.unique(np.stack([found.pool, calls.line[found.owner]], axis=1), axis=0, return_inverse=True)
    around, count = calls.around[operator], len(groups)
    rank = place_among_equals(calls.owner, order)
    parent = np.where(around >= 0, count + begins + rank[around], np.repeat(group.reshape(-1), last - first))
    no_frame = int(calls.frame.max(initial=0)) + 1
    up, what, became = merged(
        np.concatenate([np.full(count, NONE), parent]).astype(np.int32),
        np.concatenate([no_frame + np.arange(count), calls.frame[operator]]).astype(np.int32),
    )
    own_ns = summed(became, np.concatenate([np.zeros(count), calls.own_ns[operator]]), len(up))
    of_root = np.full((len(up), 2), NONE, np.int64)
    of_root[became[:count]] = groups
    return Paths(up, what, what, own_ns), of_root


def _chosen(pool: Int64, line: Int64, groups: Int64) -> Int64:
    """For each sampled node the root of its pool and line, else that of operators whose line is unknown, else -1.

    Roots without operators are -1 in `groups`.
    """
    known = {(p, n): root for root, (p, n) in enumerate(groups.tolist()) if p >= 0}
    pairs = zip(pool.tolist(), line.tolist(), strict=True)
    return np.asarray([known.get((p, n), known.get((p, NONE), NONE)) for p, n in pairs], np.int64)


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
    """The pools of the sampled nodes. Paths race from their innermost frame outwards, in groups that agree so far."""
    first = len(sampled.key)
    outside = first + len(recorded.key)  # stands for what is above a root
    key = np.concatenate([sampled.key, recorded.key, [NONE]])
    above = np.concatenate([sampled.above, np.where(recorded.above >= 0, recorded.above + first, NONE), [NONE]])
    above[above < 0] = outside
    node = np.concatenate([sampled.nodes, recorded.nodes + first])
    of_node = np.full(len(sampled.nodes), NONE, np.int64)
    pools, owners = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    count = 0
    racing, at, before = np.arange(len(node)), node, np.zeros(len(node), np.int64)
    for length in range(MAX_LENGTH):
        after = np.unique(np.stack([before, key[at]], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
        is_sampled = racing < len(sampled.nodes)
        matched = (np.bincount(after, is_sampled) > 0)[after] & (np.bincount(after, ~is_sampled) > 0)[after]
        ended = at == outside
        # sampled paths whose longest common end is found: what they agreed on, with this frame or without it
        ends = [(is_sampled & matched & ended, after)]
        for stopping, group in ends if length == 0 else [(is_sampled & ~matched, before), *ends]:
            distinct = np.unique(group[stopping])
            of_node[racing[stopping]] = count + np.searchsorted(distinct, group[stopping])
            member = ~is_sampled & np.isin(group, distinct)
            pools.append(count + np.searchsorted(distinct, group[member]))
            owners.append(node[racing[member]] - first)
            count += len(distinct)
        going = matched & ~ended
        if not (is_sampled & going).any():
            break
        racing, before, at = racing[going], after[going], above[at[going]]
    return PathMatches(of_node, np.concatenate(pools), np.concatenate(owners), count)
