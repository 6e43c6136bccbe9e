"""Who had the cores: how busy the allowed ones were, and what a process's threads beside the main one used and waited.

Both are for the time between two readings, once a second, and read a few small files of /proc.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from stepscope.record.host.gpu import Metric

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# A file for each thread takes some 10 us: a process with more threads is read so many times less often.
THREADS_PER_READING = 64
_CHUNK = 1 << 16


class Times(NamedTuple):
    """What the scheduler counts for a thread, or for several together."""

    cpu_ns: int
    delay_ns: int  # ready, without a core
    timeslices: int  # times it was put on a core


_NONE = Times(0, 0, 0)


class CoresMeter:
    """How many of `cpus` were in use by anyone since the last reading, and how many a hypervisor gave to others."""

    def __init__(self, cpus: Iterable[int], path: str = "/proc/stat") -> None:
        self._names = {f"cpu{cpu}".encode() for cpu in cpus}
        self._path = path
        self._last: tuple[int, int, int] | None = None  # monotonic ns, busy and stolen ticks

    def metrics(self, monotonic_ns: int) -> list[Metric]:
        """`busy_cores` and `stolen_cores`; empty at the first reading and where the kernel does not tell."""
        ticks = self._ticks()
        if ticks is None:
            return []
        last, self._last = self._last, (monotonic_ns, *ticks)
        if last is None or monotonic_ns <= last[0]:
            return []
        per_tick = 1e9 / (_TICKS_PER_SECOND * (monotonic_ns - last[0]))
        grown = (max(0, ticks[0] - last[1]), max(0, ticks[1] - last[2]))
        return [
            (name, "cores", round(value * per_tick, 4), None, None)
            for name, value in zip(("busy_cores", "stolen_cores"), grown, strict=True)
        ]

    def _ticks(self) -> tuple[int, int] | None:
        """(busy, stolen) of all cores since boot. Fields: user nice system idle iowait irq softirq steal."""
        data = _read(self._path)
        if data is None:
            return None
        busy = stolen = found = 0
        for line in data.split(b"\n"):
            if not line.startswith(b"cpu"):
                break
            words = line.split()
            if words[0] in self._names and len(words) > 8:
                try:
                    user, nice, system, _, _, irq, soft, steal = (int(word) for word in words[1:9])
                except ValueError:
                    return None
                busy, stolen, found = busy + user + nice + system + irq + soft, stolen + steal, found + 1
        return (busy, stolen) if found else None


class PoolMeter:
    """What all threads of a process but the main one used and waited, those that ended included."""

    def __init__(self, pid: int) -> None:
        self._folder, self._main = f"/proc/{pid}/task", str(pid)
        self._last: dict[str, Times] = {}
        self._sums = [0, 0, 0]
        self._pause = 0

    def read(self, threads: int) -> Times | None:
        """Counters. None between the readings of a process with many threads, and for one that never had a second.

        Args:
            threads: of the process, the main one included.
        """
        if threads <= 1 and not self._last:
            return None
        self._pause -= 1
        if self._pause > 0:
            return None
        self._pause = -(-threads // THREADS_PER_READING)
        try:
            names = os.listdir(self._folder)
        except OSError:
            return None
        last: dict[str, Times] = {}
        for name in names:
            times = None if name == self._main else read_times(f"{self._folder}/{name}/schedstat")
            if times is not None:
                last[name] = times
                before = self._last.get(name, _NONE)
                same = all(now >= then for now, then in zip(times, before, strict=True))
                for index, value in enumerate(times):  # a number may have been given to a new thread
                    self._sums[index] += value - (before[index] if same else 0)
        self._last = last
        return Times(*self._sums)


def read_times(path: str) -> Times | None:
    """A schedstat file of a thread; that of a process is its main thread's."""
    words = (_read(path) or b"").split()
    if len(words) != 3 or not all(word.isdigit() for word in words):
        return None
    return Times(*(int(word) for word in words))


def _read(path: str) -> bytes | None:
    """A file of /proc, with few calls: there are many, once a second."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(descriptor, _CHUNK):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(descriptor)
