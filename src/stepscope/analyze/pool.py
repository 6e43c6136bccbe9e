"""What more threads than cores cost a training process, by the scheduler's counts of all its threads.

With more threads than cores the main thread sleeps at the end of every operator until the last thread of the pool has
had a core. Its wait is no loss as a whole, since the pool computes meanwhile. So the step is put together again as it
would be with as many threads as cores:

    what waits for something else + what the main thread does alone + the pool's work, spread over the cores there are

An operator is split into equal parts, so the main thread's part of the pool's work is that of any other thread. CPU
time that threads use for nothing but waking, looking for work and going to sleep again is no work: it grows with the
number of times the kernel put them on a core. Measured with libgomp on an AMD EPYC with 2 cores, 3 to 16 threads and
operators of 10 to 5,000 us, each time takes 4 to 8 us; the cost allows for 6, the ceiling for 15.
"""

from __future__ import annotations

import polars as pl
from msgspec import Struct

from stepscope.analyze.readings import growths
from stepscope.analyze.steps import mean
from stepscope.model.machine import PoolFacts

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


def facts(
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
