"""What of the hardware holds a run up, by telemetry: clocks of its GPUs, NUMA nodes, storage, page faults.

A power cap at the limit the board was delivered with is how it works under load, and no loss; below that limit somebody
has set it. An idle GPU lowers its clock by itself. A page fault costs what was measured beside the run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import polars as pl

from stepscope.analyze.machine.readings import (
    average,
    growths,
    level,
    manifest_objects,
    mapping,
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
    """GPUs on which a process of the run computes; all that were used where no list of processes tells.

    One that was idle throughout is left out.
    """
    if readings is None:
        return ()
    own = readings.filter(pl.col("device").str.starts_with("gpu:"))
    pids = [*rank_pids(tables), *tables.processes["pid"].drop_nulls()]
    told = own.filter((pl.col("metric") == "gpu_process") & pl.col("pid").is_in(pids)).height > 0
    found = []
    for (host, device), rows in own.partition_by("host", "device", as_dict=True, maintain_order=True).items():
        # others' processes: known only where ours show, as in a container the driver may tell numbers of the host
        listed, theirs = of(rows, "gpu_process").filter(pl.col("pid").is_not_null()), ~pl.col("pid").is_in(pids)
        others, strangers, held = listed.filter(theirs), None, []
        if others.height < listed.height:
            strangers = max(others.group_by("time_ns").len()["len"].to_list(), default=0)
            per_reading = of(rows, "gpu_process_bytes").filter(theirs).group_by("time_ns").agg(pl.col("value").sum())
            held = per_reading["value"].to_list()
        times: dict[int, dict[str, float]] = {}
        for time, metric, value in (
            rows.filter(pl.col("metric").is_in(_LEVELS)).select("time_ns", "metric", "value").rows()
        ):
            times.setdefault(time, {})[metric] = value
        needed = {"gpu_sm_clock_mhz", "gpu_sm_clock_max_mhz", "gpu_clock_reasons"}
        known = [times[time] for time in sorted(times) if needed <= times[time].keys()]
        busy = [reading for reading in known if not int(reading["gpu_clock_reasons"]) & _IDLE]
        utilization = _mean(known, "gpu_util_pct")
        if not busy or (strangers is None and (told or not utilization)):
            continue
        removable = [_removable(reading) for reading in busy]
        counts = Counter(name for _, reasons in removable for name in reasons)
        power, limit, delivered = (_mean(busy, f"gpu_power{end}_w") for end in ("", "_limit", "_default"))
        clocks = GpuClocks(
            host=host,
            device=device,
            readings=len(known),
            busy_readings=len(busy),
            utilization=None if utilization is None else utilization / 100.0,
            clock_mhz=_mean(busy, "gpu_sm_clock_mhz") or 0.0,
            max_clock_mhz=max(reading["gpu_sm_clock_max_mhz"] for reading in busy),
            reasons={name: count / len(busy) for name, count in sorted(counts.items())},
            lost_share=sum(below for below, reasons in removable if reasons) / len(known),
            power_w=power,
            power_limit_w=limit,
            power_default_w=delivered,
            temperature_c=max((one["gpu_temperature_c"] for one in busy if "gpu_temperature_c" in one), default=None),
            strangers=strangers,
            strangers_bytes=int(max(held)) if held else None,
        )
        found.append(clocks)
    return tuple(found)


def _removable(reading: Mapping[str, float]) -> tuple[float, tuple[str, ...]]:
    """How far below the highest clock it is, as a share of it, and for which reasons that are no property of the
    board."""
    most = reading["gpu_sm_clock_max_mhz"]
    below = max(0.0, 1.0 - reading["gpu_sm_clock_mhz"] / most) if most > 0 else 0.0
    bits = int(reading["gpu_clock_reasons"]) if below > 0 else 0
    limit, delivered = reading.get("gpu_power_limit_w"), reading.get("gpu_power_default_w")
    lowered = limit is not None and delivered is not None and limit < _LOWERED * delivered
    return below, tuple(name for bit, name in REASONS.items() if bits & bit and (bit != _POWER_CAP or lowered))


def _mean(readings: list[dict[str, float]], name: str) -> float | None:
    known = [float(reading[name]) for reading in readings if name in reading]
    return sum(known) / len(known) if known else None


def numa(tables: Tables, readings: pl.DataFrame | None) -> NumaFacts | None:
    """None on a machine with one node, without telemetry, or of several hosts that differ."""
    hardware = manifest_objects(tables, "hardware")
    # nodes with processors; those with memory alone are of no thread
    nodes = [
        {str(node): cpus for node, cpus in mapping(one, "numa_nodes").items() if isinstance(cpus, list) and cpus}
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
    speeds: list[float | None] = []
    for rows, name in itertools.product((readings, late), ("requested_bytes", "read_bytes")):
        speeds.append(_together(rows, name, pids))
    if speeds[0] is None:
        return None
    # read-ahead brings more than was asked for: the share ends at 1
    cold, late_cold = (
        None if asked is None or brought is None or asked < MEGABYTE_PER_S else min(1.0, brought / asked)
        for asked, brought in (speeds[:2], speeds[2:])
    )
    delay_ns = average(growths(readings, "block_io_delay_ns", pids, _LEAST))
    looks = of(readings, "requested_bytes", pids).height
    blocked = of(readings, "blocked", pids).filter(pl.col("value") > 0).height
    # from open files where any was seen, else from what the command names; of the whole run, as looks are few
    own = tables.system.filter(
        pl.col("pid").is_in([*ranks, *workers]) & pl.col("device").str.contains(":", literal=True)
    )
    mounts: list[StorageMount] = []
    for metric, source in _SOURCES.items():
        counts = own.filter(pl.col("metric") == metric).group_by("device").agg(pl.col("value").sum())
        for device, count in counts.sort(["value", "device"], descending=[True, False]).rows() if not mounts else ():
            kind, _, path = device.partition(":")
            mounts.append(StorageMount(kind, path, int(count), source))
    return StorageFacts(
        role="loader_worker" if workers else "rank",
        mounts=tuple(mounts),
        requested_bytes_per_s=speeds[0],
        device_bytes_per_s=speeds[1],
        cold_share=cold,
        late_cold_share=late_cold if late["time_ns"].n_unique() >= _LEAST else None,
        blocked_share=min(1.0, blocked / looks) if looks else None,
        blocked_readings=looks,
        io_delay_share=None if delay_ns is None else delay_ns / 1e9,
        major_faults_per_s=_together(readings, "major_faults", pids),
        pressure_pct=level(readings, "psi_io_some_pct")[0],
    )


def _together(readings: pl.DataFrame, metric: str, pids: list[int]) -> float | None:
    """Growth per second of wall time, summed over processes that were there together."""
    value, own = pl.col("value"), of(readings, metric, pids).sort("time_ns")
    grown = own.group_by("pid", maintain_order=True).agg(
        pl.len(), by=(value.last() - value.first()).clip(lower_bound=0)
    )
    grown, wall = grown.filter(pl.col("len") >= _LEAST), seconds(readings)
    return float(grown["by"].sum()) / wall if grown.height and wall > 0 else None


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
    early = mean(steady.sort("start_ns")["minor_faults"].head(max(1, steady.height // 10)))
    told = [mapping(manifest, "page_faults") for manifest in tables.manifests]
    costs = [mapping(one, "cost") for one in told]
    alone, beside, returned = (_worst(costs, name) for name in ("ns_alone", "ns_beside", "ns_returned"))
    threads = int(_worst(costs, "threads") or 1)
    page_bytes = int(_worst(costs, "page_bytes") or _USUAL_PAGE_BYTES)
    # of the ranks' faults, by telemetry: those of their main threads, and those whose pages the processes kept
    share = kept = None
    if training is not None:
        names, pids = ("minor_faults", "main_minor_faults", "rss_bytes"), rank_pids(tables)
        all_faults, own, held = (growths(training, name, pids) for name in names)
        both = sorted(all_faults.keys() & own.keys())
        total, main, held_bytes = (sum(one.get(pid, 0.0) for pid in both) for one in (all_faults, own, held))
        if total > 0:
            share, kept = min(1.0, main / total), min(1.0, held_bytes / page_bytes / total)
    again = faults * (1.0 - (kept or 0.0))
    cost = at_most = None
    if alone is not None and beside is not None and returned is not None:
        of_a_fault = _critical_ns(share, threads, alone, beside) + returned
        cost = min(again * of_a_fault, own_ns) / 1e6
        at_most = max(cost, min(again * (max(alone, beside) + returned), own_ns) / 1e6)
    environment = mapping(tables.manifests[0], "environment") if tables.manifests else {}
    first = told[0] if told else {}
    installed = first.get("installed")
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
        installed=tuple(map(str, installed)) if isinstance(installed, list) else (),
        largest_bytes=max(sizes.to_list(), default=None),
        risen_share=max(0.0, 1.0 - early / faults) if faults else 0.0,
    )


def _critical_ns(share: float | None, threads: int, alone: float, beside: float) -> float:
    """Of a mean fault what the training thread pays: its own ones among those shared evenly, and all of the others."""
    if threads < 2:
        return alone
    least = 1.0 / threads
    shared = 1.0 if share is None else min(1.0, max(0.0, (1.0 - share) / (1.0 - least)))
    return shared * least * beside + (1.0 - shared) * alone


def _worst(costs: list[Mapping[str, Any]], name: str) -> float | None:
    """Of the hosts, since ranks wait for the slowest; None unless each tells it."""
    found = [cost.get(name) for cost in costs]
    known = [float(value) for value in found if isinstance(value, (int, float)) and value >= 0]
    return max(known) if known and len(known) == len(found) else None
