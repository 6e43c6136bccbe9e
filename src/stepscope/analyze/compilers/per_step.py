"""What compiling took of the steps: per backend and kind of step, with the wall time or an estimate of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import polars as pl
from msgspec.structs import replace

from stepscope.analyze.compilers import spans
from stepscope.analyze.compilers.constants import COMPILATIONS, TIMED, TRACE, WARMUP_STEPS
from stepscope.analyze.compilers.prepared import Prepared, counted
from stepscope.analyze.compilers.reports import Report, estimated_wall_ns
from stepscope.analyze.steps import mean
from stepscope.engine.step_labels import STEADY
from stepscope.model.compilers import CompilerFacts, CompilerSteps


def table(prepared: Prepared) -> pl.DataFrame:
    """`prepared.steps` with compile_ns, the counts compiles, recompiles, transfers and breaks, and `compiling`."""
    rows = prepared.rows.drop_nulls("at")
    own = counted(rows)
    counts = [
        _count("compiles", own),
        _count("recompiles", own.filter(pl.col("kind") == "recompile")),
        _count("transfers", rows.filter(pl.col("kind") == "transfer")),
        _count("breaks", rows.filter(pl.col("kind") == "graph_break")),
        _count("attempts", rows.filter(pl.col("kind").is_in(TIMED))),
    ]
    steps = prepared.steps.with_columns(pl.Series("compile_ns", spans.per_step_ns(prepared), dtype=pl.Int64))
    for count in counts:
        steps = steps.join(count, left_on="row", right_on="at", how="left", maintain_order="left")
    names = [count.columns[1] for count in counts]
    steps = steps.with_columns(pl.col(name).fill_null(0) for name in names)
    compiling = (pl.col("attempts") > 0) | (pl.col("compile_ns") > 0)
    return steps.with_columns(compiling=compiling, late=pl.col("index") >= WARMUP_STEPS).drop("attempts")


def facts(prepared: Prepared, backend: str, reports: Sequence[Report], processes: Iterable[str]) -> list[CompilerSteps]:
    """One per kind of step of the `processes` that used `backend`, "train" first.

    Of what traces alone tell, only the steps that these cover are looked at. Where none of these processes has steps
    with wall times, one for all steps that the backend's own reports count.
    """
    own = prepared.of(backend)
    steps = table(own).filter(pl.col("process").is_in(list(processes)))
    if steps.is_empty():
        return _reported(own, backend, reports)
    if own.rows.height and own.rows["source"].fill_null("").str.starts_with(TRACE).all() and steps["traced"].any():
        steps = steps.filter(pl.col("traced"))
    told = spans.durations(own.rows).height > 0 or own.rows.filter(pl.col("kind").is_in(TIMED)).is_empty()
    kinds = sorted(steps["kind"].unique().to_list(), key=lambda kind: (kind != "train", kind))
    return [_of_kind(backend, kind, _outside(steps.filter(pl.col("kind") == kind)), told) for kind in kinds]


def known(steps: Iterable[CompilerSteps], one: CompilerFacts) -> list[CompilerSteps]:
    """`steps` of a backend without the counts that none of its sources tells."""
    return [
        replace(
            kind,
            recompiles=None if one.recompiles is None else kind.recompiles,
            transfers=None if one.transfers is None else kind.transfers,
            breaks=None if one.graph_breaks is None else kind.breaks,
        )
        for kind in steps
    ]


def _outside(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps outside profiler windows; where all are inside, as in a trace of others, all."""
    outside = steps.filter(~pl.col("in_window"))
    return outside if outside.height else steps


def _of_kind(backend: str, kind: str, steps: pl.DataFrame, told: bool) -> CompilerSteps:
    """`told`: some source says how long compiling took, or nothing was compiled."""
    late = steps.filter(pl.col("late"))
    compiling = steps.filter(pl.col("compiling"))
    quiet = steps.filter(~pl.col("compiling") & (pl.col("reason") == STEADY))
    compile_ns, late_ns = int(steps["compile_ns"].sum()), int(late["compile_ns"].sum())
    wall_ns = int(steps["wall_ns"].sum())
    return CompilerSteps(
        backend=backend,
        kind=kind,
        steps=steps.height,
        compiling_steps=compiling.height,
        compile_ms=compile_ns / 1e6 if told else None,
        wall_ms=wall_ns / 1e6,
        share=compile_ns / wall_ns if told else None,
        late_compile_ms=late_ns / 1e6 if told else None,
        late_wall_ms=int(late["wall_ns"].sum()) / 1e6,
        late_share=late_ns / int(late["wall_ns"].sum()) if told and late.height else None,
        compiles=int(steps["compiles"].sum()),
        recompiles=int(steps["recompiles"].sum()),
        transfers=int(steps["transfers"].sum()),
        breaks=int(steps["breaks"].sum()),
        mean_compiling_ms=mean(compiling["wall_ns"]) / 1e6 if compiling.height else None,
        mean_quiet_ms=mean(quiet["wall_ns"]) / 1e6 if quiet.height else None,
    )


def _reported(own: Prepared, backend: str, reports: Sequence[Report]) -> list[CompilerSteps]:
    """The steps that reports count, all of them "train": a report knows no kinds."""
    marked = [report for report in reports if report.marks]
    if not marked:
        return []
    steps = sum(report.marks or 0 for report in marked)
    names = [report.process for report in marked]
    rows = own.rows.filter(pl.col("process").is_in(names))
    walls = [estimated_wall_ns(report) for report in marked]
    wall_ns = None if None in walls else sum(wall or 0 for wall in walls)
    compile_ns = _compile_ns(rows, marked)
    numbered = pl.concat([_numbered(rows, report) for report in marked])
    late = numbered.filter(pl.col("index") >= WARMUP_STEPS)
    late_ns = spans.total_ns(late) if late.height else 0
    late_steps = sum(max((report.marks or 0) - WARMUP_STEPS, 0) for report in marked)
    late_wall_ns = wall_ns * late_steps / steps if wall_ns is not None else None
    known = numbered.height > 0 or not _has_compiles(rows, marked)
    return [
        CompilerSteps(
            backend=backend,
            kind="train",
            steps=steps,
            compiling_steps=numbered.select("process", "index").n_unique() if known else None,
            compile_ms=None if compile_ns is None else compile_ns / 1e6,
            wall_ms=None if wall_ns is None else wall_ns / 1e6,
            share=_share(compile_ns, wall_ns),
            late_compile_ms=late_ns / 1e6 if known and late_ns is not None else None,
            late_wall_ms=None if late_wall_ns is None else late_wall_ns / 1e6,
            late_share=_share(late_ns, late_wall_ns) if known else None,
            compiles=max(int(counted(rows)["count"].sum()), sum(report.compiles() for report in marked)),
            recompiles=int(rows.filter(pl.col("kind") == "recompile")["count"].sum()),
            transfers=max(_sum(rows, "transfer"), sum(report.transfers() for report in marked)),
            breaks=_sum(rows, "graph_break"),
            mean_compiling_ms=None,
            mean_quiet_ms=None,
            estimated=wall_ns is not None,
        )
    ]


def _numbered(rows: pl.DataFrame, report: Report) -> pl.DataFrame:
    """The compilations of a report's process whose step is known, with the step's index."""
    own = rows.filter((pl.col("process") == report.process) & pl.col("kind").is_in(COMPILATIONS))
    index = pl.col("step") - report.first_step(own)
    return own.drop_nulls("step").with_columns(index=index)


def _has_compiles(rows: pl.DataFrame, reports: Iterable[Report]) -> bool:
    return counted(rows).height > 0 or any(report.compiles() for report in reports)


def _compile_ns(rows: pl.DataFrame, reports: Iterable[Report]) -> float | None:
    told = spans.total_ns(rows)
    whole = [value for report in reports if (value := report.compile_ns()) is not None]
    return max([*([float(told)] if told is not None else []), *([sum(whole)] if whole else [])], default=None)


def _share(part: float | None, whole: float | None) -> float | None:
    """At most 1: an estimated wall time may be shorter than what was measured inside it."""
    return None if part is None or not whole else min(part / whole, 1.0)


def _sum(rows: pl.DataFrame, kind: str) -> int:
    return int(rows.filter(pl.col("kind") == kind)["count"].sum())


def _count(name: str, rows: pl.DataFrame) -> pl.DataFrame:
    return rows.group_by("at").agg(pl.col("count").sum().alias(name))
