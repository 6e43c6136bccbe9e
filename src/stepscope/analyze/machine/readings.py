"""Telemetry of the training time: which readings count, how counters grew, where levels stood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from stepscope.engine.journal import mean
from stepscope.engine.step_labels import STEADY, LabelledSteps
from stepscope.tables.schema import Tables

# Readings come once a second, anywhere in a step: the first and the last may each be wrong by one. Of long steps five
# are needed; of short ones, of which that is 5 %, three will do.
MIN_READINGS, FEW_READINGS = 5, 3
SHORT_STEPS = 40  # between the first reading and the last


def training_readings(tables: Tables, labelled: LabelledSteps) -> pl.DataFrame | None:
    """Readings between the first and the last steady training step; None with too few of them."""
    steady = labelled.steady().filter(pl.col("start_ns").is_not_null())
    inside = _during(tables, steady)
    count = inside["time_ns"].n_unique()
    if steady.is_empty() or count < FEW_READINGS:
        return None
    steps = steady.filter(pl.col("start_ns").is_between(inside["time_ns"].min(), inside["time_ns"].max())).height
    return inside if count >= MIN_READINGS or steps >= SHORT_STEPS else None


def _during(tables: Tables, steps: pl.DataFrame) -> pl.DataFrame:
    """Readings between the start of the first step and the end of the last."""
    first, last = steps["start_ns"].min(), (steps["start_ns"] + steps["wall_ns"]).max()
    readings = tables.system.drop_nulls(["value", "time_ns"])
    return readings.filter(pl.col("time_ns").is_between(first, last))


def of(readings: pl.DataFrame, metric: str, pids: list[int] | None = None) -> pl.DataFrame:
    """The readings of a metric, of these processes alone where some are named."""
    if readings.is_empty():  # a query takes its time even so, and many ask
        return readings
    own = readings.filter(pl.col("metric") == metric)
    return own if pids is None else own.filter(pl.col("pid").is_in(pids))


def manifest_objects(tables: Tables, name: str) -> list[dict[str, Any]]:
    """What the manifests of the hosts hold under a name; those that hold nothing there are left out."""
    return [found for manifest in tables.manifests if isinstance(found := manifest.get(name), dict)]


def mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What a manifest holds under a name, where that is an object; else nothing."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def rank_pids(tables: Tables) -> list[int]:
    return [rank.pid for rank in tables.ranks]


def worker_pids(tables: Tables) -> list[int]:
    return tables.processes.filter(pl.col("role") == "loader_worker")["pid"].drop_nulls().unique().to_list()


def growths(readings: pl.DataFrame, metric: str, pids: list[int], least: int = FEW_READINGS) -> dict[int, float]:
    """Growth of a counter per second of wall time, by process with `least` readings."""
    result: dict[int, float] = {}
    own = of(readings, metric, pids)
    if own.is_empty():
        return result
    for (pid,), rows in own.sort("time_ns").partition_by("pid", as_dict=True).items():
        seconds = (rows["time_ns"][-1] - rows["time_ns"][0]) / 1e9
        if seconds > 0 and rows.height >= least:
            result[pid] = max(0.0, rows["value"][-1] - rows["value"][0]) / seconds
    return result


def average(values: dict[int, float]) -> float | None:
    """Mean over processes."""
    return sum(values.values()) / len(values) if values else None


def level(readings: pl.DataFrame, metric: str) -> tuple[float | None, str]:
    """(mean, of what): the cgroup's own figure where there is one, else the machine's."""
    rows = of(readings, metric)
    cgroup = rows.filter(pl.col("device") == "cgroup")
    chosen = cgroup if cgroup.height else rows.filter(pl.col("device").is_null())
    return (mean(chosen["value"]) if chosen.height else None), "cgroup" if cgroup.height else "machine"


def seconds(readings: pl.DataFrame) -> float:
    """From the first reading to the last."""
    return float(readings["time_ns"].to_numpy().max() - readings["time_ns"].to_numpy().min()) / 1e9


# metric -> (key, divisor): reported as growth over the training time
_COUNTERS = {"cgroup_throttled_ns": ("cgroup_throttled_s", 1e9), "cgroup_oom_events": ("cgroup_oom_events", 1.0)}
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
    *("load_1m", "runnable", "cpu_frequency_mhz", "busy_cores", "stolen_cores"),
    *("psi_cpu_some_pct", "psi_io_some_pct", "psi_memory_some_pct"),
    *("gpu_util_pct", "gpu_power_w", "gpu_power_limit_w", "gpu_temperature_c"),
    *("gpu_sm_clock_mhz", "gpu_sm_clock_max_mhz"),
)


def telemetry_summary(tables: Tables, labelled: LabelledSteps) -> dict[str, Any]:
    """Only what was measured has a key; an empty dict without telemetry.

    Of the time between the first steady step's start and the last one's end; of all time if no reading lies there.
    """
    steady = labelled.frame.filter((pl.col("reason") == STEADY) & pl.col("start_ns").is_not_null())
    inside = _during(tables, steady)
    readings = inside if inside.height else tables.system.drop_nulls(["value", "time_ns"])

    def values(metric: str, pids: list[int] | None = None) -> list[float]:
        return of(readings, metric, pids)["value"].to_list()

    result: dict[str, Any] = {}
    ranks = rank_pids(tables)
    for key, pids, together in (("rank", ranks, mean), ("workers", worker_pids(tables), pl.Series.sum)):
        cpu = of(readings, "cpu_pct", pids).group_by("pid").agg(pl.col("value").mean()).sort("pid")["value"]
        if len(cpu):
            result[f"{key}_cpu_pct"] = float(together(cpu))
        if resident := values("rss_bytes", pids):
            result[f"{key}_rss_peak_bytes"] = int(max(resident))
    for metric, key in _RATES.items():
        rate = average(growths(readings, metric, ranks, 2))
        if rate is not None:
            result[key] = rate
    for metric, (key, divisor) in _COUNTERS.items():
        if len(counts := values(metric)) > 1:
            result[key] = (max(counts) - min(counts)) / divisor
    for metric in _MEANS:
        if levels := values(metric):
            result[metric] = sum(levels) / len(levels)
    held = values("gpu_memory_bytes")
    return {**result, "gpu_memory_peak_bytes": max(held)} if held else result


def cores_used(summary_of_run: dict[str, Any]) -> float | None:
    """Mean CPU use of a training process, in cores."""
    value = summary_of_run.get("rank_cpu_pct")
    return value / 100.0 if isinstance(value, float) else None
