"""Clocks of the run's GPUs by telemetry: how far below their highest, and which of the reasons somebody could remove.

A power cap at the limit the board was delivered with is how it works under load, and no loss; below that limit somebody
has set it. An idle GPU lowers its clock by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl

from stepscope.model.machine import GpuClocks
from stepscope.tables.schema import Tables

_IDLE, _POWER_CAP = 0x1, 0x4
# Bits of NVML's clock event reasons. 0x10 (boost in step with other GPUs) and 0x100 (display) are left out: the first
# follows the reasons of another GPU, the second is of graphics.
REASONS = {
    0x2: "set clocks",
    _POWER_CAP: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}
_LEVELS = (
    "gpu_util_pct",
    "gpu_power_w",
    "gpu_power_limit_w",
    "gpu_power_default_w",
    "gpu_temperature_c",
    "gpu_sm_clock_mhz",
    "gpu_sm_clock_max_mhz",
    "gpu_clock_reasons",
)
_LOWERED = 0.99  # of the limit as delivered; drivers round it


def facts(tables: Tables, readings: pl.DataFrame | None) -> tuple[GpuClocks, ...]:
    """GPUs on which a process of the run computes; all that were used where no list of processes tells."""
    if readings is None:
        return ()
    own = readings.filter(pl.col("device").str.starts_with("gpu:"))
    if own.is_empty():
        return ()
    pids = {rank.pid for rank in tables.ranks} | set(tables.processes["pid"].drop_nulls().to_list())
    found = []
    told = False
    for (host, device), rows in own.partition_by("host", "device", as_dict=True, maintain_order=True).items():
        clocks, ours = _of(str(host), str(device), rows, pids)
        told = told or ours
        if clocks is not None and (ours or clocks.utilization):
            found.append((ours, clocks))
    return tuple(clocks for ours, clocks in found if ours or not told)


def _of(host: str, device: str, rows: pl.DataFrame, pids: set[int]) -> tuple[GpuClocks | None, bool]:
    """(the facts, whether a process of the run computes on it)."""
    strangers, strangers_bytes, ours = _strangers(rows, pids)
    times: dict[int, dict[str, float]] = {}
    for time, metric, value in rows.select("time_ns", "metric", "value").sort("time_ns").rows():
        if metric in _LEVELS:
            times.setdefault(time, {})[metric] = value
    known = [r for r in times.values() if {"gpu_sm_clock_mhz", "gpu_sm_clock_max_mhz", "gpu_clock_reasons"} <= set(r)]
    busy = [reading for reading in known if not int(reading["gpu_clock_reasons"]) & _IDLE]
    if not busy:
        return None, ours
    removable = [_removable(reading) for reading in busy]
    lost = sum(_below(reading) for reading, reasons in zip(busy, removable, strict=True) if reasons)
    names = {name for reasons in removable for name in reasons}
    return (
        GpuClocks(
            host=host,
            device=device,
            readings=len(known),
            busy_readings=len(busy),
            utilization=_mean((r.get("gpu_util_pct") for r in known), 100.0),
            clock_mhz=_mean(r["gpu_sm_clock_mhz"] for r in busy) or 0.0,
            max_clock_mhz=max(r["gpu_sm_clock_max_mhz"] for r in busy),
            reasons={name: sum(name in r for r in removable) / len(busy) for name in sorted(names)},
            lost_share=lost / len(known),
            power_w=_mean(r.get("gpu_power_w") for r in busy),
            power_limit_w=_mean(r.get("gpu_power_limit_w") for r in busy),
            power_default_w=_mean(r.get("gpu_power_default_w") for r in busy),
            temperature_c=max((r["gpu_temperature_c"] for r in busy if "gpu_temperature_c" in r), default=None),
            strangers=strangers,
            strangers_bytes=strangers_bytes,
        ),
        ours,
    )


def _below(reading: Mapping[str, float]) -> float:
    """How far below the highest clock, as a share of it."""
    most = reading["gpu_sm_clock_max_mhz"]
    return max(0.0, 1.0 - reading["gpu_sm_clock_mhz"] / most) if most > 0 else 0.0


def _removable(reading: Mapping[str, float]) -> tuple[str, ...]:
    """Names of the reasons for a clock below the highest that are no property of the board."""
    if _below(reading) <= 0:
        return ()
    bits = int(reading["gpu_clock_reasons"])
    limit, delivered = reading.get("gpu_power_limit_w"), reading.get("gpu_power_default_w")
    lowered = limit is not None and delivered is not None and limit < _LOWERED * delivered
    return tuple(name for bit, name in REASONS.items() if bits & bit and (bit != _POWER_CAP or lowered))


def _strangers(rows: pl.DataFrame, pids: set[int]) -> tuple[int | None, int | None, bool]:
    """(others' processes, their bytes, whether ours show). In a container the driver may tell numbers of the host."""
    listed = rows.filter((pl.col("metric") == "gpu_process") & pl.col("pid").is_not_null())
    ours = bool(pids & set(listed["pid"].to_list()))
    if not ours:
        return None, None, False
    others = ~pl.col("pid").is_in(list(pids))
    most = [int(count) for _, count in listed.filter(others).group_by("time_ns").len().rows()]
    sizes = rows.filter((pl.col("metric") == "gpu_process_bytes") & others)
    held = sizes.group_by("time_ns").agg(pl.col("value").sum())["value"].to_list()
    return max(most, default=0), int(max(held)) if held else None, True


def _mean(values: Iterable[Any], divisor: float = 1.0) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) / divisor if known else None
