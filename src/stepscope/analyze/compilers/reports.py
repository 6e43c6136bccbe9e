"""What torch_xla's own metrics and counters say: their last state per process, and the time of a step they imply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
from msgspec import Struct

from stepscope.analyze.compilers.constants import RING
from stepscope.engine.user_code import parse_json
from stepscope.model.compilers import CompilerMetric
from stepscope.tables.schema import Tables

COMPILE = ("CompileTime", "EagerOpCompileTime")
EXECUTE = ("ExecuteTime", "ExecuteReplicatedTime", "DynamoSyncInputExecuteTime")
TRANSFER = ("TransferFromDeviceTime", "TransferFromServerTime")  # the name of today and of reports before 2024
STEPS = "MarkStep"
ATEN = "aten::"
READ_SCALAR = "aten::_local_scalar_dense"  # what .item() is; no missing operator


class Report(Struct, frozen=True):
    """The last state of a process.

    torch_xla prints no name whose value is 0, so a name that is missing is 0, if the report holds metrics at all
    (`complete`): of a debug log nothing but the number of steps may be known.
    """

    process: str
    rank: int | None
    last_step: int | None
    metrics: Mapping[str, Mapping[str, Any]]  # rows of the table `counters`
    counters: Mapping[str, float]

    @property
    def complete(self) -> bool:
        """Whether what is missing here is 0."""
        return bool(self.metrics)

    @property
    def marks(self) -> int | None:
        """Steps as torch_xla counts them; None where the report does not say."""
        value = self.counters.get(STEPS)
        return None if value is None else int(value)

    def samples(self, name: str) -> int:
        """Samples of a metric."""
        return int(self.metrics.get(name, {}).get("samples") or 0)

    def compiles(self) -> int:
        """Compilations, those of eager mode included."""
        return sum(self.samples(name) for name in COMPILE)

    def compile_ns(self) -> float | None:
        """Time of all compilations; None where the report does not tell."""
        if not self.complete:
            return None
        return sum(float(self.metrics[name]["total"]) for name in COMPILE if name in self.metrics)

    def transfers(self) -> int:
        """Transfers from device to host."""
        return sum(self.samples(name) for name in TRANSFER)

    def unlowered(self) -> dict[str, int]:
        """Operators that ran on the CPU -> calls, in order of their names."""
        found = {name: int(value) for name, value in self.counters.items() if ATEN in name and name != READ_SCALAR}
        return dict(sorted(found.items()))

    def first_step(self, rows: pl.DataFrame) -> int:
        """The number of the first step, as far as the last one and `rows` of the process tell it."""
        low = rows["step"].drop_nulls().min()
        counted = self.last_step - self.marks + 1 if self.last_step is not None and self.marks else None
        told = [value for value in (low, counted) if isinstance(value, int)]
        return max(min(told, default=0), 0)


def latest(tables: Tables) -> tuple[Report, ...]:
    """One per process with counters, in order of rank."""
    rows = tables.counters.with_row_index("input").sort("step", "input", nulls_last=False)
    found = []
    for (process,), own in rows.partition_by("process", as_dict=True, maintain_order=True).items():
        last = own.unique("name", keep="last", maintain_order=True).sort("input")
        by_name = {str(row["name"]): row for row in last.iter_rows(named=True)}
        step = own["step"].max()
        found.append(
            Report(
                process=str(process),
                rank=own["rank"][0],
                last_step=step if isinstance(step, int) else None,
                metrics={name: row for name, row in by_name.items() if row["kind"] == "metric"},
                counters={name: row["total"] for name, row in by_name.items() if row["kind"] != "metric"},
            )
        )
    return tuple(sorted(found, key=lambda report: (report.rank is None, report.rank or 0, report.process)))


def metrics(reports: Sequence[Report]) -> tuple[CompilerMetric, ...]:
    """All metrics, then all counters, of each report in its own order; ns become ms."""
    found: list[CompilerMetric] = []
    for report in reports:
        found += [_metric(row, report.rank) for row in report.metrics.values()]
        found += [
            CompilerMetric(name, "counter", "count", None, total, None, None, (), report.rank)
            for name, total in report.counters.items()
        ]
    return tuple(found)


def percentiles(row: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    """(percent, value in the table's unit), ascending; what is no number is left out."""
    values = parse_json(row["percentiles"])
    found = []
    for percent, value in values.items() if isinstance(values, dict) else ():
        try:
            found.append((float(percent), float(value)))
        except (TypeError, ValueError):
            continue
    return tuple(sorted(found))


def longest_ns(report: Report, name: str) -> float | None:
    """The highest percentile of a metric: the longest of its last samples, or close to it."""
    row = report.metrics.get(name)
    values = percentiles(row) if row is not None and row["unit"] == "ns" else ()
    return values[-1][1] if values else None


def span_ns(report: Report) -> float | None:
    """How long the process ran, at least, by the rates of its metrics.

    A rate is the number of a metric's last samples (`RING` at most) over the time between the first and the last of
    them. So samples / rate is a time that passed; of a metric with more samples than that it holds as far as the rate
    was the same before, which is assumed of executions alone: those come once per step.
    """
    found = []
    for name, row in report.metrics.items():
        rate, samples = row["samples_per_second"], row["samples"]
        if rate and rate > 0 and samples:
            found.append((samples if name in EXECUTE else min(samples, RING)) / rate)
    return max(found) * 1e9 if found else None


def estimated_wall_ns(report: Report) -> float | None:
    """Wall time of all its steps, estimated: the span, and no less than the compilations took."""
    span = span_ns(report)
    return None if span is None else max(span, report.compile_ns() or 0.0)


def step_estimate_ms(reports: Sequence[Report]) -> float | None:
    """The mean step of all reports with steps and rates."""
    told = [(wall, report.marks) for report in reports if report.marks and (wall := estimated_wall_ns(report))]
    marks = sum(count for _, count in told)
    return sum(wall for wall, _ in told) / marks / 1e6 if marks else None


def _metric(row: Mapping[str, Any], rank: int | None) -> CompilerMetric:
    scale = 1e6 if row["unit"] == "ns" else 1.0
    rate = row["value_per_second"]
    return CompilerMetric(
        name=row["name"],
        kind="metric",
        unit="ms" if row["unit"] == "ns" else row["unit"],
        samples=row["samples"],
        total=row["total"] / scale,
        per_second=row["samples_per_second"],
        value_per_second=None if rate is None else rate / scale,
        percentiles=tuple((percent, value / scale) for percent, value in percentiles(row)),
        rank=rank,
    )
