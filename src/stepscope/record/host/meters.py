"""One reading of the machine and of each process, as the rows of system.jsonl carry them.

A metric is `(name, unit, value, pid or None, device or None)`. What cannot be read is left out, never zero.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.record.host.hardware import Cgroups, Metric, Since, counter_metrics, frequency_mhz, read_pressure_some
from stepscope.record.host.processes import Stat, read_command, read_file, read_stat

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_TICK_NS = 1_000_000_000 // _TICKS_PER_SECOND
_LOADING_ROLES = ("rank", "loader_worker")
_UNITS = {"_pct": "%", "_bytes": "bytes", "_ns": "ns", "processor": "number"}  # by the ending of a reading of a process


def machine_metrics(cgroups: Cgroups, cpus: list[int]) -> list[Metric]:
    """Load, frequency, throttling, out-of-memory events and pressure (device "cgroup" where it is the cgroup's)."""
    found: list[Metric] = []

    def add(name: str, unit: str, value: float | None, device: str | None = None) -> None:
        if value is not None:
            found.append((name, unit, round(float(value), 4), None, device))

    words = _text("/proc/loadavg").split()
    if len(words) >= 4:
        add("load_1m", "processes", float(words[0]))
        runnable = words[3].partition("/")[0]
        add("runnable", "processes", int(runnable) if runnable.isdecimal() else None)
    add("cpu_frequency_mhz", "MHz", frequency_mhz(cpus))
    add("cgroup_throttled_ns", "ns", cgroups.throttled_ns())
    add("cgroup_oom_events", "count", cgroups.oom_events())
    for resource in ("cpu", "io", "memory"):
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
        last, self._last_cpu = self._last_cpu, (monotonic_ns, stat.cpu_ticks)
        cpu_pct = None
        if last is not None and monotonic_ns > last[0]:
            cpu_pct = round(100.0 * (stat.cpu_ticks - last[1]) * _TICK_NS / (monotonic_ns - last[0]), 2)
        status, io = _text(f"/proc/{self._pid}/status"), _text(f"/proc/{self._pid}/io")
        resident_kib = _field(status, "VmRSS")
        values: dict[str, float | None] = {
            "cpu_pct": cpu_pct,
            "threads": stat.threads,
            "minor_faults": stat.minor_faults,
            "major_faults": stat.major_faults,
            "migrations": self._migrations(stat),
            "rss_bytes": None if resident_kib is None else resident_kib * 1024,
            "involuntary_switches": _field(status, "nonvoluntary_ctxt_switches"),
            "read_bytes": _field(io, "read_bytes"),
            "write_bytes": _field(io, "write_bytes"),
        }
        if role in _LOADING_ROLES:
            values["requested_bytes"] = _field(io, "rchar")
            values["blocked"] = 1 if stat.state == "D" else None
            values["block_io_delay_ns"] = stat.block_io_ticks * _TICK_NS if _delays_counted() else None
        # What the scheduler counts for the main thread, and of a training process for all others together.
        main = read_times(f"/proc/{self._pid}/schedstat")
        values["run_delay_ns"] = main and main.delay_ns
        if role == "rank":
            values["processor"] = stat.processor
            values["voluntary_switches"] = _field(status, "voluntary_ctxt_switches")
            alone = read_stat(self._pid, thread=self._pid)
            values["main_minor_faults"] = None if alone is None else alone.minor_faults
            pool = self._pool.read(stat.threads)
            for name, times in (("main", main), ("pool", pool)):
                if times is not None:
                    values |= {f"{name}_cpu_ns": times.cpu_ns, f"{name}_timeslices": times.timeslices}
            values["pool_delay_ns"] = pool and pool.delay_ns
        found: list[Metric] = []
        for name, reading in values.items():
            unit = next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "count")
            found += [(name, unit, reading, self._pid, None)] if reading is not None else []
        return found

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


def _text(path: str) -> str:
    return read_file(path).decode("utf-8", "replace")


# A file for each thread takes some 10 us: a process with more threads is read so many times less often.
THREADS_PER_READING = 64


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
        rows = [
            words
            for line in read_file(self._path).partition(b"\nintr")[0].split(b"\n")
            if (words := line.split()) and words[0] in self._names
        ]
        try:  # user nice system idle iowait irq softirq steal of each, since boot
            cores = [[int(word) for word in words[1:9]] for words in rows if len(words) > 8]
        except ValueError:
            return []
        if not cores:
            return []
        ticks = sum(sum(core) - core[3] - core[4] - core[7] for core in cores), sum(core[7] for core in cores)
        last, self._last = self._last, (monotonic_ns, *ticks)
        if last is None or monotonic_ns <= last[0]:
            return []
        per_tick = _TICK_NS / (monotonic_ns - last[0])
        return [
            (name, "cores", round(max(0, now - before) * per_tick, 4), None, None)
            for name, now, before in zip(("busy_cores", "stolen_cores"), ticks, last[1:], strict=True)
        ]


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
    words = read_file(path).split()
    if len(words) != 3 or not all(word.isdigit() for word in words):
        return None
    return Times(*(int(word) for word in words))


LOOKS_PER_READING = 4  # processes; each costs some 2 us per open file
_MOST_FILES = 256  # of a process: more are sockets of a server, not data
_MOST_WORDS = 256
_NO_DATA = re.compile(r"\.(?:py[co]?|so(?:\.[\d.]+)?|pth|egg)$| \(deleted\)$|^/(?:dev|proc|sys|run|memfd:)")
_PSEUDO = ("proc", "sysfs", "devtmpfs", "devpts", "mqueue", "securityfs", "debugfs", "tracefs", "bpf", "configfs")
_ESCAPED = re.compile(r"\\([0-7]{3})")

Mounts = list[tuple[str, str]]  # (mount point, kind), longest first


class StorageLooks:
    """Looks at processes in turn. `own`: a folder whose files are no data of the run."""

    def __init__(self, own: str) -> None:
        self._own = own.rstrip("/") + "/"
        self._mounts: dict[str, Mounts] = {}  # by mount namespace
        self._next = 0
        self._named: set[int] = set()

    def metrics(self, pids: Sequence[int]) -> list[Metric]:
        """`open_files` per process and mount, and once for each process `named_paths`; device is `KIND:MOUNT`."""
        found: list[Metric] = []
        for _ in range(min(LOOKS_PER_READING, len(pids))):
            pid = pids[self._next % len(pids)]
            self._next += 1
            try:
                space = os.readlink(f"/proc/{pid}/ns/mnt")
                if space not in self._mounts:
                    with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="replace") as file:
                        self._mounts[space] = parse_mounts(file)
            except OSError:
                continue
            mounts = self._mounts[space]
            found += _counted("open_files", pid, mounts, self._open(pid))
            if pid not in self._named:
                self._named.add(pid)
                found += _counted("named_paths", pid, mounts, named_paths(pid))
        return found

    def _open(self, pid: int) -> list[str]:
        try:
            numbers = [name for name in os.listdir(f"/proc/{pid}/fd") if name not in ("0", "1", "2")]
        except OSError:
            return []
        found = []
        for number in numbers[:_MOST_FILES]:
            try:
                path = os.readlink(f"/proc/{pid}/fd/{number}")
                if path.startswith("/") and not _NO_DATA.search(path) and not path.startswith(self._own):
                    with open(f"/proc/{pid}/fdinfo/{number}", encoding="ascii", errors="replace") as file:
                        told = re.search(r"^flags:\s*([0-7]+)", file.read(256), re.MULTILINE)
                    flags = int(told[1], 8) if told is not None else os.O_WRONLY
                    if flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_DIRECTORY:
                        found.append(path)
            except OSError:
                continue  # closed meanwhile
        return found


def parse_mounts(lines: Iterable[str]) -> Mounts:
    """The rows of a mountinfo file; of several mounts at one point the last counts."""
    found: dict[str, str] = {}
    for line in lines:
        head, _, tail = line.partition(" - ")
        words, kinds = head.split(), tail.split()
        if len(words) >= 5 and kinds:
            found[_ESCAPED.sub(lambda match: chr(int(match[1], 8)), words[4])] = kinds[0]
    return sorted(found.items(), key=lambda item: (-len(item[0]), item[0]))


def mount_of(path: str, mounts: Mounts) -> tuple[str, str] | None:
    """The mount a path lies on, by its text alone; None for file systems that hold no data."""
    for point, kind in mounts:
        if point == "/" or path == point or path.startswith(point.rstrip("/") + "/"):
            return None if kind in _PSEUDO or kind.startswith("cgroup") else (point, kind)
    return None


def named_paths(pid: int) -> list[str]:
    """Absolute paths among the words of a command, after `=` too; programs and their code are no data."""
    words = read_command(pid)
    values = [word.partition("=")[2] if word.startswith("-") and "=" in word else word for word in words[1:_MOST_WORDS]]
    return [os.path.normpath(value) for value in values if value.startswith("/") and not _NO_DATA.search(value)]


def _counted(name: str, pid: int, mounts: Mounts, paths: Iterable[str]) -> list[Metric]:
    places = Counter(place for path in paths if (place := mount_of(path, mounts)) is not None)
    return [(name, "count", float(count), pid, f"{kind}:{point}") for (point, kind), count in sorted(places.items())]


POWERCAP = Path("/sys/class/powercap")
READABLE = "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj (until the next boot)"
_ZONE = re.compile(r"(intel-rapl:\d{1,3})(:\d{1,3})?")  # AMD's processors have the same name; -mmio repeats the first
_PACKAGE = re.compile(r"package-[\w.-]{1,40}")
_NUMBER = re.compile(rb"\d{1,18}")
_MOST_ZONES = 256


class Rapl:
    """What processors and their memory have drawn, as the kernel's powercap counts it, of the whole machine.

    A package holds its cores, and "psys" the packages, so that packages and their DRAM are all that may be summed.
    Where one cannot be read `reason` says why, and `remedy` what to do if there is something.
    """

    def __init__(self, folder: Path | None = None) -> None:
        folder = POWERCAP if folder is None else folder
        self._counters: list[tuple[str, str, int | None]] = []  # name, path, the highest value before it begins anew
        self.reason: str | None = None
        self.remedy: str | None = None
        try:
            found = sorted(os.listdir(folder))
        except OSError:
            found = []
        zones = [match for name in found if (match := _ZONE.fullmatch(name))][:_MOST_ZONES]
        names = {match[0]: _small(folder / match[0] / "name").decode("ascii", "replace").strip() for match in zones}
        refused: list[tuple[str, bool]] = []
        for zone, parent in ((match[0], match[1]) for match in zones):
            package = names[parent] if _PACKAGE.fullmatch(names.get(parent, "")) else None
            if package is None or (zone != parent and names[zone] != "dram"):
                continue
            device = package if zone == parent else f"{package}-dram"
            path = folder / zone / "energy_uj"
            if any(device == known for known, _, _ in self._counters):
                continue  # two of a name: one of them repeats the other
            if _counter(path) is not None:
                self._counters.append((device, str(path), _counter(folder / zone / "max_energy_range_uj")))
            else:
                refused.append((device, os.access(path, os.R_OK)))
        if refused:
            why = "cannot be read"
            if not all(allowed for _, allowed in refused):
                why, self.remedy = "may be read by root alone", READABLE
            self.reason = f"energy of {', '.join(device for device, _ in refused[:4])} {why}"
        elif not self._counters:
            self.reason = "this machine shows no energy of its processors (RAPL), as usual in virtual machines"

    @property
    def devices(self) -> list[str]:
        return [device for device, _, _ in self._counters]

    def describe(self) -> dict[str, Any]:
        """The manifest's `hardware.cpu_energy`."""
        return {"devices": self.devices, "reason": self.reason, "remedy": self.remedy}

    def metrics(self, since: Since) -> list[Metric]:
        """The counters in uJ with the value at which each begins anew."""
        found: list[Metric] = []
        for device, path, highest in self._counters:
            read = counter_metrics("cpu_energy_uj", "uJ", device, partial(_counter, path), since)
            if read and highest:
                read.append(("cpu_energy_range_uj", "uJ", float(highest), None, device))
            found += read
        return found


def _counter(path: str | Path) -> int | None:
    text = _small(path).strip()
    return int(text) if _NUMBER.fullmatch(text) else None


def _small(path: str | Path) -> bytes:
    """The first bytes of a file that is read once a second; empty where it cannot be, and it never waits."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 64)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


_READINGS = 5  # only every fifth reading of telemetry looks at it
_CLOCK_LOOKS = 3  # at two clocks; the one in which least time went by between counts
_SCALE = 65_536.0  # of the frequency, which counts 2^-16 ppm
_RAW = getattr(time, "CLOCK_MONOTONIC_RAW", None)


class _Timex(ctypes.Structure):
    """struct timex of Linux, as far as it is read here."""

    _fields_ = (
        ("modes", ctypes.c_int),  # 0: nothing is set
        *((name, ctypes.c_long) for name in ("offset", "frequency", "max_error", "estimated_error")),
        ("status", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("constant", "precision", "tolerance", "seconds", "fraction", "tick")),
        ("rest", ctypes.c_byte * 256),
    )


# (state, frequency in 2^-16 ppm, largest error in us, length of a tick in us), None where the kernel does not tell.
KernelState = Callable[[], "tuple[int, int, int, int] | None"]


def kernel_state() -> tuple[int, int, int, int] | None:
    """`adjtimex` without a change; None on other systems, and where a sandbox forbids it."""
    try:
        call = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    told = _Timex()
    state = call(ctypes.byref(told))
    return None if state < 0 else (state, told.frequency, told.max_error, told.tick)


class SystemClock:
    """Readings of the clock that stamps traces, in every fifth call of `metrics`."""

    def __init__(
        self, read: Callable[[int], int] = time.clock_gettime_ns, state: KernelState | None = kernel_state
    ) -> None:
        self._read, self._state = read, state
        self._count = 0
        self._first: dict[str, int] = {}

    def metrics(self) -> list[Metric]:
        self._count += 1
        if self._count % _READINGS != 1:
            return []
        found: list[Metric] = []
        # what setting it does, and what making it faster or slower does
        for name, clock, steady in (
            ("clock_set_ns", time.CLOCK_REALTIME, time.CLOCK_MONOTONIC),
            ("clock_slewed_ns", time.CLOCK_MONOTONIC, _RAW),
        ):
            if steady is not None:
                apart = self._apart(clock, steady)
                found.append((name, "ns", float(apart - self._first.setdefault(name, apart)), None, None))
        told = None if self._state is None else self._state()
        if told is None:
            self._state = None
            return found
        state, frequency, max_error, tick = told
        usual = 1_000_000 / _TICKS_PER_SECOND
        ppm = frequency / _SCALE + (1e6 * (tick - usual) / usual if tick > 0 else 0.0)
        found += [
            ("clock_state", "number", float(state), None, None),
            ("clock_frequency_ppm", "ppm", round(ppm, 4), None, None),
            ("clock_max_error_us", "us", float(max_error), None, None),
        ]
        return found

    def _apart(self, clock: int, steady: int) -> int:
        """What one clock shows more than the other, read at nearly the same moment."""
        looks = []
        for _ in range(_CLOCK_LOOKS):
            before, middle, after = self._read(steady), self._read(clock), self._read(steady)
            looks.append((after - before, middle - (before + after) // 2))
        return min(looks)[1]
