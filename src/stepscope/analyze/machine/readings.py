"""Telemetry of the training time: which readings count, how counters grew, where levels stood."""

from __future__ import annotations

from typing import Any

import polars as pl

from stepscope.engine.journal import mean
from stepscope.engine.step_labels import LabelledSteps
from stepscope.tables.schema import Tables

# Readings come once a second, anywhere in a step: the first and the last may each be wrong by one. Of long steps five
# are needed; of short ones, of which that is 5 %, three will do.
MIN_READINGS, FEW_READINGS = 5, 3
SHORT_STEPS = 40  # between the first reading and the last


def training_readings(tables: Tables, labelled: LabelledSteps) -> pl.DataFrame | None:
    """Readings between the first and the last steady training step; None with too few of them."""
    steady = labelled.steady().filter(pl.col("start_ns").is_not_null())
    if steady.is_empty():
        return None
    readings = tables.system.filter(pl.col("value").is_not_null() & pl.col("time_ns").is_not_null())
    first, last = steady["start_ns"].min(), (steady["start_ns"] + steady["wall_ns"]).max()
    inside = readings.filter(pl.col("time_ns").is_between(first, last))
    count = inside["time_ns"].n_unique()
    if count < FEW_READINGS:
        return None
    steps = steady.filter(pl.col("start_ns").is_between(inside["time_ns"].min(), inside["time_ns"].max())).height
    return inside if count >= MIN_READINGS or steps >= SHORT_STEPS else None


def growths(readings: pl.DataFrame, metric: str, pids: list[int], least: int = FEW_READINGS) -> dict[int, float]:
    """Growth of a counter per second of wall time, by process with `least` readings."""
    own = readings.filter((pl.col("metric") == metric) & pl.col("pid").is_in(pids)).sort("time_ns")
    result = {}
    for (pid,), rows in own.partition_by("pid", as_dict=True, maintain_order=True).items():
        seconds = (rows["time_ns"][-1] - rows["time_ns"][0]) / 1e9
        if seconds > 0 and rows.height >= least:
            result[pid] = max(0.0, rows["value"][-1] - rows["value"][0]) / seconds
    return result


def average(values: dict[int, float]) -> float | None:
    """Mean over processes."""
    return sum(values.values()) / len(values) if values else None


def level(readings: pl.DataFrame, metric: str) -> tuple[float | None, str]:
    """(mean, of what): the cgroup's own figure where there is one, else the machine's."""
    rows = readings.filter(pl.col("metric") == metric)
    cgroup = rows.filter(pl.col("device") == "cgroup")
    chosen = cgroup if cgroup.height else rows.filter(pl.col("device").is_null())
    return (mean(chosen["value"]) if chosen.height else None), "cgroup" if cgroup.height else "machine"


def seconds(readings: pl.DataFrame) -> float:
    """From the first reading to the last."""
    values: list[int] = readings["time_ns"].to_list()
    return (max(values) - min(values)) / 1e9


_COUNTERS = {  # metric -> (key, divisor): reported as growth over the training time
    "cgroup_throttled_ns": ("cgroup_throttled_s", 1e9),
    "cgroup_oom_events": ("cgroup_oom_events", 1.0),
}
_RATES = {  # metric of the training process -> key: growth per second
    "involuntary_switches": "rank_involuntary_switches_per_s",
    "voluntary_switches": "rank_voluntary_switches_per_s",
    "migrations": "rank_migrations_per_s",
    "major_faults": "rank_major_faults_per_s",
    "read_bytes": "rank_read_bytes_per_s",
    "requested_bytes": "rank_requested_bytes_per_s",
    "write_bytes": "rank_write_bytes_per_s",
    "run_delay_ns": "rank_run_delay_ns_per_s",
}
_MEANS = (
    "load_1m",
    "runnable",
    "cpu_frequency_mhz",
    "busy_cores",
    "stolen_cores",
    "psi_cpu_some_pct",
    "psi_io_some_pct",
    "psi_memory_some_pct",
    "gpu_util_pct",
    "gpu_power_w",
    "gpu_power_limit_w",
    "gpu_temperature_c",
    "gpu_sm_clock_mhz",
    "gpu_sm_clock_max_mhz",
)
_PEAKS = {"gpu_memory_bytes": "gpu_memory_peak_bytes"}


def telemetry_summary(tables: Tables, labelled: LabelledSteps) -> dict[str, Any]:
    """Only what was measured has a key; an empty dict without telemetry."""
    readings = tables.system.filter(pl.col("value").is_not_null() & pl.col("time_ns").is_not_null())
    if readings.is_empty():
        return {}
    readings = _during_training(readings, labelled)
    result: dict[str, Any] = {}
    ranks = [rank.pid for rank in tables.ranks]
    workers = tables.processes.filter(pl.col("role") == "loader_worker")["pid"].drop_nulls().unique().to_list()
    _of_processes(result, "rank", readings.filter(pl.col("pid").is_in(ranks)))
    _of_processes(result, "workers", readings.filter(pl.col("pid").is_in(workers)))
    for metric, key in _RATES.items():
        rate = _growth_rate(readings.filter((pl.col("metric") == metric) & pl.col("pid").is_in(ranks)))
        if rate is not None:
            result[key] = rate
    for metric, (key, divisor) in _COUNTERS.items():
        values = _values(readings, metric)
        if len(values) > 1:
            result[key] = (max(values) - min(values)) / divisor
    for metric in _MEANS:
        values = _values(readings, metric)
        if values:
            result[metric] = sum(values) / len(values)
    for metric, key in _PEAKS.items():
        values = _values(readings, metric)
        if values:
            result[key] = max(values)
    return result


def _of_processes(result: dict[str, Any], key: str, own: pl.DataFrame) -> None:
    """CPU use (mean over processes of a rank, sum over workers) and the highest resident size of one of them."""
    cpu = own.filter(pl.col("metric") == "cpu_pct").group_by("pid").agg(pl.col("value").mean())["value"].to_list()
    if cpu:
        result[f"{key}_cpu_pct"] = sum(cpu) if key == "workers" else sum(cpu) / len(cpu)
    resident = _values(own, "rss_bytes")
    if resident:
        result[f"{key}_rss_peak_bytes"] = int(max(resident))


def _values(readings: pl.DataFrame, metric: str) -> list[float]:
    return readings.filter(pl.col("metric") == metric)["value"].to_list()


def cores_used(summary_of_run: dict[str, Any]) -> float | None:
    """Mean CPU use of a training process, in cores."""
    value = summary_of_run.get("rank_cpu_pct")
    return value / 100.0 if isinstance(value, float) else None


def _during_training(readings: pl.DataFrame, labelled: LabelledSteps) -> pl.DataFrame:
    """Readings between the first steady step's start and the last one's end; all of them if none lies there."""
    steady = labelled.frame.filter((pl.col("reason") == "steady") & pl.col("start_ns").is_not_null())
    if steady.is_empty():
        return readings
    first, last = steady["start_ns"].min(), (steady["start_ns"] + steady["wall_ns"]).max()
    inside = readings.filter(pl.col("time_ns").is_between(first, last))
    return inside if inside.height else readings


def _growth_rate(values: pl.DataFrame) -> float | None:
    """Growth per second of a counter, mean over processes."""
    spans = (
        values.sort("time_ns")
        .group_by("pid")
        .agg(
            grown=pl.col("value").last() - pl.col("value").first(),
            seconds=(pl.col("time_ns").last() - pl.col("time_ns").first()) / 1e9,
        )
        .filter(pl.col("seconds") > 0)
    )
    if spans.is_empty():
        return None
    return mean(spans["grown"] / spans["seconds"])
