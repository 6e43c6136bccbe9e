"""How a run shared its cores, by telemetry of the steady time: who made the main thread wait for a core.

A main thread that could run and had no core is wall time lost. Who had the core is bounded by CPU time: others can take
no more than what the run's own processes leave of the cores, and the run's own threads no more than what they used: the
threads of torch's pool, and processes that the script started. Here is also what to do about processes in which the
agent never reported.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze.input.loader import known_cores, ranks_on_host
from stepscope.analyze.machine.readings import average, growths, level, manifest_objects, of, rank_pids, seconds
from stepscope.analyze.sites import thread_count, threads_set
from stepscope.engine.journal import event_data, mean, place_of
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import Place, ProcessFacts
from stepscope.model.machine import THREADS_FOUND, Child, ChildrenFacts, CpuFacts, MemoryPressureFacts, PoolFacts
from stepscope.read.text import integer
from stepscope.tables.arrays import Floats
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
    own = own_cores(readings)
    if delay_ns is None or own is None:
        return None
    delay = min(1.0, delay_ns / 1e9)
    throttled = throttled_share(readings)
    held = 0.0 if throttled is None else min(delay, throttled)
    rest = delay - held
    taken = others(readings, own)
    taken = max(0.0, cores - own) if taken is None else taken  # by others, or what they could have taken
    mains = of(readings, "cpu_pct", pids).group_by("pid").agg(pl.col("value").mean() / 100.0).sort("pid")["value"]
    beside = max(0.0, own - sum(min(used, 1.0 - delay) for used in mains))  # what our other threads and processes used
    threads, place, source = _threads(tables)
    ranks, waits = ranks_on_host(tables), min(1.0, waits_ms / mean_ms)
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
        pool=_pool(tables, readings, mean_ms, cores=cores, own=own, ranks=ranks, waits=waits, threads=threads),
        main_cpu_share=None if main_ns is None else min(1.0, main_ns / 1e9),
        waits_ms_per_step=min(waits_ms, mean_ms),
    )


def memory_pressure(tables: Tables, readings: pl.DataFrame | None, mean_ms: float | None) -> MemoryPressureFacts | None:
    """None without steps or telemetry of page faults."""
    pids = rank_pids(tables)
    faults = None if readings is None else average(growths(readings, "major_faults", pids))
    if readings is None or mean_ms is None or faults is None:
        return None
    stalled, whose = level(readings, "psi_memory_some_pct")
    resident = max(of(readings, "rss_bytes", pids)["value"].to_list(), default=None)
    return MemoryPressureFacts(
        seconds=seconds(readings),
        major_faults_per_step=faults * mean_ms / 1e3,
        stalled_pct=stalled,
        stalled_of=whose,
        rss_bytes=None if resident is None else int(resident),
    )


def own_cores(readings: pl.DataFrame) -> float | None:
    """CPU use of all processes of the run on a host, in cores, mean over readings and hosts."""
    cpu = of(readings, "cpu_pct").group_by("host", "time_ns").agg(pl.col("value").sum())
    cpu = cpu.sort("host", "time_ns")  # sums of another order differ in the last digit
    return mean(cpu["value"]) / 100.0 if cpu.height else None


def throttled_share(readings: pl.DataFrame) -> float | None:
    """Growth of the cgroup's throttled time by wall time, mean over hosts."""
    time, value = pl.col("time_ns"), pl.col("value")
    by_host = of(readings, "cgroup_throttled_ns").sort("time_ns").group_by("host", maintain_order=True)
    grown = by_host.agg(wall=time.last() - time.first(), held=(value.last() - value.first()).clip(lower_bound=0))
    shares = grown.filter(pl.col("wall") > 0).select(pl.col("held") / pl.col("wall")).to_series()
    return mean(shares) if len(shares) else None


def _threads(tables: Tables) -> tuple[int | None, Place | None, str]:
    """(threads, the line that set them, source): the last `torch.set_num_threads`, what torch says, the environment."""
    last = threads_set(tables)
    if last is not None:
        return *last, "events.jsonl, torch.set_num_threads"
    named = ((name, one.get(name)) for one in manifest_objects(tables, "environment") for name in _THREADS)
    known = ((count, f"manifest.json, {name}") for name, text in named if (count := thread_count(text)))
    count, asked = next(known, (None, ""))
    told = [rank.threads for rank in tables.ranks if rank.threads is not None]
    if told:
        return max(told), None, f"{THREADS_FOUND}; {asked}" if asked else THREADS_FOUND
    return count, None, asked


WAKING_NS, WAKING_MOST_NS = 6_000, 15_000
_LEAST = 3  # readings: of a process with many threads only some are taken, and the counts are exact
_COUNTERS = ("main_cpu_ns", "run_delay_ns", "pool_cpu_ns", "pool_delay_ns", "main_timeslices", "pool_timeslices")


def _pool(
    tables: Tables,
    readings: pl.DataFrame,
    mean_ms: float,
    *,
    cores: float,
    own: float,
    ranks: int,
    waits: float,
    threads: int | None,
) -> PoolFacts | None:
    """Mean over training processes; None without the counts. Where threads fit the cores nothing is put together.

    Args:
        cores: that the run may use, its cgroup's quota included.
        own: CPU use of the run on its host, in cores, of all its `ranks` there.
        waits: share of a step: for data, files or sleep.
        threads: of torch in each rank.
    """
    pids = rank_pids(tables)
    rates = [growths(readings, name, pids, _LEAST) for name in _COUNTERS]
    known = [pid for pid in pids if all(pid in rate for rate in rates)]
    if not known:
        return None
    # shares of wall time of the main thread, and of the pool summed over threads; time slices per second
    main, main_delay, pool, delay = (np.array([rate[pid] for pid in known]) / 1e9 for rate in rates[:4])
    main_slices, slices = (np.array([rate[pid] for pid in known]) for rate in rates[4:])
    off = np.maximum(0.0, 1.0 - main - main_delay)  # the main thread neither on a core nor ready
    beside = others(readings, own)
    used = float((main + pool).mean())
    had = used
    if beside is not None:  # where nothing tells what others used, a rank could have had only the cores it did use
        sets = [one.get("affinity") for one in manifest_objects(tables, "hardware")]
        # processors of the smallest host that the run may use, whatever its quota
        processors = min((len(cpus) for cpus in sets if isinstance(cpus, list) and cpus), default=None)
        there = min(cores, (processors or cores) - beside)
        had = max(used, (there - max(0.0, own - used * ranks)) / ranks)

    def lost_ms(waited: Floats, waking_ns: int) -> float:
        """Of `waited` what the step would not take with as many threads as cores."""
        waking, count = waking_ns / 1e9, threads or 1
        part = np.maximum(0.0, pool - slices * waking) / max(1, count - 1)  # the main thread's, like any other's
        alone = np.maximum(0.0, main - main_slices * waking - part)
        again = waits + alone / min(1.0, had) + count * part / had
        return float(np.maximum(0.0, np.minimum(waited, 1.0 - again)).mean()) * mean_ms

    lost = most = None
    if threads is not None and threads * ranks > cores:
        # The main thread waited for a core while the pool had them, and for the pool while that waited. Of several
        # ranks the second is not counted: there it also waits for the others.
        waited, asleep = np.minimum(main_delay, pool), np.maximum(0.0, off - waits)
        lost = lost_ms(waited + np.minimum(asleep, delay) if ranks == 1 else waited, WAKING_NS)
        most = max(lost, lost_ms(main_delay + asleep + main_slices * WAKING_MOST_NS / 1e9, WAKING_MOST_NS))
    return PoolFacts(
        main_cpu_share=float(main.mean()),
        main_off_share=float(off.mean()),
        used_cores=float(pool.mean()),
        ready_threads=float(delay.mean()),
        timeslices_per_step=float((main_slices + slices).mean()) * mean_ms / 1e3,
        other_waits_share=waits,
        cores=had,
        others_cores=beside,
        lost_ms_per_step=lost,
        at_most_ms_per_step=most,
    )


def others(readings: pl.DataFrame, own_cores: float) -> float | None:
    """Cores that others used or a hypervisor took, of those in the run's affinity; None in recordings without it."""
    busy = of(readings, "busy_cores")["value"]
    if busy.is_empty():
        return None
    return max(0.0, mean(busy) + mean(of(readings, "stolen_cores")["value"]) - own_cores)


_TRAINING_ROLES = ("rank", "root", "other")  # launchers, workers and helpers need no agent of their own
_ISOLATED = re.compile(r"[^ ]* (?:-[^ ]* )*?(-[a-zA-Z]*[IES][a-zA-Z]*)(?: |$)")  # a flag before the script
_ISOLATING = "Python ran with {} and ignores PYTHONPATH: drop the flag, or use stepscope.profile() in it"
_UNREACHED = (
    "the agent never started in it: keep PYTHONPATH and STEPSCOPE_RECORD in its environment (a cleaned one, a "
    "container or a script that overwrites PYTHONPATH loses them), or use stepscope.profile() in the script"
)


def processes(tables: Tables) -> tuple[ProcessFacts, ...]:
    """Every process seen from outside; a torch process without an agent has `reported` False and a remedy."""
    found = []
    for row in tables.processes.sort("start_ns", "pid").iter_rows(named=True):
        role, command = row["role"] or "other", row["command"] or ""
        silent = bool(row["torch"]) and not row["reported"] and role in _TRAINING_ROLES
        isolating = _ISOLATED.match(command)
        remedy = _ISOLATING.format(isolating[1]) if isolating is not None else _UNREACHED
        pid = row["pid"] if row["pid"] is not None else -1
        found.append(ProcessFacts(pid, role, command, not silent, remedy if silent else None))
    return tuple(found)


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
    for row, event in _starts(tables):
        cores = used.get((row["host"], row["pid"]), 0.0)
        command, how = row["command"] or "?", (event or {}).get("how")
        if event is not None and how == "multiprocessing.Process" and event.get("pid") == row["pid"]:
            # a copy of the training process has its command line: what it was made to run says more
            command = f"Process({event.get('command')})"
        if cores > 0:
            groups[command, place_of(event), None if how is None else str(how)].append(cores)
    found = [Child(command, how, place, len(cores), sum(cores)) for (command, place, how), cores in groups.items()]
    found.sort(key=lambda child: (-child.cores, child.command))
    total = sum(child.cores for child in found)
    cost = most = None
    if cpu is not None and mean_ms is not None and found:
        others_cores = (cpu.pool.others_cores or 0.0) if cpu.pool is not None else 0.0
        cost, most = (share * mean_ms for share in _lost(cpu, total, others_cores))
        quickest = labelled.steady()["wall_ns"].quantile(QUICKEST)
        if quickest is not None and cost > 0 and others_cores < total:
            # between two turns of another process short steps run as they would without it
            most = max(most, mean_ms - quickest / 1e6)
    return ChildrenFacts(tuple(found), total, cost, most)


def _lost(cpu: CpuFacts, children: float, others_cores: float) -> tuple[float, float]:
    """(cost, at most) as shares of the step.

    While the main thread was ready without a core, others had the cores: each in proportion to what it used.
    """
    pool = cpu.pool
    main = pool.main_cpu_share if pool is not None else max(0.0, 1.0 - cpu.run_delay_share)
    beside = max(children, cpu.own_cores - main * cpu.ranks_on_host + others_cores)
    waited = most = max(0.0, cpu.run_delay_share - (cpu.throttled_share or 0.0))
    if pool is not None and cpu.ranks_on_host == 1:
        ready = min(1.0, pool.ready_threads / max(1, (cpu.threads or 2) - 1))
        asleep = min(max(0.0, pool.main_off_share - pool.other_waits_share), ready)  # until the pool had a core
        waited += asleep
        most += asleep + main * ready  # it may have looked for work instead of sleeping
    return waited * children / beside if beside > 0 else 0.0, min(1.0, most)


def _starts(tables: Tables) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Processes of no role of ours, each with the event of its start, or of that of its nearest ancestor with one."""
    parents = {row["pid"]: row for row in tables.processes.iter_rows(named=True)}
    told = [(integer(data.get("pid")), row["time_ns"], data) for row, data in event_data(tables, "child")]
    by_pid = {pid: data for pid, _, data in told if pid in parents}
    # with the end of the process: what outlived it, or a process never seen, may have lost its parent
    ends = [(parents[pid]["end_ns"] if pid in parents else 0, at, data) for pid, at, data in told]
    for row in tables.processes.filter(pl.col("role") == OTHER).iter_rows(named=True):
        ancestry = [row]
        while len(ancestry) < _MOST_GENERATIONS and ancestry[-1]["ppid"] in parents:
            ancestry.append(parents[ancestry[-1]["ppid"]])
        found = next((by_pid[each["pid"]] for each in ancestry if each["pid"] in by_pid), None)
        for each in ancestry:
            if found is None and each["role"] == OTHER and each["start_ns"] is not None:
                last = each["end_ns"] or math.inf
                since = [(each["start_ns"] - at, data) for end, at, data in ends if end is not None and end < last]
                near = [(abs(ns), data) for ns, data in since if -_BEFORE_NS <= ns <= _AFTER_NS]
                found = min(near, key=lambda pair: pair[0], default=(0, None))[1]
        yield row, found
