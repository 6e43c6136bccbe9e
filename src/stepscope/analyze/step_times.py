"""What a step costs: steady statistics per kind, the exclusive partition of its wall time, the series; and what the
profiler windows among the steps cost: whose they are, and how much they slowed their steps.

`engine.step_labels` says which steps a figure stands on; those left out are counted by reason.
With several ranks all their steady steps are pooled, so the mean is weighted by steps; samples per second is summed
over ranks, because they run beside each other.

The clock is that of the journal. Traces that others recorded have none: their steps are those that `trace_steps` cuts,
with the work of devices that a step launched, so that the headline, the overview and a comparison of the same trace
tell one step time. A last step whose device work was not recorded whole is left out of all of them.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from operator import itemgetter

import numpy as np
import polars as pl

from stepscope.engine.journal import event_data, mean
from stepscope.engine.step_labels import EDGE, STEADY, LabelledSteps
from stepscope.model import PHASES, FixedCosts, LoaderFacts, PartitionPart, StepFacts, WindowFacts
from stepscope.model.machine import MachineFacts, Pipeline, ProfilerFacts, RankWait
from stepscope.read.text import integer, number
from stepscope.tables.arrays import Floats
from stepscope.tables.categories import ANNOTATION, OPERATORS
from stepscope.tables.categories import STEP as MARK
from stepscope.tables.schema import Tables

FEW_STEPS = 10  # below this many steady steps a mean moves by several percent between runs
SERIES_POINTS = 500  # as many as a chart of that width can draw


def step_facts(labelled: LabelledSteps) -> tuple[StepFacts, ...]:
    """One `StepFacts` per kind that has steps, "train" first."""
    frame, found = labelled.frame, []
    for kind in sorted(frame["kind"].unique().drop_nulls().to_list(), key=lambda kind: (kind != "train", kind)):
        own, steady = frame.filter(pl.col("kind") == kind), labelled.steady(kind)
        wall_ms = steady["wall_ns"] / 1e6
        mean_ms = mean(wall_ms)
        left_out = own.filter(pl.col("reason") != STEADY).group_by("reason").len().sort("reason")
        first = own.filter(pl.col("first_batch").fill_null(False) & ~pl.col("in_window").fill_null(False))
        lead = own.sort("rank", "process")["process"][0]
        series = own.filter(pl.col("process") == lead).select("step", pl.col("wall_ns") / 1e6).rows()
        signals = steady["signal"].drop_nulls().value_counts(sort=True)
        per_second = pl.col("samples").sum() * 1e9 / pl.col("wall_ns").sum()
        rates = steady.drop_nulls("samples").group_by("rank").agg(rate=per_second)
        facts = StepFacts(
            kind=kind,
            count=steady.height,
            signal=signals["signal"][0] if signals.height else "unknown",
            ranks=tuple(sorted(own["rank"].unique().drop_nulls().to_list())),
            mean_ms=mean_ms,
            median_ms=wall_ms.quantile(0.5, interpolation="linear") or 0.0,
            p95_ms=wall_ms.quantile(0.95, interpolation="linear") or 0.0,
            per_second=1000.0 / mean_ms,
            samples_per_second=float(rates["rate"].sum()) if rates.height else None,
            partition=partition(steady),
            excluded={str(reason): int(count) for reason, count in left_out.rows()},
            first_batch_ms=mean(first["wall_ns"]) / 1e6 if first.height else None,
            low_confidence=steady.height < FEW_STEPS or kind in labelled.fallback,
            series=thin([(int(step), float(ms)) for step, ms in series]),
            by_rank=tuple(n for _, n in steady.drop_nulls("rank").group_by("rank").len().sort("rank").rows()),
        )
        found.append(facts)
    return tuple(found)


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


def theil_sen(x: Floats, y: Floats, first: float | None = None, last: float | None = None) -> tuple[float, float]:
    """The line through points by the median slope of all pairs, which odd points do not bend: its value at two `x`.

    Without others these are the first and the last of the points.
    """
    one, other = np.triu_indices(len(x), 1)
    slope = float(np.median((y[other] - y[one]) / (x[other] - x[one])))
    first, last = x[0] if first is None else first, x[-1] if last is None else last
    start = float(np.median(y - slope * (x - first)))
    return start, start + slope * float(last - first)


def thin(points: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """At most `SERIES_POINTS`: the lowest and highest of each bucket, so that no stall is lost."""
    if len(points) <= SERIES_POINTS:
        return tuple(points)
    count = SERIES_POINTS // 2
    edges = [index * len(points) // count for index in range(count + 1)]
    buckets = (points[low:high] for low, high in pairwise(edges))
    ends = ({min(own, key=itemgetter(1)), max(own, key=itemgetter(1))} for own in buckets)
    return tuple(point for both in ends for point in sorted(both))


def fixed_costs(tables: Tables, labelled: LabelledSteps) -> FixedCosts:
    """`warmup_s` is the excess of the first steps, what they compile included, over as many steady ones.

    `total_s` is the sum of what is known; the first step counts in it only where no warm-up does.
    """
    started = tables.run.started_ns
    train = labelled.frame.filter(pl.col("kind") == "train")
    steps = train if train.height else labelled.frame
    first = steps.filter(pl.col("start_ns").is_not_null()).sort("start_ns").head(1)
    if started is None and first["in_window"].fill_null(False).all():
        return FixedCosts(None, None, None, None, None)  # traces of others begin anywhere in a run
    before = max(0.0, (first["start_ns"][0] - started) / 1e9) if first.height and started is not None else None
    first_step = first["wall_ns"][0] / 1e9 if first.height else None
    # of the first steps the mean excess over processes: they warm up beside each other
    steady, warmup = steps.filter(pl.col("reason") == STEADY)["wall_ns"], None
    slow = steps.filter(pl.col("warmup") & ~pl.col("in_window").fill_null(False))
    if len(steady) and slow.height:
        excess = float((slow["wall_ns"] - steady.sum() / len(steady)).clip(lower_bound=0).sum())
        warmup = excess / slow["process"].n_unique() / 1e9
    # what windows took to start, stop and export: ours between steps, the script's own what its steps took longer
    spent: dict[str, float] = defaultdict(float)
    for row, data in event_data(tables, "window"):
        for name in ("stop_duration_ns", "export_duration_ns"):
            if (spent_ns := integer(data.get(name))) is not None:
                spent[row["process"]] += spent_ns
    for row in labelled.frame.filter(pl.col("reason") == EDGE).iter_rows(named=True):
        usual = labelled.steady(row["kind"]).filter(pl.col("process") == row["process"])["wall_ns"]
        if not usual.is_empty():
            spent[row["process"]] += max(0.0, row["wall_ns"] - mean(usual))
    windows = max(spent.values()) / 1e9 if spent else None
    known = [part for part in (before, first_step if warmup is None else warmup, windows) if part is not None]
    return FixedCosts(
        total_s=sum(known) if known else None,
        before_first_step_s=before,
        first_step_s=first_step,
        warmup_s=warmup,
        windows_s=windows,
    )


PARTS = 4  # of the run: what a loss takes at most is its part of the step in the worst of them
FEW = 8  # steps in a part; with fewer, one slow step makes the worst part


def pipeline(
    labelled: LabelledSteps, train: StepFacts | None, loader: LoaderFacts | None, machine: MachineFacts
) -> Pipeline | None:
    """None without training steps."""
    if train is None or train.mean_ms <= 0:
        return None
    known = labelled.steady().filter(pl.col("data_wait_ns").is_not_null())
    wait = next((part.ms for part in train.partition if part.category == "data_wait"), None)
    at_most = wait or 0.0
    if known.height >= PARTS * FEW:  # the largest part of the step that it was in any quarter, of all ranks together
        order = pl.col("step").rank("ordinal").over("process") - 1
        quarters = known.group_by((order * PARTS // pl.len().over("process")).alias("quarter"))
        sums = quarters.agg(pl.col("data_wait_ns").sum(), pl.col("wall_ns").sum())
        at_most = max(at_most, (sums["data_wait_ns"] / sums["wall_ns"]).to_numpy().max() * train.mean_ms)
    workers = None
    if loader is not None and (loader.num_workers is not None or loader.site is not None):
        workers = loader.num_workers or 0
    waits = known.drop_nulls("rank").group_by("rank").agg(pl.col("wall_ns", "data_wait_ns").mean()).sort("rank")
    return Pipeline(
        mean_ms=train.mean_ms,
        wait_ms=wait,
        wait_at_most_ms=None if wait is None else float(at_most),
        workers=workers,
        workers_ms=loader.load_ms if loader is not None and workers else None,
        cores=loader.cpu_limit / loader.ranks_on_host if loader is not None else None,
        contended_ms=machine.cpu.own_ms_per_step if machine.cpu is not None else None,
        ranks=tuple(RankWait(rank, wall / 1e6, data / 1e6) for rank, wall, data in waits.rows()),
    )


def profiler_windows(tables: Tables, labelled: LabelledSteps) -> tuple[WindowFacts, ...]:
    """One per recorded window, the user's own included."""
    found: dict[str, WindowFacts] = {}
    events = [(row, data) for row, data in event_data(tables, "window") if data.get("status") != "dropped"]
    events += event_data(tables, "user_trace")
    if not events:
        return ()
    train = labelled.frame.filter(pl.col("kind") == "train").with_columns(pl.col("in_window").fill_null(False))
    kept = []
    for row, data in events:
        users = row["kind"] == "user_trace"
        name = str(data.get("trace") or (data.get("path") if users else "") or "")
        if users and name in found:
            continue
        own = train.filter(pl.col("process") == row["process"])
        inside, outside = (
            own.filter(pl.col("in_window")),
            own.filter(~pl.col("in_window") & (pl.col("reason") == STEADY)),
        )
        first, count = integer(data.get("first_step")), integer(data.get("steps")) or 0
        if users:
            slices = tables.events.filter(pl.col("process") == row["process"])
            slices = slices.filter(pl.col("trace").str.ends_with(name.rsplit("/", 1)[-1]))
            marked = pl.col("name").str.starts_with(MARK) & (pl.col("category") == ANNOTATION)
            marks = slices.filter(marked & (pl.col("duration_ns") > 0) & pl.col("stream").is_null())["duration_ns"]
            count = len(marks) or slices["step"].drop_nulls().n_unique()
            walls = marks if len(marks) else inside["wall_ns"]
        else:
            if first is not None and count:
                inside = inside.filter(pl.col("step").is_between(first, first + count - 1))
            walls = inside["wall_ns"]
        stop_ns, export_ns = (number(data.get(key)) for key in ("stop_duration_ns", "export_duration_ns"))
        found[name] = WindowFacts(
            rank=row["rank"] or 0,
            trace=name,
            owner="user" if users else "stepscope",
            steps=count,
            low_confidence=not users and data.get("confidence") == "low",
            reason="written by the training script's own profiler" if users else str(data.get("reason") or ""),
            stop_ms=None if stop_ns is None or users else stop_ns / 1e6,
            export_ms=None if export_ns is None or users else export_ns / 1e6,
            bytes=None if users else integer(data.get("bytes")),
            overhead_ratio=mean(walls) / mean(outside["wall_ns"]) if len(walls) and outside.height else None,
        )
        kept.append(found[name])
    return tuple(kept)


JOURNAL, TRACE = "journal", "trace"


def profiler_cost(tables: Tables, labelled: LabelledSteps) -> ProfilerFacts | None:
    """None where no rank has training steps inside and outside a profiler that is the script's alone."""
    ours = tables.journal.filter(pl.col("kind") == "window")["process"].unique().to_list()
    train = labelled.frame.filter(
        (pl.col("kind") == "train") & ~pl.col("process").is_in(ours) & pl.col("start_ns").is_not_null()
    ).select("process", "wall_ns", "reason", profiled=pl.col("in_window").fill_null(False))
    source = JOURNAL
    if not train["profiled"].any():  # the steps that the script's own traces name on the host
        own = tables.traces.filter(pl.col("owner") == "user").select("process", "trace")
        marked = pl.col("name").str.starts_with(MARK) & pl.col("stream").is_null() & (pl.col("duration_ns") > 0)
        steps = tables.events.filter(marked & pl.col("category").is_in([ANNOTATION, *OPERATORS]))
        steps = steps.join(own, on=["process", "trace"], how="semi").select("process", wall_ns="duration_ns")
        traced = steps.with_columns(reason=pl.lit(TRACE), profiled=pl.lit(True))
        train, source = pl.concat([train, traced]), TRACE
    measured = train.filter(pl.col("profiled") | (pl.col("reason") == STEADY))
    here, usual = (pl.col("wall_ns").filter(pl.col("profiled") == inside) for inside in (True, False))
    longer = pl.min_horizontal(here.mean() - usual.mean(), here.median() - usual.median()).clip(lower_bound=0)
    both = measured.group_by("process").agg(lost=here.len() * longer).drop_nulls("lost").sort("process")
    if both.is_empty():
        return None
    lost = sum(both["lost"].to_list())
    train, measured = (each.join(both, on="process", how="semi") for each in (train, measured))
    inside, outside = (measured.filter(pl.col("profiled") == profiled) for profiled in (True, False))
    return ProfilerFacts(
        inside=inside.height,
        outside=outside.height,
        inside_ms=mean(inside["wall_ns"]) / 1e6,
        outside_ms=mean(outside["wall_ns"]) / 1e6,
        steps=train.height,
        lost_ms_per_step=lost / train.height / 1e6,
        total_ms_per_step=mean(train["wall_ns"]) / 1e6,
        source=source,
    )
