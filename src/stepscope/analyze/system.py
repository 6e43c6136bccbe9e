"""A summary of the telemetry while the run trained: means over the training time, units in the names."""

from __future__ import annotations

from typing import Any

import polars as pl

from stepscope.analyze.steps import mean
from stepscope.engine.step_labels import LabelledSteps
from stepscope.tables.schema import Tables

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


def summary(tables: Tables, labelled: LabelledSteps) -> dict[str, Any]:
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
