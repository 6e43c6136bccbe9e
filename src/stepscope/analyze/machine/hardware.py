"""What of the hardware holds a run up, by telemetry: clocks of its GPUs, NUMA nodes, storage, page faults.

A power cap at the limit the board was delivered with is how it works under load, and no loss; below that limit somebody
has set it. An idle GPU lowers its clock by itself. A page fault costs what was measured beside the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import polars as pl

from stepscope.analyze.machine.readings import (
    average,
    growths,
    level,
    manifest_objects,
    of,
    rank_pids,
    seconds,
    worker_pids,
)
from stepscope.engine.journal import mean
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model.machine import GpuClocks, NumaFacts, PageFaultFacts, StorageFacts, StorageMount
from stepscope.read.text import string
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
    *("gpu_util_pct", "gpu_power_w", "gpu_power_limit_w", "gpu_power_default_w", "gpu_temperature_c"),
    *("gpu_sm_clock_mhz", "gpu_sm_clock_max_mhz", "gpu_clock_reasons"),
)
_LOWERED = 0.99  # of the limit as delivered; drivers round it


def gpu_clocks(tables: Tables, readings: pl.DataFrame | None) -> tuple[GpuClocks, ...]:
    """GPUs on which a process of the run computes; all that were used where no list of processes tells."""
    if readings is None:
        return ()
    own = readings.filter(pl.col("device").str.starts_with("gpu:"))
    pids = [*rank_pids(tables), *tables.processes["pid"].drop_nulls()]
    told = own.filter((pl.col("metric") == "gpu_process") & pl.col("pid").is_in(pids)).height > 0
    found = []
    for (host, device), rows in own.partition_by("host", "device", as_dict=True, maintain_order=True).items():
        clocks = _of(host, device, rows, pids)
        # only where ours show are there strangers
        if clocks is not None and (clocks.strangers is not None or (clocks.utilization and not told)):
            found.append(clocks)
    return tuple(found)


def _of(host: str, device: str, rows: pl.DataFrame, pids: list[int]) -> GpuClocks | None:
    """None where it was idle throughout."""
    strangers, strangers_bytes = _strangers(rows, pids)
    times: dict[int, dict[str, float]] = {}
    levels = rows.filter(pl.col("metric").is_in(_LEVELS)).select("time_ns", "metric", "value").sort("time_ns")
    for time, metric, value in levels.rows():
        times.setdefault(time, {})[metric] = value
    known = [r for r in times.values() if {"gpu_sm_clock_mhz", "gpu_sm_clock_max_mhz", "gpu_clock_reasons"} <= set(r)]
    busy = [reading for reading in known if not int(reading["gpu_clock_reasons"]) & _IDLE]
    if not busy:
        return None
    removable = [_removable(reading) for reading in busy]
    lost = sum(_below(reading) for reading, reasons in zip(busy, removable, strict=True) if reasons)
    counts = Counter(name for reasons in removable for name in reasons)
    power, limit, delivered = (_mean(busy, f"gpu_power{end}_w") for end in ("", "_limit", "_default"))
    utilization = _mean(known, "gpu_util_pct")
    return GpuClocks(
        host=host,
        device=device,
        readings=len(known),
        busy_readings=len(busy),
        utilization=None if utilization is None else utilization / 100.0,
        clock_mhz=_mean(busy, "gpu_sm_clock_mhz") or 0.0,
        max_clock_mhz=max(r["gpu_sm_clock_max_mhz"] for r in busy),
        reasons={name: count / len(busy) for name, count in sorted(counts.items())},
        lost_share=lost / len(known),
        power_w=power,
        power_limit_w=limit,
        power_default_w=delivered,
        temperature_c=max((r["gpu_temperature_c"] for r in busy if "gpu_temperature_c" in r), default=None),
        strangers=strangers,
        strangers_bytes=strangers_bytes,
    )


def _below(reading: Mapping[str, float]) -> float:
    """How far below the highest clock, as a share of it."""
    most = reading["gpu_sm_clock_max_mhz"]
    return max(0.0, 1.0 - reading["gpu_sm_clock_mhz"] / most) if most > 0 else 0.0


def _removable(reading: Mapping[str, float]) -> tuple[str, ...]:
    """Names of the reasons for a clock below the highest that are no property of the board."""
    bits = int(reading["gpu_clock_reasons"]) if _below(reading) > 0 else 0
    limit, delivered = reading.get("gpu_power_limit_w"), reading.get("gpu_power_default_w")
    lowered = limit is not None and delivered is not None and limit < _LOWERED * delivered
    return tuple(name for bit, name in REASONS.items() if bits & bit and (bit != _POWER_CAP or lowered))


def _strangers(rows: pl.DataFrame, pids: list[int]) -> tuple[int | None, int | None]:
    """(others' processes, their bytes); None where none of ours shows: in a container the driver may tell numbers of
    the host."""
    listed = of(rows, "gpu_process").filter(pl.col("pid").is_not_null())
    theirs = ~pl.col("pid").is_in(pids)
    others = listed.filter(theirs)
    if others.height == listed.height:
        return None, None
    held = of(rows, "gpu_process_bytes").filter(theirs).group_by("time_ns").agg(pl.col("value").sum())["value"]
    most = max(others.group_by("time_ns").len()["len"].to_list(), default=0)
    return most, int(max(held.to_list())) if len(held) else None


def _mean(readings: list[dict[str, float]], name: str) -> float | None:
    known = [float(reading[name]) for reading in readings if name in reading]
    return sum(known) / len(known) if known else None


def numa(tables: Tables, readings: pl.DataFrame | None) -> NumaFacts | None:
    """None on a machine with one node, without telemetry, or of several hosts that differ."""
    hardware = manifest_objects(tables, "hardware")
    # nodes with processors; those with memory alone are of no thread
    nodes = [
        {str(node): cpus for node, cpus in _object(one, "numa_nodes").items() if isinstance(cpus, list) and cpus}
        for one in hardware
    ]
    if readings is None or not nodes or len(nodes[0]) < 2 or any(other != nodes[0] for other in nodes):
        return None
    of_cpu = {cpu: node for node, cpus in nodes[0].items() for cpu in cpus}
    seen = of(readings, "processor", rank_pids(tables)).select("pid", "value").rows()
    known = [(int(pid), of_cpu[int(cpu)]) for pid, cpu in seen if int(cpu) in of_cpu]
    if not known:
        return None
    gpus = hardware[0].get("gpus")
    listed = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    node_of = {f"gpu:{gpu.get('index')}": gpu["numa_node"] for gpu in listed if isinstance(gpu.get("numa_node"), int)}
    nearest: dict[int, set[str]] = {}  # nodes next to the GPUs that a process computes on
    for pid, device in of(readings, "gpu_process").drop_nulls("pid").select("pid", "device").unique().rows():
        if device in node_of:
            nearest.setdefault(int(pid), set()).add(str(node_of[device]))
    away = [node not in nearest[pid] for pid, node in known if pid in nearest]
    counts = Counter(node for _, node in known)
    return NumaFacts(
        nodes=len(nodes[0]),
        main_nodes={node: count / len(known) for node, count in sorted(counts.items())},
        away_share=sum(away) / len(away) if away else None,
    )


_SOURCES = {"open_files": "open files", "named_paths": "command line"}
_LEAST = 2  # readings of a worker that lives for an epoch
MEGABYTE_PER_S = 1e6  # below it reading is not worth a share of anything


def storage(tables: Tables, readings: pl.DataFrame | None) -> StorageFacts | None:
    """None without telemetry of reads."""
    if readings is None:
        return None
    ranks, workers = rank_pids(tables), worker_pids(tables)
    pids = workers or ranks
    times = readings["time_ns"].unique().sort().to_list()
    late = readings.filter(pl.col("time_ns") >= times[-1] - (times[-1] - times[0]) // 3)
    (requested, device), (late_requested, late_device) = (
        [_total(rows, name, pids) for name in ("requested_bytes", "read_bytes")] for rows in (readings, late)
    )
    if requested is None:
        return None
    delay_ns = average(growths(readings, "block_io_delay_ns", pids, _LEAST))
    looks = of(readings, "requested_bytes", pids).height
    blocked = of(readings, "blocked", pids).filter(pl.col("value") > 0).height
    return StorageFacts(
        role="loader_worker" if workers else "rank",
        mounts=_mounts(tables.system.filter(pl.col("pid").is_in([*ranks, *workers]))),
        requested_bytes_per_s=requested,
        device_bytes_per_s=device,
        cold_share=_cold(requested, device),
        late_cold_share=_cold(late_requested, late_device) if late["time_ns"].n_unique() >= _LEAST else None,
        blocked_share=min(1.0, blocked / looks) if looks else None,
        blocked_readings=looks,
        io_delay_share=None if delay_ns is None else delay_ns / 1e9,
        major_faults_per_s=_total(readings, "major_faults", pids),
        pressure_pct=level(readings, "psi_io_some_pct")[0],
    )


def _total(readings: pl.DataFrame, metric: str, pids: list[int]) -> float | None:
    """Growth per second of wall time, summed over processes that were there together."""
    wall = seconds(readings)
    grown = [
        max(0.0, rows["value"][-1] - rows["value"][0])
        for rows in of(readings, metric, pids).sort("time_ns").partition_by("pid", maintain_order=True)
        if rows.height >= _LEAST
    ]
    return sum(grown) / wall if grown and wall > 0 else None


def _cold(requested: float | None, device: float | None) -> float | None:
    """Read-ahead brings more than was asked for: the share ends at 1."""
    if requested is None or device is None or requested < MEGABYTE_PER_S:
        return None
    return min(1.0, device / requested)


def _mounts(rows: pl.DataFrame) -> tuple[StorageMount, ...]:
    """From open files where any was seen, else from what the command names. Of the whole run: looks are few."""
    for metric, source in _SOURCES.items():
        own = rows.filter((pl.col("metric") == metric) & pl.col("device").str.contains(":", literal=True))
        counts = own.group_by("device").agg(pl.col("value").sum()).sort(["value", "device"], descending=[True, False])
        if counts.height:
            split = ((device.partition(":"), count) for device, count in counts.rows())
            return tuple(StorageMount(kind, path, int(count), source) for (kind, _, path), count in split)
    return ()


_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_",
             "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE")  # fmt: skip
_USUAL_PAGE_BYTES = 4096


def page_faults(tables: Tables, labelled: LabelledSteps, training: pl.DataFrame | None) -> PageFaultFacts | None:
    """None where no steady step tells its faults."""
    steady = labelled.steady().drop_nulls(["minor_faults", "wall_ns"])
    if steady.is_empty():
        return None
    own_ns = mean(steady["wall_ns"] - steady["data_wait_ns"].fill_null(0))
    faults = mean(steady["minor_faults"])
    told = [_object(manifest, "page_faults") for manifest in tables.manifests]
    costs = [_object(one, "cost") for one in told]
    alone, beside, returned = (_worst(costs, name) for name in ("ns_alone", "ns_beside", "ns_returned"))
    threads = int(_worst(costs, "threads") or 1)
    page_bytes = int(_worst(costs, "page_bytes") or _USUAL_PAGE_BYTES)
    share, kept = _shares(training, rank_pids(tables), page_bytes)
    again = faults * (1.0 - (kept or 0.0))
    cost = at_most = None
    if alone is not None and beside is not None and returned is not None:
        of_a_fault = _critical_ns(share, threads, alone, beside) + returned
        cost = min(again * of_a_fault, own_ns) / 1e6
        at_most = max(cost, min(again * (max(alone, beside) + returned), own_ns) / 1e6)
    environment = _object(tables.manifests[0], "environment") if tables.manifests else {}
    first = told[0] if told else {}
    # of what was allocated in windows that recorded memory
    sizes = tables.memory.filter((pl.col("bytes") > 0) & (pl.col("device").fill_null("cpu") == "cpu"))["bytes"]
    return PageFaultFacts(
        steps=steady.height,
        minor_per_step=faults,
        main_share=share,
        kept_share=kept,
        page_bytes=page_bytes,
        threads=threads,
        ns_alone=alone,
        ns_beside=beside,
        ns_returned=returned,
        cost_ms_per_step=cost,
        at_most_ms_per_step=at_most,
        libc=string(first.get("libc")),
        preloaded=str(environment["LD_PRELOAD"]) if environment.get("LD_PRELOAD") else None,
        settings={name: str(environment[name]) for name in _SETTINGS if name in environment},
        huge_pages=string(first.get("huge_pages")),
        installed=tuple(str(name) for name in first.get("installed") or ()),
        largest_bytes=max(sizes.to_list(), default=None),
    )


def _critical_ns(share: float | None, threads: int, alone: float, beside: float) -> float:
    """Of a mean fault what the training thread pays: its own ones among those shared evenly, and all of the others."""
    if threads < 2:
        return alone
    least = 1.0 / threads
    shared = 1.0 if share is None else min(1.0, max(0.0, (1.0 - share) / (1.0 - least)))
    return shared * least * beside + (1.0 - shared) * alone


def _shares(training: pl.DataFrame | None, pids: list[int], page_bytes: int) -> tuple[float | None, float | None]:
    """Of the ranks' faults, by telemetry: those of their main threads, and those whose pages the processes kept."""
    if training is None:
        return None, None
    faults, own, held = (growths(training, name, pids) for name in ("minor_faults", "main_minor_faults", "rss_bytes"))
    both = faults.keys() & own.keys()
    total, main, kept = (sum(one.get(pid, 0.0) for pid in sorted(both)) for one in (faults, own, held))
    return (min(1.0, main / total), min(1.0, kept / page_bytes / total)) if total > 0 else (None, None)


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _worst(costs: list[Mapping[str, Any]], name: str) -> float | None:
    """Of the hosts, since ranks wait for the slowest; None unless each tells it."""
    found = [cost.get(name) for cost in costs]
    known = [float(value) for value in found if isinstance(value, (int, float)) and value >= 0]
    return max(known) if known and len(known) == len(found) else None
