"""What torch_xla's own metrics and counters say: their last state per process, and the time of a step they imply."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl
from msgspec import Struct

from stepscope.analyze.compilers.prepared import TORCH_COMPILE, TORCH_XLA
from stepscope.engine.journal import event_data, json_object
from stepscope.model.compilers import CompilerMetric, CompilerWarning
from stepscope.read.text import integer, string
from stepscope.tables.schema import Tables

# The article's rule (torch_xla's debug profiler): it speaks only after so many steps, of more compiles per step.
WARMUP_STEPS = 10  # also what we call warm-up: per process and kind of step, because evaluation compiles its own first
PER_STEP = 0.5
SLOW_COMPILE_NS, SLOW_EXECUTE_NS = 300 * 10**9, 30 * 10**9  # its own bounds for one compilation and one execution
RING = 1024  # samples it keeps of a metric; its rates and percentiles stand on these

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
    marks: int | None  # steps as torch_xla counts them; None where the report does not say

    @property
    def complete(self) -> bool:
        """Whether what is missing here is 0."""
        return bool(self.metrics)

    def samples(self, name: str) -> int:
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
        counts = sorted(self.counters.items())
        return {name: int(value) for name, value in counts if ATEN in name and name != READ_SCALAR}

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
        metrics = {name: row for name, row in by_name.items() if row["kind"] == "metric"}
        counters = {name: row["total"] for name, row in by_name.items() if row["kind"] != "metric"}
        marks = None if STEPS not in counters else int(counters[STEPS])
        last_step = max(own["step"].drop_nulls(), default=None)
        found.append(Report(str(process), own["rank"][0], last_step, metrics, counters, marks))
    return tuple(sorted(found, key=lambda report: (report.rank is None, report.rank or 0, report.process)))


def metrics(reports: Sequence[Report]) -> tuple[CompilerMetric, ...]:
    """All metrics, then all counters, of each report in its own order; ns become ms."""
    found: list[CompilerMetric] = []
    for report in reports:
        for row in report.metrics.values():
            scale, rate = 1e6 if row["unit"] == "ns" else 1.0, row["value_per_second"]
            metric = CompilerMetric(
                name=row["name"],
                kind="metric",
                unit="ms" if row["unit"] == "ns" else row["unit"],
                samples=row["samples"],
                total=row["total"] / scale,
                per_second=row["samples_per_second"],
                value_per_second=None if rate is None else rate / scale,
                percentiles=tuple((percent, value / scale) for percent, value in percentiles(row)),
                rank=report.rank,
            )
            found.append(metric)
        found += [
            CompilerMetric(name, "counter", "count", None, total, None, None, (), report.rank)
            for name, total in report.counters.items()
        ]
    return tuple(found)


def percentiles(row: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    """(percent, value in the table's unit), ascending; what is no number is left out."""
    found = []
    for percent, value in json_object(row["percentiles"]).items():
        with contextlib.suppress(TypeError, ValueError):
            found.append((float(percent), float(value)))
    return tuple(sorted(found))


def longest_ns(report: Report, name: str) -> float | None:
    """The highest percentile of a metric: the longest of its last samples, or close to it."""
    row = report.metrics.get(name)
    values = percentiles(row) if row is not None and row["unit"] == "ns" else ()
    return values[-1][1] if values else None


def estimated_wall_ns(report: Report) -> float | None:
    """Wall time of all its steps, at least: how long the process ran by the rates of its metrics, or compiled.

    A rate is the number of a metric's last samples (`RING` at most) over the time between the first and the last of
    them. So samples / rate is a time that passed; of a metric with more samples than that it holds as far as the rate
    was the same before, which is assumed of executions alone: those come once per step.
    """
    found = []
    for name, row in report.metrics.items():
        rate, samples = row["samples_per_second"], row["samples"]
        if rate and rate > 0 and samples:
            found.append((samples if name in EXECUTE else min(samples, RING)) / rate)
    return max(max(found) * 1e9, report.compile_ns() or 0.0) if found else None


def step_estimate_ms(reports: Sequence[Report]) -> float | None:
    """The mean step of all reports with steps and rates."""
    told = [(wall, report.marks) for report in reports if report.marks and (wall := estimated_wall_ns(report))]
    return sum(wall for wall, _ in told) / sum(count for _, count in told) / 1e6 if told else None


PREFIX = "pt-xla-profiler:"
TOO_FREQUENT, TOO_SLOW, NOT_LOWERED = "too_frequent", "too_slow", "not_lowered"
_MARKS = ((" too frequent", TOO_FREQUENT), (" too slow", TOO_SLOW))
_ORDER = {TOO_FREQUENT: 0, TOO_SLOW: 1, NOT_LOWERED: 2}
_COUNTS = re.compile(r"([0-9]{1,15}) counts during ([0-9]{1,15}) steps")
_UNITS = ((86_400_000_000_000, "d"), (3_600_000_000_000, "h"), (60_000_000_000, "m"), (10**9, "s"), (10**6, "ms"))


class Rate(NamedTuple):
    """Compilations and steps of one process, warm-up included, as the article counts them."""

    process: str
    compiles: int
    steps: int

    @property
    def too_frequent(self) -> bool:
        """The article's rule."""
        return self.steps > WARMUP_STEPS and self.compiles / self.steps > PER_STEP


def quoted(tables: Tables) -> tuple[CompilerWarning, ...]:
    """The lines a log holds: the last of each kind, with how often it came; one of no known form is of rule "other"."""
    found: dict[tuple[str, str], CompilerWarning] = {}
    for row, data in event_data(tables, "xla_warning"):
        text = (string(data.get("text")) or "").strip().removeprefix(PREFIX).strip()
        if not text:
            continue
        forms = ((name, text.partition(mark)[0].strip()) for mark, name in _MARKS if mark in text)
        kind = next(forms, ("other", ""))
        if text.startswith("Op(s) not lowered"):
            kind = NOT_LOWERED, "aten::"
        counts = _COUNTS.search(text)
        count, steps = (int(counts[1]), int(counts[2])) if counts else (None, None)
        source = string(data.get("source")) or f"log of {row['process']}"
        repeats = integer(data.get("repeats")) or 0
        if kind not in found or (count or 0) >= (found[kind].count or 0):
            rule, metric = kind
            found[kind] = CompilerWarning(rule, text, TORCH_XLA, metric, count, steps, True, repeats, source)
    return tuple(found.values())


def warnings(
    quotes: Iterable[CompilerWarning], reports: Sequence[Report], rates: Mapping[str, Rate | None]
) -> tuple[CompilerWarning, ...]:
    """Quoted lines, and of those that hold by the conditions the first of each kind that is not quoted, of several
    processes that with the highest count; by rule and metric.

    Args:
        rates: backend -> compilations and steps as the article counts them.
    """
    every = list(quotes)
    for backend, metric, source in ((TORCH_COMPILE, "compiles", "frames by steps"), (TORCH_XLA, "CompileTime", "")):
        rate = rates.get(backend)
        if rate is not None and rate.too_frequent:
            text = f"CompileTime too frequent: {rate.compiles} counts during {rate.steps} steps"
            source = source or f"compilations by steps of {rate.process}"
            warning = CompilerWarning(TOO_FREQUENT, text, backend, metric, rate.compiles, rate.steps, False, 0, source)
            every.append(warning)
    found = [warning for report in reports for warning in _of_report(report)]
    every += sorted(found, key=lambda warning: -(warning.count or 0))
    first: dict[tuple[str, str], CompilerWarning] = {}
    for one in every:
        first.setdefault((one.rule, one.metric), one)
    return tuple(sorted(first.values(), key=lambda one: (_ORDER.get(one.rule, len(_ORDER)), one.metric)))


def _of_report(report: Report) -> Iterator[CompilerWarning]:
    steps = report.marks or 0
    source = "metrics report" if report.rank is None else f"metrics report of rank {report.rank}"

    def line(rule: str, text: str, metric: str, count: int | None) -> CompilerWarning:
        return CompilerWarning(rule, text, TORCH_XLA, metric, count, report.marks, False, 0, source)

    for name in TRANSFER:
        count = report.samples(name)
        if steps and count / steps > PER_STEP:
            yield line(TOO_FREQUENT, f"{name} too frequent: {count} counts during {steps} steps", name, count)
    for name, bound in (("CompileTime", SLOW_COMPILE_NS), ("ExecuteTime", SLOW_EXECUTE_NS)):
        longest = longest_ns(report, name)
        if longest is not None and longest > bound:
            text = f"{name} too slow: longest instance took {xla_time(longest)}"
            yield line(TOO_SLOW, text, name, report.samples(name))
    operators = report.unlowered()
    if operators:
        yield line(NOT_LOWERED, f"Op(s) not lowered: {', '.join(operators)}", "aten::", sum(operators.values()))


def xla_time(ns: float) -> str:
    """A time as torch_xla writes it: "05m12s003ms000.000us"; leading units that are 0 left out."""
    rest, parts = max(ns, 0.0), ""
    for size, unit in _UNITS:
        value = int(rest // size)
        rest -= value * size
        if value or parts:
            parts += f"{value:0{3 if unit == 'ms' else 2}d}{unit}"
    return f"{parts}{rest / 1e3:07.3f}us"
