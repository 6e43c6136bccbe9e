"""How a run shared its cores, by telemetry of the steady time: who made the main thread wait for a core.

A main thread that could run and had no core is wall time lost. Who had the core is bounded by CPU time: others can take
no more than what the run's own processes leave of the cores, and the run's own threads no more than what they used.
"""

from __future__ import annotations

import re
from typing import Any

import polars as pl
from msgspec import Struct

from stepscope.analyze.input.loader import known_cores, ranks_on_host
from stepscope.analyze.machine.readings import average, growths, level, seconds, training_readings
from stepscope.engine.journal import event_data, mean, place_of
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import Place
from stepscope.model.machine import CpuFacts, MemoryPressureFacts, PoolFacts
from stepscope.tables.schema import Tables

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def cpu_facts(tables: Tables, labelled: LabelledSteps, mean_ms: float | None, waits_ms: float = 0.0) -> CpuFacts | None:
    """None without steps, telemetry of the main threads, or the number of cores.

    Args:
        waits_ms: of the mean step, in which the main thread waits for data or files, or sleeps.
    """
    cores = known_cores(tables)
    readings = training_readings(tables, labelled)
    if cores is None or mean_ms is None or readings is None:
        return None
    pids = [rank.pid for rank in tables.ranks]
    delays = growths(readings, "run_delay_ns", pids)
    own = _own_cores(readings)
    if not delays or own is None:
        return None
    delay = min(1.0, sum(delays.values()) / len(delays) / 1e9)
    throttled = _throttled(readings)
    held = 0.0 if throttled is None else min(delay, throttled)
    rest = delay - held
    used_by_others = others(readings, own)
    taken = (
        max(0.0, cores - own) if used_by_others is None else used_by_others
    )  # by others, or what they could have taken
    mains = sum(min(used, 1.0 - delay) for used in _mean_cores(readings, pids).values())
    beside = max(0.0, own - mains)  # what our threads and processes used beside the main threads
    threads, place, source = _threads(tables)
    ranks = ranks_on_host(tables)
    shared = Shared(cores, _processors(tables), own, ranks, min(1.0, waits_ms / mean_ms))
    return CpuFacts(
        readings=readings["time_ns"].n_unique(),
        seconds=seconds(readings),
        cores=cores,
        ranks_on_host=ranks,
        threads=threads,
        threads_place=place,
        threads_source=source,
        own_cores=own,
        run_delay_share=delay,
        throttled_share=throttled,
        throttled_ms_per_step=None if throttled is None else held * mean_ms,
        own_ms_per_step=max(0.0, rest - taken) * mean_ms,
        others_ms_per_step=max(0.0, min(taken, rest - beside)) * mean_ms,
        involuntary_switches_per_s=average(growths(readings, "involuntary_switches", pids)),
        pressure_pct=level(readings, "psi_cpu_some_pct")[0],
        load=level(readings, "load_1m")[0],
        migrations_per_s=average(growths(readings, "migrations", pids)),
        stolen_cores=level(readings, "stolen_cores")[0],
        pool=pool_facts(readings, pids, shared, threads, mean_ms),
        main_cpu_share=_share(average(growths(readings, "main_cpu_ns", pids))),
        waits_ms_per_step=min(waits_ms, mean_ms),
    )


def memory_pressure(tables: Tables, labelled: LabelledSteps, mean_ms: float | None) -> MemoryPressureFacts | None:
    """None without steps or telemetry of page faults."""
    readings = training_readings(tables, labelled)
    if readings is None or mean_ms is None:
        return None
    pids = [rank.pid for rank in tables.ranks]
    faults = growths(readings, "major_faults", pids)
    if not faults:
        return None
    stalled, of = level(readings, "psi_memory_some_pct")
    resident = readings.filter((pl.col("metric") == "rss_bytes") & pl.col("pid").is_in(pids))["value"]
    return MemoryPressureFacts(
        seconds=seconds(readings),
        major_faults_per_step=sum(faults.values()) / len(faults) * mean_ms / 1e3,
        stalled_pct=stalled,
        stalled_of=of,
        rss_bytes=int(max(resident.to_list())) if len(resident) else None,
    )


def _share(ns_per_s: float | None) -> float | None:
    return None if ns_per_s is None else min(1.0, ns_per_s / 1e9)


def _mean_cores(readings: pl.DataFrame, pids: list[int]) -> dict[int, float]:
    """CPU use by process, in cores."""
    cpu = readings.filter((pl.col("metric") == "cpu_pct") & pl.col("pid").is_in(pids))
    means = cpu.group_by("pid").agg(pl.col("value").mean()).sort("pid")
    return {pid: value / 100.0 for pid, value in means.rows()}


def _own_cores(readings: pl.DataFrame) -> float | None:
    """CPU use of all processes of the run on a host, in cores, mean over readings and hosts."""
    cpu = readings.filter(pl.col("metric") == "cpu_pct").group_by("host", "time_ns").agg(pl.col("value").sum())
    cpu = cpu.sort("host", "time_ns")  # sums of another order differ in the last digit
    return mean(cpu["value"]) / 100.0 if cpu.height else None


def _throttled(readings: pl.DataFrame) -> float | None:
    """Growth of the cgroup's throttled time by wall time, mean over hosts."""
    shares = []
    for rows in readings.filter(pl.col("metric") == "cgroup_throttled_ns").sort("time_ns").partition_by("host"):
        wall = rows["time_ns"][-1] - rows["time_ns"][0]
        if wall > 0:
            shares.append(max(0.0, rows["value"][-1] - rows["value"][0]) / wall)
    return sum(shares) / len(shares) if shares else None


def _processors(tables: Tables) -> int | None:
    """Processors of the smallest host that the run may use, whatever its quota."""
    found = [manifest.get("hardware") for manifest in tables.manifests]
    sets = [hardware.get("affinity") for hardware in found if isinstance(hardware, dict)]
    return min((len(cpus) for cpus in sets if isinstance(cpus, list) and cpus), default=None)


def _threads(tables: Tables) -> tuple[int | None, Place | None, str]:
    """(threads, the line that set them, source): the last `torch.set_num_threads`, what torch says, the environment."""
    last: dict[str, Any] | None = None
    for _, data in event_data(tables, "site"):
        if data.get("what") == "set_num_threads" and _value(data) is not None:
            last = data
    if last is not None:
        return _value(last), place_of(last), "events.jsonl, torch.set_num_threads"
    told = [rank.threads for rank in tables.ranks if rank.threads is not None]
    if told:
        return max(told), None, "rank.json, torch.get_num_threads when training began"
    for manifest in tables.manifests:
        environment = manifest.get("environment")
        for name in _THREADS:
            text = str(environment.get(name, "")) if isinstance(environment, dict) else ""
            if re.fullmatch(r"[1-9]\d{0,4}", text):
                return int(text), None, f"manifest.json, {name}"
    return None, None, ""


def _value(data: dict[str, Any]) -> int | None:
    arguments = data.get("arguments")
    for value in (arguments or {}).values() if isinstance(arguments, dict) else ():
        if re.fullmatch(r"[1-9]\d{0,4}", str(value)):
            return int(value)
    return None


WAKING_NS, WAKING_MOST_NS = 6_000, 15_000
_LEAST = 3  # readings: of a process with many threads only some are taken, and the counts are exact
_COUNTERS = (
    "main_cpu_ns",
    "run_delay_ns",
    "main_timeslices",
    "pool_cpu_ns",
    "pool_delay_ns",
    "pool_timeslices",
)


class Shared(Struct, frozen=True):
    """What ranks share: all of a host, mean over its readings. `waits` is of a step: for data, files or sleep."""

    cores: float  # the run may use, its cgroup's quota included
    processors: int | None  # in its affinity
    own_cores: float  # CPU use of the run
    ranks: int
    waits: float


def pool_facts(
    readings: pl.DataFrame, pids: list[int], shared: Shared, threads: int | None, mean_ms: float
) -> PoolFacts | None:
    """Mean over training processes; None without the counts.

    Args:
        threads: of torch in each of them; where they fit the cores nothing is put together again.
    """
    rates = [growths(readings, name, pids, _LEAST) for name in _COUNTERS]
    known = [pid for pid in pids if all(pid in rate for rate in rates)]
    if not known:
        return None
    units = [1.0 if "slices" in name else 1e9 for name in _COUNTERS]
    rows = [_Rank(*(rate[pid] / unit for rate, unit in zip(rates, units, strict=True))) for pid in known]
    beside = others(readings, shared.own_cores)
    cores = _cores_of_a_rank(rows, shared, beside)
    count = len(rows)
    lost = most = None
    if threads is not None and threads * shared.ranks > shared.cores:
        lost = sum(_lost(row, shared, threads, cores) for row in rows) / count * mean_ms
        most = max(lost, sum(_at_most(row, shared, threads, cores) for row in rows) / count * mean_ms)
    return PoolFacts(
        main_cpu_share=sum(row.main_cpu for row in rows) / count,
        main_off_share=sum(row.off for row in rows) / count,
        used_cores=sum(row.cpu for row in rows) / count,
        ready_threads=sum(row.delay for row in rows) / count,
        timeslices_per_step=sum(row.main_slices + row.slices for row in rows) / count * mean_ms / 1e3,
        other_waits_share=shared.waits,
        cores=cores,
        others_cores=beside,
        lost_ms_per_step=lost,
        at_most_ms_per_step=most,
    )


class _Rank(Struct, frozen=True):
    """Shares of wall time of the main thread, then of the pool summed over threads; time slices per second."""

    main_cpu: float
    main_delay: float
    main_slices: float
    cpu: float
    delay: float
    slices: float

    @property
    def off(self) -> float:
        """The main thread neither on a core nor ready."""
        return max(0.0, 1.0 - self.main_cpu - self.main_delay)


def others(readings: pl.DataFrame, own_cores: float) -> float | None:
    """Cores that others used or a hypervisor took, of those in the run's affinity; None in recordings without it."""
    busy = readings.filter(pl.col("metric") == "busy_cores")["value"]
    if busy.is_empty():
        return None
    stolen = readings.filter(pl.col("metric") == "stolen_cores")["value"]
    return max(0.0, mean(busy) + mean(stolen) - own_cores)


def _cores_of_a_rank(rows: list[_Rank], shared: Shared, taken: float | None) -> float:
    """Cores a rank could have used: where nothing tells what others used, only those it did use."""
    used = sum(row.main_cpu + row.cpu for row in rows) / len(rows)
    if taken is None:
        return used
    there = min(shared.cores, (shared.processors or shared.cores) - taken)
    loading = max(0.0, shared.own_cores - used * shared.ranks)
    return max(used, (there - loading) / shared.ranks)


def _again(row: _Rank, shared: Shared, threads: int, cores: float, waking_ns: int) -> float:
    """The step with as many threads as cores, as a share of the present one."""
    waking = waking_ns / 1e9
    work = max(0.0, row.cpu - row.slices * waking)
    part = work / max(1, threads - 1)  # the main thread's, like any other's
    alone = max(0.0, row.main_cpu - row.main_slices * waking - part)
    return shared.waits + alone / min(1.0, cores) + threads * part / cores


def _lost(row: _Rank, shared: Shared, threads: int, cores: float) -> float:
    """At most what the main thread waited because of the pool.

    It waited for a core while the pool had them, and for the pool while that waited. Of several ranks the second is
    not counted: there it also waits for the others.
    """
    waited = min(row.main_delay, row.cpu)
    if shared.ranks == 1:
        waited += min(max(0.0, row.off - shared.waits), row.delay)
    return max(0.0, min(waited, 1.0 - _again(row, shared, threads, cores, WAKING_NS)))


def _at_most(row: _Rank, shared: Shared, threads: int, cores: float) -> float:
    waited = row.main_delay + max(0.0, row.off - shared.waits) + row.main_slices * WAKING_MOST_NS / 1e9
    return max(0.0, min(waited, 1.0 - _again(row, shared, threads, cores, WAKING_MOST_NS)))
