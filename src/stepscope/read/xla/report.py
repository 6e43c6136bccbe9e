"""A metrics report of torch_xla, a line at a time: blocks of metrics and counters in any order, without head or end.

Lines that are no field of a block are passed over, so a report may stand among what a script prints. A field counts
once per block, and a name that comes again begins the next report.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec import Struct, field
from msgspec.structs import replace

from stepscope.read.text import clean
from stepscope.read.xla.values import BYTES, COUNT, number, per_second, value, whole

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


def with_totals(metric: Metric, samples: int, total: float) -> Metric:
    """`metric` with other totals."""
    return replace(metric, samples=samples, total=total)
