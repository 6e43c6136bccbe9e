"""The log of XLA_METRICS_FILE: a report after every step, each with the totals since the process began.

What a step did is the difference to the report before. A total that has gone down was cleared by the user
(`clear_all`): then the new one is the difference, and the totals of the run are those of all stretches together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct, field

from stepscope.read.xla.report import STEPS, Metric, Report, with_totals

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
    operators: dict[str, int] = field(default_factory=dict)  # "aten::…" -> calls

    @property
    def scalars(self) -> int:
        """Transfers that read the value of a tensor with one element."""
        return min(self.operators.get(SCALAR, 0), self.transfers)

    def __bool__(self) -> bool:
        return bool(self.compiles or self.eager_compiles or self.transfers or self.operators)

    def add(self, other: StepChange) -> None:
        """Take in what happened in another step."""
        self.compiles += other.compiles
        self.compile_ns += other.compile_ns
        self.eager_compiles += other.eager_compiles
        self.eager_compile_ns += other.eager_compile_ns
        self.transfers += other.transfers
        self.transfer_ns += other.transfer_ns
        self.transfer_bytes += other.transfer_bytes
        for name, count in other.operators.items():
            self.operators[name] = self.operators.get(name, 0) + count


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
                whole.metrics[name] = with_totals(metric, samples + kept_samples, total + kept_total)
            else:
                whole.counters[name] = samples + kept_samples
        return whole


def _change(grown: dict[str, tuple[int, float]]) -> StepChange:
    compiles, compile_ns = grown.get(COMPILE, (0, 0.0))
    eager, eager_ns = grown.get(EAGER_COMPILE, (0, 0.0))
    transfers, transfer_ns = grown.get(TRANSFER, (0, 0.0))
    operators = {name: count for name, (count, _) in sorted(grown.items()) if "aten::" in name}
    return StepChange(
        None, compiles, compile_ns, eager, eager_ns, transfers, transfer_ns, grown.get(INBOUND, (0, 0.0))[1], operators
    )


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
