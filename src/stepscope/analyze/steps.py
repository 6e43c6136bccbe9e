"""What a step costs: steady statistics per kind, the exclusive partition of its wall time, the series.

This is the one place that says which steps a figure of a step stands on, and on which clock. Steady means: after
warm-up, not the first batch of an epoch, outside profiler windows, not compiling. Steps left out are counted by reason.
With several ranks all their steady steps are pooled, so the mean is weighted by steps; samples per second is summed
over ranks, because they run beside each other.

The clock is that of the journal. Traces that others recorded have none: their steps are those that `views.step_windows`
cuts, with the work of devices that a step launched, so that the headline, the overview and a comparison of the same
trace tell one step time. A last step whose device work was not recorded whole is left out of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from stepscope.model import PHASES, PartitionPart, StepFacts
from stepscope.tables.schema import Tables

WARMUP_RATIO = 2.0  # a leading step slower than this many medians of the later half is warm-up (allocator, caches)
WARMUP_MAX_SHARE = 0.33  # never call more than a third of a run warm-up: a slow third is how the run is
FEW_STEPS = 10  # below this many steady steps a mean moves by several percent between runs
SERIES_POINTS = 500  # as many as a chart of that width can draw
COMPILING = ("compile", "recompile", "limit_hit", "failure")  # kinds of `compiles` that take time of their step

STEADY = "steady"  # the value of `reason` for a step that counts
EDGE = "profiler"  # the script's own profiler starts, or stops and exports, in the step
INCOMPLETE = "incomplete"  # of a step at the end of a trace: its device work was not recorded whole


@dataclass(frozen=True)
class LabelledSteps:
    """The steps with `reason`: "steady", or why one is left out. `fallback`: kind -> what stands in for steady ones.

    `warmup` marks the first steps that are slower than the run becomes, whatever their reason.
    """

    frame: pl.DataFrame
    fallback: dict[str, str]

    def steady(self, kind: str = "train") -> pl.DataFrame:
        """The rows the statistics of `kind` stand on."""
        return self.frame.filter((pl.col("kind") == kind) & (pl.col("reason") == STEADY))


def label(tables: Tables, cut: pl.DataFrame | None = None) -> LabelledSteps:
    """Gives every step its reason. A kind without any steady step falls back to all outside windows, then to all.

    Args:
        cut: the steps of traces that others recorded, and of the script's own profiler, as `views.step_windows.cut`
            takes them.
    """
    steps = tables.steps.filter(pl.col("wall_ns").is_not_null() & (pl.col("wall_ns") > 0))
    if steps.is_empty():
        return LabelledSteps(steps.with_columns(warmup=pl.lit(False), reason=pl.lit(STEADY)), {})
    if cut is None or cut.is_empty():
        steps = steps.with_columns(incomplete=pl.lit(False), edge=pl.lit(False))
    else:
        steps = _as_cut(steps, cut)
    steps = steps.sort("process", "step").join(_compiling(tables), on=["process", "step"], how="left")
    parts = [_warmup(part) for part in steps.partition_by("process", "kind", maintain_order=True)]
    steps = pl.concat(parts).with_columns(
        pl.when("incomplete")
        .then(pl.lit(INCOMPLETE))
        .when("edge")
        .then(pl.lit(EDGE))
        .when(pl.col("in_window").fill_null(False))
        .then(pl.lit("window"))
        .when(pl.col("compiling").fill_null(False))
        .then(pl.lit("compile"))
        .when(pl.col("warmup"))
        .then(pl.lit("warmup"))
        .when(pl.col("first_batch").fill_null(False))
        .then(pl.lit("first_batch"))
        .otherwise(pl.lit(STEADY))
        .alias("reason")
    )
    fallback: dict[str, str] = {}
    for kind in steps["kind"].unique().drop_nulls().to_list():
        own = steps.filter((pl.col("kind") == kind) & (pl.col("reason") != INCOMPLETE))
        if own.is_empty() or (own["reason"] == STEADY).any():
            continue
        outside = pl.col("reason").is_in(["window", EDGE]).not_()
        some = own.filter(outside).height > 0
        fallback[kind] = "all steps outside windows" if some else "all steps"
        relaxed = (outside if some else pl.lit(True)) & (pl.col("reason") != INCOMPLETE)
        steps = steps.with_columns(
            pl.when((pl.col("kind") == kind) & relaxed).then(pl.lit(STEADY)).otherwise(pl.col("reason")).alias("reason")
        )
    return LabelledSteps(steps.drop("compiling", "edge", "incomplete"), fallback)


def _as_cut(steps: pl.DataFrame, cut: pl.DataFrame) -> pl.DataFrame:
    """Steps begin and end as they are cut; `incomplete` marks those that are cut away.

    A step that the script's own profiler touched and did not record whole is in no window any more: none of a window's
    figures may be divided by it. It is `edge`: the profiler started, or stopped and exported, in it.
    """
    marked = cut.with_columns(incomplete=pl.col("cut_ns").is_null())
    wall = pl.col("end_ns") - pl.col("cut_ns")
    told = pl.col("process").is_in(cut["process"].unique().implode())
    inside = pl.col("in_window").fill_null(False)
    return (
        steps.join(marked, on=["process", "start_ns"], how="left", maintain_order="left")
        .with_columns(
            pl.when(wall > 0).then("cut_ns").otherwise("start_ns").alias("start_ns"),
            pl.when(wall > 0).then(wall).otherwise("wall_ns").alias("wall_ns"),
            pl.col("incomplete").fill_null(False),
            edge=inside & told & pl.col("incomplete").is_null(),
        )
        .with_columns(in_window=inside & ~pl.col("edge"))
        .drop("cut_ns", "end_ns")
    )


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


def _compiling(tables: Tables) -> pl.DataFrame:
    """(process, step) of steps in which something was compiled, by torch.compile or torch_xla, or was tried to be.

    A graph break, a fallback or a transfer is part of how a step runs, and leaves it what it is.
    """
    journal = tables.journal.filter(pl.col("kind") == "compile").select("process", "step")
    compiles = tables.compiles.filter(pl.col("kind").is_in(COMPILING)).select("process", "step")
    both = pl.concat([journal, compiles]).drop_nulls().unique()
    return both.with_columns(pl.lit(True).alias("compiling"))


def _warmup(steps: pl.DataFrame) -> pl.DataFrame:
    """Marks the leading steps of one process and kind that are slower than the run becomes; at least the first."""
    wall = steps["wall_ns"].to_list()
    outside = steps.filter(~pl.col("in_window").fill_null(False))
    later = (outside if outside.height else steps)["wall_ns"].to_list()
    later = sorted(later[len(later) // 2 :])
    median = later[len(later) // 2]
    count = 1
    while count < len(wall) * WARMUP_MAX_SHARE and wall[count] > WARMUP_RATIO * median:
        count += 1
    return steps.with_columns((pl.int_range(pl.len()) < count).alias("warmup"))


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
