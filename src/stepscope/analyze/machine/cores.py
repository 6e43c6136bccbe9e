"""How a run shared its cores, by telemetry of the steady time: who made the main thread wait for a core.

A main thread that could run and had no core is wall time lost. Who had the core is bounded by CPU time: others can take
no more than what the run's own processes leave of the cores, and the run's own threads no more than what they used: the
threads of torch's pool, and processes that the script started. Here is also what to do about processes in which the
agent never reported.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from typing import Any

import polars as pl
from msgspec import Struct

from stepscope.analyze.input.loader import known_cores, ranks_on_host
from stepscope.analyze.machine.readings import (
    average,
    growths,
    level,
    manifest_objects,
    mean_of,
    of,
    rank_pids,
    seconds,
)
from stepscope.analyze.sites import thread_count, threads_set
from stepscope.engine.journal import event_data, mean, place_of
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import Place, ProcessFacts
from stepscope.model.machine import Child, ChildrenFacts, CpuFacts, MemoryPressureFacts, PoolFacts
from stepscope.tables.processes import OTHER
from stepscope.tables.schema import Tables

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def cpu_facts(tables: Tables, readings: pl.DataFrame | None, mean_ms: float | None, waits_ms: float) -> CpuFacts | None:
    """None without steps, telemetry of the main threads, or the number of cores.

    Args:
        readings: of the training time, as `readings.training_readings` gives them.
        waits_ms: of the mean step, in which the main thread waits for data or files, or sleeps.
    """
    cores = known_cores(tables)
    if cores is None or mean_ms is None or readings is None:
        return None
    pids = rank_pids(tables)
    delay_ns = average(growths(readings, "run_delay_ns", pids))
    own = _own_cores(readings)
    if delay_ns is None or own is None:
        return None
    delay = min(1.0, delay_ns / 1e9)
    throttled = _throttled(readings)
    held = 0.0 if throttled is None else min(delay, throttled)
    rest = delay - held
    taken = others(readings, own)
    taken = max(0.0, cores - own) if taken is None else taken  # by others, or what they could have taken
    mains = of(readings, "cpu_pct", pids).group_by("pid").agg(pl.col("value").mean() / 100.0).sort("pid")["value"]
    beside = max(0.0, own - sum(min(used, 1.0 - delay) for used in mains))  # what our other threads and processes used
    threads, place, source = _threads(tables)
    ranks = ranks_on_host(tables)
    shared = _Shared(cores, _processors(tables), own, ranks, min(1.0, waits_ms / mean_ms), threads)
    main_ns = average(growths(readings, "main_cpu_ns", pids))
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
        pool=_pool(readings, pids, shared, mean_ms),
        main_cpu_share=None if main_ns is None else min(1.0, main_ns / 1e9),
        waits_ms_per_step=min(waits_ms, mean_ms),
    )


def memory_pressure(tables: Tables, readings: pl.DataFrame | None, mean_ms: float | None) -> MemoryPressureFacts | None:
    """None without steps or telemetry of page faults."""
    if readings is None or mean_ms is None:
        return None
    pids = rank_pids(tables)
    faults = average(growths(readings, "major_faults", pids))
    if faults is None:
        return None
    stalled, whose = level(readings, "psi_memory_some_pct")
    resident = of(readings, "rss_bytes", pids)["value"].to_list()
    return MemoryPressureFacts(
        seconds=seconds(readings),
        major_faults_per_step=faults * mean_ms / 1e3,
        stalled_pct=stalled,
        stalled_of=whose,
        rss_bytes=int(max(resident)) if resident else None,
    )


def _own_cores(readings: pl.DataFrame) -> float | None:
    """CPU use of all processes of the run on a host, in cores, mean over readings and hosts."""
    cpu = of(readings, "cpu_pct").group_by("host", "time_ns").agg(pl.col("value").sum())
    cpu = cpu.sort("host", "time_ns")  # sums of another order differ in the last digit
    return mean(cpu["value"]) / 100.0 if cpu.height else None


def _throttled(readings: pl.DataFrame) -> float | None:
    """Growth of the cgroup's throttled time by wall time, mean over hosts."""
    shares = []
    for rows in of(readings, "cgroup_throttled_ns").sort("time_ns").partition_by("host"):
        wall = rows["time_ns"][-1] - rows["time_ns"][0]
        if wall > 0:
            shares.append(max(0.0, rows["value"][-1] - rows["value"][0]) / wall)
    return sum(shares) / len(shares) if shares else None


def _processors(tables: Tables) -> int | None:
    """Processors of the smallest host that the run may use, whatever its quota."""
    sets = [hardware.get("affinity") for hardware in manifest_objects(tables, "hardware")]
    return min((len(cpus) for cpus in sets if isinstance(cpus, list) and cpus), default=None)


def _threads(tables: Tables) -> tuple[int | None, Place | None, str]:
    """(threads, the line that set them, source): the last `torch.set_num_threads`, what torch says, the environment."""
    last = threads_set(tables)
    if last is not None:
        return *last, "events.jsonl, torch.set_num_threads"
    told = [rank.threads for rank in tables.ranks if rank.threads is not None]
    if told:
        return max(told), None, "rank.json, torch.get_num_threads when training began"
    for environment in manifest_objects(tables, "environment"):
        for name in _THREADS:
            count = thread_count(environment.get(name))
            if count is not None:
                return count, None, f"manifest.json, {name}"
    return None, None, ""


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


class _Shared(Struct, frozen=True):
    """What ranks share: all of a host, mean over its readings. `waits` is of a step: for data, files or sleep."""

    cores: float  # the run may use, its cgroup's quota included
    processors: int | None  # in its affinity
    own_cores: float  # CPU use of the run
    ranks: int
    waits: float
    threads: int | None  # of torch in each of them


def _pool(readings: pl.DataFrame, pids: list[int], shared: _Shared, mean_ms: float) -> PoolFacts | None:
    """Mean over training processes; None without the counts. Where threads fit the cores nothing is put together."""
    rates = [growths(readings, name, pids, _LEAST) for name in _COUNTERS]
    units = [1.0 if "slices" in name else 1e9 for name in _COUNTERS]
    rows = [
        _Rank(*(rate[pid] / unit for rate, unit in zip(rates, units, strict=True)))
        for pid in pids
        if all(pid in rate for rate in rates)
    ]
    if not rows:
        return None
    beside = others(readings, shared.own_cores)
    used = mean_of(row.main_cpu + row.cpu for row in rows)
    cores = used
    if beside is not None:  # where nothing tells what others used, a rank could have had only the cores it did use
        there = min(shared.cores, (shared.processors or shared.cores) - beside)
        loading = max(0.0, shared.own_cores - used * shared.ranks)
        cores = max(used, (there - loading) / shared.ranks)
    lost = most = None
    if shared.threads is not None and shared.threads * shared.ranks > shared.cores:
        lost = mean_of(_waiting_for_pool(row, shared, cores) for row in rows) * mean_ms
        most = max(lost, mean_of(_at_most(row, shared, cores) for row in rows) * mean_ms)
    return PoolFacts(
        main_cpu_share=mean_of(row.main_cpu for row in rows),
        main_off_share=mean_of(row.off for row in rows),
        used_cores=mean_of(row.cpu for row in rows),
        ready_threads=mean_of(row.delay for row in rows),
        timeslices_per_step=mean_of(row.main_slices + row.slices for row in rows) * mean_ms / 1e3,
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
    busy = of(readings, "busy_cores")["value"]
    if busy.is_empty():
        return None
    return max(0.0, mean(busy) + mean(of(readings, "stolen_cores")["value"]) - own_cores)


def _again(row: _Rank, shared: _Shared, cores: float, waking_ns: int) -> float:
    """The step with as many threads as cores, as a share of the present one."""
    waking, threads = waking_ns / 1e9, shared.threads or 1
    work = max(0.0, row.cpu - row.slices * waking)
    part = work / max(1, threads - 1)  # the main thread's, like any other's
    alone = max(0.0, row.main_cpu - row.main_slices * waking - part)
    return shared.waits + alone / min(1.0, cores) + threads * part / cores


def _waiting_for_pool(row: _Rank, shared: _Shared, cores: float) -> float:
    """At most what the main thread waited because of the pool.

    It waited for a core while the pool had them, and for the pool while that waited. Of several ranks the second is
    not counted: there it also waits for the others.
    """
    waited = min(row.main_delay, row.cpu)
    if shared.ranks == 1:
        waited += min(max(0.0, row.off - shared.waits), row.delay)
    return max(0.0, min(waited, 1.0 - _again(row, shared, cores, WAKING_NS)))


def _at_most(row: _Rank, shared: _Shared, cores: float) -> float:
    waited = row.main_delay + max(0.0, row.off - shared.waits) + row.main_slices * WAKING_MOST_NS / 1e9
    return max(0.0, min(waited, 1.0 - _again(row, shared, cores, WAKING_MOST_NS)))


_TRAINING_ROLES = ("rank", "root", "other")  # launchers, workers and helpers need no agent of their own
_ISOLATED = re.compile(r"(^|\s)-[a-zA-Z]*[IES][a-zA-Z]*(\s|$)")


def processes(tables: Tables) -> tuple[ProcessFacts, ...]:
    """Every process seen from outside; a torch process without an agent has `reported` False and a remedy."""
    found = []
    for row in tables.processes.sort("start_ns", "pid").iter_rows(named=True):
        role, command = row["role"] or "other", row["command"] or ""
        silent = bool(row["torch"]) and not row["reported"] and role in _TRAINING_ROLES
        pid = row["pid"] if row["pid"] is not None else -1
        found.append(ProcessFacts(pid, role, command, not silent, _remedy(command) if silent else None))
    return tuple(found)


def _remedy(command: str) -> str:
    flags = itertools.takewhile(lambda argument: argument.startswith("-"), command.split(" ")[1:])
    isolating = next((flag for flag in flags if _ISOLATED.search(flag)), None)
    if isolating is not None:
        return f"Python ran with {isolating} and ignores PYTHONPATH: drop the flag, or use stepscope.profile() in it"
    return (
        "the agent never started in it: keep PYTHONPATH and STEPSCOPE_RECORD in its environment (a cleaned one, a "
        "container or a script that overwrites PYTHONPATH loses them), or use stepscope.profile() in the script"
    )


# From the call that starts a process to its first instruction, and back by a tick of the kernel's clock.
_AFTER_NS, _BEFORE_NS = 2_000_000_000, 20_000_000
_MOST_GENERATIONS = 16
QUICKEST = 0.01  # quantile of the steady steps: the least step alone may be one that was cut wrong


def children(
    tables: Tables, labelled: LabelledSteps, readings: pl.DataFrame | None, cpu: CpuFacts | None, mean_ms: float | None
) -> ChildrenFacts | None:
    """None without telemetry of the training time (`readings`)."""
    if readings is None:
        return None
    # processor use, mean over all readings of a host: none while a process was not there
    counts = dict(readings.group_by("host").agg(pl.col("time_ns").n_unique()).rows())
    sums = of(readings, "cpu_pct").drop_nulls("pid").group_by("host", "pid").agg(pl.col("value").sum())
    used = {(host, pid): value / 100.0 / counts[host] for host, pid, value in sums.rows()}
    groups: dict[tuple[str, Place | None, str | None], list[float]] = defaultdict(list)
    starts = _Starts(tables)
    for row in tables.processes.filter(pl.col("role") == OTHER).iter_rows(named=True):
        cores = used.get((row["host"], row["pid"]), 0.0)
        if cores > 0:
            groups[_named(row, starts.of(row))].append(cores)
    found = [Child(command, how, place, len(cores), sum(cores)) for (command, place, how), cores in groups.items()]
    found.sort(key=lambda child: (-child.cores, child.command))
    total = sum(child.cores for child in found)
    cost = most = None
    if cpu is not None and mean_ms is not None and found:
        cost, most = (share * mean_ms for share in _lost(cpu, total))
        quickest = labelled.steady()["wall_ns"].quantile(QUICKEST)
        if quickest is not None and cost > 0 and _others(cpu) < total:
            # between two turns of another process short steps run as they would without it
            most = max(most, mean_ms - quickest / 1e6)
    return ChildrenFacts(tuple(found), total, cost, most)


def _lost(cpu: CpuFacts, children: float) -> tuple[float, float]:
    """(cost, at most) as shares of the step.

    While the main thread was ready without a core, others had the cores: each in proportion to what it used.
    """
    pool = cpu.pool
    main = pool.main_cpu_share if pool is not None else max(0.0, 1.0 - cpu.run_delay_share)
    beside = max(children, cpu.own_cores - main * cpu.ranks_on_host + _others(cpu))
    waited = max(0.0, cpu.run_delay_share - (cpu.throttled_share or 0.0))
    most = waited
    if pool is not None and cpu.ranks_on_host == 1:
        ready = min(1.0, pool.ready_threads / max(1, (cpu.threads or 2) - 1))
        asleep = min(max(0.0, pool.main_off_share - pool.other_waits_share), ready)  # until the pool had a core
        waited += asleep
        most += asleep + main * ready  # it may have looked for work instead of sleeping
    return waited * children / beside if beside > 0 else 0.0, min(1.0, most)


def _others(cpu: CpuFacts) -> float:
    """Cores that processes of others used; 0 where nothing tells."""
    return (cpu.pool.others_cores or 0.0) if cpu.pool is not None else 0.0


class _Starts:
    """Which line started a process."""

    def __init__(self, tables: Tables) -> None:
        self._parents = {row["pid"]: row for row in tables.processes.iter_rows(named=True)}
        self._by_pid: dict[int, dict[str, Any]] = {}
        self._loose: list[tuple[int, dict[str, Any]]] = []
        for row, data in event_data(tables, "child"):
            pid = data.get("pid")
            if isinstance(pid, int) and pid in self._parents:
                self._by_pid[pid] = data
            else:
                self._loose.append((row["time_ns"], data))

    def of(self, process: dict[str, Any]) -> dict[str, Any] | None:
        """The event of its start, or of that of its nearest ancestor with one."""
        ancestry = [process]
        while len(ancestry) < _MOST_GENERATIONS and ancestry[-1]["ppid"] in self._parents:
            ancestry.append(self._parents[ancestry[-1]["ppid"]])
        known = next((each["pid"] for each in ancestry if each["pid"] in self._by_pid), None)
        if known is not None:
            return self._by_pid[known]
        for each in ancestry:
            if each["role"] == OTHER and each["start_ns"] is not None:
                since = [(each["start_ns"] - time_ns, data) for time_ns, data in self._loose]
                near = [(abs(ns), data) for ns, data in since if -_BEFORE_NS <= ns <= _AFTER_NS]
                if near:
                    return min(near, key=lambda pair: pair[0])[1]
        return None


def _named(row: dict[str, Any], event: dict[str, Any] | None) -> tuple[str, Place | None, str | None]:
    """(command, place, how). A copy of the training process has its command line: what it was made to run says more."""
    command = row["command"] or "?"
    if event is None:
        return command, None, None
    how = event.get("how")
    if how == "multiprocessing.Process" and event.get("pid") == row["pid"]:
        command = f"Process({event.get('command')})"
    return command, place_of(event), str(how) if how is not None else None
