"""What a page draws over time, thinned so that nothing that stands out is lost: steps, telemetry, any series.

Steps one by one, of the journal or of traces: their parts, their distribution, and the longest of them.

The statistics of a run stand on steady steps alone (`steps.py`); here every step is shown with its reason, because the
one that is not steady is often the one that somebody looks for. Telemetry: levels and rates of processes, devices and
hosts on one axis. `positions` says which values of a series to draw, where there are more than pixels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analyze.machine import energy
from stepscope.engine.journal import json_object
from stepscope.engine.step_labels import STEADY, LabelledSteps
from stepscope.model import PHASES
from stepscope.model.timeline import (
    LongStep,
    ProcessSteps,
    StepDistribution,
    StepEvent,
    StepPhases,
    Telemetry,
    TelemetrySeries,
)
from stepscope.tables.schema import Tables

UNATTRIBUTED = "unattributed"
SMALLEST_REST = 0.001  # of all wall time: less than that is rounding between clocks, and no part of its own
BINS = 40
WIDE = 3.0  # medians up to which bins reach, unless one step in a hundred is longer
MAX_EVENTS = 3  # of a step
EVENT_SHARE = 0.02  # of the step's wall time, below which an event says nothing about it
# kinds of events whose length is no time in the step
WITHOUT_TIME = ("memory", "counters", "loss", "device_step", "exit", "knob", "seed", "site")


def processes_of(labelled: LabelledSteps, kind: str) -> tuple[str, ...]:
    """The processes that have steps of a kind, in order of rank."""
    own = labelled.frame.filter(pl.col("kind") == kind).select("rank", "process").unique().sort("rank", "process")
    return tuple(str(process) for process in own["process"].to_list())


def _of(labelled: LabelledSteps, kind: str, processes: Collection[str]) -> pl.DataFrame:
    return labelled.frame.filter((pl.col("kind") == kind) & pl.col("process").is_in(list(processes)))


def step_phases(labelled: LabelledSteps, kind: str, process: str, limit: int) -> StepPhases:
    """The steps of one process and kind, at most `limit` of them, each with its phases."""
    every = _of(labelled, kind, (process,)).sort("step")
    own = every[positions(every["wall_ns"].to_numpy(), limit)]
    wall = own["wall_ns"].to_numpy() / 1e6
    parts = {phase: own[f"{phase}_ns"] / 1e6 for phase in PHASES if own[f"{phase}_ns"].null_count() < own.height}
    made = {phase: tuple(column.to_list()) for phase, column in parts.items()}
    if parts:
        rest = np.maximum(wall - sum(column.fill_null(0).to_numpy() for column in parts.values()), 0.0)
        if rest.sum() > SMALLEST_REST * wall.sum():
            made[UNATTRIBUTED] = tuple(rest.tolist())
    return StepPhases(
        process=process,
        kind=kind,
        steps=tuple(own["step"].to_list()),
        wall_ms=tuple(wall.tolist()),
        reasons=tuple(own["reason"].to_list()),
        parts_ms=made,
        total=every.height,
    )


def distribution(labelled: LabelledSteps, kind: str, processes: Collection[str]) -> StepDistribution:
    """How long the steps of a kind take, of which these processes have some."""
    own = _of(labelled, kind, processes)
    wall = own["wall_ns"].to_numpy() / 1e6
    steady = (own["reason"] == STEADY).to_numpy()
    usual = wall[steady] if steady.any() else wall  # one step that compiles or holds an export would hide all others
    low, high = float(wall.min()), float(wall.max())
    top = min(high, max(WIDE * float(np.median(usual)), float(np.quantile(usual, 0.99))))
    if top <= low:
        low, top = 0.9 * low, 1.1 * low
    edges = np.linspace(low, top, BINS + 1)
    inside = np.minimum(wall, top)
    return StepDistribution(
        edges_ms=tuple(edges.tolist()),
        steady=tuple(np.histogram(inside[steady], edges)[0].tolist()),
        others=tuple(np.histogram(inside[~steady], edges)[0].tolist()),
        longer=high > top,
        longest_ms=high,
    )


def by_process(labelled: LabelledSteps) -> tuple[ProcessSteps, ...]:
    """Each process and kind: train first, then in order of ranks."""
    found = []
    ordered = labelled.frame.drop_nulls("kind").sort("rank", "process")
    for own in ordered.partition_by("kind", "process", maintain_order=True):
        wall = own["wall_ns"].to_numpy() / 1e6
        steady = wall[(own["reason"] == STEADY).to_numpy()]
        found.append(
            ProcessSteps(
                process=own["process"][0],
                rank=own["rank"][0],
                kind=own["kind"][0],
                steps=own.height,
                steady=len(steady),
                mean_ms=float(steady.mean()) if len(steady) else None,
                median_ms=float(np.median(steady)) if len(steady) else None,
                p95_ms=float(np.quantile(steady, 0.95)) if len(steady) else None,
                longest_ms=float(wall.max()),
            )
        )
    return tuple(sorted(found, key=lambda row: (row.kind != "train", row.kind)))


def longest(
    tables: Tables, labelled: LabelledSteps, kind: str, limit: int, processes: Collection[str]
) -> tuple[LongStep, ...]:
    """The longest steps of a kind, by what they take above the median of their process.

    Medians are of steady steps, of all where there is none.
    """
    steady = pl.col("reason") == STEADY
    median = (pl.col(f"{name}_ns").filter(pl.col("usual")).median().over("process") for name in ("wall", *PHASES))
    rows = (
        _of(labelled, kind, processes)
        .with_columns(usual=steady | ~steady.any().over("process"))
        .with_columns(each.name.suffix("_usual") for each in median)
        .sort(pl.col("wall_ns") - pl.col("wall_ns_usual"), descending=True, maintain_order=True)
        .head(limit)
    )
    # by process and step what the journal notes with a duration, the longest first
    events: dict[tuple[str, int], list[StepEvent]] = {}
    noted = tables.journal.filter((pl.col("duration_ns") > 0) & ~pl.col("kind").is_in(WITHOUT_TIME))
    noted = noted.join(rows, on=["process", "step"], how="semi").sort("duration_ns", descending=True)
    for row in noted.iter_rows(named=True):
        fields = json_object(row["data"])
        named = (fields.get(key) for key in ("name", "path", "function"))
        name = next((value for value in named if isinstance(value, str) and value), None)
        event = StepEvent(row["kind"], name, row["duration_ns"] / 1e6)
        events.setdefault((row["process"], row["step"]), []).append(event)
    found = []
    for row in rows.iter_rows(named=True):
        over = {
            name: row[f"{name}_ns"] / 1e6 - row[f"{name}_ns_usual"] / 1e6
            for name in ("wall", *PHASES)
            if row[f"{name}_ns"] is not None and row[f"{name}_ns_usual"] is not None
        }
        phase = max((name for name in PHASES if over.get(name, 0) > 0), key=over.__getitem__, default=None)
        wall_ms = row["wall_ns"] / 1e6
        long = [event for event in events.get((row["process"], row["step"]), ()) if event.ms >= EVENT_SHARE * wall_ms]
        found.append(
            LongStep(
                process=row["process"],
                step=row["step"],
                wall_ms=wall_ms,
                extra_ms=over["wall"],
                reason=row["reason"],
                phase=phase,
                phase_extra_ms=over[phase] if phase is not None else None,
                events=tuple(long[:MAX_EVENTS]),
            )
        )
    return tuple(found)


LEVELS = (
    *("cpu_pct", "threads", "rss_bytes", "busy_cores", "stolen_cores", "load_1m", "runnable", "cpu_frequency_mhz"),
    *("psi_cpu_some_pct", "psi_io_some_pct", "psi_memory_some_pct"),
    *("gpu_util_pct", "gpu_memory_bytes", "gpu_temperature_c", "gpu_power_w", "gpu_power_limit_w"),
    *("gpu_sm_clock_mhz", "gpu_sm_clock_max_mhz"),
    *energy.TELEMETRY,
)
RATES = {  # counter -> (name of its growth per second, divisor)
    "read_bytes": ("read_bytes_per_s", 1.0),
    "requested_bytes": ("requested_bytes_per_s", 1.0),
    "write_bytes": ("write_bytes_per_s", 1.0),
    "major_faults": ("major_faults_per_s", 1.0),
    "involuntary_switches": ("involuntary_switches_per_s", 1.0),
    "run_delay_ns": ("run_delay_share", 1e9),  # ns of each second: of the time, ready without a core
    "cgroup_throttled_ns": ("throttled_cores", 1e9),  # summed over cores
}
WORKERS, OTHERS = "loader workers", "other processes"
MAX_SUBJECTS = 16  # of one metric
SECOND = 1e9


def telemetry(
    tables: Tables, labelled: LabelledSteps, limit: int, between: tuple[int, int] | None = None
) -> Telemetry | None:
    """All figures at `limit` points at most, read between two moments (epoch ns) where given; None without any."""
    readings = tables.system.drop_nulls(["value", "time_ns"])
    if between is not None:
        readings = readings.filter(pl.col("time_ns").is_between(*between))
    values = by_subject(readings, tables)
    if values.is_empty():
        return None
    times = values["time_ns"].unique().sort()
    first, last = int(times[0]), int(times[-1])
    origin = min(first, tables.run.started_ns or first)
    if len(times) <= limit:  # each reading at its own time
        points = pl.DataFrame({"time_ns": times, "point": np.arange(len(times))})
        values, time_s, width = values.join(points, on="time_ns"), _seconds(times, origin), None
    else:  # into buckets of equal length
        width = -(-(last - first + 1) // limit)
        values = values.with_columns(point=(pl.col("time_ns") - first) // width)
        middles = range((last - first) // width + 1)
        time_s = tuple((first - origin + width * (at + 0.5)) / SECOND for at in middles)
    series, dropped = _series(values, len(time_s))
    steps = labelled.frame.filter(pl.col("start_ns").is_not_null())
    if between is not None:
        steps = steps.filter(pl.col("start_ns").is_between(*between))
    train = steps.filter(pl.col("kind") == "train")
    steps = (train if train.height else steps).sort("rank", "process", "start_ns")
    process = str(steps["process"][0]) if steps.height else None
    steps = steps.filter(pl.col("process") == pl.col("process").first())
    steps = steps[positions(steps["wall_ns"].to_numpy(), limit)]
    return Telemetry(
        time_s=time_s,
        bucket_s=width / SECOND if width is not None else None,
        series=series,
        readings=readings["time_ns"].n_unique(),
        dropped=dropped,
        step_time_s=_seconds(steps["start_ns"], origin),
        step_ms=tuple((steps["wall_ns"] / 1e6).to_list()),
        step_process=process,
        hosts=tuple(sorted(readings["host"].drop_nulls().unique().to_list())),
    )


def by_subject(readings: pl.DataFrame, tables: Tables) -> pl.DataFrame:
    """Levels and rates of `readings`, a frame of the table of the system: (time_ns, metric, subject, value).

    Processes of one subject are summed. Of counters it is the growth since the reading before; what fell (a process
    number used again) is left out.
    """
    wanted = readings.filter(pl.col("metric").is_in([*LEVELS, *RATES]))
    counted = energy.as_telemetry(tables)
    if counted is not None:
        wanted = pl.concat([wanted, counted.filter(pl.col("time_ns").is_in(readings["time_ns"].unique().implode()))])
    workers = tables.processes.filter(pl.col("role") == "loader_worker").select("host", "pid").drop_nulls()
    rows = [(rank.host, rank.pid, rank.process) for rank in tables.ranks]
    rows += [(host, pid, WORKERS) for host, pid in workers.rows()]
    schema = {"host": pl.String, "pid": pl.Int64, "who": pl.String}
    who = pl.DataFrame(rows, schema=schema, orient="row").unique(["host", "pid"], keep="first")
    several = wanted["host"].n_unique() > 1
    host, device = pl.col("host").fill_null("host"), pl.col("device")

    def on_host(name: pl.Expr) -> pl.Expr:
        return pl.concat_str([host, pl.lit(" "), name]) if several else name

    named = wanted.join(who, on=["host", "pid"], how="left").with_columns(
        subject=pl.when(pl.col("who") == WORKERS)
        .then(on_host(pl.col("who")))
        .when(pl.col("who").is_not_null())
        .then(pl.col("who"))
        .when(pl.col("pid").is_not_null() & device.is_null())
        .then(pl.lit(OTHERS))
        .when(device.is_not_null() & (device != "cgroup"))
        .then(on_host(device))
        .otherwise(host)
    )
    keys = ["host", "pid", "device", "metric"]
    columns = ("time_ns", "metric", "subject", "value")
    rate = pl.col("grown") / pl.col("seconds") / pl.col("metric").replace_strict({m: d for m, (_, d) in RATES.items()})
    rates = (
        named.filter(pl.col("metric").is_in(list(RATES)))
        .sort("time_ns")
        .with_columns(grown=pl.col("value").diff().over(keys), seconds=pl.col("time_ns").diff().over(keys) / SECOND)
        .filter((pl.col("seconds") > 0) & (pl.col("grown") >= 0))
        .with_columns(value=rate, metric=pl.col("metric").replace({m: name for m, (name, _) in RATES.items()}))
    )
    both = pl.concat([named.filter(pl.col("metric").is_in(LEVELS)).select(columns), rates.select(columns)])
    return both.group_by("time_ns", "metric", "subject").agg(pl.col("value").sum())


def _series(values: pl.DataFrame, points: int) -> tuple[tuple[TelemetrySeries, ...], int]:
    means = values.group_by("metric", "subject", "point").agg(pl.col("value").mean())
    found: list[TelemetrySeries] = []
    count: Counter[str] = Counter()
    for (metric, subject), own in sorted(means.partition_by("metric", "subject", as_dict=True).items(), key=_order):
        count[str(metric)] += 1
        if count[str(metric)] <= MAX_SUBJECTS:
            known = dict(own.select("point", "value").rows())
            found.append(TelemetrySeries(str(metric), str(subject), tuple(known.get(at) for at in range(points))))
    return tuple(found), count.total() - len(found)


def _order(item: tuple[tuple[object, ...], pl.DataFrame]) -> tuple[str, int, str]:
    """By metric; ranks in the order of their numbers, what sums up several processes last."""
    metric, subject = (str(part) for part in item[0])
    parts = subject.replace(":", "-").replace(".", "-").split("-")
    natural = "-".join(part.zfill(9) if part.isdigit() else part for part in parts)
    return metric, int(subject.endswith((WORKERS, OTHERS))), natural


def _seconds(times: pl.Series, origin: int) -> tuple[float, ...]:
    return tuple(((times - origin).to_numpy().astype(np.float64) / SECOND).tolist())


Value = TypeVar("Value")
Series = Sequence[float | None] | npt.NDArray[np.generic]


def positions(values: Series, limit: int) -> list[int]:
    """Which of `values` to show where at most `limit` (4 or more) can be, in ascending order; all if they are not more.

    The first and the last stay, and the lowest and the highest of each stretch. Missing values (None, not a number)
    only stay where a stretch has no other.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    known = values if isinstance(values, np.ndarray) else [np.nan if value is None else value for value in values]
    column = np.asarray(known, dtype=np.float64)
    edges = np.linspace(0, count, max((limit - 2) // 2, 1) + 1).astype(np.int64)[:-1]
    stretch = np.repeat(np.arange(len(edges)), np.diff(np.append(edges, count)))
    kept = {0, count - 1}
    for hidden, extreme in ((np.inf, np.minimum), (-np.inf, np.maximum)):
        shown = np.where(np.isnan(column), hidden, column)
        first = np.flatnonzero(shown == extreme.reduceat(shown, edges)[stretch])
        kept.update(first[np.unique(stretch[first], return_index=True)[1]].tolist())
    return sorted(kept)


def pick(values: Sequence[Value], kept: Sequence[int]) -> list[Value]:
    return [values[place] for place in kept]
