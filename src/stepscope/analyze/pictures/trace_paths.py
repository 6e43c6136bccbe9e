"""The call paths of one trace: every slice of the host below what called it, merged into a tree of distinct paths.

Paths hold Python functions and operators (and, where asked for, calls of the device's runtime). Three things are not as
the trace nests them. The backward pass of an operator stands below the Python code that called the operator, in a frame
"backward of ..."; what the autograd engine does for no known operator stands below the call of backward(). A function
of the user's is as many frames as it has lines that are known to call something. And operators of traces that hold call
stacks in place of Python functions (2021) stand below the frames of their stack.

All work goes over arrays of the trace's rows, so that millions of slices take seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.pictures.flame_tree import drawn, merged
from stepscope.engine.source_lines import Call
from stepscope.engine.spans import Span, texts
from stepscope.engine.user_code import (
    MAX_FRAMES,
    MODULE_CALL,
    RECORDER,
    RECORDER_WRAPPER,
    called_by_name,
    callee_name,
    python_frame,
)
from stepscope.model.sampled import FlameFrame
from stepscope.read.raw import Frame
from stepscope.tables import phases
from stepscope.tables.arrays import (
    NONE,
    Bools,
    Int32,
    Int64,
    Numbers,
    expanded,
    nearest_ancestor,
    self_or_ancestor,
    unique,
)

_BACKWARD_CALL = (
    r"(^|/)torch/(autograd/graph\.py\(\d+\): _engine_run_backward|autograd/__init__\.py\(\d+\): (backward|grad)"
    r"|_tensor\.py\(\d+\): backward|tensor\.py\(\d+\): backward)$|run_backward"
)
_ENGINE = "autograd::engine::"
_NESTED_CALLS = 16  # of backward() around each other; what is open beyond that is not looked for


class TracePaths(Struct, frozen=True):
    """Distinct paths, parents before children; `frame` counts in `TraceNames`.

    `node` of each row of the span is that of its own path, or of the nearest slice around it that stands in paths; -1
    without one. `ours`: rows of the recorder.
    """

    parent: Int32
    frame: Int32
    node: Int32
    ours: Bools


class _Draft(Struct):
    """Rows and, behind them, nodes that stand for no row (`extra_*`). `parent` of a row may be one of those."""

    names: TraceNames
    visible: Bools
    frame: Int32
    parent: Int64
    extra_frame: list[Int64] = field(default_factory=list)
    extra_parent: list[Int64] = field(default_factory=list)
    extra: int = 0

    def add(self, frame: Int64, parent: Int64) -> Int64:
        first = len(self.frame) + self.extra
        self.extra_frame.append(frame.astype(np.int64))
        self.extra_parent.append(parent.astype(np.int64))
        self.extra += len(frame)
        return first + np.arange(len(frame))


def trace_paths(span: Span, names: TraceNames, thread: Bools | None = None) -> TracePaths:
    """The paths of all rows, the backward pass below its forward pass.

    With `thread` those of its rows as the thread itself nests them, with calls of the device's runtime in them.
    """
    frame, kinds = _frames(span, names, calls=thread is not None)
    ours = self_or_ancestor(span.parent, kinds == OURS) >= 0
    visible = (frame >= 0) & (kinds != OURS) & (kinds != SKIPPED) & ~ours
    if thread is not None:
        visible &= thread
    above = nearest_ancestor(span.parent, visible)
    draft = _Draft(names, visible, frame, np.where(visible, above, NONE))
    free = visible.copy()  # rows that still stand below the slice around them
    stacked = _below_call_stacks(span, draft)
    free[stacked] = False
    if thread is not None:
        _with_lines(span, draft, free)
    else:
        forwards, makers = _backward_rows(span, draft, above, stacked)
        free[forwards] = False
        _with_lines(span, draft, free)
        # each of these rows goes below a node "backward of ..." beside its maker, the forward operator
        distinct, which = np.unique(makers, return_inverse=True)
        codes, code = np.unique(span.names.codes[distinct], return_inverse=True)
        named = [TraceFrame(MARK, f"backward of {span.names.values[each]}") for each in codes.tolist()]
        marks = draft.add(np.asarray([names.numbers[each] for each in named], np.int64)[code], distinct)
        draft.parent[forwards] = marks[which]
        draft.extra_parent[-1] = draft.parent[distinct]  # set last: a maker may belong to a backward pass itself
        _below_backward_calls(span, draft, free)
    count = len(draft.frame)
    frame = np.concatenate([draft.frame, *draft.extra_frame]).astype(np.int32)
    parent = np.concatenate([draft.parent, *draft.extra_parent]).astype(np.int64)
    order = _downwards(parent, np.append(draft.visible, np.ones(len(frame) - count, bool)))
    place = np.full(len(frame) + 1, NONE, np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    up, what, group = merged(place[parent[order]], frame[order])
    node = np.full(len(frame) + 1, NONE, np.int32)
    node[order] = group
    return TracePaths(up, what, node[np.where(draft.visible, np.arange(count), above)], ours | (kinds == SKIPPED))


def _frames(span: Span, names: TraceNames, *, calls: bool) -> tuple[Int32, Int32]:
    """The number of the frame of each row, -1 for what stands in no path, and its kind."""
    known = span.names
    frame = np.full(len(span), NONE, np.int32)
    sorts: list[tuple[Bools, Callable[[str], TraceFrame]]] = [
        (span.is_function, of_function),
        (span.is_operator, lambda name: TraceFrame(OPERATOR, name)),
    ]
    if calls:
        sorts.append((span.is_runtime & ~span.on_device, lambda name: TraceFrame(CALL, name)))
    for mask, make in sorts:
        rows = np.flatnonzero(mask & (known.codes >= 0))
        used = unique(known.codes[rows])
        numbers = np.full(len(known.values), NONE, np.int32)
        numbers[used] = [names.numbers[make(known.values[code])] for code in used.tolist()]
        frame[rows] = numbers[known.codes[rows]]
    kind = np.asarray([*(each.kind for each in names.numbers), NONE], np.int32)
    return frame, kind[frame]


def _below_call_stacks(span: Span, draft: _Draft) -> Int64:
    column = span.series("call_stack")
    if not column.count():
        return np.zeros(0, np.int64)
    carries = draft.visible & (column.fill_null("") != "").to_numpy()
    rows: Int64 = np.flatnonzero(carries & (nearest_ancestor(span.parent, carries) == NONE))
    stacks = texts(column.gather(rows))
    bottoms = []
    for stack in stacks.values:  # its frames, innermost first
        above = NONE
        for part in reversed(stack.split(";", MAX_FRAMES)[:MAX_FRAMES]):
            frame = of_function(part.strip(), exact=True)
            if part.strip() and frame.kind not in (OURS, SKIPPED):
                above = int(draft.add(np.asarray([draft.names.numbers[frame]]), np.asarray([above]))[0])
        bottoms.append(above)
    draft.parent[rows] = np.asarray(bottoms, np.int64)[stacks.codes]
    return rows


def _backward_rows(span: Span, draft: _Draft, above: Int64, stacked: Int64) -> tuple[Int64, Int64]:
    """Rows that begin the backward pass of a forward operator, and the operator that Python called for it."""
    operator = draft.visible & span.is_operator
    inner = operator & (above >= 0)
    inner[inner] = operator[above[inner]]
    inner[stacked] = False
    # for each row the outermost operator around it with no Python function in between, itself included
    tops = self_or_ancestor(span.parent, operator & ~inner)
    forward = span.forward
    known = draft.visible & (forward >= 0)
    known[known] = span.start_ns[forward[known]] < span.start_ns[known]
    rows = np.flatnonzero(known)
    around = nearest_ancestor(span.parent, known)[rows]
    new = (around == NONE) | (forward[np.maximum(around, 0)] != forward[rows])
    rows = rows[new]
    made = forward[rows]
    outer = tops[made].astype(np.int64)
    # the forward pass of a backward pass is named by itself: above it stands the engine
    own = (outer == NONE) | span.names.starting(_ENGINE)[np.maximum(outer, 0)]
    maker = np.where(own, made, outer)
    shown = draft.visible[maker]
    return rows[shown], maker[shown]


def _with_lines(span: Span, draft: _Draft, free: Bools) -> None:
    """What a function of the user's calls on a known line goes below a node of the function with that line."""
    rows = np.flatnonzero(free & (draft.parent >= 0) & (draft.parent < len(span)))
    above = draft.parent[rows]
    rows, above = rows[span.is_function[above]], above[span.is_function[above]]
    if not len(rows):
        return
    known, span_of = span.names, len(span.names.values)
    pairs, which = np.unique(draft.frame[above].astype(np.int64) * span_of + known.codes[rows], return_inverse=True)
    frames = list(draft.names.numbers)
    calls = ((frames[pair // span_of], known.values[pair % span_of]) for pair in pairs.tolist())
    frame = np.asarray([draft.names.calling(*call) for call in calls], np.int64)[which]
    changed = frame != draft.frame[above]
    rows, above, frame = rows[changed], above[changed], frame[changed]
    count = len(draft.names.numbers)
    keys, which = np.unique(above * count + frame, return_inverse=True)
    caller, line = np.divmod(keys, count)
    # the parents of these nodes are those of the functions, which may get lines here too: so they are set last
    nodes = draft.add(line, caller)
    draft.parent[rows] = nodes[which]
    draft.extra_parent[-1] = draft.parent[caller]


def _below_backward_calls(span: Span, draft: _Draft, free: Bools) -> None:
    """What the engine does on a thread of its own goes below the call of backward() that was open at the time."""
    engine = span.names.starting(_ENGINE)
    engine |= span.column("forward_thread") > 0
    rows = np.flatnonzero(free & (draft.parent == NONE) & span.is_operator & engine)
    calls = span.names.like(_BACKWARD_CALL) & span.is_function & draft.visible
    opened = np.flatnonzero(calls)
    if not len(rows) or not len(opened):
        return
    opened = opened[np.argsort(span.start_ns[opened], kind="stable")]
    outer = nearest_ancestor(span.parent, calls)
    times = span.start_ns[rows]
    last = np.searchsorted(span.start_ns[opened], times, side="right") - 1
    found = np.where(last >= 0, opened[np.maximum(last, 0)], NONE)
    for _ in range(_NESTED_CALLS):
        over = np.flatnonzero(found >= 0)
        over = over[span.ends(found[over]) < times[over]]
        if not len(over):
            break
        found[over] = outer[found[over]]
    inside = found >= 0
    inside[inside] = span.ends(found[inside]) >= times[inside]
    draft.parent[rows[inside]] = found[inside]


def _downwards(parent: Int64, wanted: Bools) -> Int64:
    """The wanted nodes, parents before children; those of a broken (cyclic) tree are left out."""
    children = np.flatnonzero(wanted & (parent >= 0))
    children = children[np.argsort(parent[children], kind="stable")]
    above = parent[children]  # once: a deep tree has as many levels as nodes
    level = np.flatnonzero(wanted & (parent < 0))
    levels = [level]
    while len(level):
        first, last = (np.searchsorted(above, level, side=side) for side in ("left", "right"))
        level = children[expanded(first, last - first)[0]]
        levels.append(level)
    return np.concatenate(levels)


# What a frame is. SKIPPED slices stand in no path, but what they enclose does; OURS, and what these enclose, are the
# recorder's work.
FUNCTION, BUILTIN, MODULE, OPERATOR, CALL, MARK, KERNEL, SKIPPED, OURS = range(9)
_SYNCHRONIZE = re.compile(r"^(cuda|cu|hip)((Device|Ctx|Stream|Event)Synchronize|Memcpy)$")
_KINDS = {
    BUILTIN: "native",
    MODULE: "library",
    OPERATOR: "operator",
    CALL: "native",
    MARK: "operator",
    KERNEL: "kernel",
    SKIPPED: "library",
    OURS: "library",
}


class TraceFrame(NamedTuple):
    """A frame of a path, as the trace names it. `exact`: the line is the call's, not the definition's."""

    kind: int
    name: str
    file: str = ""
    line: int | None = None
    exact: bool = False


class TraceNames:
    """Numbers for the frames of trace paths."""

    def __init__(self, context: Context) -> None:
        self.numbers: Numbers[TraceFrame] = Numbers()
        self._code, self._lines = context.code, context.lines
        self._roots = (*context.tables.run.user_roots, *context.options.source_roots)

    def calling(self, frame: TraceFrame, callee: str) -> int:
        """The number of a function of the user's with the line on which it calls the slice `callee`.

        That of the frame itself where no single line is known, and for all other frames.
        """
        file = self._code.resolve(frame.file) if frame.kind == FUNCTION and not frame.exact else None
        call = Call(called_by_name(callee))
        line = self._lines.only_line(file, frame.name, frame.line, call) if file is not None else None
        return self.numbers[frame if line is None else frame._replace(line=line, exact=True)]

    def drawn(self) -> list[FlameFrame]:
        """The frames by number as they are drawn."""
        functions = [Frame(frame.name, frame.file, frame.line) for frame in self.numbers]
        found = []
        for frame, as_function in zip(self.numbers, drawn(functions, self._code, self._roots), strict=True):
            if frame.kind != FUNCTION:
                waits = frame.kind == CALL and _SYNCHRONIZE.match(frame.name) is not None
                as_function = FlameFrame(frame.name, "", None, "wait" if waits else _KINDS[frame.kind])
            elif phases.is_wait(Frame(frame.name, frame.file, frame.line), on_device=False):
                as_function = replace(as_function, kind="wait")
            found.append(as_function)
        return found


def of_function(name: str, *, exact: bool = False) -> TraceFrame:
    """What a slice of the category of Python functions is, or a frame of a recorded call stack (`exact`)."""
    frame = python_frame(name)
    if frame:
        if RECORDER.search(frame.file):
            return TraceFrame(SKIPPED if RECORDER_WRAPPER.search(frame.file) else OURS, name)
        return TraceFrame(FUNCTION, frame.function, frame.file, frame.line, exact)
    if name.startswith(MODULE_CALL):
        return TraceFrame(MODULE, name)
    return TraceFrame(BUILTIN, callee_name(name) or name)
