"""Clocks of the run's GPUs by telemetry: how far below their highest, and which of the reasons somebody could remove.

A power cap at the limit the board was delivered with is how it works under load, and no loss; below that limit somebody
has set it. An idle GPU lowers its clock by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl

from stepscope.analyze.machine.readings import growths, level
from stepscope.engine.journal import mean
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model.machine import GpuClocks, NumaFacts, PageFaultFacts, StorageFacts, StorageMount
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


def gpu_clocks(tables: Tables, readings: pl.DataFrame | None) -> tuple[GpuClocks, ...]:
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


def numa(tables: Tables, readings: pl.DataFrame | None) -> NumaFacts | None:
    """None on a machine with one node, without telemetry, or of several hosts that differ."""
    hardware = [found for m in tables.manifests if isinstance(found := m.get("hardware"), dict)]
    nodes = [_nodes(one) for one in hardware]
    if readings is None or not nodes or len(nodes[0]) < 2 or any(other != nodes[0] for other in nodes):
        return None
    of_cpu = {cpu: node for node, cpus in nodes[0].items() for cpu in cpus}
    pids = [rank.pid for rank in tables.ranks]
    seen = readings.filter((pl.col("metric") == "processor") & pl.col("pid").is_in(pids))
    at = [(int(pid), of_cpu.get(int(cpu))) for pid, cpu in seen.select("pid", "value").rows()]
    known = [(pid, node) for pid, node in at if node is not None]
    if not known:
        return None
    counts = Counter(node for _, node in known)
    return NumaFacts(
        nodes=len(nodes[0]),
        main_nodes={node: count / len(known) for node, count in sorted(counts.items())},
        away_share=_away(known, _nearest(readings, _gpus(hardware[0]))),
    )


def _nodes(hardware: Mapping[str, Any]) -> dict[str, list[int]]:
    """Nodes with processors; those with memory alone are of no thread."""
    nodes = hardware.get("numa_nodes")
    if not isinstance(nodes, dict):
        return {}
    return {str(node): cpus for node, cpus in nodes.items() if isinstance(cpus, list) and cpus}


def _gpus(hardware: Mapping[str, Any]) -> dict[str, int]:
    gpus = hardware.get("gpus")
    found = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    return {f"gpu:{gpu.get('index')}": gpu["numa_node"] for gpu in found if isinstance(gpu.get("numa_node"), int)}


def _nearest(readings: pl.DataFrame, gpus: Mapping[str, int]) -> dict[int, set[str]]:
    """Nodes next to the GPUs that a process computes on."""
    listed = readings.filter((pl.col("metric") == "gpu_process") & pl.col("pid").is_not_null())
    found: dict[int, set[str]] = {}
    for pid, device in listed.select("pid", "device").unique().rows():
        if device in gpus:
            found.setdefault(int(pid), set()).add(str(gpus[device]))
    return found


def _away(known: list[tuple[int, str]], nearest: Mapping[int, set[str]]) -> float | None:
    with_gpu = [node not in nearest[pid] for pid, node in known if pid in nearest]
    return sum(with_gpu) / len(with_gpu) if with_gpu else None


_SOURCES = {"open_files": "open files", "named_paths": "command line"}
_LEAST = 2  # readings of a worker that lives for an epoch
MEGABYTE_PER_S = 1e6  # below it reading is not worth a share of anything


def storage(tables: Tables, readings: pl.DataFrame | None) -> StorageFacts | None:
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


_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_",
             "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE")  # fmt: skip
_USUAL_PAGE_BYTES = 4096


def page_faults(tables: Tables, labelled: LabelledSteps, training: pl.DataFrame | None) -> PageFaultFacts | None:
    """None where no steady step tells its faults."""
    steady = labelled.steady().drop_nulls(["minor_faults", "wall_ns"])
    if steady.is_empty():
        return None
    own_ns = mean(steady["wall_ns"] - steady["data_wait_ns"].fill_null(0))
    pids = [rank.pid for rank in tables.ranks]
    faults = mean(steady["minor_faults"])
    told = [_object(manifest, "page_faults") for manifest in tables.manifests]
    costs = [_object(one, "cost") for one in told]
    alone, beside, returned = (_worst(costs, name) for name in ("ns_alone", "ns_beside", "ns_returned"))
    threads = int(_worst(costs, "threads") or 1)
    page_bytes = int(_worst(costs, "page_bytes") or _USUAL_PAGE_BYTES)
    share, kept = _shares(training, pids, page_bytes)
    again = faults * (1.0 - (kept or 0.0))
    cost = at_most = None
    if alone is not None and beside is not None and returned is not None:
        of_a_fault = _critical_ns(share, threads, alone, beside) + returned
        cost = min(again * of_a_fault, own_ns) / 1e6
        at_most = max(cost, min(again * (max(alone, beside) + returned), own_ns) / 1e6)
    environment = [_object(manifest, "environment") for manifest in tables.manifests][:1] or [{}]
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
        libc=_text(told, "libc"),
        preloaded=str(environment[0]["LD_PRELOAD"]) if environment[0].get("LD_PRELOAD") else None,
        settings={name: str(environment[0][name]) for name in _SETTINGS if name in environment[0]},
        huge_pages=_text(told, "huge_pages"),
        installed=tuple(str(name) for one in told[:1] for name in one.get("installed") or ()),
        largest_bytes=_largest(tables),
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
    both = [pid for pid in faults if pid in own]
    total = sum(faults[pid] for pid in both)
    if total <= 0:
        return None, None
    kept = sum(held.get(pid, 0.0) for pid in both) / page_bytes / total
    return min(1.0, sum(own[pid] for pid in both) / total), min(1.0, kept)


def _largest(tables: Tables) -> int | None:
    """Of what was allocated in windows that recorded memory."""
    sizes = tables.memory.filter((pl.col("bytes") > 0) & (pl.col("device").fill_null("cpu") == "cpu"))["bytes"]
    return int(max(sizes.to_list())) if len(sizes) else None


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _worst(costs: list[Mapping[str, Any]], name: str) -> float | None:
    """Of the hosts, since ranks wait for the slowest; None unless each tells it."""
    found = [cost.get(name) for cost in costs]
    known = [float(value) for value in found if isinstance(value, (int, float)) and value >= 0]
    return max(known) if known and len(known) == len(found) else None


def _text(told: list[Mapping[str, Any]], name: str) -> str | None:
    value = told[0].get(name) if told else None
    return value if isinstance(value, str) else None
