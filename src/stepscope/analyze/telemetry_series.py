"""Telemetry over time: readings of a second brought onto one axis, counters as growth per second.

A run of a day has 86,400 readings of each figure; a picture holds some hundred points. Here, unlike with steps, a
point is the mean of what was read in its time: a reading is a sample of a second, and no event of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from stepscope.analyze.thinning import positions
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model.timeline import Telemetry, TelemetrySeries
from stepscope.tables.schema import Tables

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
    own = named.filter(pl.col("metric").is_in(list(RATES))).sort("time_ns")
    keys = ["host", "pid", "device", "metric"]
    own = own.with_columns(
        grown=pl.col("value") - pl.col("value").shift(1).over(keys),
        seconds=(pl.col("time_ns") - pl.col("time_ns").shift(1).over(keys)) / SECOND,
        divisor=pl.col("metric").replace_strict({name: by for name, (_, by) in RATES.items()}, return_dtype=pl.Float64),
        name=pl.col("metric").replace_strict({name: new for name, (new, _) in RATES.items()}, return_dtype=pl.String),
    ).filter((pl.col("seconds") > 0) & (pl.col("grown") >= 0))
    rates = own.with_columns(metric=pl.col("name"), value=pl.col("grown") / pl.col("seconds") / pl.col("divisor"))
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
