"""A backend in one record: what it compiled, how long that took, what it could not tell."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from stepscope.analyze.compilers import spans
from stepscope.analyze.compilers.constants import TORCH_COMPILE, TORCH_XLA
from stepscope.analyze.compilers.prepared import Prepared, counted
from stepscope.analyze.compilers.reports import Report, longest_ns, step_estimate_ms
from stepscope.analyze.windows import event_data
from stepscope.model.compilers import CompilerFacts
from stepscope.tables.schema import Tables

METRICS = "CompilationMetrics"  # the source that tells everything of torch.compile


def backends(prepared: Prepared, reports: Sequence[Report], warned: bool) -> tuple[str, ...]:
    """The backends a run tells of, torch.compile first; `warned`: a log of torch_xla's warnings is at hand."""
    found = {str(name) for name in prepared.rows["backend"].unique().drop_nulls().to_list()}
    if reports or warned:
        found.add(TORCH_XLA)
    return tuple(sorted(found, key=lambda name: (name != TORCH_COMPILE, name != TORCH_XLA, name)))


def processes(prepared: Prepared, backend: str, reports: Sequence[Report]) -> tuple[str, ...]:
    """The processes that used `backend`, sorted."""
    found = {str(name) for name in prepared.of(backend).rows["process"].unique().to_list()}
    if backend == TORCH_XLA:
        found.update(report.process for report in reports)
    return tuple(sorted(found))


def facts(
    tables: Tables, prepared: Prepared, backend: str, reports: Sequence[Report], names: Sequence[str]
) -> CompilerFacts:
    """All ranks together; `names` are the processes that used it."""
    rows = prepared.of(backend).rows
    own = [report for report in reports if backend == TORCH_XLA and report.process in names]
    measured = prepared.steps.filter(pl.col("process").is_in(list(names))).height > 0
    ranks = {rank for rank in rows["rank"].unique().to_list() if rank is not None}
    ranks |= {report.rank for report in own if report.rank is not None}
    return CompilerFacts(
        backend=backend,
        versions=_versions(tables, rows, names),
        ranks=tuple(sorted(ranks)),
        source=_source(rows, own),
        compiles=sum(_most(rows, own, name) for name in names),
        recompiles=_recompiles(rows),
        limit_hits=count(rows, "limit_hit"),
        failures=count(rows, "failure"),
        graph_breaks=_graph_breaks(rows),
        transfers=_transfers(rows, own, names),
        fallbacks=max(count(rows, "fallback"), sum(sum(report.unlowered().values()) for report in own)),
        compile_ms=_compile_ms(rows, own, names),
        in_steps_ms=_in_steps_ms(prepared.of(backend), measured),
        longest_ms=_longest_ms(rows, own),
        marked_steps=max((report.marks for report in own if report.marks is not None), default=None),
        step_estimate_ms=None if measured else step_estimate_ms(own),
        unknown=_unknown(tables, rows, backend),
    )


def count(rows: pl.DataFrame, kind: str) -> int:
    """Events of a kind."""
    return int(rows.filter(pl.col("kind") == kind)["count"].sum())


def _most(rows: pl.DataFrame, reports: Sequence[Report], process: str) -> int:
    """Compilations of a process: of its report, or of its events where these are more (counters can be cleared)."""
    events = int(counted(rows.filter(pl.col("process") == process))["count"].sum())
    return max([events, *(report.compiles() for report in reports if report.process == process)])


def _recompiles(rows: pl.DataFrame) -> int | None:
    recompiled = counted(rows).filter(pl.col("kind") == "recompile")
    told = recompiled.height or rows.filter(pl.col("source").str.starts_with(METRICS)).height
    return int(recompiled["count"].sum()) if told else None


def _graph_breaks(rows: pl.DataFrame) -> int | None:
    """The handler for graph breaks goes in with the one for metrics."""
    breaks = count(rows, "graph_break")
    return breaks if breaks or rows.filter(pl.col("source").str.starts_with(METRICS)).height else None


def _transfers(rows: pl.DataFrame, reports: Sequence[Report], names: Sequence[str]) -> int | None:
    events = rows.filter(pl.col("kind") == "transfer")
    if events.is_empty() and not any(report.complete for report in reports):
        return None
    total = 0
    for name in names:
        own = int(events.filter(pl.col("process") == name)["count"].sum())
        total += max([own, *(report.transfers() for report in reports if report.process == name)])
    return total


def _compile_ms(rows: pl.DataFrame, reports: Sequence[Report], names: Sequence[str]) -> float | None:
    """Union of spans where they are known; of a process whose report holds more than its events, the report's sum."""
    found = []
    for name in names:
        told = spans.total_ns(rows.filter(pl.col("process") == name))
        timed = spans.durations(rows.filter(pl.col("process") == name)).drop_nulls("time_ns").height
        sums = [report.compile_ns() for report in reports if report.process == name]
        own = [round(value) for value in sums if value is not None]
        if own and not timed:
            told = max([*own, *([told] if told is not None else [])])
        if told is not None:
            found.append(told)
    return sum(found) / 1e6 if found else None


def _in_steps_ms(own: Prepared, measured: bool) -> float | None:
    """Of steps with a wall time what was spent in them; else the time of events that name their step."""
    told = spans.durations(own.rows)
    if measured:
        return int(spans.per_step_ns(own).sum()) / 1e6 if told.height else None
    named = spans.total_ns(told.drop_nulls("step"))
    return None if named is None else named / 1e6


def _longest_ms(rows: pl.DataFrame, reports: Sequence[Report]) -> float | None:
    single = spans.durations(rows).filter(pl.col("count") == 1)["duration_ns"].max()
    told = [float(single)] if isinstance(single, int) else []
    told += [value for report in reports if (value := longest_ns(report, "CompileTime")) is not None]
    return max(told) / 1e6 if told else None


def _versions(tables: Tables, rows: pl.DataFrame, names: Sequence[str]) -> tuple[str, ...]:
    """What the ranks say of their packages, else what the events say of their source."""
    wanted = ("torch", "torch_xla")
    told = [
        f"{package} {rank.versions[package]}"
        for rank in tables.ranks
        if rank.process in names
        for package in wanted
        if rank.versions.get(package)
    ]
    if not told:
        tails = [str(source).rpartition(", ")[2] for source in rows["source"].unique().drop_nulls().sort().to_list()]
        told = [tail for tail in tails if tail.startswith("torch")]
    return tuple(dict.fromkeys(told))


def _source(rows: pl.DataFrame, reports: Sequence[Report]) -> str:
    heads = [_head(str(source)) for source in rows["source"].drop_nulls().unique(maintain_order=True).to_list()]
    if not heads and any(report.complete for report in reports):
        return "metrics report"
    return "; ".join(dict.fromkeys(heads))


def _head(source: str) -> str:
    """A source without its version."""
    head, _, tail = source.rpartition(", ")
    return head if head and tail.startswith("torch") else source


def _unknown(tables: Tables, rows: pl.DataFrame, backend: str) -> int:
    unread = 0
    for _, data in event_data(tables, "compile_unknown"):
        value = data.get("count")
        if (data.get("backend") or TORCH_COMPILE) == backend:
            unread += value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
    return unread + int(rows.filter(pl.col("cause") == "unknown")["count"].sum())
