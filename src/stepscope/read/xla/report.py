"""A metrics report of torch_xla, a line at a time: blocks of metrics and counters in any order, without head or end.

Lines that are no field of a block are passed over, so a report may stand among what a script prints. A field counts
once per block, and a name that comes again begins the next report.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator

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


def whole(text: str) -> int | None:
    """A whole number from zero on, or None."""
    text = text.strip()
    return int(text) if _WHOLE.fullmatch(text) else None


def per_second(text: str) -> str:
    """The value of a rate, `851ms / second`."""
    return text.partition("/")[0].strip()


MAX_NAMES = 10_000
MAX_PERCENTILES = 1_000
MAX_LINE_CHARS = 65_536

# Names of the time when a server stood between host and device, and what the same things have been called since.
OLD_NAMES = {
    "TransferFromServerTime": "TransferFromDeviceTime",
    "TransferToServerTime": "TransferToDeviceTime",
}

STEPS = "MarkStep"
_ENOUGH_STEPS = 3  # in which something happens every time, to tell that it did so more often elsewhere

_KEYS = frozenset(["Metric", "Counter", "TotalSamples", "Accumulator", "ValueRate", "Rate", "Percentiles", "Value"])
# The same behind a prefix of a launcher or a logger.
_FIELD = re.compile(r"(?<=[\s\]:|>])(Metric|Counter|TotalSamples|Accumulator|ValueRate|Rate|Percentiles|Value): (\S.*)")


class Metric(Struct, frozen=True):
    """Totals since the process began; rates and percentiles of the last samples only. Values are in `unit`."""

    unit: str  # ns | bytes | count
    samples: int
    total: float
    samples_per_second: float | None = None
    value_per_second: float | None = None
    percentiles: dict[str, float] = field(default_factory=dict)


class Report(Struct):
    """Everything one report says. A name that is not there had no sample: it counts 0."""

    metrics: dict[str, Metric] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)  # new name -> the old one that stood there

    def __bool__(self) -> bool:
        return bool(self.metrics or self.counters)

    def figures(self) -> dict[str, int]:
        """Every count by name: samples of metrics, values of counters."""
        return {**self.counters, **{name: metric.samples for name, metric in self.metrics.items()}}


class _Block(Struct):
    name: str
    metric: bool
    samples: int | None = None
    total: tuple[str, float] | None = None  # (unit, value)
    value: int | None = None
    seen: set[str] = field(default_factory=set)
    rates: dict[str, float] = field(default_factory=dict)
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
        if key == "Metric" or (key == "Counter" and not self._is_accumulator(text)):
            self._begin(_Block(clean(text), key == "Metric"))
        elif self._block is not None:
            self._field(self._block, "Accumulator" if key == "Counter" else key, text)
        else:
            return False
        return True

    def cut(self) -> None:
        """What comes next is of another report."""
        self._end_block()
        if self._report:
            self._done(self._report)
        self._report = Report()

    def _is_accumulator(self, text: str) -> bool:
        """Old reports call the accumulator of a metric its counter."""
        block = self._block
        return block is not None and block.metric and block.total is None and value(text) is not None

    def _begin(self, block: _Block) -> None:
        self._end_block()
        known = self._report.metrics if block.metric else self._report.counters
        if not self.in_section and OLD_NAMES.get(block.name, block.name) in known:
            self.cut()
        self._block = block

    def _field(self, block: _Block, key: str, text: str) -> None:
        if key in block.seen:
            return
        block.seen.add(key)
        good = True
        if key == "Value":
            block.value = whole(text) if not block.metric else None
        elif key == "TotalSamples":
            block.samples = whole(text)
        elif key == "Accumulator":
            block.total = value(text)
            good = block.total is not None
        elif key == "Rate":
            good = _keep(block.rates, "samples", number(per_second(text)))
        elif key == "ValueRate":
            rate = value(per_second(text))
            good = _keep(block.rates, "value", rate[1] if rate is not None else None)
        else:
            good = _percentiles(block.percentiles, text)
        self.bad_lines += not good

    def _end_block(self) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        report = self._report
        name = OLD_NAMES.get(block.name, block.name)
        if len(name) > 200 or " " in name or len(report.metrics) + len(report.counters) >= MAX_NAMES:
            self.bad_lines += bool(block.seen)  # a line of the script's that happens to begin like a block is none
            return
        if block.metric and block.samples is not None and block.total is not None and block.total[1] >= 0:
            unit, total = block.total
            known = report.metrics.get(name)
            if known is None or known.samples <= block.samples:
                report.metrics[name] = Metric(
                    unit, block.samples, total, block.rates.get("samples"), block.rates.get("value"), block.percentiles
                )
            if name != block.name:
                report.renamed[name] = block.name
        elif not block.metric and block.value is not None:
            report.counters[name] = max(block.value, report.counters.get(name, 0))
        else:
            self.bad_lines += bool(block.seen)


def _keep(rates: dict[str, float], name: str, rate: float | None) -> bool:
    if rate is not None:
        rates[name] = rate
    return rate is not None


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


def highest(reports: list[Report]) -> Report:
    """The reports of one process as one: of every name, the entry with the highest count."""
    best = Report()
    for report in reports:
        for name, metric in report.metrics.items():
            known = best.metrics.get(name)
            if known is None or (metric.samples, metric.total) >= (known.samples, known.total):
                best.metrics[name] = metric
        for name, figure in report.counters.items():
            best.counters[name] = max(figure, best.counters.get(name, 0))
        best.renamed.update(report.renamed)
    return best


def contradict(one: Report, other: Report) -> bool:
    """Whether no single process can have written both: what it counts only ever grows, and little between two steps."""
    ours, theirs = one.figures(), other.figures()
    # Every report, a short one too, holds all operators without lowering: one that is missing was never called.
    both = (ours.keys() & theirs.keys()) | {name for name in ours.keys() | theirs.keys() if "aten::" in name}
    pairs = [(ours.get(name, 0), theirs.get(name, 0)) for name in both]
    if any(mine > their for mine, their in pairs) and any(mine < their for mine, their in pairs):
        return True
    steps = ours.get(STEPS, 0)
    if steps == theirs.get(STEPS) and steps >= _ENOUGH_STEPS:
        lows = [(min(pair), max(pair)) for pair in pairs]
        if any(low >= steps and high > 2 * low for low, high in lows):
            return True
    return any(
        metric.samples == other.metrics[name].samples and not _same(metric, other.metrics[name])
        for name, metric in one.metrics.items()
        if name in other.metrics
    )


def _same(one: Metric, other: Metric) -> bool:
    # A rounded size may differ by its last digit where two files were written by two versions; times are exact.
    if one.unit in (BYTES, COUNT):
        return abs(one.total - other.total) <= 0.01 * max(one.total, other.total, 1.0)
    return abs(one.total - other.total) < 1.0


HEAD = "[MetricsData; step="
COMPILE = "CompileTime"
EAGER_COMPILE = "EagerOpCompileTime"
TRANSFER = "TransferFromDeviceTime"
INBOUND = "InboundData"  # bytes that came from the device
SCALAR = "aten::_local_scalar_dense"
MAX_STEPS = 200_000  # in which something happened; what happens later is counted without its step

_HEAD = re.compile(r"\[MetricsData; step=(\d{1,15})\]")


def section_step(line: str) -> int | None:
    """The step of a section's first line, or None where `line` is none."""
    at = line.find(HEAD)
    match = _HEAD.match(line, at) if at >= 0 else None
    return int(match[1]) if match is not None else None


class StepChange(Struct):
    """What happened in a step, or in several together (`step` None). Times are in ns; None where nothing tells."""

    step: int | None
    compiles: int = 0
    compile_ns: float = 0.0
    eager_compiles: int = 0
    eager_compile_ns: float = 0.0
    transfers: int = 0
    transfer_ns: float = 0.0
    transfer_bytes: float = 0.0
    operators: Counter[str] = field(default_factory=Counter)  # "aten::…" -> calls

    @property
    def scalars(self) -> int:
        """Transfers that read the value of a tensor with one element."""
        return min(self.operators[SCALAR], self.transfers)

    def __bool__(self) -> bool:
        return bool(self.compiles or self.eager_compiles or self.transfers or self.operators)

    def add(self, other: StepChange, sign: int = 1) -> None:
        """Take in what happened in another step; with a negative sign take it away, down to nothing."""
        for name in CHANGE_FIGURES:
            setattr(self, name, max(0, getattr(self, name) + sign * getattr(other, name)))
        (self.operators.update if sign > 0 else self.operators.subtract)(other.operators)
        self.operators = +self.operators


CHANGE_FIGURES = tuple(name for name in StepChange.__struct_fields__ if name not in ("step", "operators"))


class Totals:
    """Totals of a process that only grow, from reports whose totals may have been cleared between."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, float]] = {}
        self._cleared: dict[str, tuple[int, float]] = {}
        self._last: dict[str, Metric] = {}

    def add(self, report: Report) -> StepChange:
        """What has happened since the report before."""
        now: dict[str, tuple[int, float]] = {name: (count, float(count)) for name, count in report.counters.items()}
        now.update((name, (metric.samples, metric.total)) for name, metric in report.metrics.items())
        grown: dict[str, tuple[int, float]] = {}
        for name in now.keys() | self._before.keys():
            samples, total = now.get(name, (0, 0.0))
            old_samples, old_total = self._before.get(name, (0, 0.0))
            if samples < old_samples:
                kept_samples, kept_total = self._cleared.get(name, (0, 0.0))
                self._cleared[name] = (kept_samples + old_samples, kept_total + old_total)
                old_samples, old_total = 0, 0.0
            if samples > old_samples:
                grown[name] = (samples - old_samples, max(0.0, total - old_total))
        self._before = now
        self._last.update(report.metrics)
        return _change(grown)

    def report(self) -> Report:
        """The totals of all, with the rates and percentiles that stood last."""
        whole = Report()
        for name in self._before.keys() | self._cleared.keys():
            samples, total = self._before.get(name, (0, 0.0))
            kept_samples, kept_total = self._cleared.get(name, (0, 0.0))
            metric = self._last.get(name)
            if metric is not None:
                whole.metrics[name] = replace(metric, samples=samples + kept_samples, total=total + kept_total)
            else:
                whole.counters[name] = samples + kept_samples
        return whole


def _change(grown: dict[str, tuple[int, float]]) -> StepChange:
    compiles, eager, transfers = (grown.get(name, (0, 0.0)) for name in (COMPILE, EAGER_COMPILE, TRANSFER))
    operators = Counter({name: count for name, (count, _) in sorted(grown.items()) if "aten::" in name})
    return StepChange(None, *compiles, *eager, *transfers, grown.get(INBOUND, (0, 0.0))[1], operators)


def change_of(report: Report) -> StepChange:
    """All that a report says happened, without steps."""
    return Totals().add(report)


class Sections:
    """The sections of a file, in order. A file is appended to: where a new process begins, what was before is dropped.

    `earlier_runs` counts those. `steps` is the number of the last step and one.
    """

    def __init__(self) -> None:
        self.earlier_runs = 0
        self._step = -1
        self._marks = 0
        self._begin()

    def _begin(self) -> None:
        self.count = 0
        self._totals = Totals()
        self._changes: list[StepChange] = []
        self._more = StepChange(None)
        self._renamed: dict[str, str] = {}

    def add(self, step: int, report: Report) -> None:
        """Take in the report of a section."""
        marks = report.counters.get(STEPS, 0)
        if step < self._step and marks < self._marks:
            self.earlier_runs += 1
            self._begin()
            self._step = -1
        self._step, self._marks = max(step, self._step), marks
        self.count += 1
        self._renamed.update(report.renamed)
        change = self._totals.add(report)
        if not change:
            return
        change.step = self._step
        if len(self._changes) < MAX_STEPS:
            self._changes.append(change)
        else:
            self._more.add(change)

    @property
    def last_step(self) -> int | None:
        """The number of the last step."""
        return self._step if self.count else None

    def changes(self) -> Iterator[StepChange]:
        """Steps in which something happened, in order."""
        yield from self._changes
        if self._more:
            yield self._more

    def report(self) -> Report:
        """The totals of the whole process."""
        report = self._totals.report()
        report.renamed = dict(self._renamed)
        return report
