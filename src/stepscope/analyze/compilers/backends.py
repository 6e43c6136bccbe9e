"""A backend in one record: what it compiled, how long that took, what it could not tell, and whether checks pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import polars as pl

from stepscope.analyze.compilers.per_step import Backend
from stepscope.analyze.compilers.prepared import (
    COMPILERS,
    TORCH_COMPILE,
    TORCH_XLA,
    TRACE,
    WARMUP_STEPS,
    Prepared,
    counted,
    durations,
    per_step_ns,
    total_ns,
)
from stepscope.analyze.compilers.xla_reports import Report, longest_ns, step_estimate_ms
from stepscope.engine.journal import event_data
from stepscope.model.compilers import (
    CompilerCause,
    CompilerCheck,
    CompilerFacts,
    CompilerSteps,
    CompilersView,
)
from stepscope.tables.schema import Tables

METRICS = "CompilationMetrics"  # the source that tells everything of torch.compile


def backends(prepared: Prepared, reports: tuple[Report, ...], warned: bool) -> tuple[Backend, ...]:
    """The backends a run tells of, torch.compile first; `warned`: a log of torch_xla's warnings is at hand."""
    names = {str(name) for name in prepared.rows["backend"].unique().drop_nulls().to_list()}
    if reports or warned:
        names.add(TORCH_XLA)
    found = []
    for name in sorted(names, key=lambda name: (name != TORCH_COMPILE, name != TORCH_XLA, name)):
        own, told = prepared.of(name), reports if name == TORCH_XLA else ()
        processes = {str(process) for process in own.rows["process"].unique().to_list()}
        found.append(Backend(name, own, told, tuple(sorted(processes.union(report.process for report in told)))))
    return tuple(found)


def facts(tables: Tables, backend: Backend) -> CompilerFacts:
    """All ranks together."""
    rows, own, names = backend.own.rows, backend.reports, backend.processes
    measured = backend.own.steps.filter(pl.col("process").is_in(list(names))).height > 0
    ranks = {rank for rank in rows["rank"].unique().to_list() if rank is not None}
    ranks |= {report.rank for report in own if report.rank is not None}
    return CompilerFacts(
        backend=backend.name,
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
        in_steps_ms=_in_steps_ms(backend.own, measured),
        longest_ms=_longest_ms(rows, own),
        marked_steps=max((report.marks for report in own if report.marks is not None), default=None),
        step_estimate_ms=None if measured else step_estimate_ms(own),
        unknown=_unknown(tables, rows, backend.name),
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
        told = total_ns(rows.filter(pl.col("process") == name))
        timed = durations(rows.filter(pl.col("process") == name)).drop_nulls("time_ns").height
        sums = [report.compile_ns() for report in reports if report.process == name]
        own = [round(value) for value in sums if value is not None]
        if own and not timed:
            told = max([*own, *([told] if told is not None else [])])
        if told is not None:
            found.append(told)
    return sum(found) / 1e6 if found else None


def _in_steps_ms(own: Prepared, measured: bool) -> float | None:
    """Of steps with a wall time what was spent in them; else the time of events that name their step."""
    told = durations(own.rows)
    if measured:
        return int(per_step_ns(own).sum()) / 1e6 if told.height else None
    named = total_ns(told.drop_nulls("step"))
    return None if named is None else named / 1e6


def _longest_ms(rows: pl.DataFrame, reports: Sequence[Report]) -> float | None:
    single = durations(rows).filter(pl.col("count") == 1)["duration_ns"].max()
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
    """What the figures stand on, without versions."""
    heads = []
    for source in rows["source"].drop_nulls().unique(maintain_order=True).to_list():
        head, _, tail = str(source).rpartition(", ")
        heads.append(head if head and tail.startswith("torch") else str(source))
    if not heads and any(report.complete for report in reports):
        return "metrics report"
    return "; ".join(dict.fromkeys(heads))


def _unknown(tables: Tables, rows: pl.DataFrame, backend: str) -> int:
    unread = 0
    for _, data in event_data(tables, "compile_unknown"):
        value = data.get("count")
        if (data.get("backend") or TORCH_COMPILE) == backend:
            unread += value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
    return unread + int(rows.filter(pl.col("cause") == "unknown")["count"].sum())


def notes(prepared: Prepared, backends: Sequence[CompilerFacts], steps: Sequence[CompilerSteps]) -> tuple[str, ...]:
    """What was not seen of compiling, and why, in the order in which a reader needs it."""
    return tuple(dict.fromkeys(_notes(prepared, backends, steps)))


def _notes(prepared: Prepared, backends: Sequence[CompilerFacts], steps: Sequence[CompilerSteps]) -> Iterator[str]:
    traced = prepared.rows.filter(pl.col("source").str.starts_with(TRACE))
    if traced.filter(pl.col("kind").is_in(["compile", "recompile"])).height:
        yield (
            "Compile spans come from profiler traces, which tell when and how long, not why; "
            "what was compiled outside the recorded steps is not in them."
        )
    if traced.filter(pl.col("kind") == "transfer").height:
        yield "Copies from a device to the host come from profiler traces: only the steps these cover have any."
    for one in backends:
        yield from _of_backend(one, prepared.of(one.backend).rows)
    if any(kind.estimated for kind in steps):
        yield (
            "No source gives the wall time of steps: it is estimated from the rates of the metrics, "
            "which stand on the last samples alone."
        )
    for backend in (one.backend for one in backends if one.backend in COMPILERS):
        kinds = [kind for kind in steps if kind.backend == backend]
        if not kinds:
            yield f"Nothing counts the steps of {backend}: how often it compiled per step is not known."


def _of_backend(one: CompilerFacts, rows: pl.DataFrame) -> Iterator[str]:
    if one.backend == TORCH_XLA and one.recompiles is None and one.compiles > 1:
        yield "torch_xla does not tell a recompilation from a first compilation: each new graph counts alike."
    if one.backend == TORCH_COMPILE:
        if one.recompiles is None and one.compiles:
            yield "This source does not tell recompilations from first compilations, nor their causes."
        if one.graph_breaks is None and one.compiles:
            yield "Graph breaks were not watched."
    unexplained = rows.filter((pl.col("kind") == "recompile") & pl.col("cause").is_null()).height
    if unexplained:
        yield (
            f"The cause of {unexplained} recompilation{'s' if unexplained > 1 else ''} was not told: "
            "older versions of torch do not."
        )
    if one.unknown:
        yield (
            f"{one.unknown} event{'s' if one.unknown > 1 else ''} of {one.backend} in a wording that is not known: "
            "counted, their cause not read."
        )


RECOMPILE, GRAPH_BREAK = "recompile", "graph-break"
CHECKS = (RECOMPILE, GRAPH_BREAK)


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
    makers = {RECOMPILE: _recompile, GRAPH_BREAK: _graph_break}
    result = []
    for name in names:
        if name not in makers:
            raise ValueError(f"no check is named {name!r}; there are {', '.join(CHECKS)}")
        result.append(_of_none(name, recorded) if view is None else makers[name](view, recorded))
    return tuple(result)


def _of_none(name: str, recorded: bool) -> CompilerCheck:
    text = "torch.compile was not used" if recorded else "nothing in this run tells of compilations"
    return CompilerCheck(name, failed=False, judged=recorded, text=text, place=None)


def _recompile(view: CompilersView, recorded: bool) -> CompilerCheck:
    """Recompilations and limit hits; of torch_xla, which does not tell them, a storm by either rule.

    A run of no more steps than warm-up cannot show a storm, so torch_xla's is not judged then.
    """
    causes = [cause for cause in view.causes if cause.kind in ("recompile", "limit_hit")]
    if causes:
        return CompilerCheck(RECOMPILE, True, True, _text(causes, "recompilation"), _worst(causes).place)
    storms = [storm for storm in view.storms if storm.backend == TORCH_XLA]
    stormy = next((storm for storm in storms if storm.whole_run or storm.windows), None)
    if stormy is not None:
        place = next((c.place for c in view.causes if c.backend == TORCH_XLA and c.kind == "compile" and c.place), None)
        text = f"torch_xla compiled again and again from step {stormy.first_window_step} on, after warm-up"
        if stormy.whole_run:
            text = f"CompileTime too frequent: {stormy.compiles} counts during {stormy.steps} steps"
        return CompilerCheck(RECOMPILE, True, True, text, place)
    if any(facts.recompiles is not None for facts in view.backends):
        return CompilerCheck(RECOMPILE, False, True, "no recompilation", None)
    counted = next((storm for storm in storms if storm.steps > WARMUP_STEPS), None)
    if counted is not None:
        graphs = f"{counted.compiles} graph" + ("" if counted.compiles == 1 else "s")
        text = f"torch_xla compiled {graphs} in {counted.steps} steps: too few for a storm"
        return CompilerCheck(RECOMPILE, False, True, text, None)
    if recorded and not _used(view, TORCH_COMPILE) and not _used(view, TORCH_XLA):
        return _of_none(RECOMPILE, recorded)
    text = "no source of this run tells recompilations from first compilations"
    return CompilerCheck(RECOMPILE, False, False, text, None)


def _graph_break(view: CompilersView, recorded: bool) -> CompilerCheck:
    causes = [cause for cause in view.causes if cause.kind == "graph_break"]
    if causes:
        return CompilerCheck(GRAPH_BREAK, True, True, _text(causes, "graph break"), _worst(causes).place)
    watched = any(facts.graph_breaks is not None for facts in view.backends)
    unused = recorded and not _used(view, TORCH_COMPILE)
    text = "no graph break" if watched else "torch.compile was not used" if unused else "graph breaks were not watched"
    return CompilerCheck(GRAPH_BREAK, False, watched or unused, text, None)


def _used(view: CompilersView, backend: str) -> bool:
    return any(facts.backend == backend for facts in view.backends)


def _worst(causes: list[CompilerCause]) -> CompilerCause:
    """A limit hit speaks first, then the dearest with a place."""
    return min(causes, key=lambda cause: (cause.kind != "limit_hit", cause.place is None))


def _text(causes: list[CompilerCause], noun: str) -> str:
    """`7 recompilations, 1 at the limit of versions, the first in step 1; s.calls == 0`."""
    worst = _worst(causes)
    reason = worst.text or worst.cause
    limits = sum(cause.count for cause in causes if cause.kind == "limit_hit")
    others = sum(cause.count for cause in causes) - limits
    parts = [f"{others} {noun}{'' if others == 1 else 's'}"] if others else []
    if limits:
        parts.append(f"{limits} refused at the limit of compiled versions")
    steps = [cause.first_step for cause in causes if cause.first_step is not None]
    if steps:
        parts.append(f"the first in step {min(steps)}")
    return ", ".join(parts) + (f"; {reason}" if reason else "")
