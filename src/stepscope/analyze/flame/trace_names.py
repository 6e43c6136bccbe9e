"""What slices of traces are called in flame graphs: Python functions, modules, built-in functions, operators, calls.

Traces name a function by the line its definition begins on. Where the source of the user's function, or samples of it,
tell on which line it makes a call, the frame above that call gets this line.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.flame.names import drawn
from stepscope.engine.call_tree import CallFrame
from stepscope.engine.slice_names import callee_name
from stepscope.model.views.flame import FlameFrame
from stepscope.read.raw import Frame
from stepscope.tables import phases

# What a frame is. SKIPPED slices stand in no path, but what they enclose does; OURS, and what these enclose, are the
# recorder's work.
FUNCTION, BUILTIN, MODULE, OPERATOR, CALL, MARK, KERNEL, SKIPPED, OURS = range(9)
_FUNCTION = re.compile(r"(.*)\((\d{1,9})\): (.*)", re.DOTALL)
_MODULE = "nn.Module: "
_OURS = re.compile(r"(^|/)stepscope/record/")
_OUR_WRAPPER = re.compile(r"(^|/)stepscope/record/agent/(probes/)?wrapper_importlib_bootstrap\.py")
_SYNCHRONIZE = re.compile(r"^(cuda|cu|hip)((Device|Ctx|Stream|Event)Synchronize|Memcpy)$")
_KINDS = {BUILTIN: "native", MODULE: "library", OPERATOR: "operator", CALL: "native", MARK: "operator"}


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
        self.frames: list[TraceFrame] = []
        self._numbers: dict[TraceFrame, int] = {}
        self._called: dict[tuple[int, str], int] = {}
        self._code, self._lines = context.code, context.lines
        self._roots = (*context.tables.run.user_roots, *context.options.source_roots)

    def number(self, frame: TraceFrame) -> int:
        """The number of a frame, a new one where it is met for the first time."""
        known = self._numbers.setdefault(frame, len(self.frames))
        if known == len(self.frames):
            self.frames.append(frame)
        return known

    def calling(self, number: int, callee: str) -> int:
        """The frame of a function of the user's with the line on which it calls the slice `callee`.

        The frame itself where no single line is known, and for all other frames.
        """
        key = (number, callee)
        if key not in self._called:
            self._called[key] = self._searched(number, callee)
        return self._called[key]

    def _searched(self, number: int, callee: str) -> int:
        frame = self.frames[number]
        file = self._code.resolve(frame.file) if frame.kind == FUNCTION and not frame.exact else None
        if file is None:
            return number
        line = self._lines.only_line(file, frame.name, frame.line, callee_name(callee))
        return number if line is None else self.number(frame._replace(line=line, exact=True))

    def drawn(self) -> list[FlameFrame]:
        """The frames by number as they are drawn."""
        functions = [CallFrame(frame.name, frame.file, frame.line) for frame in self.frames]
        named = drawn(functions, self._code, self._roots)
        return [_drawn(frame, as_function) for frame, as_function in zip(self.frames, named, strict=True)]


def of_function(name: str, *, exact: bool = False) -> TraceFrame:
    """What a slice of the category of Python functions is, or a frame of a recorded call stack (`exact`)."""
    match = _FUNCTION.fullmatch(name)
    if match:
        if _OURS.search(match[1]):
            return TraceFrame(SKIPPED if _OUR_WRAPPER.search(match[1]) else OURS, name)
        return TraceFrame(FUNCTION, match[3], match[1], int(match[2]), exact)
    if name.startswith(_MODULE):
        return TraceFrame(MODULE, name)
    return TraceFrame(BUILTIN, callee_name(name) or name)


def _drawn(frame: TraceFrame, as_function: FlameFrame) -> FlameFrame:
    if frame.kind == FUNCTION:
        waits = phases.is_wait(Frame(frame.name, frame.file, frame.line), on_device=False)
        return replace(as_function, kind="wait") if waits else as_function
    if frame.kind == KERNEL:
        return FlameFrame(frame.name, "", None, "kernel")
    kind = "wait" if frame.kind == CALL and _SYNCHRONIZE.match(frame.name) else _KINDS.get(frame.kind, "library")
    return FlameFrame(frame.name, "", None, kind)
