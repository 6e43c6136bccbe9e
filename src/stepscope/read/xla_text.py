"""What torch_xla prints, a line at a time: metrics reports, and the debug log of PT_XLA_DEBUG.

A report is blocks of metrics and counters in any order, without head or end. Lines that are no field of a block are
passed over, so a report may stand among what a script prints. A field counts once per block, and a name that comes
again begins the next report.

In a debug log an analysis tells of one compilation or execution its cause, graph and Python frames. Warnings tell
counts of metrics and operators without lowering; the table of frames at its end, which lines called such operators.
Lines of several processes may be mixed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from stepscope.model.findings import Place
from stepscope.read.stack_lines import pyspy_frame
from stepscope.read.text import clean

NS = "ns"
BYTES = "bytes"
COUNT = "count"

_TIME = re.compile(
    r"(?:(\d{1,6})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m(?!s))?(?:(\d{1,9})s)?(?:(\d{1,9})ms)?(?:(\d{1,12}(?:\.\d{1,9})?)us)?"
)
_PART_NS = (86_400 * 10**9, 3_600 * 10**9, 60 * 10**9, 10**9, 10**6)  # days to milliseconds
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)(B|KB|MB|GB|TB|PB)")
_SIZES = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40, "PB": 2**50}
_NUMBER = re.compile(r"-?\d{1,18}(?:\.\d{0,18})?(?:e[+-]?\d{1,3})?")
_WHOLE = re.compile(r"\d{1,18}")
_MAX_CHARS = 64


def time_ns(text: str) -> int | None:
    """Nanoseconds of a time, or None where `text` is none."""
    match = _TIME.fullmatch(text) if 0 < len(text) <= _MAX_CHARS else None
    if match is None:
        return None
    parts = [(int(digits), unit) for digits, unit in zip(match.groups(), _PART_NS, strict=False) if digits is not None]
    below = round(float(match[6]) * 1000) if match[6] is not None else 0
    cut_off = below + sum(count * unit for count, unit in parts)
    total = below
    for place, (count, unit) in reversed(list(enumerate(parts))):
        floor = count - 1 if 2 * total > unit else count
        if floor < 0 or (floor == 0 and place == 0):
            return cut_off  # no rounding writer writes this: its first part is never below one
        total += floor * unit
    return total


def value(text: str) -> tuple[str, float] | None:
    """(unit, value) of a time in ns, a size in bytes or a plain number; None where `text` is none of them."""
    text = text.strip()
    size = _SIZE.fullmatch(text) if len(text) <= _MAX_CHARS else None
    if size is not None:
        return BYTES, float(size[1]) * _SIZES[size[2]]
    figure = number(text)
    if figure is not None:
        return COUNT, figure
    nanoseconds = time_ns(text)
    return (NS, float(nanoseconds)) if nanoseconds is not None else None


def number(text: str) -> float | None:
    """A finite plain number, or None."""
    text = text.strip()
    if len(text) > _MAX_CHARS or not _NUMBER.fullmatch(text):
        return None
    figure = float(text)
    return figure if math.isfinite(figure) else None


def _whole(text: str) -> int | None:
    text = text.strip()
    return int(text) if _WHOLE.fullmatch(text) else None


MAX_NAMES = 10_000
MAX_PERCENTILES = 1_000
MAX_LINE_CHARS = 65_536

# Names of the time when a server stood between host and device, and what the same things have been called since.
OLD_NAMES = {"TransferFromServerTime": "TransferFromDeviceTime", "TransferToServerTime": "TransferToDeviceTime"}
STEPS = "MarkStep"
COMPILE = "CompileTime"
EAGER_COMPILE = "EagerOpCompileTime"
TRANSFER = "TransferFromDeviceTime"
INBOUND = "InboundData"  # bytes that came from the device
SCALAR = "aten::_local_scalar_dense"
_ENOUGH_STEPS = 3  # in which something happens every time, to tell that it did so more often elsewhere

_FIELDS = "Metric|Counter|TotalSamples|Accumulator|ValueRate|Rate|Percentiles|Value"
_KEYS = frozenset(_FIELDS.split("|"))
# The same behind a prefix of a launcher or a logger.
_FIELD = re.compile(rf"(?<=[\s\]:|>])({_FIELDS}): (\S.*)")


class Figure(Struct, frozen=True):
    """Totals since the process began; rates and percentiles of the last samples only. Values are in `unit`.

    A counter has no unit, and its value as `samples`.
    """

    unit: str | None  # ns | bytes | count
    samples: int
    total: float
    samples_per_second: float | None = None
    value_per_second: float | None = None
    percentiles: dict[str, float] = field(default_factory=dict)


class Report(Struct):
    """Everything one report says by name. A name that is not there had no sample: it counts 0."""

    figures: dict[str, Figure] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)  # new name -> the old one that stood there

    def __bool__(self) -> bool:
        return bool(self.figures)

    def count(self, name: str) -> int:
        figure = self.figures.get(name)
        return figure.samples if figure is not None else 0

    def take(self, name: str, figure: Figure) -> None:
        known = self.figures.get(name)
        if known is None or _rank(known) <= _rank(figure):
            self.figures[name] = figure


def _rank(figure: Figure) -> tuple[bool, int, float]:
    return figure.unit is not None, figure.samples, figure.total


class ReportReader:
    """Puts lines together to reports; `done` gets each one that the next one, `cut` or the end has finished.

    While `in_section`, a name that comes again adds to the same report. `bad_lines` counts fields and blocks that could
    not be read.
    """

    def __init__(self, done: Callable[[Report], None]) -> None:
        self.bad_lines = 0
        self.in_section = False
        self._done = done
        self._report = Report()
        self._block: dict[str, str] = {}  # the texts of the block under way by their keys, its first with its name

    def feed(self, line: str) -> bool:
        """Take in a line; False where it is no field of a report."""
        key, _, text = line.partition(": ")
        key = key.strip()
        if key not in _KEYS or not text or text[0].isspace():
            match = _FIELD.search(line[:MAX_LINE_CHARS])
            if match is None:
                return False
            key, text = match[1], match[2]
        text = text[:MAX_LINE_CHARS].rstrip()
        block = self._block
        if key == "Counter" and "Metric" in block and value(block.get("Accumulator", "")) is None and value(text):
            key = "Accumulator"  # old reports call that of a metric its counter
        if key in ("Metric", "Counter"):
            self._end_block()
            name = clean(text)
            known = self._report.figures.get(OLD_NAMES.get(name, name))
            if not self.in_section and known is not None and (known.unit is not None) == (key == "Metric"):
                self.cut()
            self._block = {key: name}
        elif not block:
            return False
        else:
            block.setdefault(key, text)
        return True

    def cut(self) -> None:
        """What comes next is of another report."""
        self._end_block()
        if self._report:
            self._done(self._report)
        self._report = Report()

    def _end_block(self) -> None:
        block, self._block = self._block, {}
        if not block:
            return
        report, metric = self._report, "Metric" in block
        written = block["Metric" if metric else "Counter"]
        name = OLD_NAMES.get(written, written)
        samples = _whole(block.get("TotalSamples" if metric else "Value", ""))
        accumulated = value(block.get("Accumulator", ""))
        rates: list[float | None] = []
        for key in ("Rate", "ValueRate"):
            rate = value(block.get(key, "").partition("/")[0])  # `851ms / second`
            rates.append(rate[1] if rate is not None and (key != "Rate" or rate[0] == COUNT) else None)
            self.bad_lines += key in block and rates[-1] is None
        percentiles: dict[str, float] = {}
        parts = [part.strip() for part in block.get("Percentiles", "").split(";", MAX_PERCENTILES)[:MAX_PERCENTILES]]
        for percent, _, figure in (part.partition("%=") for part in parts if part):
            at, parsed = number(percent), value(figure)
            if at is not None and parsed is not None:
                percentiles[f"{at:g}"] = parsed[1]
        self.bad_lines += ("Accumulator" in block and accumulated is None) + (len(percentiles) < sum(map(bool, parts)))
        unit, total = (accumulated or (None, -1.0)) if metric else (None, float(samples or 0))
        if len(name) > 200 or " " in name or len(report.figures) >= MAX_NAMES or samples is None or total < 0:
            self.bad_lines += len(block) > 1  # a line of the script's that happens to begin like a block is none
            return
        report.take(name, Figure(unit, samples, total, rates[0], rates[1], percentiles))
        if name != written:
            report.renamed[name] = written


def highest(reports: Sequence[Report]) -> Report:
    """The reports of one process as one: of every name, the entry with the highest count."""
    best = Report()
    for report in reports:
        for name, figure in report.figures.items():
            best.take(name, figure)
        best.renamed.update(report.renamed)
    return best


def contradict(one: Report, other: Report) -> bool:
    """Whether no single process can have written both: what it counts only ever grows, and little between two steps."""
    # Every report, a short one too, holds all operators without lowering: one that is missing was never called.
    shared = one.figures.keys() & other.figures.keys()
    both = shared | {name for name in one.figures.keys() | other.figures.keys() if "aten::" in name}
    pairs = [(one.count(name), other.count(name)) for name in both]
    if any(mine > their for mine, their in pairs) and any(mine < their for mine, their in pairs):
        return True
    steps = one.count(STEPS)
    often = any(min(pair) >= steps and max(pair) > 2 * min(pair) for pair in pairs)
    if often and steps == other.count(STEPS) and steps >= _ENOUGH_STEPS:
        return True
    return any(not _same(one.figures[name], other.figures[name]) for name in shared)


def _same(one: Figure, other: Figure) -> bool:
    """Whether the totals are the same, as far as the same samples must have the same."""
    if one.samples != other.samples:
        return True
    # A rounded size may differ by its last digit where two files were written by two versions; times are exact.
    if one.unit in (BYTES, COUNT):
        return abs(one.total - other.total) <= 0.01 * max(one.total, other.total, 1.0)
    return abs(one.total - other.total) < 1.0


HEAD = "[MetricsData; step="
MAX_STEPS = 200_000  # in which something happened; what happens later is counted without its step

SECTION = re.compile(r"\[MetricsData; step=(\d{1,15})\]")  # in its first line


class StepChange(Struct):
    """What happened in a step, or in several together (`step` None), by name: samples, and totals of metrics."""

    step: int | None
    samples: Counter[str] = field(default_factory=Counter)
    totals: Any = field(default_factory=Counter)  # a Counter of float; times are in ns

    @property
    def operators(self) -> dict[str, int]:
        return {name: count for name, count in sorted(self.samples.items()) if "aten::" in name}

    @property
    def scalars(self) -> int:
        """Transfers that read the value of a tensor with one element."""
        return min(self.samples[SCALAR], self.samples[TRANSFER])

    def __bool__(self) -> bool:
        return any(name in (COMPILE, EAGER_COMPILE, TRANSFER) or "aten::" in name for name in self.samples)


_NOTHING = Figure(None, 0, 0.0)


def growth(before: Report, report: Report, cleared: StepChange) -> StepChange:
    """What has happened from one report of a process to the next; what was cleared between goes into `cleared`."""
    grown = StepChange(None)
    for name in report.figures.keys() | before.figures.keys():
        now, old = (one.figures.get(name, _NOTHING) for one in (report, before))
        if now.samples < old.samples:
            cleared.samples[name] += old.samples
            cleared.totals[name] += old.total
            old = _NOTHING
        if now.samples > old.samples:
            grown.samples[name] = now.samples - old.samples
            grown.totals[name] = max(0.0, now.total - old.total)
    return grown


class Sections:
    """The sections of a file, in order. A file is appended to: where a new process begins, what was before is dropped.

    `earlier_runs` counts those. `changes` are the steps in which something happened, in order.
    """

    def __init__(self) -> None:
        self.earlier_runs = 0
        self._begin()

    def _begin(self) -> None:
        self.count = 0
        self.changes: list[StepChange] = []
        self.last_step: int | None = None
        self._before = Report()
        self._cleared = StepChange(None)
        self._last: dict[str, Figure] = {}
        self._renamed: dict[str, str] = {}

    def add(self, step: int, report: Report) -> None:
        if self.last_step is not None and step < self.last_step and report.count(STEPS) < self._before.count(STEPS):
            self.earlier_runs += 1
            self._begin()
        self.last_step = max(step, self.last_step or 0)
        self.count += 1
        change = growth(self._before, report, self._cleared)
        self._before = report
        self._last.update(report.figures)
        self._renamed.update(report.renamed)
        if change and len(self.changes) < MAX_STEPS:
            change.step = self.last_step
            self.changes.append(change)
        elif change:
            if len(self.changes) == MAX_STEPS:
                self.changes.append(StepChange(None))
            self.changes[-1].samples.update(change.samples)
            self.changes[-1].totals.update(change.totals)

    def report(self) -> Report:
        whole = Report(renamed=dict(self._renamed))
        for name, last in self._last.items():
            now, cleared = self._before.figures.get(name, _NOTHING), self._cleared
            samples, total = now.samples + cleared.samples[name], now.total + cleared.totals[name]
            whole.figures[name] = replace(last, samples=samples, total=total)
        return whole


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
