"""One reading of the machine and of each process, as the rows of system.jsonl carry them.

A metric is `(name, unit, value, pid or None, device or None)`. What cannot be read is left out, never zero.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

from stepscope.record.host.cgroups import Cgroups, read_pressure_some
from stepscope.record.host.cores import PoolMeter, read_times
from stepscope.record.host.gpu import Metric
from stepscope.record.host.hardware import frequency_mhz
from stepscope.record.host.processes import Stat, read_stat

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PRESSURES = ("cpu", "io", "memory")
_LOADING_ROLES = ("rank", "loader_worker")


def machine_metrics(cgroups: Cgroups, cpus: list[int]) -> list[Metric]:
    """Load, frequency, throttling, out-of-memory events and pressure (device "cgroup" where it is the cgroup's)."""
    found: list[Metric] = []

    def add(name: str, unit: str, value: float | None, device: str | None = None) -> None:
        if value is not None:
            found.append((name, unit, round(float(value), 4), None, device))

    words = _text("/proc/loadavg").split()
    if len(words) >= 4:
        add("load_1m", "processes", float(words[0]))
        add("runnable", "processes", _integer(words[3].partition("/")[0]))
    add("cpu_frequency_mhz", "MHz", frequency_mhz(cpus))
    add("cgroup_throttled_ns", "ns", cgroups.throttled_ns())
    add("cgroup_oom_events", "count", cgroups.oom_events())
    for resource in _PRESSURES:
        add(f"psi_{resource}_some_pct", "%", read_pressure_some(Path(f"/proc/pressure/{resource}")))
        path = cgroups.pressure_file(resource)
        if path is not None:
            add(f"psi_{resource}_some_pct", "%", read_pressure_some(path), "cgroup")
    return found


class ProcessMeter:
    """Turns the counters of one process into metrics; rates need two readings."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pool = PoolMeter(pid)
        self._last_cpu: tuple[int, int] | None = None  # monotonic ns, ticks
        self._last_processor: int | None = None
        self._processor_changes = 0

    def metrics(self, stat: Stat, monotonic_ns: int, role: str) -> list[Metric]:
        """`cpu_pct` is of one core since the last reading; the rest are counters and sizes.

        Of processes that neither train nor load only what tells how much of the machine they use.
        """
        values: list[tuple[str, str, float | None]] = [
            ("cpu_pct", "%", self._cpu_pct(stat, monotonic_ns)),
            ("threads", "count", stat.threads),
            ("minor_faults", "count", stat.minor_faults),
            ("major_faults", "count", stat.major_faults),
            ("migrations", "count", self._migrations(stat)),
        ]
        status = _text(f"/proc/{self._pid}/status")
        values.append(("rss_bytes", "bytes", _scaled(_field(status, "VmRSS"), 1024)))
        values.append(("involuntary_switches", "count", _field(status, "nonvoluntary_ctxt_switches")))
        io = _text(f"/proc/{self._pid}/io")
        values.append(("read_bytes", "bytes", _field(io, "read_bytes")))
        values.append(("write_bytes", "bytes", _field(io, "write_bytes")))
        if role in _LOADING_ROLES:
            values.append(("requested_bytes", "bytes", _field(io, "rchar")))
            values.append(("blocked", "count", 1 if stat.state == "D" else None))
            values.append(("block_io_delay_ns", "ns", stat.block_io_ticks * _TICK_NS if _delays_counted() else None))
        values += self._threads(stat, status, role)
        return [(name, unit, value, self._pid, None) for name, unit, value in values if value is not None]

    def _threads(self, stat: Stat, status: str, role: str) -> list[tuple[str, str, float | None]]:
        """What the scheduler counts for the main thread, and of a training process for all others together."""
        main = read_times(f"/proc/{self._pid}/schedstat")
        if role != "rank":
            return [("run_delay_ns", "ns", None if main is None else main.delay_ns)]
        found: list[tuple[str, str, float | None]] = [
            ("processor", "number", stat.processor),
            ("voluntary_switches", "count", _field(status, "voluntary_ctxt_switches")),
        ]
        if main is not None:
            found += [("run_delay_ns", "ns", main.delay_ns), ("main_cpu_ns", "ns", main.cpu_ns)]
            found.append(("main_timeslices", "count", main.timeslices))
        alone = read_stat(self._pid, thread=self._pid)
        if alone is not None:
            found.append(("main_minor_faults", "count", alone.minor_faults))
        pool = self._pool.read(stat.threads)
        if pool is not None:
            found += [("pool_cpu_ns", "ns", pool.cpu_ns), ("pool_delay_ns", "ns", pool.delay_ns)]
            found.append(("pool_timeslices", "count", pool.timeslices))
        return found

    def _cpu_pct(self, stat: Stat, monotonic_ns: int) -> float | None:
        last, self._last_cpu = self._last_cpu, (monotonic_ns, stat.cpu_ticks)
        if last is None or monotonic_ns <= last[0]:
            return None
        return round(100.0 * (stat.cpu_ticks - last[1]) * _TICK_NS / (monotonic_ns - last[0]), 2)

    def _migrations(self, stat: Stat) -> int | None:
        """The scheduler's own count of the main thread; without it, how often it was seen on another processor."""
        counted = re.search(r"^se\.nr_migrations\s*:\s*(\d+)", _text(f"/proc/{self._pid}/sched"), re.MULTILINE)
        if counted:
            return int(counted[1])
        if self._last_processor is not None and self._last_processor != stat.processor:
            self._processor_changes += 1
        self._last_processor = stat.processor
        return self._processor_changes


@lru_cache(maxsize=1)
def _delays_counted() -> bool:
    """Whether the kernel counts how long tasks wait for a disk; where it does not, it shows zeros."""
    return _text("/proc/sys/kernel/task_delayacct").strip() == "1"


def _field(text: str, name: str) -> int | None:
    match = re.search(rf"^{name}:\s*(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


def _scaled(value: int | None, factor: int) -> int | None:
    return None if value is None else value * factor


def _integer(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
