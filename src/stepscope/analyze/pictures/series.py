"""What a page draws over time, thinned so that nothing that stands out is lost: steps, telemetry, any series.

Steps one by one, of the journal or of traces: their parts, their distribution, and the longest of them.

The statistics of a run stand on steady steps alone (`steps.py`); here every step is shown with its reason, because the
one that is not steady is often the one that somebody looks for. Telemetry: levels and rates of processes, devices and
hosts on one axis. `positions` says which values of a series to draw, where there are more than pixels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

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


def step_phases(labelled: LabelledSteps, kind: str, process: str, limit: int) -> StepPhases:
    """The steps of one process and kind, at most `limit` of them, each with its phases."""
    own = _of(labelled, kind, (process,)).sort("step")
    total = own.height
    own = own[positions(own["wall_ns"].to_numpy(), limit)]
    wall = own["wall_ns"].to_numpy() / 1e6
    known = {phase: own[f"{phase}_ns"] for phase in PHASES if own[f"{phase}_ns"].null_count() < own.height}
    made = {phase: tuple((column / 1e6).to_list()) for phase, column in known.items()}
    if known:
        rest = wall - sum(column.fill_null(0).to_numpy() / 1e6 for column in known.values())
        rest = np.maximum(rest, 0.0)
        if rest.sum() > SMALLEST_REST * wall.sum():
            made[UNATTRIBUTED] = tuple(rest.tolist())
    return StepPhases(
        process=process,
        kind=kind,
        steps=tuple(own["step"].to_list()),
        wall_ms=tuple(wall.tolist()),
        reasons=tuple(own["reason"].to_list()),
        parts_ms=made,
        total=total,
    )


def distribution(labelled: LabelledSteps, kind: str, chosen: Collection[str] | None = None) -> StepDistribution | None:
    """How long the steps of a kind take, of all processes or the chosen ones; None without steps."""
    own = _of(labelled, kind, chosen)
    if own.is_empty():
        return None
    wall = own["wall_ns"].to_numpy() / 1e6
    steady = (own["reason"] == STEADY).to_numpy()
    usual = wall[steady] if steady.any() else wall  # one step that compiles or holds an export would hide all others
    low, high = float(wall.min()), float(wall.max())
    most = max(WIDE * float(np.median(usual)), float(np.quantile(usual, 0.99)))
    top = min(high, most)
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
    found = [
        _summary(own)
        for own in labelled.frame.drop_nulls("kind")
        .sort("rank", "process")
        .partition_by("kind", "process", maintain_order=True)
    ]
    return tuple(sorted(found, key=lambda row: (row.kind != "train", row.kind)))


def longest(
    tables: Tables, labelled: LabelledSteps, kind: str, limit: int, chosen: Collection[str] | None = None
) -> tuple[LongStep, ...]:
    """The longest steps of a kind, by what they take above the median of their process."""
    found: list[tuple[float, dict[str, Any], dict[str, float]]] = []
    for own in _of(labelled, kind, chosen).partition_by("process", maintain_order=True):
        medians = _medians(own)
        wall = own["wall_ns"].to_numpy()
        for at in np.argsort(-wall, kind="stable")[:limit].tolist():
            row = own.row(at, named=True)
            found.append((row["wall_ns"] / 1e6 - medians["wall"], row, medians))
    found.sort(key=lambda item: -item[0])
    rows = found[:limit]
    events = _events(tables, [row for _, row, _ in rows])
    return tuple(_long(row, extra, medians, events) for extra, row, medians in rows)


def _long(
    row: dict[str, Any], extra: float, medians: dict[str, float], events: dict[tuple[str, int], list[StepEvent]]
) -> LongStep:
    over = {
        phase: row[f"{phase}_ns"] / 1e6 - medians[phase]
        for phase in PHASES
        if phase in medians and row[f"{phase}_ns"] is not None
    }
    phase = max(over, key=lambda name: over[name], default=None)
    if phase is not None and over[phase] <= 0:
        phase = None
    wall_ms = row["wall_ns"] / 1e6
    noted = [event for event in events.get((row["process"], row["step"]), ()) if event.ms >= EVENT_SHARE * wall_ms]
    return LongStep(
        process=row["process"],
        step=row["step"],
        wall_ms=wall_ms,
        extra_ms=extra,
        reason=row["reason"],
        phase=phase,
        phase_extra_ms=over[phase] if phase is not None else None,
        events=tuple(noted[:MAX_EVENTS]),
    )


def _medians(own: pl.DataFrame) -> dict[str, float]:
    """Of wall time and phases over steady steps, over all where there is none, ms."""
    steady = own.filter(pl.col("reason") == STEADY)
    steady = steady if steady.height else own
    found = {"wall": float(np.median(steady["wall_ns"].to_numpy())) / 1e6}
    for phase in PHASES:
        column = steady[f"{phase}_ns"].drop_nulls()
        if not column.is_empty():
            found[phase] = float(np.median(column.to_numpy())) / 1e6
    return found


def _events(tables: Tables, rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[StepEvent]]:
    """By process and step what the journal notes with a duration, the longest first."""
    if not rows or tables.journal.is_empty():
        return {}
    wanted = pl.DataFrame(
        {"process": [row["process"] for row in rows], "step": [row["step"] for row in rows]},
        schema={"process": pl.String, "step": pl.Int64},
    ).unique()
    noted = tables.journal.filter(
        (pl.col("duration_ns") > 0) & pl.col("step").is_not_null() & ~pl.col("kind").is_in(WITHOUT_TIME)
    )
    noted = noted.join(wanted, on=["process", "step"], how="semi").sort("duration_ns", descending=True)
    found: dict[tuple[str, int], list[StepEvent]] = {}
    for row in noted.iter_rows(named=True):
        event = StepEvent(row["kind"], _name(row["data"]), row["duration_ns"] / 1e6)
        found.setdefault((row["process"], row["step"]), []).append(event)
    return found


def _name(data: str | None) -> str | None:
    """What the event is about, where it says so."""
    fields = json_object(data)
    named = (fields.get(key) for key in ("name", "path", "function"))
    return next((value for value in named if isinstance(value, str) and value), None)


def _summary(own: pl.DataFrame) -> ProcessSteps:
    wall = own["wall_ns"].to_numpy() / 1e6
    steady = wall[(own["reason"] == STEADY).to_numpy()]
    return ProcessSteps(
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


def _of(labelled: LabelledSteps, kind: str, chosen: Collection[str] | None) -> pl.DataFrame:
    own = labelled.frame.filter(pl.col("kind") == kind)
    return own if chosen is None else own.filter(pl.col("process").is_in(list(chosen)))


LEVELS = (
    *("cpu_pct", "threads", "rss_bytes", "busy_cores", "stolen_cores", "load_1m", "runnable", "cpu_frequency_mhz"),
    *("psi_cpu_some_pct", "psi_io_some_pct", "psi_memory_some_pct"),
    *("gpu_util_pct", "gpu_memory_bytes", "gpu_temperature_c", "gpu_power_w", "gpu_power_limit_w"),
    *("gpu_sm_clock_mhz", "gpu_sm_clock_max_mhz"),
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


class _Axis(NamedTuple):
    """Where readings go: by their own time, or into buckets of equal length."""

    frame: pl.DataFrame  # with the column `point`
    time_s: tuple[float, ...]
    bucket_s: float | None


def telemetry(
    tables: Tables, labelled: LabelledSteps, limit: int, between: tuple[int, int] | None = None
) -> Telemetry | None:
    """All figures at `limit` points at most, read between two moments (epoch ns) where given; None without any."""
    readings = tables.system.filter(pl.col("value").is_not_null() & pl.col("time_ns").is_not_null())
    if between is not None:
        readings = readings.filter(pl.col("time_ns").is_between(*between))
    named = _named(readings, tables)
    if named.is_empty():
        return None
    values = pl.concat([_levels(named), _rates(named)])
    if values.is_empty():
        return None
    first = values["time_ns"].min()
    assert isinstance(first, int)
    origin = first if tables.run.started_ns is None else min(tables.run.started_ns, first)
    axis = _axis(values, origin, limit)
    series, dropped = _series(axis)
    times, walls, process = _steps(labelled, origin, limit, between)
    return Telemetry(
        time_s=axis.time_s,
        bucket_s=axis.bucket_s,
        series=series,
        readings=readings["time_ns"].n_unique(),
        dropped=dropped,
        step_time_s=times,
        step_ms=walls,
        step_process=process,
        hosts=tuple(sorted(readings["host"].drop_nulls().unique().to_list())),
    )


def _named(readings: pl.DataFrame, tables: Tables) -> pl.DataFrame:
    """The readings of interest with their `subject`."""
    wanted = readings.filter(pl.col("metric").is_in([*LEVELS, *RATES]))
    workers = tables.processes.filter(pl.col("role") == "loader_worker")
    rows = [(rank.host, rank.pid, rank.process) for rank in tables.ranks]
    taken = {(host, pid) for host, pid, _ in rows}
    for host, pid in workers.select("host", "pid").drop_nulls().unique().rows():
        if (host, pid) not in taken:
            rows.append((host, pid, WORKERS))
    schema = {"host": pl.String, "pid": pl.Int64, "who": pl.String}
    who = pl.DataFrame(rows, schema=schema, orient="row").unique(["host", "pid"], keep="first")
    several = wanted["host"].n_unique() > 1
    host = pl.col("host").fill_null("host")
    of_device = pl.concat_str([host, pl.lit(" "), pl.col("device")]) if several else pl.col("device")
    of_group = pl.concat_str([host, pl.lit(" "), pl.col("who")]) if several else pl.col("who")
    return wanted.join(who, on=["host", "pid"], how="left").with_columns(
        subject=pl.when(pl.col("who").is_in([WORKERS]))
        .then(of_group)
        .when(pl.col("who").is_not_null())
        .then(pl.col("who"))
        .when(pl.col("pid").is_not_null() & pl.col("device").is_null())
        .then(pl.lit(OTHERS))
        .when(pl.col("device").is_not_null() & (pl.col("device") != "cgroup"))
        .then(of_device)
        .otherwise(host)
    )


def _levels(named: pl.DataFrame) -> pl.DataFrame:
    """(time_ns, metric, subject, value), processes of one subject summed."""
    own = named.filter(pl.col("metric").is_in(LEVELS))
    return own.group_by("time_ns", "metric", "subject").agg(pl.col("value").sum())


def _rates(named: pl.DataFrame) -> pl.DataFrame:
    """The same for counters: growth since the reading before. What fell (a process number used again) is left out."""
    keys = ["host", "pid", "device", "metric"]
    renamed = pl.DataFrame(
        [(metric, name, divisor) for metric, (name, divisor) in RATES.items()],
        schema={"metric": pl.String, "name": pl.String, "divisor": pl.Float64},
        orient="row",
    )
    rates = (
        named.join(renamed, on="metric")
        .sort("time_ns")
        .with_columns(grown=pl.col("value").diff().over(keys), seconds=pl.col("time_ns").diff().over(keys) / SECOND)
        .filter((pl.col("seconds") > 0) & (pl.col("grown") >= 0))
        .select("time_ns", "subject", metric="name", value=pl.col("grown") / pl.col("seconds") / pl.col("divisor"))
    )
    return rates.group_by("time_ns", "metric", "subject").agg(pl.col("value").sum())


def _axis(values: pl.DataFrame, origin: int, limit: int) -> _Axis:
    times = values["time_ns"].unique().sort()
    if len(times) <= limit:
        points = pl.DataFrame({"time_ns": times, "point": np.arange(len(times))})
        return _Axis(values.join(points, on="time_ns"), _seconds(times, origin), None)
    first, last = int(times[0]), int(times[-1])
    width = -(-(last - first + 1) // limit)
    placed = values.with_columns(point=(pl.col("time_ns") - first) // width)
    middles = tuple((first - origin + width * (at + 0.5)) / SECOND for at in range((last - first) // width + 1))
    return _Axis(placed, middles, width / SECOND)


def _series(axis: _Axis) -> tuple[tuple[TelemetrySeries, ...], int]:
    """Each metric of each subject along the axis, and how many subjects were left out."""
    means = axis.frame.group_by("metric", "subject", "point").agg(pl.col("value").mean())
    found: list[TelemetrySeries] = []
    count: dict[str, int] = {}
    dropped = 0
    for (metric, subject), own in sorted(means.partition_by("metric", "subject", as_dict=True).items(), key=_order):
        count[str(metric)] = count.get(str(metric), 0) + 1
        if count[str(metric)] > MAX_SUBJECTS:
            dropped += 1
            continue
        values: list[float | None] = [None] * len(axis.time_s)
        for point, value in own.select("point", "value").rows():
            values[point] = value
        found.append(TelemetrySeries(str(metric), str(subject), tuple(values)))
    return tuple(found), dropped


def _order(item: tuple[tuple[object, ...], pl.DataFrame]) -> tuple[str, int, str]:
    """By metric; ranks in the order of their numbers, what sums up several processes last."""
    metric, subject = (str(part) for part in item[0])
    parts = subject.replace(":", "-").replace(".", "-").split("-")
    natural = "-".join(part.zfill(9) if part.isdigit() else part for part in parts)
    return metric, int(subject.endswith((WORKERS, OTHERS))), natural


def _steps(
    labelled: LabelledSteps, origin: int, limit: int, between: tuple[int, int] | None
) -> tuple[tuple[float, ...], tuple[float, ...], str | None]:
    """When the steps of the first training process began, and how long they took."""
    steps = labelled.frame.filter(pl.col("start_ns").is_not_null())
    if between is not None:
        steps = steps.filter(pl.col("start_ns").is_between(*between))
    train = steps.filter(pl.col("kind") == "train")
    steps = (train if train.height else steps).sort("rank", "process", "start_ns")
    if steps.is_empty():
        return (), (), None
    process = str(steps["process"][0])
    own = steps.filter(pl.col("process") == process)
    own = own[positions(own["wall_ns"].to_numpy(), limit)]
    return _seconds(own["start_ns"], origin), tuple((own["wall_ns"] / 1e6).to_list()), process


def _seconds(times: pl.Series, origin: int) -> tuple[float, ...]:
    return tuple(((times - origin).to_numpy().astype(np.float64) / SECOND).tolist())


Value = TypeVar("Value")
Series = Sequence[float | None] | npt.NDArray[np.generic]


def positions(values: Series, limit: int, *, always: Iterable[int] = ()) -> list[int]:
    """Which of `values` to show where at most `limit` (4 or more) can be, in ascending order; all if they are not more.

    The first and the last stay, the lowest and the highest of each stretch, and those of `always` (the highest of them
    where they would take more than half). Missing values (None, not a number) only stay where a stretch has no other.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    known = values if isinstance(values, np.ndarray) else [np.nan if value is None else value for value in values]
    column = np.asarray(known, dtype=np.float64)
    wanted = {place for place in always if 0 <= place < count}
    forced = sorted(wanted, key=lambda place: (-np.nan_to_num(column[place], nan=-np.inf), place))
    forced = forced[: max(limit - 4, 0) // 2]
    room = max(limit - len(forced) - 2, 2)
    return sorted({0, count - 1, *forced, *_extremes(column, max(room // 2, 1))})


def pick(values: Sequence[Value], kept: Sequence[int]) -> list[Value]:
    """`values` at the positions `kept`."""
    return [values[place] for place in kept]


def _extremes(column: npt.NDArray[np.float64], stretches: int) -> list[int]:
    """Positions of the lowest and the highest value of each stretch."""
    edges = np.linspace(0, len(column), stretches + 1).astype(np.int64)[:-1]
    missing = np.isnan(column)
    stretch = np.repeat(np.arange(len(edges)), np.diff(np.append(edges, len(column))))
    found = []
    for hidden in (np.inf, -np.inf):
        shown = np.where(missing, hidden, column)
        best = (np.minimum if hidden > 0 else np.maximum).reduceat(shown, edges)
        first = np.flatnonzero(shown == best[stretch])
        _, at = np.unique(stretch[first], return_index=True)
        found += first[at].tolist()
    return found
