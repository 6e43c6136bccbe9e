"""Telemetry of the training time: which readings count, how counters grew, where levels stood."""

from __future__ import annotations

import polars as pl

from stepscope.analyze.steps import mean
from stepscope.engine.step_labels import LabelledSteps
from stepscope.tables.schema import Tables

# Readings come once a second, anywhere in a step: the first and the last may each be wrong by one. Of long steps five
# are needed; of short ones, of which that is 5 %, three will do.
MIN_READINGS, FEW_READINGS = 5, 3
SHORT_STEPS = 40  # between the first reading and the last


def training(tables: Tables, labelled: LabelledSteps) -> pl.DataFrame | None:
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
