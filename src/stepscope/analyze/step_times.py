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

from stepscope.engine.journal import event_data, mean
from stepscope.engine.step_labels import EDGE, STEADY, LabelledSteps
from stepscope.model import PHASES, FixedCosts, LoaderFacts, PartitionPart, StepFacts
from stepscope.model.machine import MachineFacts
from stepscope.model.ranks import Pipeline, RankWait
from stepscope.tables.schema import Tables

FEW_STEPS = 10  # below this many steady steps a mean moves by several percent between runs
SERIES_POINTS = 500  # as many as a chart of that width can draw


def step_facts(labelled: LabelledSteps) -> tuple[StepFacts, ...]:
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


def _quantile(values: pl.Series, q: float) -> float:
    value = values.quantile(q, interpolation="linear")
    return float(value) if value is not None else 0.0


def fixed_costs(tables: Tables, labelled: LabelledSteps) -> FixedCosts:
    """`warmup_s` is the excess of the first steps, what they compile included, over as many steady ones.

    `total_s` is the sum of what is known; the first step counts in it only where no warm-up does.
    """
    started = tables.run.started_ns
    train = labelled.frame.filter(pl.col("kind") == "train")
    steps = train if train.height else labelled.frame
    first = steps.filter(pl.col("start_ns").is_not_null()).sort("start_ns").head(1)
    before = first_step = None
    if started is None and first["in_window"].fill_null(False).all():
        return FixedCosts(None, None, None, None, None)  # traces of others begin anywhere in a run
    if first.height:
        first_step = first["wall_ns"][0] / 1e9
        if started is not None:
            before = max(0.0, (first["start_ns"][0] - started) / 1e9)
    warmup, windows = _warmup(steps), _windows(tables, labelled)
    known = [part for part in (before, first_step if warmup is None else warmup, windows) if part is not None]
    return FixedCosts(
        total_s=sum(known) if known else None,
        before_first_step_s=before,
        first_step_s=first_step,
        warmup_s=warmup,
        windows_s=windows,
    )


def _warmup(steps: pl.DataFrame) -> float | None:
    """Mean over processes: they warm up beside each other."""
    steady = steps.filter(pl.col("reason") == STEADY)
    slow = steps.filter(pl.col("warmup") & ~pl.col("in_window").fill_null(False))
    if steady.is_empty() or slow.is_empty():
        return None
    mean = steady["wall_ns"].sum() / steady.height
    excess = float((slow["wall_ns"] - mean).clip(lower_bound=0).sum())
    return excess / slow["process"].n_unique() / 1e9


def _windows(tables: Tables, labelled: LabelledSteps) -> float | None:
    """What windows took to start, stop and export: ours between steps, the script's own what its steps took longer."""
    spent: dict[str, float] = {}
    for row, data in event_data(tables, "window"):
        parts = [data.get("stop_duration_ns"), data.get("export_duration_ns")]
        known = [part for part in parts if isinstance(part, int)]
        if known:
            spent[row["process"]] = spent.get(row["process"], 0) + sum(known)
    for row in labelled.frame.filter(pl.col("reason") == EDGE).iter_rows(named=True):
        usual = labelled.steady(row["kind"]).filter(pl.col("process") == row["process"])["wall_ns"]
        if not usual.is_empty():
            spent[row["process"]] = spent.get(row["process"], 0) + max(0.0, row["wall_ns"] - mean(usual))
    return max(spent.values()) / 1e9 if spent else None


PARTS = 4  # of the run: what a loss takes at most is its part of the step in the worst of them
FEW = 8  # steps in a part; with fewer, one slow step makes the worst part


def pipeline(
    labelled: LabelledSteps, train: StepFacts | None, loader: LoaderFacts | None, machine: MachineFacts
) -> Pipeline | None:
    """None without training steps."""
    if train is None or train.mean_ms <= 0:
        return None
    steady = labelled.steady()
    known = steady.filter(pl.col("data_wait_ns").is_not_null())
    wait = next((part.ms for part in train.partition if part.category == "data_wait"), None)
    with_loader = loader is not None and (loader.num_workers is not None or loader.site is not None)
    workers = (loader.num_workers or 0) if loader is not None and with_loader else None
    cpu = machine.cpu
    return Pipeline(
        mean_ms=train.mean_ms,
        wait_ms=wait,
        wait_at_most_ms=None if wait is None else max(wait, _worst(known) * train.mean_ms),
        workers=workers,
        workers_ms=loader.load_ms if loader is not None and workers else None,
        cores=loader.cpu_limit / loader.ranks_on_host if loader is not None else None,
        contended_ms=cpu.own_ms_per_step if cpu is not None else None,
        ranks=tuple(
            RankWait(rank, wall / 1e6, data / 1e6)
            for rank, wall, data in known.filter(pl.col("rank").is_not_null())
            .group_by("rank")
            .agg(pl.col("wall_ns").mean(), pl.col("data_wait_ns").mean())
            .sort("rank")
            .iter_rows()
        ),
    )


def _worst(steady: pl.DataFrame) -> float:
    """The largest part of the step that was data wait in any quarter of the run, of all ranks together."""
    if steady.height < PARTS * FEW:
        return 0.0
    order = pl.col("step").rank("ordinal").over("process") - 1
    quarter = (order * PARTS // pl.len().over("process")).alias("quarter")
    parts = steady.with_columns(quarter).group_by("quarter").agg(pl.col("data_wait_ns").sum(), pl.col("wall_ns").sum())
    return float((parts["data_wait_ns"] / parts["wall_ns"]).max() or 0.0)  # type: ignore[arg-type]
