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
