"""The lines torch_xla's debug profiler writes, made from counts by its own conditions, or quoted from a log.

They are evaluated once, on the last counts of a process, where torch_xla repeats them after every step. What a log
holds is quoted, and then not made again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from stepscope.analyze.compilers.constants import PER_STEP, SLOW_COMPILE_NS, SLOW_EXECUTE_NS, TORCH_COMPILE, TORCH_XLA
from stepscope.analyze.compilers.reports import TRANSFER, Report, longest_ns
from stepscope.analyze.compilers.storms import Rate
from stepscope.analyze.windows import event_data
from stepscope.model.compilers import CompilerWarning
from stepscope.tables.schema import Tables

PREFIX = "pt-xla-profiler:"
TOO_FREQUENT, TOO_SLOW, NOT_LOWERED = "too_frequent", "too_slow", "not_lowered"
_MARKS = ((" too frequent", TOO_FREQUENT), (" too slow", TOO_SLOW))
_ORDER = {TOO_FREQUENT: 0, TOO_SLOW: 1, NOT_LOWERED: 2}
_COUNTS = re.compile(r"([0-9]{1,15}) counts during ([0-9]{1,15}) steps")
_UNITS = ((86_400_000_000_000, "d"), (3_600_000_000_000, "h"), (60_000_000_000, "m"), (10**9, "s"), (10**6, "ms"))


class _Kind(Struct, frozen=True):
    rule: str
    metric: str


def quoted(tables: Tables) -> tuple[CompilerWarning, ...]:
    """The lines a log holds: the last of each kind, with how often it came."""
    found: dict[_Kind, CompilerWarning] = {}
    for row, data in event_data(tables, "xla_warning"):
        text = data.get("text")
        if not isinstance(text, str) or not text.strip():
            continue
        warning = _read(text, data, row["process"])
        kind = _Kind(warning.rule, warning.metric)
        known = found.get(kind)
        if known is None or (warning.count or 0) >= (known.count or 0):
            found[kind] = warning
    return tuple(found.values())


def made(reports: Sequence[Report], rates: Mapping[str, Rate | None]) -> tuple[CompilerWarning, ...]:
    """The lines that hold by the conditions, each once, of the process with the highest count.

    Args:
        rates: backend -> compilations and steps as the article counts them.
    """
    found: dict[_Kind, CompilerWarning] = {}
    for backend, metric, source in ((TORCH_COMPILE, "compiles", "frames by steps"), (TORCH_XLA, "CompileTime", "")):
        rate = rates.get(backend)
        if rate is not None and rate.too_frequent:
            text = _frequent("CompileTime", rate.compiles, rate.steps)
            source = source or f"compilations by steps of {rate.process}"
            found[_Kind(TOO_FREQUENT, metric)] = CompilerWarning(
                TOO_FREQUENT, text, backend, metric, rate.compiles, rate.steps, False, 0, source
            )
    for report in reports:
        for warning in _of_report(report):
            kind = _Kind(warning.rule, warning.metric)
            if kind not in found or (warning.count or 0) > (found[kind].count or 0):
                found[kind] = warning
    return tuple(found.values())


def together(quotes: Iterable[CompilerWarning], others: Iterable[CompilerWarning]) -> tuple[CompilerWarning, ...]:
    """Quoted lines, and the made ones of kinds that are not quoted; by rule and metric."""
    quotes = tuple(quotes)
    known = {(one.rule, one.metric) for one in quotes}
    found = (*quotes, *(one for one in others if (one.rule, one.metric) not in known))
    return tuple(sorted(found, key=lambda one: (_ORDER.get(one.rule, len(_ORDER)), one.metric)))


def _of_report(report: Report) -> Iterator[CompilerWarning]:
    steps = report.marks or 0
    source = "metrics report" if report.rank is None else f"metrics report of rank {report.rank}"

    def line(rule: str, text: str, metric: str, count: int | None) -> CompilerWarning:
        return CompilerWarning(rule, text, TORCH_XLA, metric, count, report.marks, False, 0, source)

    for name in TRANSFER:
        count = report.samples(name)
        if steps and count / steps > PER_STEP:
            yield line(TOO_FREQUENT, _frequent(name, count, steps), name, count)
    for name, bound in (("CompileTime", SLOW_COMPILE_NS), ("ExecuteTime", SLOW_EXECUTE_NS)):
        longest = longest_ns(report, name)
        if longest is not None and longest > bound:
            text = f"{name} too slow: longest instance took {xla_time(longest)}"
            yield line(TOO_SLOW, text, name, report.samples(name))
    operators = report.unlowered()
    if operators:
        yield line(NOT_LOWERED, f"Op(s) not lowered: {', '.join(operators)}", "aten::", sum(operators.values()))


def _frequent(metric: str, count: int, steps: int) -> str:
    return f"{metric} too frequent: {count} counts during {steps} steps"


def _read(text: str, data: Mapping[str, Any], process: str | None) -> CompilerWarning:
    """A line of a log; one of no known form is quoted under the rule "other"."""
    text = text.strip().removeprefix(PREFIX).strip()
    rule, metric = "other", ""
    for mark, name in _MARKS:
        if mark in text:
            rule, metric = name, text.partition(mark)[0].strip()
            break
    if text.startswith("Op(s) not lowered"):
        rule, metric = NOT_LOWERED, "aten::"
    counts = _COUNTS.search(text)
    repeats = data.get("repeats")
    source = data.get("source")
    return CompilerWarning(
        rule=rule,
        text=text,
        backend=TORCH_XLA,
        metric=metric,
        count=int(counts[1]) if counts else None,
        steps=int(counts[2]) if counts else None,
        verbatim=True,
        repeats=repeats if isinstance(repeats, int) and not isinstance(repeats, bool) else 0,
        source=source if isinstance(source, str) else f"log of {process}",
    )


def xla_time(ns: float) -> str:
    """A time as torch_xla writes it: "05m12s003ms000.000us"; leading units that are 0 left out."""
    rest, parts = max(ns, 0.0), ""
    for size, unit in _UNITS:
        value = int(rest // size)
        rest -= value * size
        if value or parts:
            parts += f"{value:0{3 if unit == 'ms' else 2}d}{unit}"
    return f"{parts}{rest / 1e3:07.3f}us"
