"""Distinct call stacks of the user's code behind the calls of one operator.

Newer traces hold Python functions around the call; the stack is those of the user's, innermost first. Traces of 2021
hold a call stack with each operator that Python called.
"""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from stepscope.analyze.views.operator_times import Calls
from stepscope.engine import attribution
from stepscope.engine.spans import Base, Span
from stepscope.engine.user_code import UserCode, user_code
from stepscope.model.findings import Place
from stepscope.model.trace import SpanRef
from stepscope.model.views import CallStack
from stepscope.tables.arrays import NONE, Int64

MAX_FRAMES = 64
_FRAME = re.compile(r"(.*)\((\d{1,9})\): (.*)", re.DOTALL)
_Frames = tuple[Place, ...]
_KEPT = "operator calls"


def stacks(
    base: Base,
    name: str,
    shapes: str | None = None,
    *,
    span: SpanRef | None = None,
    code: UserCode | None = None,
) -> tuple[CallStack, ...]:
    """The stacks behind calls of operator `name` (with input `shapes`, where given), costliest first.

    Calls without any frame are left out. `code` tells whose the frames of traces of 2021 are; None: as found without
    what the user says of it.
    """
    sums: dict[_Frames, list[int]] = {}
    code = code or user_code(base.tables, {})
    for item in base.spans:
        if span is None or item.ref == span:
            _add(base, item, (name, shapes), code, sums)
    found = [CallStack(frames, *figures) for frames, figures in sums.items()]
    found.sort(key=lambda stack: (-stack.device_self_ns, -stack.host_self_ns, -stack.calls, str(stack.frames)))
    return tuple(found)


def _add(
    base: Base, span: Span, operator: tuple[str, str | None], code: UserCode, sums: dict[_Frames, list[int]]
) -> None:
    """Adds calls, host and device self time of the operator's stacks in one span to `sums`."""
    name, shapes = operator
    calls = _calls(span)
    wanted = span.names.where([name])[calls.rows]
    if shapes is not None:
        wanted &= (span.series("shapes")[calls.rows] == shapes).fill_null(False).to_numpy()
    chosen = np.flatnonzero(wanted)
    if not len(chosen):
        return
    rows = calls.rows[chosen]
    text = span.series("call_stack")[rows]
    frames, numbers = _recorded(code, text) if (text.fill_null("") != "").any() else _functions(base, span, rows)
    figures = [np.ones(len(chosen), np.int64), calls.host_self_ns[chosen], calls.device_ns[chosen]]
    known = numbers >= 0
    totals = [np.bincount(numbers[known], weights=values[known], minlength=len(frames)) for values in figures]
    for number, stack in enumerate(frames):
        if stack:
            entry = sums.setdefault(stack, [0, 0, 0])
            for place, total in enumerate(totals):
                entry[place] += round(total[number])


def _calls(span: Span) -> Calls:
    """Kept: of a large trace they take a second, and whoever looks at one operator looks at the next."""
    if _KEPT not in span.kept:
        span.kept[_KEPT] = Calls(span)
    found: Calls = span.kept[_KEPT]
    return found


def _recorded(code: UserCode, text: pl.Series) -> tuple[list[_Frames], Int64]:
    """The distinct stacks that operators carry as text, and which one each has; `NONE` without one."""
    distinct = text.unique(maintain_order=True).drop_nulls().to_list()
    numbers = text.replace_strict(distinct, list(range(len(distinct))), default=None, return_dtype=pl.Int64)
    return [_parsed(stack, code) for stack in distinct], numbers.fill_null(NONE).to_numpy()


def _parsed(stack: str, code: UserCode) -> _Frames:
    """The user's frames; where there are none those of libraries outside torch, else all."""
    matches = [_FRAME.fullmatch(part.strip()) for part in stack.split(";", MAX_FRAMES)[:MAX_FRAMES]]
    frames = [Place(match[1], int(match[2]), match[3]) for match in matches if match]
    own = [(code.resolve(frame.file), frame) for frame in frames]
    users = tuple(Place(file, frame.line, frame.function) for file, frame in own if file is not None)
    return users or tuple(frame for frame in frames if code.library(frame.file)) or tuple(frames)


def _functions(base: Base, span: Span, rows: Int64) -> tuple[list[_Frames], Int64]:
    """The distinct stacks of the user's functions around rows, and which one each has; `NONE` without one."""
    tree, names = base.origins, span.names
    number = np.zeros(len(rows), np.int64)  # of the stack so far
    at = rows + span.first
    levels: list[tuple[Int64, Int64]] = []
    for _ in range(MAX_FRAMES):
        walk = tree.walk(at, boundary=False)
        if (walk.stop < 0).all():
            break
        place = np.where(walk.stop >= 0, tree.user[np.maximum(walk.stop, 0)], NONE).astype(np.int64)
        callee = np.where(walk.below >= 0, names.codes[np.maximum(walk.below - span.first, 0)], NONE).astype(np.int64)
        levels.append((place, callee))
        step = (place + 1) * (len(names.values) + 1) + callee + 1
        step = np.unique(step, return_inverse=True)[1]
        number = np.unique(number * (int(step.max()) + 1) + step, return_inverse=True)[1].astype(np.int64)
        at = np.where(walk.stop >= 0, tree.parent[np.maximum(walk.stop, 0)], NONE)
    if not levels:
        return [], np.full(len(rows), NONE, np.int64)
    firsts = np.unique(number, return_index=True)[1]
    frames = [
        tuple(
            attribution.place(base, int(place[first]), names.values[callee[first]] if callee[first] >= 0 else None)[0]
            for place, callee in levels
            if place[first] >= 0
        )
        for first in firsts.tolist()
    ]
    return frames, number
