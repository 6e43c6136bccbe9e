"""A debug log of torch_xla (PT_XLA_DEBUG), a line at a time: analyses, warnings, and the table of frames at its end.

An analysis tells of one compilation or execution its cause, graph and Python frames. Warnings tell counts of metrics
and operators without lowering; the table, which lines called such operators. Lines of several processes may be mixed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec import Struct, field

from stepscope.model.findings import Place
from stepscope.read.stacks.source import pyspy_frame
from stepscope.read.text import clean

_LIBRARIES = ("/site-packages/", "/dist-packages/", "\\site-packages\\")


def frame_of(line: str) -> Place | None:
    """The frame that `line` is, `name (file:line)`, or None."""
    text = line.strip()
    frame = pyspy_frame(text if len(text) <= 4096 else "")
    known = frame.file and frame.line is not None and frame.line >= 0
    return Place(frame.file, frame.line, frame.function) if known else None


def user_place(frames: Sequence[Place]) -> Place | None:
    """Of frames, innermost first, the first of no installed package, rather one that is not Python's or torch_xla's."""
    own = [frame for frame in frames if not any(part in frame.file for part in _LIBRARIES)]
    runtime = ("/lib/python3.", "/torch_xla/")
    named = (frame for frame in own if frame.file[:1] != "<" and not any(part in frame.file for part in runtime))
    return next(named, own[0] if own else None)


MAX_TEXT = 2_000
MAX_COMPILES = 100_000  # kept one by one; what comes later is counted without its graph
MAX_GROUPS = 10_000
MAX_WARNINGS = 100
MAX_OPEN = 64
MAX_FRAMES = 64

MARK = "Analysis: "
WARNING = "pt-xla-profiler:"

_SYNCS = (
    *("user torch_xla.sync", "torch_xla.sync in parallel loader", "torch_xla.sync when exiting"),
    *("user mark_step", "mark_step in parallel loader", "mark_step when exiting"),
)
_FREQUENT = re.compile(r"(\w{1,100}) too frequent: (\d{1,15}) counts during (\d{1,15}) steps")
_NOT_LOWERED = "Op(s) not lowered: "
_COUNTED = re.compile(r"FRAME \(count=(\d{1,15})\):")
_LAUNCHER_PREFIX = re.compile(r"\A\s*\[[^\]]{1,40}\]: ?")  # of a launcher that says which process a line is of
_OPERATOR = re.compile(r"Unlowered Op: \"([^\"]{1,200})\"")
_TABLE_LINES = ("===", "---", "Note: _local_scalar_dense")
_ANY_FALLBACK = "xla_fallback"  # what the table calls every operator since its names were lost


class Compile(Struct, frozen=True):
    """A compilation, or one kind of them; `step` where the syncs of the log tell it."""

    cause: str | None
    graph: str | None
    inputs: int | None
    outputs: int | None
    place: Place | None
    step: int | None = None

    def kind(self, graph: str | None = None) -> Compile:
        return Compile(self.cause, graph, None, None, self.place)


class FrameCount(Struct, frozen=True):
    """A line of the table of frames: how often operators without lowering were called there."""

    operator: str | None
    place: Place
    count: int


class _Analysis(Struct):
    """An analysis that is being printed."""

    cause: str | None = None
    graph: str | None = None
    inputs: int | None = None
    outputs: int | None = None
    frames: list[Place] = field(default_factory=list)
    framed: bool = False


class _Table(Struct):
    """A row of the table of frames that is being printed."""

    count: int
    operator: str | None = None
    frames: list[Place] = field(default_factory=list)


# What begins a line of an analysis -> the field that follows.
_DETAILS = {"Graph Hash": "graph", "Number of Graph Inputs": "inputs", "Number of Graph Outputs": "outputs"}


class Analyses:
    """Everything a debug log says, filled line by line."""

    def __init__(self) -> None:
        self.compiles: list[Compile] = []
        self.more_compiles: Counter[Compile] = Counter()  # beyond `MAX_COMPILES`
        self.executions: Counter[Compile] = Counter()
        self.warnings: dict[str, tuple[str, int]] = {}  # kind -> (last line, how many)
        self.frames: list[FrameCount] = []
        self.fallback_calls: int | None = None  # as the table of frames has it, of all operators together
        self.operators: list[str] = []  # without lowering, as the warnings name them
        self.counts: dict[str, int] = {}  # metric -> samples, as the last warning has it
        self.syncs = 0
        self.steps_hold = True  # whether the syncs of the log can be taken as its steps
        self._steps_told = 0
        self._opened: dict[str, list[_Analysis]] = {"Compilation": [], "Execution": []}
        self._table: _Table | None = None

    def __bool__(self) -> bool:
        return bool(self.compiles or self.executions or self.warnings or self.frames or self.fallback_calls)

    @property
    def steps(self) -> int:
        """How many steps were made, as far as the log tells: never more than there were."""
        return max(self._steps_told, self.syncs)

    def feed(self, line: str) -> None:
        if MARK in line and self._analysis(line[: MAX_TEXT * 2]):
            return
        at = line.find(WARNING)  # the table comes through Python's logging, whose prefix ends without a space
        text = line[: MAX_TEXT * 2] if at < 0 else line[at + len(WARNING) : at + MAX_TEXT].rstrip()
        if not self._in_table(text) and at >= 0:
            self._warning(clean(text.strip()))

    def end(self) -> None:
        """The log is over: an analysis that was cut off counts as well."""
        for kind, opened in self._opened.items():
            while opened:
                self._close(kind, opened.pop(0))
        self._close_table()

    def _analysis(self, line: str) -> bool:
        head, _, text = line.partition(MARK)
        if head.endswith("Post Compilation "):
            return True
        kind = next((kind for kind in self._opened if head.endswith(f"{kind} ")), None)
        if kind is None:
            return False
        opened = self._opened[kind]
        words = text.strip()
        if words == f"{kind} Cause":
            opened.append(_Analysis())
            if len(opened) > MAX_OPEN:
                self._close(kind, opened.pop(0))
        elif words.startswith("---"):
            done = next((analysis for analysis in opened if analysis.framed), opened[0] if opened else None)
            if done is not None:
                opened.remove(done)
                self._close(kind, done)
        elif words and not words.startswith("==="):
            _detail(opened, words)
        return True

    def _close(self, kind: str, analysis: _Analysis) -> None:
        place = user_place(analysis.frames)
        found = Compile(analysis.cause, analysis.graph, analysis.inputs, analysis.outputs, place, self.syncs)
        if kind == "Execution":
            self._count(self.executions, found)
            self.syncs += found.cause is not None and found.cause.startswith(_SYNCS)
        elif len(self.compiles) < MAX_COMPILES:
            self.compiles.append(found)
        else:
            self._count(self.more_compiles, found)

    def _count(self, counter: Counter[Compile], found: Compile) -> None:
        whole = found.kind(found.graph)
        if whole not in counter and len(counter) >= MAX_GROUPS:
            whole = found.kind()
            if whole not in counter and len(counter) >= 2 * MAX_GROUPS:
                whole = Compile(None, None, None, None, None)
        counter[whole] += 1

    def _warning(self, text: str) -> None:
        kind = text.partition(":")[0][:200]
        full = kind not in self.warnings and len(self.warnings) >= MAX_WARNINGS
        if not text or text.startswith(_TABLE_LINES) or full:
            return
        self.warnings[kind] = (f"{WARNING} {text}", self.warnings.get(kind, ("", 0))[1] + 1)
        match = _FREQUENT.match(text)
        if match is not None:
            count, steps = int(match[2]), int(match[3])
            self.counts[match[1]] = max(count, self.counts.get(match[1], 0))
            self._steps_told = max(steps, self._steps_told)
            self.steps_hold = self.steps_hold and steps == self.syncs
        elif text.startswith(_NOT_LOWERED):
            words = (word.strip(" ,") for word in text[len(_NOT_LOWERED) :].split(","))
            found = [word for word in words if "aten::" in word and " " not in word]
            self.operators.extend(name for name in found if name not in self.operators)

    def _in_table(self, line: str) -> bool:
        match = _COUNTED.search(line)
        if match is not None:
            self._close_table()
            self._table = _Table(int(match[1]))
        table = self._table
        if match is not None or "Unlowered Op usage summary" in line:
            return True
        if table is None:
            return False
        line = _LAUNCHER_PREFIX.sub("", line, count=1)
        if line.startswith("=" * 40):
            self._close_table()
            return True
        operator = _OPERATOR.search(line)
        frame = frame_of(line)
        if operator is not None:
            table.operator = clean(operator[1])
        elif frame is not None and len(table.frames) < MAX_FRAMES:
            table.frames.append(frame)
        return operator is not None or frame is not None

    def _close_table(self) -> None:
        table, self._table = self._table, None
        if table is None:
            return
        place, name = user_place(table.frames), table.operator
        if place is None and name is not None:
            self.fallback_calls = (self.fallback_calls or 0) + table.count
        elif place is not None and len(self.frames) < MAX_GROUPS:
            operator = name if name is None or "::" in name else f"aten::{name}"
            self.frames.append(FrameCount(operator if name != _ANY_FALLBACK else None, place, table.count))


def _detail(opened: list[_Analysis], words: str) -> None:
    def first(lacks: Callable[[_Analysis], bool]) -> _Analysis | None:
        return next((analysis for analysis in opened if lacks(analysis)), None)

    key, _, text = words.partition(":")
    name = _DETAILS.get(key)
    if name is not None:
        text = text.strip()
        count = int(text) if text.isdecimal() and len(text) <= 15 else None
        if (analysis := first(lambda one: getattr(one, name) is None)) is not None:
            setattr(analysis, name, clean(text[:200]) if name == "graph" else count)
    elif key == "Python Frame Triggered Execution":
        if (analysis := first(lambda one: not one.framed)) is not None:
            analysis.framed = True
    elif key != "Graph Info":
        frame = frame_of(words)
        analysis = first(lambda one: one.framed)
        if frame is not None and analysis is not None:
            if len(analysis.frames) < MAX_FRAMES:
                analysis.frames.append(frame)
            return
        analysis = first(lambda one: one.cause is None)
        if analysis is not None and not analysis.framed:
            analysis.cause = clean(words[:MAX_TEXT])
