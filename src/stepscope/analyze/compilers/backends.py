"""A backend in one record: what it compiled, how long that took of the run and of its steps, and whether checks pass.

Wall time is measured, or estimated from a report. How often a backend compiled is asked three ways: over the whole run
as the article counts, in the last steps, and late. The whole-run rate holds the compilations of warm-up for ever, so it
speaks of runs whose compiling is long over and misses a storm that begins late. The windowed count asks the last steps
after warm-up alone. Both are made here; what they are worth is the rules' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.compilers import xla_reports
from stepscope.analyze.compilers.prepared import (
    COMPILATIONS,
    COMPILERS,
    TIMED,
    TORCH_COMPILE,
    TORCH_XLA,
    TRACE,
    Row,
    counted,
    durations,
    groups,
    per_step_ns,
    prepare,
    total_ns,
)
from stepscope.analyze.compilers.xla_reports import WARMUP_STEPS, Rate, Report, estimated_wall_ns, longest_ns
from stepscope.analyze.context import Context
from stepscope.engine.journal import event_data, mean
from stepscope.engine.step_labels import STEADY
from stepscope.model import Place
from stepscope.model.compilers import (
    CompilerCause,
    CompilerCheck,
    CompilerFacts,
    CompilerPoint,
    CompilerSteps,
    CompilersView,
    CompileStorm,
    EagerAfterLimit,
)
from stepscope.model.counted import things
from stepscope.read.text import integer
from stepscope.tables.arrays import Bools, Int64
from stepscope.tables.schema import Tables

METRICS = "CompilationMetrics"  # the source that tells everything of torch.compile
# The windowed rule: a storm is a compile in 3 of the last 10 steps. Chosen on four recorded sequences, not tuned.
WINDOW_STEPS, WINDOW_COMPILES = 10, 3
QUIET_STEPS = 50  # a compile after so many steps without one comes as a surprise
POINTS_SHOWN = 500  # as many as a chart of that width can draw
EAGER_STEPS = 3  # a median of fewer steps is no measurement

_OWN, _KIND = pl.col("pos") == pl.col("owner"), pl.col("kind")
_COUNTS = {
    "compiles": _KIND.is_in(COMPILATIONS) & _OWN,
    "recompiles": (_KIND == "recompile") & _OWN,
    "transfers": _KIND == "transfer",
    "breaks": _KIND == "graph_break",
    "attempts": _KIND.is_in(TIMED),
}
_SUMS = [pl.col("count").filter(wanted).sum().alias(name) for name, wanted in _COUNTS.items()]


def build(context: Context) -> CompilersView | None:
    """All of it; None where the run holds no compile event, no counters and no warning of a log."""
    tables = context.tables
    quotes = xla_reports.quoted(tables)
    if tables.compiles.is_empty() and tables.counters.is_empty() and not quotes:
        return None
    rows, steps = prepare(tables, context.labelled)
    reports = xla_reports.latest(tables)
    names = {*rows["backend"].drop_nulls(), *([TORCH_XLA] if reports or quotes else [])}
    used = [
        Backend(name, rows.filter(pl.col("backend") == name), steps, reports if name == TORCH_XLA else ())
        for name in sorted(names, key=lambda name: (name != TORCH_COMPILE, name != TORCH_XLA, name))
    ]
    causes = groups(rows, steps, context.code)
    found = tuple(facts(tables, one) for one in used)
    by_backend = [compiling_steps(one, known) for one, known in zip(used, found, strict=True)]
    rates = {one.name: article_rate(one) for one in used}
    storms = (storm(one, rates[one.name], own) for one, own in zip(used, by_backend, strict=True))
    all_steps = tuple(kind for own in by_backend for kind in own)
    return CompilersView(
        backends=found,
        causes=tuple(cause for cause, _ in causes),
        steps=all_steps,
        points=points(rows, steps),
        metrics=xla_reports.metrics(reports),
        warnings=xla_reports.warnings(quotes, reports, rates),
        limits=limits(used, causes),
        storms=tuple(storm for storm in storms if storm is not None),
        notes=tuple(dict.fromkeys(notes(rows, found, all_steps))),
    )


def table(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """`steps` with compile_ns, the counts compiles, recompiles, transfers and breaks of `rows`, and `compiling`."""
    steps = steps.with_columns(pl.Series("compile_ns", per_step_ns(rows, steps), dtype=pl.Int64))
    counts = rows.drop_nulls("at").group_by(row="at").agg(*_SUMS)
    steps = steps.join(counts, on="row", how="left", maintain_order="left").with_columns(pl.col(*_COUNTS).fill_null(0))
    compiling = (pl.col("attempts") > 0) | (pl.col("compile_ns") > 0)
    return steps.with_columns(compiling=compiling, late=pl.col("index") >= WARMUP_STEPS)


class Backend(Struct, frozen=True, dict=True):
    """One backend of a run: its rows, the run's steps, and torch_xla's reports (of the others none)."""

    name: str
    rows: pl.DataFrame
    run_steps: pl.DataFrame
    reports: tuple[Report, ...]

    @cached_property
    def processes(self) -> list[str]:
        """Those that used it."""
        return sorted({*self.rows["process"], *(report.process for report in self.reports)})

    @cached_property
    def table(self) -> pl.DataFrame:
        """`table` of its rows."""
        return table(self.rows, self.run_steps)

    def count(self, kind: str) -> int:
        return int(self.rows.filter(pl.col("kind") == kind)["count"].sum())

    def most(self, rows: pl.DataFrame, reported: Callable[[Report], int]) -> int:
        """Over its processes, of the report, or of the events `rows` where these are more (counters can be cleared)."""
        events = _by_process(rows)
        told = {report.process: reported(report) for report in self.reports}
        return sum(max(events.get(name, 0), told.get(name, 0)) for name in self.processes)


def _by_process(rows: pl.DataFrame) -> dict[str, int]:
    return dict(rows.group_by("process").agg(pl.col("count").sum()).iter_rows())


def facts(tables: Tables, backend: Backend) -> CompilerFacts:
    """All ranks together."""
    rows, own, measured = backend.rows, backend.reports, not _steps(backend).is_empty()
    # it tells everything of torch.compile: the handler for graph breaks goes in with the one for metrics
    watched = rows.filter(pl.col("source").str.starts_with(METRICS)).height > 0
    recompiled = counted(rows).filter(pl.col("kind") == "recompile")
    breaks, transfers = backend.count("graph_break"), rows.filter(pl.col("kind") == "transfer")
    complete = any(report.complete for report in own)
    # of each source of events what it is, and the version behind it, "" where it names none
    sources = []
    for source in rows["source"].drop_nulls().unique(maintain_order=True).to_list():
        head, _, tail = source.rpartition(", ")
        sources.append((head or source, tail) if tail.startswith("torch") else (source, ""))
    # what the ranks say of their packages, else what the events say of their source
    versions = [
        f"{package} {rank.versions[package]}"
        for rank in tables.ranks
        if rank.process in backend.processes
        for package in ("torch", "torch_xla")
        if rank.versions.get(package)
    ]
    unread = [data for _, data in event_data(tables, "compile_unknown")]
    unread = [data for data in unread if (data.get("backend") or TORCH_COMPILE) == backend.name]
    # the union of spans where they are known; of a process whose report holds more than its events, the report's sum
    spent = []
    by_report = {report.process: report.compile_ns() for report in own}
    for name in backend.processes:
        mine = rows.filter(pl.col("process") == name)
        told, whole = total_ns(mine), by_report.get(name)
        if whole is not None and not durations(mine).drop_nulls("time_ns").height:
            told = max(round(whole), told or 0)
        if told is not None:
            spent.append(told)
    # of steps with a wall time what was spent in them; else the time of events that name their step
    timed = durations(rows)
    in_steps = total_ns(timed.drop_nulls("step"))
    if measured:
        in_steps = int(backend.table["compile_ns"].sum()) if timed.height else None
    longest = timed.filter(pl.col("count") == 1)["duration_ns"].to_list()
    longest += [value for report in own if (value := longest_ns(report, "CompileTime")) is not None]
    return CompilerFacts(
        backend=backend.name,
        versions=tuple(dict.fromkeys(versions or [tail for _, tail in sorted(sources) if tail])),
        ranks=tuple(sorted({rank for rank in (*rows["rank"], *(report.rank for report in own)) if rank is not None})),
        source="; ".join(dict.fromkeys(head for head, _ in sources)) or ("metrics report" if complete else ""),
        compiles=backend.most(counted(rows), Report.compiles),
        recompiles=int(recompiled["count"].sum()) if recompiled.height or watched else None,
        limit_hits=backend.count("limit_hit"),
        failures=backend.count("failure"),
        graph_breaks=breaks if breaks or watched else None,
        transfers=backend.most(transfers, Report.transfers) if transfers.height or complete else None,
        fallbacks=max(backend.count("fallback"), sum(sum(report.unlowered().values()) for report in own)),
        compile_ms=sum(spent) / 1e6 if spent else None,
        in_steps_ms=None if in_steps is None else in_steps / 1e6,
        longest_ms=max(longest) / 1e6 if longest else None,
        marked_steps=max((report.marks for report in own if report.marks is not None), default=None),
        step_estimate_ms=None if measured else xla_reports.step_estimate_ms(own),
        unknown=int(rows.filter(pl.col("cause") == "unknown")["count"].sum())
        + sum(max(integer(data.get("count")) or 1, 1) for data in unread),
    )


def _steps(backend: Backend) -> pl.DataFrame:
    """The part of `table` that is of its processes."""
    return backend.table.filter(pl.col("process").is_in(backend.processes))


def notes(rows: pl.DataFrame, backends: Sequence[CompilerFacts], steps: Sequence[CompilerSteps]) -> Iterator[str]:
    """What was not seen of compiling, and why, in the order in which a reader needs it."""
    traced = rows.filter(pl.col("source").str.starts_with(TRACE))["kind"]
    if traced.is_in(COMPILATIONS).any():
        yield (
            "Compile spans come from profiler traces, which tell when and how long, not why; "
            "what was compiled outside the recorded steps is not in them."
        )
    if (traced == "transfer").any():
        yield "Copies from a device to the host come from profiler traces: only the steps these cover have any."
    for one in backends:
        untold = (pl.col("backend") == one.backend) & (pl.col("kind") == "recompile") & pl.col("cause").is_null()
        unexplained = rows.filter(untold).height
        by_torch = one.backend == TORCH_COMPILE and one.compiles > 0
        said = {
            "torch_xla does not tell a recompilation from a first compilation: each new graph counts alike.": (
                one.backend == TORCH_XLA and one.recompiles is None and one.compiles > 1
            ),
            "This source does not tell recompilations from first compilations, nor their causes.": (
                by_torch and one.recompiles is None
            ),
            "Graph breaks were not watched.": by_torch and one.graph_breaks is None,
            f"The cause of {things(unexplained, 'recompilation')} was not told: older versions of torch do not.": (
                unexplained
            ),
            f"{things(one.unknown, 'event')} of {one.backend} in a wording that is not known: "
            "counted, their cause not read.": one.unknown,
        }
        yield from (text for text, holds in said.items() if holds)
    if any(kind.estimated for kind in steps):
        yield (
            "No source gives the wall time of steps: it is estimated from the rates of the metrics, "
            "which stand on the last samples alone."
        )
    for backend in (one.backend for one in backends if one.backend in COMPILERS):
        if not any(kind.backend == backend for kind in steps):
            yield f"Nothing counts the steps of {backend}: how often it compiled per step is not known."


# ---- checks ----------------------------------------------------------------------------------------------------------


RECOMPILE, GRAPH_BREAK = "recompile", "graph-break"
CHECKS = (RECOMPILE, GRAPH_BREAK)
_Judged = tuple[bool, bool, str, Place | None]  # as `CompilerCheck` has them behind the name


def checks(view: CompilersView | None, names: Iterable[str], *, recorded: bool = False) -> tuple[CompilerCheck, ...]:
    """One result per name, in order.

    Args:
        view: what compilers did; None where the run tells of none.
        names: of `CHECKS`.
        recorded: the run was recorded by our agent, which tells of every compilation; then a run without any has
            passed instead of not being judged.

    Raises:
        ValueError: for a name that is none of `CHECKS`.
    """
    result = []
    for name in names:
        if name not in CHECKS:
            raise ValueError(f"no check is named {name!r}; there are {', '.join(CHECKS)}")
        result.append(CompilerCheck(name, *_judged(view, name, recorded)))
    return tuple(result)


def _judged(view: CompilersView | None, name: str, recorded: bool) -> _Judged:
    passed: _Judged = (False, True, "torch.compile was not used", None)
    if view is None:
        return passed if recorded else (False, False, "nothing in this run tells of compilations", None)
    failing = ("recompile", "limit_hit") if name == RECOMPILE else ("graph_break",)
    causes = [cause for cause in view.causes if cause.kind in failing]
    if causes:
        # a limit hit speaks first, then the dearest with a place
        worst = min(causes, key=lambda cause: (cause.kind != "limit_hit", cause.place is None))
        refused = sum(cause.count for cause in causes if cause.kind == "limit_hit")
        others = sum(cause.count for cause in causes) - refused
        first = min((cause.first_step for cause in causes if cause.first_step is not None), default=None)
        parts = [things(others, "recompilation" if name == RECOMPILE else "graph break")] if others else []
        parts += [f"{refused} refused at the limit of compiled versions"] if refused else []
        parts += [f"the first in step {first}"] if first is not None else []
        reason = worst.text or worst.cause
        return True, True, ", ".join(parts) + (f"; {reason}" if reason else ""), worst.place
    if name == RECOMPILE and (storms := _storms(view)) is not None:
        return storms
    if name == GRAPH_BREAK and any(facts.graph_breaks is not None for facts in view.backends):
        return False, True, "no graph break", None
    used = {facts.backend for facts in view.backends}
    if recorded and not used.intersection(COMPILERS if name == RECOMPILE else (TORCH_COMPILE,)):
        return passed
    unseen = "no source of this run tells recompilations from first compilations"
    return False, False, unseen if name == RECOMPILE else "graph breaks were not watched", None


def _storms(view: CompilersView) -> _Judged | None:
    """Of torch_xla, which does not tell recompilations, a storm by either rule; None where nothing can be judged.

    A run of no more steps than warm-up cannot show a storm, so torch_xla's is not judged then.
    """
    storms = [storm for storm in view.storms if storm.backend == TORCH_XLA]
    stormy = next((storm for storm in storms if storm.whole_run or storm.windows), None)
    if stormy is not None:
        place = next((c.place for c in view.causes if c.backend == TORCH_XLA and c.kind == "compile" and c.place), None)
        text = f"torch_xla compiled again and again from step {stormy.first_window_step} on, after warm-up"
        if stormy.whole_run:
            text = f"CompileTime too frequent: {stormy.compiles} counts during {stormy.steps} steps"
        return True, True, text, place
    if any(facts.recompiles is not None for facts in view.backends):
        return False, True, "no recompilation", None
    quiet = next((storm for storm in storms if storm.steps > WARMUP_STEPS), None)
    if quiet is None:
        return None
    graphs, steps = things(quiet.compiles, "graph"), things(quiet.steps, "step")
    return False, True, f"torch_xla compiled {graphs} in {steps}: too few for a storm", None


# ---- steps -----------------------------------------------------------------------------------------------------------


def compiling_steps(backend: Backend, one: CompilerFacts) -> list[CompilerSteps]:
    """One per kind of step of the processes that used it, "train" first; counts that no source tells are None.

    Steps in profiler windows are left out where there are others. Of what traces alone tell, only the steps that these
    cover are looked at. Where none of these processes has steps with wall times, one for all steps that the backend's
    own reports count.
    """
    rows, all_steps = backend.rows, _steps(backend)
    if all_steps.is_empty():
        return _reported(backend, one)
    if rows.height and rows["source"].fill_null("").str.starts_with(TRACE).all() and all_steps["traced"].any():
        all_steps = all_steps.filter(pl.col("traced"))
    # some source says how long compiling took, or nothing was compiled
    told = durations(rows).height > 0 or rows.filter(pl.col("kind").is_in(TIMED)).is_empty()
    found = []
    for kind in sorted(all_steps["kind"].unique().to_list(), key=lambda kind: (kind != "train", kind)):
        steps = all_steps.filter(pl.col("kind") == kind)
        outside = steps.filter(~pl.col("in_window"))
        steps = outside if outside.height else steps
        late, compiling = steps.filter(pl.col("late")), steps.filter(pl.col("compiling"))
        quiet = steps.filter(~pl.col("compiling") & (pl.col("reason") == STEADY))
        compile_ns, late_ns = int(steps["compile_ns"].sum()), int(late["compile_ns"].sum())
        wall_ns, late_wall_ns = int(steps["wall_ns"].sum()), int(late["wall_ns"].sum())
        of_kind = CompilerSteps(
            backend=one.backend,
            kind=kind,
            steps=steps.height,
            compiling_steps=compiling.height,
            compile_ms=compile_ns / 1e6 if told else None,
            wall_ms=wall_ns / 1e6,
            share=compile_ns / wall_ns if told else None,
            late_compile_ms=late_ns / 1e6 if told else None,
            late_wall_ms=late_wall_ns / 1e6,
            late_share=late_ns / late_wall_ns if told and late.height else None,
            compiles=int(steps["compiles"].sum()),
            recompiles=None if one.recompiles is None else int(steps["recompiles"].sum()),
            transfers=None if one.transfers is None else int(steps["transfers"].sum()),
            breaks=None if one.graph_breaks is None else int(steps["breaks"].sum()),
            mean_compiling_ms=mean(compiling["wall_ns"]) / 1e6 if compiling.height else None,
            mean_quiet_ms=mean(quiet["wall_ns"]) / 1e6 if quiet.height else None,
        )
        found.append(of_kind)
    return found


def _reported(backend: Backend, one: CompilerFacts) -> list[CompilerSteps]:
    """The steps that reports count, all of them "train": a report knows no kinds."""
    marked = [report for report in backend.reports if report.marks]
    if not marked:
        return []
    rows = backend.rows.filter(pl.col("process").is_in([report.process for report in marked]))
    steps = sum(report.marks or 0 for report in marked)
    walls = [wall for report in marked if (wall := estimated_wall_ns(report)) is not None]
    wall_ns = sum(walls) if len(walls) == len(marked) else None
    whole = [value for report in marked if (value := report.compile_ns()) is not None]
    spent = [ns for ns in (total_ns(rows), sum(whole) if whole else None) if ns is not None]
    compile_ns = max(spent, default=None)
    # the compilations whose step is known, with the step's index
    parts = []
    for report in marked:
        own = rows.filter((pl.col("process") == report.process) & pl.col("kind").is_in(COMPILATIONS))
        parts.append(own.drop_nulls("step").with_columns(index=pl.col("step") - report.first_step(own)))
    numbered = pl.concat(parts)
    late = numbered.filter(pl.col("index") >= WARMUP_STEPS)
    late_ns = total_ns(late) if late.height else 0
    late_steps = sum(max((report.marks or 0) - WARMUP_STEPS, 0) for report in marked)
    late_wall_ns = wall_ns * late_steps / steps if wall_ns is not None else None
    compiled, reported = counted(rows), sum(report.compiles() for report in marked)
    known = numbered.height > 0 or not (compiled.height or reported)
    counts = {kind: int(rows.filter(pl.col("kind") == kind)["count"].sum()) for kind in rows["kind"].unique()}
    transfers = max(counts.get("transfer", 0), sum(report.transfers() for report in marked))

    def share(part: float | None, whole: float | None) -> float | None:
        """At most 1: an estimated wall time may be shorter than what was measured inside it."""
        return None if part is None or not whole else min(part / whole, 1.0)

    return [
        CompilerSteps(
            backend=backend.name,
            kind="train",
            steps=steps,
            compiling_steps=numbered.select("process", "index").n_unique() if known else None,
            compile_ms=None if compile_ns is None else compile_ns / 1e6,
            wall_ms=None if wall_ns is None else wall_ns / 1e6,
            share=share(compile_ns, wall_ns),
            late_compile_ms=late_ns / 1e6 if known and late_ns is not None else None,
            late_wall_ms=None if late_wall_ns is None else late_wall_ns / 1e6,
            late_share=share(late_ns, late_wall_ns) if known else None,
            compiles=max(int(compiled["count"].sum()), reported),
            recompiles=None if one.recompiles is None else counts.get("recompile", 0),
            transfers=None if one.transfers is None else transfers,
            breaks=None if one.graph_breaks is None else counts.get("graph_break", 0),
            mean_compiling_ms=None,
            mean_quiet_ms=None,
            estimated=wall_ns is not None,
        )
    ]


def points(rows: pl.DataFrame, steps: pl.DataFrame, limit: int = POINTS_SHOWN) -> tuple[CompilerPoint, ...]:
    """Steps of the lead rank's process with a compilation, graph break or transfer, of all backends, in order.

    That is the process of the lowest rank with events; of several such, the one with the most. Of more than `limit`
    steps, those that recompiled stay, then of equal stretches of the rest the dearest. Where no step has a wall time,
    the steps that events name.
    """
    counts = rows.group_by("rank", "process").len()
    lead = counts.sort(["rank", "len", "process"], descending=[False, True, False]).select("process").head(1)
    rows = rows.join(lead, on="process", how="semi", maintain_order="left")
    shown = table(rows, steps).join(lead, on="process", how="semi", maintain_order="left")
    if shown.is_empty():
        named = rows.drop_nulls("step")
        lengths = durations(named).group_by("step").agg(compile_ns=pl.col("duration_ns").sum())
        shown = named.group_by("step").agg(*_SUMS).join(lengths, on="step", how="left").sort("step")
        unknown = pl.lit(None, pl.Int64)
        shown = shown.with_columns(compiling=pl.col("compiles") > 0, kind=pl.lit("train"), wall_ns=unknown)
    shown = shown.filter(pl.col("compiling") | (pl.col("breaks") > 0) | (pl.col("transfers") > 0))
    if shown.height > limit:
        lengths_ns, recompiled = shown["compile_ns"].fill_null(0).to_list(), shown["recompiles"] > 0
        first = _dearest(recompiled.arg_true().to_list(), lengths_ns, limit)
        shown = shown[sorted(first + _dearest((~recompiled).arg_true().to_list(), lengths_ns, limit - len(first)))]
    return tuple(
        CompilerPoint(
            **{name: row[name] for name in ("step", "kind", "compiles", "recompiles", "breaks", "transfers")},
            wall_ms=None if row["wall_ns"] is None else row["wall_ns"] / 1e6,
            compile_ms=None if row["compile_ns"] is None else row["compile_ns"] / 1e6,
        )
        for row in shown.iter_rows(named=True)
    )


def _dearest(rows: list[int], lengths: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the rows: of each of as many equal stretches the one that took longest."""
    if len(rows) <= limit:
        return rows
    edges = [number * len(rows) // limit for number in range(limit + 1)] if limit else []
    return [max(rows[low:high], key=lengths.__getitem__) for low, high in pairwise(edges)]


# ---- how often -------------------------------------------------------------------------------------------------------


def article_rate(backend: Backend) -> Rate | None:
    """The rate of the process that compiled most.

    torch_xla: samples of CompileTime by MarkStep, of the process's report. torch.compile, and torch_xla without a
    report: compilations that events tell (of torch.compile, frames) by steps of all kinds. None without steps.
    """
    reports = {report.process: report for report in backend.reports if report.marks}
    events = _by_process(counted(backend.rows))
    measured = dict(backend.run_steps.group_by("process").len().iter_rows())
    rates = []
    for process in backend.processes:
        report, compiles, steps = reports.get(process), events.get(process, 0), measured.get(process, 0)
        if report is not None:
            compiles = report.samples("CompileTime") if report.complete else compiles
            steps = report.marks or steps
        if steps:
            rates.append(Rate(process, compiles, steps))
    return max(rates, key=lambda rate: (rate.too_frequent, rate.compiles, rate.steps), default=None)


def storm(backend: Backend, rate: Rate | None, steps: Iterable[CompilerSteps]) -> CompileStorm | None:
    """The rates of one compiler, by its `article_rate`; None where nothing counts steps."""
    if backend.name not in COMPILERS or rate is None:
        return None
    worst: dict[str, Any] = dict.fromkeys(("kind", "windows", "first_window_step", "late_step", "quiet_before"))
    found = []
    for kind, numbers, compiled in _sequences(backend):
        after = np.arange(len(compiled)) >= WARMUP_STEPS
        so_far = np.concatenate([[0], np.cumsum(compiled & after)])
        ends = np.arange(1, len(compiled) + 1)
        stormy = np.flatnonzero(so_far[ends] - so_far[np.maximum(ends - WINDOW_STEPS, 0)] >= WINDOW_COMPILES)
        at = np.flatnonzero(compiled)
        quiet = np.diff(np.concatenate([[-1], at])) - 1
        late = np.flatnonzero(quiet >= QUIET_STEPS)[:1]
        own = {
            "kind": kind,
            "windows": len(stormy),
            "first_window_step": int(numbers[stormy[0]]) if len(stormy) else None,
            "late_step": int(numbers[at[late[0]]]) if len(late) else None,
            "quiet_before": int(quiet[late[0]]) if len(late) else None,
            "late_steps": int((compiled & after).sum()),
        }
        found.append(own)
    worst = max(found, key=lambda own: (own["windows"], own["quiet_before"] or 0, own["late_steps"]), default=worst)
    # compile time after warm-up and its share, of all kinds together
    told = [(kind.late_compile_ms, kind.late_wall_ms or 0.0) for kind in steps if kind.late_compile_ms is not None]
    wall_ms = sum(wall for _, wall in told)
    return CompileStorm(
        backend=backend.name,
        compiles=rate.compiles,
        steps=rate.steps,
        whole_run=rate.too_frequent,
        late_ms=sum(late for late, _ in told) if told else None,
        late_share=min(sum(late for late, wall in told if wall) / wall_ms, 1.0) if wall_ms else None,
        **worst,
    )


def _sequences(backend: Backend) -> Iterator[tuple[str | None, Int64, Bools]]:
    """A kind of step, numbers of steps, and whether each compiled: of each process and kind; of a report whose
    compilations name their steps, by these."""
    by_process = {report.process: report for report in backend.reports}
    for process in backend.processes:
        mine = backend.table.filter(pl.col("process") == process)
        for part in mine.partition_by("kind", maintain_order=True):
            ordered = part.sort("index")
            yield str(part["kind"][0]), ordered["step"].to_numpy(), (ordered["compiles"] > 0).to_numpy()
        report = by_process.get(process)
        if mine.is_empty() and report is not None and report.marks:
            rows = counted(backend.rows).filter(pl.col("process") == process)
            named = rows.drop_nulls("step")
            if named.is_empty() and (rows.height or report.compiles()):
                continue  # it compiled, and nothing tells when
            first, steps = report.first_step(rows), report.marks
            at = named["step"].to_numpy() - first
            compiled = np.zeros(steps, bool)
            compiled[at[(at >= 0) & (at < steps)]] = True
            yield None, first + np.arange(steps), compiled


def limits(
    backends: Iterable[Backend], groups: Iterable[tuple[CompilerCause, list[Row]]]
) -> tuple[EagerAfterLimit, ...]:
    """One per cause of a limit hit, in the order of the causes: steps before and after it.

    These are steps of the kind and the processes it happened in, windows and first batches left out, ranks pooled.
    """
    by_name = {backend.name: backend.table for backend in backends}
    found = []
    for cause, rows in groups:
        if cause.kind != "limit_hit":
            continue
        hits = pl.DataFrame(
            [(row["process"], row["at"]) for row in rows if row["at"] is not None],
            schema={"process": pl.String, "at": pl.Int64},
            orient="row",
        ).unique("process", keep="first")
        steps = by_name[cause.backend]
        hits = hits.join(steps.select(at="row", hit_kind="kind"), on="at")
        own = steps.join(hits, on="process", maintain_order="left").filter(
            (pl.col("kind") == pl.col("hit_kind")) & ~pl.col("in_window") & ~pl.col("first_batch")
        )
        own = own.with_columns(left_ns=pl.col("wall_ns") - pl.col("compile_ns"))
        sides, medians = [], []
        for side in (own.filter(pl.col("row") < pl.col("at")), own.filter(pl.col("row") > pl.col("at"))):
            quiet = side.filter(~pl.col("compiling"))
            sides.append(quiet if quiet.height >= EAGER_STEPS else side)
            median = sides[-1]["left_ns"].median() if sides[-1].height >= EAGER_STEPS else None
            medians.append(median / 1e6 if isinstance(median, int | float) else None)
        found.append(
            EagerAfterLimit(
                cause=cause.id,
                step=cause.first_step,
                before_ms=medians[0],
                before_steps=sides[0].height,
                after_ms=medians[1],
                after_steps=sides[1].height,
                before_compiling=bool(sides[0]["compiling"].any()),
            )
        )
    return tuple(found)
