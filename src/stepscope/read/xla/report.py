"""A metrics report of torch_xla, a line at a time: blocks of metrics and counters in any order, without head or end.

Lines that are no field of a block are passed over, so a report may stand among what a script prints. A field counts
once per block, and a name that comes again begins the next report.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

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
    """A whole number from zero on, or None."""
    text = text.strip()
    return int(text) if _WHOLE.fullmatch(text) else None


# ------------------------------------------------------------------------------------------------------ one report

MAX_NAMES = 10_000
MAX_PERCENTILES = 1_000
MAX_LINE_CHARS = 65_536

# Names of the time when a server stood between host and device, and what the same things have been called since.
OLD_NAMES = {
    "TransferFromServerTime": "TransferFromDeviceTime",
    "TransferToServerTime": "TransferToDeviceTime",
}
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
        """Samples of a metric, or the value of a counter."""
        figure = self.figures.get(name)
        return figure.samples if figure is not None else 0

    def take(self, name: str, figure: Figure) -> None:
        """Keep of one name the figure with the highest count; a metric rather than a counter."""
        known = self.figures.get(name)
        if known is None or _rank(known) <= _rank(figure):
            self.figures[name] = figure


def _rank(figure: Figure) -> tuple[bool, int, float]:
    return figure.unit is not None, figure.samples, figure.total


class _Block(Struct):
    name: str
    metric: bool
    samples: int | None = None
    total: tuple[str, float] | None = None  # (unit, value)
    seen: set[str] = field(default_factory=set)
    rates: dict[str, float | None] = field(default_factory=dict)
    percentiles: dict[str, float] = field(default_factory=dict)


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
        self._block: _Block | None = None

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
        if key == "Counter" and block is not None and block.metric and block.total is None and value(text) is not None:
            key = "Accumulator"  # old reports call that of a metric its counter
        if key in ("Metric", "Counter"):
            self._begin(_Block(clean(text), key == "Metric"))
        elif block is None:
            return False
        elif key not in block.seen:
            block.seen.add(key)
            self.bad_lines += not self._field(block, key, text)
        return True

    def cut(self) -> None:
        """What comes next is of another report."""
        self._end_block()
        if self._report:
            self._done(self._report)
        self._report = Report()

    def _begin(self, block: _Block) -> None:
        self._end_block()
        known = self._report.figures.get(OLD_NAMES.get(block.name, block.name))
        if not self.in_section and known is not None and (known.unit is not None) == block.metric:
            self.cut()
        self._block = block

    def _field(self, block: _Block, key: str, text: str) -> bool:
        """Take in a field; False where it cannot be read. A block without a count is told at its end."""
        if key in ("Value", "TotalSamples"):
            if block.metric == (key == "TotalSamples"):
                block.samples = _whole(text)
        elif key == "Accumulator":
            block.total = value(text)
            return block.total is not None
        elif key == "Percentiles":
            return _percentiles(block.percentiles, text)
        else:
            rate = value(text.partition("/")[0])  # `851ms / second`
            block.rates[key] = rate[1] if rate is not None and (key != "Rate" or rate[0] == COUNT) else None
            return block.rates[key] is not None
        return True

    def _end_block(self) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        report = self._report
        name = OLD_NAMES.get(block.name, block.name)
        unit, total = (block.total or (None, -1.0)) if block.metric else (None, float(block.samples or 0))
        if len(name) > 200 or " " in name or len(report.figures) >= MAX_NAMES or block.samples is None or total < 0:
            self.bad_lines += bool(block.seen)  # a line of the script's that happens to begin like a block is none
            return
        rates = block.rates.get("Rate"), block.rates.get("ValueRate")
        report.take(name, Figure(unit, block.samples, total, *rates, block.percentiles))
        if name != block.name:
            report.renamed[name] = block.name


def _percentiles(found: dict[str, float], text: str) -> bool:
    good = True
    for part in text.split(";", MAX_PERCENTILES)[:MAX_PERCENTILES]:
        percent, _, figure = part.strip().partition("%=")
        at, parsed = number(percent), value(figure)
        if at is None or parsed is None:
            good = good and not part.strip()
        else:
            found[f"{at:g}"] = parsed[1]
    return good


# ------------------------------------------------------------------------------------------- one report of several


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


# ------------------------------------------------------------------------------------------------- reports by step

HEAD = "[MetricsData; step="
MAX_STEPS = 200_000  # in which something happened; what happens later is counted without its step

_HEAD = re.compile(r"\[MetricsData; step=(\d{1,15})\]")


def section_step(line: str) -> int | None:
    """The step of a section's first line, or None where `line` is none."""
    match = _HEAD.search(line)
    return int(match[1]) if match is not None else None


class StepChange(Struct):
    """What happened in a step, or in several together (`step` None), by name: samples, and totals of metrics."""

    step: int | None
    samples: Counter[str] = field(default_factory=Counter)
    totals: Any = field(default_factory=Counter)  # a Counter of float; times are in ns

    @property
    def operators(self) -> dict[str, int]:
        """Calls of operators without lowering ("aten::…")."""
        return {name: count for name, count in sorted(self.samples.items()) if "aten::" in name}

    @property
    def scalars(self) -> int:
        """Transfers that read the value of a tensor with one element."""
        return min(self.samples[SCALAR], self.samples[TRANSFER])

    def __bool__(self) -> bool:
        return any(name in (COMPILE, EAGER_COMPILE, TRANSFER) or "aten::" in name for name in self.samples)

    def add(self, other: StepChange) -> None:
        """Take in what happened in another step."""
        self.samples.update(other.samples)
        self.totals.update(other.totals)

    def remove(self, other: StepChange) -> None:
        """Take away what happened in another step, down to nothing."""
        self.samples -= other.samples
        self.totals -= other.totals


class Totals:
    """Totals of a process that only grow, from reports whose totals may have been cleared between."""

    def __init__(self) -> None:
        self._before = Report()
        self._cleared = StepChange(None)
        self._last: dict[str, Figure] = {}

    def add(self, report: Report) -> StepChange:
        """What has happened since the report before."""
        grown = StepChange(None)
        for name in report.figures.keys() | self._before.figures.keys():
            now, old = (one.figures.get(name, _NOTHING) for one in (report, self._before))
            if now.samples < old.samples:
                self._cleared.samples[name] += old.samples
                self._cleared.totals[name] += old.total
                old = _NOTHING
            if now.samples > old.samples:
                grown.samples[name] = now.samples - old.samples
                grown.totals[name] = max(0.0, now.total - old.total)
        self._before = report
        self._last.update(report.figures)
        return grown

    def report(self) -> Report:
        """The totals of all, with the rates and percentiles that stood last."""
        whole = Report()
        for name in self._before.figures.keys() | self._cleared.samples.keys():
            now, cleared = self._before.figures.get(name, _NOTHING), self._cleared
            samples, total = now.samples + cleared.samples[name], now.total + cleared.totals[name]
            whole.figures[name] = replace(self._last[name], samples=samples, total=total)
        return whole


_NOTHING = Figure(None, 0, 0.0)


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
        self._step = -1
        self._marks = 0
        self._totals = Totals()
        self._renamed: dict[str, str] = {}

    def add(self, step: int, report: Report) -> None:
        """Take in the report of a section."""
        marks = report.count(STEPS)
        if step < self._step and marks < self._marks:
            self.earlier_runs += 1
            self._begin()
        self._step, self._marks = max(step, self._step), marks
        self.count += 1
        self._renamed.update(report.renamed)
        change = self._totals.add(report)
        if change and len(self.changes) < MAX_STEPS:
            change.step = self._step
            self.changes.append(change)
        elif change:
            if len(self.changes) == MAX_STEPS:
                self.changes.append(StepChange(None))
            self.changes[-1].add(change)

    @property
    def last_step(self) -> int | None:
        """The number of the last step."""
        return self._step if self.count else None

    def report(self) -> Report:
        """The totals of the whole process."""
        report = self._totals.report()
        report.renamed = dict(self._renamed)
        return report
