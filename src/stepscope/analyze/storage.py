"""Where the run's data lies and whether reading it reaches a device, by telemetry of the processes that load it.

`rchar` counts every byte asked for by a read, `read_bytes` those that a storage layer had to bring. Mapped files show
in neither of them but as major faults.
"""

from __future__ import annotations

import polars as pl

from stepscope.analyze.readings import growths, level
from stepscope.model.machine import StorageFacts, StorageMount
from stepscope.tables.schema import Tables

_SOURCES = {"open_files": "open files", "named_paths": "command line"}
_LEAST = 2  # readings of a worker that lives for an epoch
MEGABYTE_PER_S = 1e6  # below it reading is not worth a share of anything


def facts(tables: Tables, readings: pl.DataFrame | None) -> StorageFacts | None:
    """None without telemetry of reads."""
    if readings is None:
        return None
    ranks = [rank.pid for rank in tables.ranks]
    workers = tables.processes.filter(pl.col("role") == "loader_worker")["pid"].drop_nulls().unique().to_list()
    role, pids = ("loader_worker", workers) if workers else ("rank", ranks)
    requested = _total(readings, "requested_bytes", pids)
    if requested is None:
        return None
    device = _total(readings, "read_bytes", pids)
    blocked, looks = _blocked(readings, pids)
    delays = growths(readings, "block_io_delay_ns", pids, _LEAST)
    return StorageFacts(
        role=role,
        mounts=_mounts(tables.system.filter(pl.col("pid").is_in([*ranks, *workers]))),
        requested_bytes_per_s=requested,
        device_bytes_per_s=device,
        cold_share=_cold(requested, device),
        late_cold_share=_late_cold(readings, pids),
        blocked_share=blocked,
        blocked_readings=looks,
        io_delay_share=sum(delays.values()) / len(delays) / 1e9 if delays else None,
        major_faults_per_s=_total(readings, "major_faults", pids),
        pressure_pct=level(readings, "psi_io_some_pct")[0],
    )


def _total(readings: pl.DataFrame, metric: str, pids: list[int]) -> float | None:
    """Growth per second of wall time, summed over processes that were there together."""
    own = readings.filter((pl.col("metric") == metric) & pl.col("pid").is_in(pids)).sort("time_ns")
    wall = (int(readings["time_ns"].to_numpy().max()) - int(readings["time_ns"].to_numpy().min())) / 1e9
    grown = [
        max(0.0, rows["value"][-1] - rows["value"][0])
        for rows in own.partition_by("pid", maintain_order=True)
        if rows.height >= _LEAST
    ]
    return sum(grown) / wall if grown and wall > 0 else None


def _cold(requested: float | None, device: float | None) -> float | None:
    """Read-ahead brings more than was asked for: the share ends at 1."""
    if requested is None or device is None or requested < MEGABYTE_PER_S:
        return None
    return min(1.0, device / requested)


def _late_cold(readings: pl.DataFrame, pids: list[int]) -> float | None:
    times: list[int] = readings["time_ns"].unique().sort().to_list()
    part = readings.filter(pl.col("time_ns") >= times[-1] - (times[-1] - times[0]) // 3)
    if part["time_ns"].n_unique() < _LEAST:
        return None
    return _cold(_total(part, "requested_bytes", pids), _total(part, "read_bytes", pids))


def _blocked(readings: pl.DataFrame, pids: list[int]) -> tuple[float | None, int]:
    """(share of looks at the processes that met one blocked, looks)."""
    own = readings.filter(pl.col("pid").is_in(pids))
    looks = own.filter(pl.col("metric") == "requested_bytes").height
    blocked = own.filter((pl.col("metric") == "blocked") & (pl.col("value") > 0)).height
    return (min(1.0, blocked / looks) if looks else None), looks


def _mounts(rows: pl.DataFrame) -> tuple[StorageMount, ...]:
    """From open files where any was seen, else from what the command names. Of the whole run: looks are few."""
    for metric, source in _SOURCES.items():
        own = rows.filter((pl.col("metric") == metric) & pl.col("device").str.contains(":", literal=True))
        counts = own.group_by("device").agg(pl.col("value").sum()).sort(["value", "device"], descending=[True, False])
        found = [
            StorageMount(device.partition(":")[0], device.partition(":")[2], int(count), source)
            for device, count in counts.rows()
        ]
        if found:
            return tuple(found)
    return ()
