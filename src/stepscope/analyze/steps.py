"""What a step costs: steady statistics per kind, the exclusive partition of its wall time, the series.

`engine.step_labels` says which steps a figure stands on; those left out are counted by reason.
With several ranks all their steady steps are pooled, so the mean is weighted by steps; samples per second is summed
over ranks, because they run beside each other.

The clock is that of the journal. Traces that others recorded have none: their steps are those that `step_windows` cuts,
with the work of devices that a step launched, so that the headline, the overview and a comparison of the same trace
tell one step time. A last step whose device work was not recorded whole is left out of all of them.
"""

from __future__ import annotations

import polars as pl

from stepscope.engine.step_labels import STEADY, LabelledSteps
from stepscope.model import PHASES, PartitionPart, StepFacts

FEW_STEPS = 10  # below this many steady steps a mean moves by several percent between runs
SERIES_POINTS = 500  # as many as a chart of that width can draw


def facts(labelled: LabelledSteps) -> tuple[StepFacts, ...]:
    """One `StepFacts` per kind that has steps, "train" first."""
    kinds = sorted(labelled.frame["kind"].unique().drop_nulls().to_list(), key=lambda kind: (kind != "train", kind))
    return tuple(_facts(labelled, kind) for kind in kinds)


def partition(steady: pl.DataFrame) -> tuple[PartitionPart, ...]:
    """The mean step of `steady` split by phase; time of unknown phases is "unattributed". Shares sum to 1."""
    mean_ms = mean(steady["wall_ns"]) / 1e6
    if mean_ms <= 0:
        return ()
    parts = {}
    for phase in PHASES:
        column = steady[f"{phase}_ns"]
        if column.null_count() < len(column):
            parts[phase] = float(column.fill_null(0).clip(lower_bound=0).sum()) / steady.height / 1e6
    known = sum(parts.values())
    if known > mean_ms:  # phases measured by different clocks may overlap by a little
        parts = {phase: ms * mean_ms / known for phase, ms in parts.items()}
    elif mean_ms - known > 1e-6 * mean_ms:
        parts["unattributed"] = mean_ms - known
    return tuple(PartitionPart(phase, ms, ms / mean_ms) for phase, ms in parts.items())


def with_all_phases(steps: pl.DataFrame) -> pl.DataFrame:
    """`steps` with 0 for the one of `data_wait` and `before_forward` that a step lacks while it has the other."""
    wait, before = pl.col("data_wait_ns"), pl.col("before_forward_ns")
    return steps.with_columns(
        pl.when(before.is_not_null()).then(wait.fill_null(0)).otherwise(wait).alias("data_wait_ns"),
        pl.when(wait.is_not_null()).then(before.fill_null(0)).otherwise(before).alias("before_forward_ns"),
    )


def thin(points: list[tuple[int, float]], limit: int = SERIES_POINTS) -> tuple[tuple[int, float], ...]:
    """At most `limit` points: the lowest and highest of each bucket, so that no stall is lost."""
    if len(points) <= limit:
        return tuple(points)
    buckets = limit // 2
    kept: list[tuple[int, float]] = []
    for index in range(buckets):
        bucket = points[index * len(points) // buckets : (index + 1) * len(points) // buckets]
        if bucket:
            kept.extend(sorted({min(bucket, key=_value), max(bucket, key=_value)}))
    return tuple(kept)


def _value(point: tuple[int, float]) -> float:
    return point[1]


def _facts(labelled: LabelledSteps, kind: str) -> StepFacts:
    own = labelled.frame.filter(pl.col("kind") == kind)
    steady = labelled.steady(kind)
    wall_ms = steady["wall_ns"] / 1e6
    mean_ms = mean(wall_ms)
    left_out = own.filter(pl.col("reason") != STEADY).group_by("reason").len().sort("reason")
    first = own.filter(pl.col("first_batch").fill_null(False) & ~pl.col("in_window").fill_null(False))
    lead = own.sort("rank", "process")["process"][0]
    series = own.filter(pl.col("process") == lead).select("step", pl.col("wall_ns") / 1e6).rows()
    return StepFacts(
        kind=kind,
        count=steady.height,
        signal=_most_common(steady["signal"]),
        ranks=tuple(sorted(own["rank"].unique().drop_nulls().to_list())),
        mean_ms=mean_ms,
        median_ms=_quantile(wall_ms, 0.5),
        p95_ms=_quantile(wall_ms, 0.95),
        per_second=1000.0 / mean_ms,
        samples_per_second=_samples_per_second(steady),
        partition=partition(steady),
        excluded={str(reason): int(count) for reason, count in left_out.rows()},
        first_batch_ms=mean(first["wall_ns"]) / 1e6 if first.height else None,
        low_confidence=steady.height < FEW_STEPS or kind in labelled.fallback,
        series=thin([(int(step), float(ms)) for step, ms in series]),
        by_rank=tuple(n for _, n in steady.drop_nulls("rank").group_by("rank").len().sort("rank").rows()),
    )


def _samples_per_second(steady: pl.DataFrame) -> float | None:
    counted = steady.filter(pl.col("samples").is_not_null())
    if counted.is_empty():
        return None
    rates = counted.group_by("rank").agg(rate=pl.col("samples").sum() * 1e9 / pl.col("wall_ns").sum())
    return float(rates["rate"].sum())


def _most_common(values: pl.Series) -> str:
    counts = values.drop_nulls().value_counts(sort=True)
    return str(counts[0, 0]) if counts.height else "unknown"


def mean(values: pl.Series) -> float:
    """The mean of a column, 0 where it holds nothing."""
    value = values.mean()
    return float(value) if isinstance(value, int | float) else 0.0


def _quantile(values: pl.Series, q: float) -> float:
    value = values.quantile(q, interpolation="linear")
    return float(value) if value is not None else 0.0
