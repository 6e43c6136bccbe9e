"""Which lines of the user's code the sampled main threads stand on, by phase, in steady state."""

from __future__ import annotations

import polars as pl

from stepscope.engine.samples import Samples
from stepscope.model import HotLine, StackFacts, StepFacts
from stepscope.tables.schema import Tables

MAX_LINES = 200  # more than any report shows; the table `stacks` holds the rest


def facts(tables: Tables, samples: Samples | None, train: StepFacts | None) -> StackFacts | None:
    """None without sampled stacks. A line's `ms_per_step` is its share of the main thread times the mean step."""
    if samples is None:
        return None
    ranks, workers = samples.rank_steps(), samples.workers()
    mean_ms = train.mean_ms if train else None
    phases = ranks.group_by("phase").agg(pl.col("samples").sum()).sort("phase")
    lines = [*hot_lines(ranks, "rank", mean_ms), *hot_lines(workers, "loader_worker", None)]
    weights = tables.stacks.group_by("source").agg(pl.col("samples").sum())
    weights = weights.sort("samples", "source", descending=[True, False])
    rates = tables.stacks.filter(pl.col("source") == weights[0, 0])["rate_hz"].drop_nulls()
    counts = tables.quality.counts
    return StackFacts(
        source=str(weights[0, 0] or "unknown"),
        rate_hz=float(rates.median() or 0.0) if len(rates) else 0.0,  # type: ignore[arg-type]
        samples=int(tables.stacks["samples"].sum()),
        skipped=sum(count for name, count in counts.items() if "stack" in name and "skipped" in name),
        steady_samples=int(ranks["samples"].sum()),
        by_phase={str(phase): int(count) for phase, count in phases.rows()},
        hot_lines=tuple(lines[:MAX_LINES]),
    )


def hot_lines(rows: pl.DataFrame, role: str, mean_ms: float | None, prefix: str = "user") -> list[HotLine]:
    """The lines under `prefix` ("user", "entry" or "inner") of these rows, most samples first.

    Shares are of all samples in `rows`, those without a user frame included.
    """
    total = int(rows["samples"].sum())
    if not total:
        return []
    file, line, function = (f"{prefix}_{part}" for part in ("file", "line", "function"))
    own = rows.filter(pl.col(file).is_not_null() & pl.col(line).is_not_null())
    key = [file, line, function, "phase"]
    leaf = pl.format("{}:{}", pl.col("leaf_file").fill_null("?"), pl.col("leaf_function").fill_null("?"))
    leaves = (
        own.filter(pl.col("leaf_position") > pl.col("user_position"))
        .with_columns(leaf.alias("leaf"))
        .group_by([*key, "leaf"])
        .agg(n=pl.col("samples").sum())
        .sort("n", "leaf", descending=[True, False])
        .group_by(key, maintain_order=True)
        .agg(pl.col("leaf").first())
    )
    grouped = (
        own.group_by(key)
        .agg(n=pl.col("samples").sum(), waiting=pl.col("samples").filter(pl.col("waiting")).sum())
        .join(leaves, on=key, how="left", nulls_equal=True)
        .sort(["n", file, line, function, "phase"], descending=[True, False, False, False, False])
    )
    return [
        HotLine(
            file=row[file],
            line=row[line],
            function=row[function] or "?",
            role=role,
            phase=row["phase"] or "other",
            self_samples=row["n"],
            share=row["n"] / total,
            ms_per_step=row["n"] / total * mean_ms if mean_ms is not None else None,
            waiting_share=row["waiting"] / row["n"],
            library_leaf=row["leaf"],
        )
        for row in grouped.iter_rows(named=True)
    ]
