"""Flame graphs of traces: device time by call path, operator and kernel; host time of the training thread by call path.

Both add up whole nanoseconds, which are divided by the steps of the windows at the end: the root of "gpu" is the sum of
the durations of all device slices, the root of "operators" the sum of the self times of the training threads' slices.

`split` estimates the operators in which samples stand: a sampler sees the Python function that called an operator, not
the operator. Where a trace recorded the same call path, the samples of the function itself are split as its time in the
trace is: between Python and the operators called there. Paths match by the longest common end of (function, file), so
that it does not matter where a recording began. On a line whose operators are known, samples go to these. What no trace
explains stays the frame's own; sums stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.device.device_time import EARLY, NO_LAUNCH, NO_STACKS, REPLAYED
from stepscope.analyze.pictures.flame_tree import (
    Limits,
    Paths,
    PlannedTree,
    flame_tree,
    merged,
    nested,
    summed,
    together,
)
from stepscope.analyze.pictures.trace_paths import (
    BUILTIN,
    FUNCTION,
    KERNEL,
    OPERATOR,
    TraceFrame,
    TraceNames,
    trace_paths,
)
from stepscope.analyze.views.kernels import short_names
from stepscope.analyze.views.operators import settled
from stepscope.engine.call_tree import CallTree
from stepscope.engine.device_work import BEFORE_RECORDING, GRAPH, in_state, links_of, work
from stepscope.engine.spans import Span
from stepscope.engine.user_code import INSTALLED, UserCode
from stepscope.model.sampled import FlameFrame, FlameTree
from stepscope.tables import categories
from stepscope.tables.arrays import NONE, Bools, Floats, Int32, Int64, Numbers, expanded, place_among_equals, unique

GPU, OPERATORS = "gpu", "operators"
NOT_LINKED = "(not linked)"
NO_CODE = "launched outside all functions and operators"
NO_TRACE = "no trace was recorded"
MAX_RANK_TREES = 64
_STEP = "ProfilerStep#"
_ROUNDED = 0.01  # of a step: a recording that begins or ends within it of a step holds it whole
_DEFINITIONS = "lines are those of definitions where the line of the call is not known"


class _Part(Struct, frozen=True):
    """What one trace adds to a tree: distinct paths with ns; `steps` it holds, 0 where the trace names none."""

    rank: int
    steps: float
    paths: Paths


class TraceWindows:
    """The traces of a run that hold Python stacks, ready to be drawn."""

    def __init__(self, context: Context) -> None:
        self._spans = [span for span in context.base.spans if span.has_stacks]
        self._all = len(context.base.spans)
        self._names = TraceNames(context)
        self._code = context.code

    @property
    def absent(self) -> str | None:
        """Why there are no trees, None where there are some."""
        if self._spans:
            return None
        return NO_STACKS if self._all else NO_TRACE

    def trees(self, frames: Numbers[FlameFrame], limits: Limits) -> tuple[FlameTree, ...]:
        """Device time, if there is any, and host time; of several ranks their mean, then device time of each.

        Keys "gpu", "gpu:rank:N", "operators"; none where no trace holds Python stacks.
        """
        device = f"device time of {self.named}; {_DEFINITIONS}"
        host = f"self times on the training thread in {self.named}, where recording slows Python; {_DEFINITIONS}"
        ranks = sorted({part.rank for part in self._device})
        planned = [(self._device, GPU, "device time by line", device)]
        for rank in ranks[:MAX_RANK_TREES] if len(ranks) > 1 else ():
            own = [part for part in self._device if part.rank == rank]
            planned.append((own, f"{GPU}:rank:{rank}", f"device time, rank {rank}", device))
        planned.append((self._host, OPERATORS, "host time by operator", host))
        trees, drawn = [], self._names.drawn()
        for parts, key, label, source in planned:
            if not parts:
                continue
            paths = _together(parts)
            used = unique(paths.frame)
            numbers = np.zeros(len(drawn), np.int32)
            numbers[used] = [frames[drawn[number]] for number in used.tolist()]
            # whole ns, brought to ms per step; of a trace without steps to µs of all of it
            steps = sum(part.steps for part in parts) if all(part.steps for part in parts) else 0
            per = f"mean of {steps:.3g} step" + "s" * (steps != 1) if steps else "no steps are marked"
            unit, ns = ("ms per step", 1e6 * steps) if steps else ("us", 1e3)
            tree = PlannedTree(key, label, replace(paths, frame=numbers[paths.frame]), unit, f"{source}; {per}")
            made = flame_tree(tree, frames, limits)
            trees.append(replace(made, value=tuple(value / ns for value in made.value), hidden=made.hidden / ns))
        return tuple(trees)

    def operator_leaves(self, tree: CallTree, own: Floats) -> OperatorLeaves:
        """The operators that the samples of each path stand in, as far as the traces tell.

        Args:
            tree: the sampled paths.
            own: by node, what was sampled with the node's frame innermost: of main threads of ranks only.
        """
        return split(tree, own, _together(self._host), list(self._names.numbers), self._code)

    @property
    def named(self) -> str:
        first = self._spans[0].ref.trace if self._spans else ""
        return first if len(self._spans) < 2 else f"{first} and {len(self._spans) - 1} more"

    @cached_property
    def _device(self) -> list[_Part]:
        found = [(span, work(span)) for span in self._spans]
        kernels = sorted(
            {span.names.values[code] for span, own in found for code in unique(span.names.codes[own.rows])}
        )
        short = dict(zip(kernels, short_names(kernels), strict=True))
        return [_device_part(span, self._names, short) for span, own in found if len(own)]

    @cached_property
    def _host(self) -> list[_Part]:
        parts = []
        for span in self._spans:
            own = _training_thread(span)
            paths = trace_paths(span, self._names, own)
            ranges = span.categories.where([categories.ANNOTATION, *categories.OPERATORS])
            counted = span.is_function | (span.is_runtime & ~span.on_device) | ranges
            rows = np.flatnonzero(own & counted & ~paths.ours & (paths.node >= 0))
            ns = np.maximum(span.series("self_ns").fill_null(0).to_numpy()[rows], 0).astype(np.float64)
            sums = summed(paths.node[rows], ns, len(paths.parent))
            parts.append(_Part(span.ref.rank, _steps(span, rows), Paths(paths.parent, paths.frame, paths.frame, sums)))
        return [part for part in parts if len(part.paths)]


def _device_part(span: Span, names: TraceNames, short: dict[str, str]) -> _Part:
    found = work(span)
    paths = trace_paths(span, names)
    frame = links_of(span, found, "frame").to_series().fill_null(NONE).to_numpy()
    start = np.where(found.operator >= 0, found.operator, np.where(found.launch >= 0, found.launch, frame))
    early, replayed = (in_state(span, found, state) for state in (BEFORE_RECORDING, GRAPH))
    node = np.where(start >= 0, paths.node[start], NONE).astype(np.int64)
    lost = np.flatnonzero(node < 0)
    reasons = [EARLY, REPLAYED, NO_LAUNCH, NO_CODE]
    why = np.select([start >= 0, early, replayed], [3, 0, 1], 2)[lost]
    used = unique(why)
    first = len(paths.parent)
    node[lost] = first + 1 + np.searchsorted(used, why)
    extra = [NOT_LINKED, *(reasons[number] for number in used.tolist())] if len(lost) else []
    extra_frames = [names.numbers[TraceFrame(BUILTIN, name)] for name in extra]
    extra_parents = [first if number else NONE for number in range(len(extra))]
    codes = span.names.codes[found.rows]
    kernel = np.zeros(len(span.names.values), np.int64)
    for code in unique(codes).tolist():
        kernel[code] = names.numbers[TraceFrame(KERNEL, short[span.names.values[code]])]
    base = len(names.numbers)
    pairs, which = np.unique(node * base + kernel[codes], return_inverse=True)
    above, leaf = np.divmod(pairs, base)
    count = first + len(extra)
    ns = (found.end_ns - found.start_ns).astype(np.float64)
    frame_of = np.concatenate([paths.frame, np.asarray(extra_frames, np.int64), leaf]).astype(np.int32)
    return _Part(
        rank=span.ref.rank,
        steps=_steps(span, start[start >= 0]),
        paths=Paths(
            np.concatenate([paths.parent, np.asarray(extra_parents, np.int64), above]).astype(np.int32),
            frame_of,
            frame_of,
            np.concatenate([np.zeros(count), summed(which.astype(np.int32), ns, len(pairs))]),
        ),
    )


def _training_thread(span: Span) -> Bools:
    """Rows of the host thread whose steps the trace marks, else of the one with most time in operators with stacks."""
    host = ~span.on_device & (span.tracks.codes >= 0)
    count = len(span.tracks.values)
    marks = span.names.starting(_STEP)
    marks &= host & span.categories.where([categories.ANNOTATION, *categories.OPERATORS])
    framed = span.is_function | span.series("call_stack").is_not_null().to_numpy()
    tracks = np.bincount(span.tracks.codes[framed & host], minlength=count) > 0
    for chosen in (marks, host & span.is_operator, host & span.is_function):
        sums = np.bincount(span.tracks.codes[chosen], weights=span.duration_ns[chosen] + 1, minlength=count) * tracks
        if sums.any():
            thread: Bools = host & (span.tracks.codes == int(sums.argmax()))
            return thread
    return np.zeros(len(span), bool)


def _steps(span: Span, rows: Int64) -> float:
    """How many steps the recording holds of those that the rows lie in; one that it holds in part counts in part."""
    seen = unique(span.column("step", rows))
    seen = seen[seen >= 0]
    of_window = (pl.col("process") == span.ref.process) & pl.col("in_window").fill_null(False) & (pl.col("wall_ns") > 0)
    steps = span.tables.steps.filter(of_window & pl.col("step").is_in(seen) & pl.col("start_ns").is_not_null())
    ranges = span.categories.where([categories.ANNOTATION, *categories.OPERATORS])
    host = np.flatnonzero((span.is_function | ranges) & ~span.on_device)
    if steps.is_empty() or not len(host):
        return len(seen)
    start, wall = steps["start_ns"].to_numpy(), steps["wall_ns"].to_numpy()
    first, last = int(span.start_ns[host].min()), int(span.ends(host).max())
    inside = np.clip(np.minimum(start + wall, last) - np.maximum(start, first), 0, None)
    held = float((inside / wall).sum())
    return round(held) if abs(held - round(held)) < _ROUNDED else held


def _together(parts: Sequence[_Part]) -> Paths:
    none = np.zeros(0, np.int32)
    return together([Paths(none, none, none, np.zeros(0)), *(part.paths for part in parts)])


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


def split(tree: CallTree, own: Floats, paths: Paths, frames: Sequence[TraceFrame], code: UserCode) -> OperatorLeaves:
    """The leaves of `tree`, whose nodes hold `own`.

    Args:
        paths: host time of traces in ns; their frames are numbers of `frames`.
    """
    numbers: Numbers[tuple[str, str]] = Numbers()

    def number(function: str, file: str) -> int:
        """The same for samples and traces of (last part of the function's name, file); `NONE` for native frames, and
        for those that one of the two recorders does not name."""
        name = function.rpartition(".")[2] or function
        unnamed = name in _MODULE_CALLS and file.replace("\\", "/").endswith(_MODULE_FILE)
        if unnamed or not file.endswith((".py", ">")):
            return NONE
        return numbers[name, code.resolve(file) or INSTALLED.sub("", file, count=1)]

    calls = _calls(paths, frames, number)
    key = np.asarray([*(number(frame.function, frame.file) for frame in tree.frames), NONE])[tree.frame]
    nodes = np.flatnonzero((own > 0) & (key >= 0))
    recorded = np.flatnonzero((calls.key >= 0) & calls.is_function)
    found = match_paths((key, _above(tree, key >= 0), nodes), (calls.key, calls.above, recorded))
    forest, pool_line = _by_line(calls, found)
    total = nested(forest.parent).totals(forest.own)
    top = settled(np.where(forest.parent >= 0, forest.parent, np.arange(len(forest.parent))))
    # own ns of small nodes go to the nearest one above that is large enough
    kept = (forest.parent < 0) | ((total > 0) & (total >= MIN_SHARE * total[top]))
    moved = summed(settled(np.where(kept, np.arange(len(kept)), forest.parent)), forest.own, len(kept))
    line = np.asarray([*(each.line or NONE for each in tree.frames), NONE])[tree.frame][nodes]
    # for each sampled node the root of its pool and line, else that of operators whose line is unknown, else -1
    known = {(p, n): root for root, (p, n) in enumerate(pool_line.tolist()) if p >= 0 and total[root] > 0}
    pairs = zip(found.of_node.tolist(), line.tolist(), strict=True)
    chosen = np.asarray([known.get((p, n), known.get((p, NONE), NONE)) for p, n in pairs], np.int64)
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


def _calls(paths: Paths, frames: Sequence[TraceFrame], number: Callable[[str, str], int]) -> _Calls:
    count = len(paths)
    tree = nested(paths.parent)
    kind, key, line = (
        np.asarray([*values, NONE], np.int64)[paths.frame]
        for values in (
            [each.kind for each in frames],
            [number(each.name, each.file) if each.kind == FUNCTION else NONE for each in frames],
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


MAX_LENGTH = 256  # frames that are compared


_Recorded = tuple[Int64, Int64, Int64]  # by node its key and the node above it (-1 for none); the nodes in question


class PathMatches(Struct, frozen=True):
    """`of_node` gives for each sampled node its pool, -1 where nothing matches. Pool `pool[i]` holds recorded node
    `owner[i]`; a node may be in several. `count` is how many pools there are.
    """

    of_node: Int64
    pool: Int64
    owner: Int64
    count: int


def match_paths(sampled: _Recorded, recorded: _Recorded) -> PathMatches:
    """The pools of the sampled nodes. Paths race from their innermost frame outwards, in groups that agree so far."""
    (key, above, nodes), (other_key, other_above, others) = sampled, recorded
    first = len(key)
    outside = first + len(other_key)  # stands for what is above a root
    key = np.concatenate([key, other_key, [NONE]])
    above = np.concatenate([above, np.where(other_above >= 0, other_above + first, NONE), [NONE]])
    above[above < 0] = outside
    node = np.concatenate([nodes, others + first])
    of_node = np.full(len(nodes), NONE, np.int64)
    pools, owners = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    count = 0
    racing, at, before = np.arange(len(node)), node, np.zeros(len(node), np.int64)
    for length in range(MAX_LENGTH):
        after = np.unique(np.stack([before, key[at]], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
        is_sampled = racing < len(nodes)
        matched = (np.bincount(after, is_sampled) > 0)[after] & (np.bincount(after, ~is_sampled) > 0)[after]
        ended = at == outside
        # sampled paths whose longest common end is found: what they agreed on, with this frame or without it
        ends = [(is_sampled & matched & ended, after)]
        for stopping, group in ends if length == 0 else [(is_sampled & ~matched, before), *ends]:
            distinct = unique(group[stopping])
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
