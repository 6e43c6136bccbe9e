"""The steps in which a compiler did something, as points over the run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import polars as pl

from stepscope.analyze.compilers import spans
from stepscope.analyze.compilers.constants import POINTS_SHOWN
from stepscope.analyze.compilers.per_step import table
from stepscope.analyze.compilers.prepared import Prepared, counted
from stepscope.model.compilers import CompilerPoint


def points(prepared: Prepared, limit: int = POINTS_SHOWN) -> tuple[CompilerPoint, ...]:
    """Steps of the lead rank's process with a compilation, graph break or transfer, of all backends, in order.

    Of more than `limit`, steps that recompiled stay, then of equal stretches of the rest the dearest. Where no step
    has a wall time, the steps that events name.
    """
    process = _lead(prepared)
    if process is None:
        return ()
    own = Prepared(prepared.rows.filter(pl.col("process") == process), prepared.steps)
    steps = table(own).filter(pl.col("process") == process)
    steps = _named(own.rows) if steps.is_empty() else steps
    active = pl.col("compiling") | (pl.col("breaks") > 0) | (pl.col("transfers") > 0)
    shown = steps.filter(active)
    if shown.height > limit:
        shown = shown[_kept(shown, limit)]
    return tuple(_point(row) for row in shown.iter_rows(named=True))


def _kept(steps: pl.DataFrame, limit: int) -> list[int]:
    """Numbers of the rows to show, ascending."""
    lengths = steps["compile_ns"].fill_null(0).to_list()
    recompiled = (steps["recompiles"] > 0).to_list()
    first = _dearest([row for row, chosen in enumerate(recompiled) if chosen], lengths, limit)
    rest = [row for row, chosen in enumerate(recompiled) if not chosen]
    return sorted(first + _dearest(rest, lengths, limit - len(first)))


def _lead(prepared: Prepared) -> str | None:
    """The process of the lowest rank with events; of several such, the one with the most."""
    counts = (
        prepared.rows.group_by("rank", "process")
        .len()
        .sort(["rank", "len", "process"], descending=[False, True, False])
    )
    return str(counts["process"][0]) if counts.height else None


def _dearest(rows: list[int], lengths: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the rows: of each of as many equal stretches the one that took longest."""
    if len(rows) <= limit:
        return rows
    edges = [number * len(rows) // limit for number in range(limit + 1)] if limit else []
    return [max(rows[low:high], key=lengths.__getitem__) for low, high in pairwise(edges)]


def _named(rows: pl.DataFrame) -> pl.DataFrame:
    """A row per step that events name, where the steps table has none."""
    told = rows.drop_nulls("step")
    kinds = pl.col("kind")
    own = pl.col("pos").is_in(counted(told)["pos"].to_list())
    lengths = spans.durations(told).group_by("step").agg(compile_ns=pl.col("duration_ns").sum())
    steps = told.group_by("step").agg(
        compiles=pl.col("count").filter(own).sum(),
        recompiles=pl.col("count").filter(own & (kinds == "recompile")).sum(),
        transfers=pl.col("count").filter(kinds == "transfer").sum(),
        breaks=pl.col("count").filter(kinds == "graph_break").sum(),
    )
    compiling = pl.col("compiles") + pl.col("recompiles") > 0
    named = steps.join(lengths, on="step", how="left").sort("step").with_columns(compiling=compiling)
    return named.with_columns(kind=pl.lit("train"), wall_ns=pl.lit(None, dtype=pl.Int64))


def _point(row: dict[str, object]) -> CompilerPoint:
    wall, compile_ns = row["wall_ns"], row["compile_ns"]
    return CompilerPoint(
        step=_int(row["step"]),
        kind=str(row["kind"]),
        wall_ms=wall / 1e6 if isinstance(wall, int) else None,
        compile_ms=compile_ns / 1e6 if isinstance(compile_ns, int) else None,
        compiles=_int(row["compiles"]),
        recompiles=_int(row["recompiles"]),
        breaks=_int(row["breaks"]),
        transfers=_int(row["transfers"]),
    )


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0
