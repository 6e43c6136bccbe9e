"""What slices of traces are called in flame graphs: Python functions, modules, built-in functions, operators, calls.

Traces name a function by the line its definition begins on. Where the source of the user's function, or samples of it,
tell on which line it makes a call, the frame above the call gets that line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from stepscope.analyze.call_tree import CallFrame
from stepscope.analyze.context import Context
from stepscope.analyze.flame_names import drawn
from stepscope.analyze.trace import callee_name
from stepscope.model.views.flame import FlameFrame
from stepscope.tables import phases
from stepscope.read.raw import Frame

# What a slice is to a path. SKIPPED slices stand in no path, but what they enclose does; OURS, and what they enclose,
# are the recorder's work.
FUNCTION, BUILTIN, MODULE, OPERATOR, CALL, MARK, SKIPPED, OURS = range(8)
_FUNCTION = re.compile(r"(.*)\((\d{1,9})\): (.*)", re.DOTALL)
_MODULE = "nn.Module: "
_OURS = re.compile(r"(^|/)stepscope/record/")
_OUR_WRAPPER = re.compile(r"(^|/)stepscope/record/agent/probes/wrapper_importlib_bootstrap\.py")
_ENGINE = "autograd::engine::"
_SYNCHRONIZE = re.compile(r"^(cuda|cu|hip)((Device|Ctx|Stream|Event)Synchronize|Memcpy$)")


class TraceFrame(NamedTuple):
    """A frame of a path. `file` and `function` are of the trace; `exact`: the line is the call's."""

    kind: int
    function: str
    file: str
    line: int | None
    exact: bool


class TraceNames:
    """Numbers for the frames of trace paths, with what they are."""

    def __init__(self, context: Context) -> None:
        self._code = context.code
        self._lines = context.lines
        run, options = context.tables.run, context.options
        self._roots = (*run.user_roots, *options.source_roots)
        self._numbers: dict[TraceFrame, int] = {}
        self._exact: dict[tuple[int, str], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def frames(self) -> list[TraceFrame]:
        """The frames by number."""
        return list(self._numbers)

    def number(self, frame: TraceFrame) -> int:
        """The number of a frame."""
        return self._numbers.setdefault(frame, len(self._numbers))

    def function(self, name: str, *, exact: bool = False) -> int:
        """The number of a slice that is a Python function, a module's call or a built-in function."""
        return self.number(_function(name, exact))

    def operator(self, name: str) -> int:
        """The number of an operator."""
        return self.number(TraceFrame(OPERATOR, name, "", None, False))

    def call(self, name: str) -> int:
        """The number of a call of a device's runtime or driver."""
        return self.number(TraceFrame(CALL, name, "", None, False))

    def backward_of(self, operator: str) -> int:
        """The number of the frame above the backward pass of an operator."""
        return self.number(TraceFrame(MARK, f"backward of {operator}", "", None, False))

    def with_line(self, number: int, callee: str) -> int:
        """The frame of a function of the user's with the line on which it calls the slice `callee`.

        The frame itself where no single line is known, and for all other frames.
        """
        frame = list(self._numbers)[number] if number not in self._kept else self._kept[number]
        self._kept[number] = frame
        if frame.kind != FUNCTION or frame.exact:
            return number
        key = (number, callee)
        if key not in self._exact:
            self._exact[key] = self._searched(frame, number, callee)
        return self._exact[key]

    @property
    def _kept(self) -> dict[int, TraceFrame]:
        return self.__dict__.setdefault("_by_number", {})

    def _searched(self, frame: TraceFrame, number: int, callee: str) -> int:
        file = self._code.resolve(frame.file)
        if file is None:
            return number
        line = self._lines.only_line(file, frame.function, frame.line, callee_name(callee))
        return number if line is None else self.number(frame._replace(line=line, exact=True))
