"""The machine and its noise: processors, affinity, sibling threads, limits, governor, page faults, GPUs through NVML.

`root` prefixes every path read, so that tests can show other machines. Unknown is None. Each query of a GPU is guarded
alone: drivers refuse some and answer the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path("/")


def hardware_facts(root: Path = ROOT) -> dict[str, Any]:
    """The manifest's `hardware` object; `gpus` is left None, because asking a driver may take seconds."""
    cgroups = find_cgroups(root)
    groups = sibling_groups(online_cpus(root), root)
    return {
        "cpu_model": cpu_model(root),
        "logical_cores": len(online_cpus(root)) or os.cpu_count(),
        "physical_cores": len(groups) or None,
        "affinity": affinity(),
        "smt_siblings": [group for group in groups if len(group) > 1],
        "numa_nodes": numa_nodes(root),
        "cgroup_version": cgroups.version,
        "cgroup_cpu_limit": cgroups.cpu_limit_cores(),
        "cgroup_memory_limit_bytes": cgroups.memory_limit_bytes(),
        "memory_bytes": memory_bytes(root),
        "gpus": None,
    }


def gpu_facts() -> list[dict[str, Any]]:
    with Gpus() as gpus:
        return gpus.describe()


def noise_facts(root: Path = ROOT) -> dict[str, Any]:
    """The manifest's `noise` object: what makes two runs of the same program differ on this machine."""
    load = read_text(root / "proc/loadavg")
    aslr = read_text(root / "proc/sys/kernel/randomize_va_space")
    return {
        "governor": governor(root),
        "turbo": turbo(root),
        "smt": smt_active(root),
        "load_1m": float(load.split()[0]) if load else None,
        "aslr": None if aslr is None else aslr != "0",
    }


def affinity() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def online_cpus(root: Path = ROOT) -> list[int]:
    return parse_cpu_list(read_text(root / "sys/devices/system/cpu/online") or "")


def sibling_groups(cpus: Iterable[int], root: Path = ROOT) -> list[list[int]]:
    """`cpus` grouped by physical core; a machine that does not tell yields one group per processor."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for cpu in cpus:
        text = read_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        key = tuple(parse_cpu_list(text or "")) or (cpu,)
        groups.setdefault(key, []).append(cpu)
    return [sorted(group) for group in groups.values()]


def numa_nodes(root: Path = ROOT) -> dict[str, list[int]]:
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    return {folder.name[4:]: parse_cpu_list(read_text(folder / "cpulist") or "") for folder in folders}


def parse_cpu_list(text: str) -> list[int]:
    """`0-3,8` as processor numbers; malformed parts are left out."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match:
            first = int(match[1])
            cpus.update(range(first, int(match[2] or first) + 1))
    return sorted(cpus)


def cpu_model(root: Path = ROOT) -> str | None:
    names = ("model name", "Model", "cpu model", "uarch")
    fields = (line.partition(":") for line in _lines(root / "proc/cpuinfo"))
    return next((value.strip() for name, _, value in fields if name.strip() in names), None)


def memory_bytes(root: Path = ROOT) -> int | None:
    match = re.search(r"^MemTotal:\s+(\d+) kB", read_text(root / "proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def governor(root: Path = ROOT) -> str | None:
    """The scaling governor, several joined by a comma when cores differ; None where the machine hides it."""
    paths = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    return ",".join(sorted({text for path in paths if (text := read_text(path))})) or None


def turbo(root: Path = ROOT) -> bool | None:
    """Whether processors may exceed their base frequency."""
    switches = (("intel_pstate/no_turbo", "0"), ("cpufreq/boost", "1"))
    told = ((read_text(root / "sys/devices/system/cpu" / name), on) for name, on in switches)
    return next((text == on for text, on in told if text is not None), None)


def smt_active(root: Path = ROOT) -> bool | None:
    text = read_text(root / "sys/devices/system/cpu/smt/active")
    return None if text is None else text == "1"


def frequency_mhz(cpus: Iterable[int]) -> float | None:
    """The present frequency, averaged over at most 16 of `cpus`; None where the machine hides it."""
    wanted = sorted(cpus)[:16]
    paths = (ROOT / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in wanted)
    texts = (read_text(path) for path in paths)
    values = [int(text) / 1000.0 for text in texts if text and text.isdecimal()]
    for block in () if values else (read_text(ROOT / "proc/cpuinfo") or "").split("\n\n"):
        told = dict(re.findall(r"^(processor|cpu MHz)\s*: (\d+(?:\.\d+)?)$", block, re.MULTILINE))
        if len(told) == 2 and int(float(told["processor"])) in wanted:
            values.append(float(told["cpu MHz"]))
    return sum(values) / len(values) if values else None


def read_text(path: Path) -> str | None:
    """A small file's stripped text, None when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


_NO_LIMIT = 1 << 60  # version 1 writes "no limit" as a number near 2^63, drivers "not known"


@dataclass(frozen=True)
class Cgroups:
    """Folders from the process's own cgroup up to the mount, per controller. Empty tuples where there is none."""

    version: int | None
    cpu: tuple[Path, ...]
    memory: tuple[Path, ...]

    def cpu_limit_cores(self) -> float | None:
        """The tightest CPU quota in cores, None without one."""
        limits: list[float] = []
        for folder in self.cpu:
            words = (_lines(folder / "cpu.max") or [""])[0].split()
            quota, period = _integer(folder / "cpu.cfs_quota_us"), _integer(folder / "cpu.cfs_period_us")
            if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
                limits.append(int(words[0]) / int(words[1]))
            elif quota is not None and quota > 0 and period:
                limits.append(quota / period)
        return min(limits, default=None)

    def memory_limit_bytes(self) -> int | None:
        """The tightest memory limit, None without one."""
        names = ("memory.max", "memory.limit_in_bytes")
        known = (_integer(folder / name) for folder in self.memory for name in names)
        return min((limit for limit in known if limit is not None and limit < _NO_LIMIT), default=None)

    def throttled_ns(self) -> int | None:
        """Time this cgroup was kept from running by its quota; a counter."""
        values = read_pairs(self.cpu[0] / "cpu.stat") if self.cpu else {}
        return values["throttled_usec"] * 1000 if "throttled_usec" in values else values.get("throttled_time")

    def oom_events(self) -> int | None:
        """Processes killed in this cgroup because memory ran out; a counter."""
        files = [folder / name for folder in self.memory[:1] for name in ("memory.events", "memory.oom_control")]
        return next((count for path in files if (count := read_pairs(path).get("oom_kill")) is not None), None)

    def pressure_file(self, resource: str) -> Path | None:
        """`cpu.pressure`, `io.pressure` or `memory.pressure` of this cgroup (version 2 below the root)."""
        path = self.cpu[0] / f"{resource}.pressure" if self.version == 2 else None
        return path if path is not None and path.is_file() else None


def find_cgroups(root: Path = Path("/")) -> Cgroups:
    """Where the current process is limited. Never raises: an unreadable system has no known limits."""
    mount = root / "sys/fs/cgroup"
    paths: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):  # number:controllers:path
        controllers, _, path = line.partition(":")[2].partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    if (mount / "cgroup.controllers").is_file():
        folders = tuple(_levels(mount, paths.get("", "/")))
        return Cgroups(2, folders, folders)
    found: dict[str, tuple[Path, ...]] = {}
    for name, controller in (("cpu,cpuacct", "cpu"), ("cpu", "cpu"), ("memory", "memory")):
        if (mount / name).is_dir() and controller in paths:
            found[controller] = tuple(_levels(mount / name, paths[controller]))
    return Cgroups(1 if found else None, found.get("cpu", ()), found.get("memory", ()))


def _levels(mount: Path, path: str) -> Iterator[Path]:
    """From the cgroup up to its mount. In a container the path may be the host's: then the mount is all we see."""
    relative = path.strip("/")
    folder = mount / relative if relative and ".." not in relative.split("/") else mount
    if not folder.is_dir():
        folder = mount
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def read_pairs(path: Path) -> dict[str, int]:
    """A file of `name number` lines."""
    rows = (line.split() for line in _lines(path))
    return {words[0]: int(words[1]) for words in rows if len(words) == 2 and words[1].isdecimal()}


def read_pressure_some(path: Path) -> float | None:
    """`some avg10` of a pressure file, in percent of the last ten seconds."""
    found = re.search(r"^some .*?\bavg10=([0-9.]+)", "\n".join(_lines(path)), re.MULTILINE)
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None


def _integer(path: Path) -> int | None:
    text = (_lines(path) or [""])[0].strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _lines(path: Path) -> list[str]:
    return (read_text(path) or "").splitlines()


Metric = tuple[str, str, float, int | None, str | None]  # name, unit, value, pid, device
Since = Callable[[], int]  # ns since the time that a row of readings has


def counter_metrics(name: str, unit: str, device: str, read: Callable[[], int | None], since: Since) -> list[Metric]:
    """A counter of energy and when it was read, half-way through the call; nothing where it is refused."""
    before = since()
    value = read()
    if value is None:
        return []
    after = (before + since()) // 2
    return [(name, unit, float(value), None, device), ("energy_after_ns", "ns", float(after), None, device)]


_SM_CLOCK = 1  # NVML_CLOCK_SM
_PROCESSES_EVERY = 5  # readings: the driver takes longer over this list than over all else
_VIRTUALIZATION = ("none", "passthrough", "vgpu", "host vgpu", "host vsga")  # NVML_GPU_VIRTUALIZATION_MODE_*
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_BUS_ID = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F])")


class Gpus:
    """An open NVML session; without a driver it is empty and says why in `reason`."""

    def __init__(self) -> None:
        self._nvml: Any = None
        # Of each device its handle, its highest SM clock in MHz and its power limit as delivered in W.
        self._devices: list[tuple[Any, float | None, float | None]] = []
        self._readings = 0
        self.reason: str | None = None

    def __enter__(self) -> Gpus:
        try:
            import pynvml
        except ImportError:
            self.reason = "nvidia-ml-py is not installed"
            return self
        try:
            pynvml.nvmlInit()
        except Exception as error:  # noqa: BLE001 - a binding that does not fit its driver raises anything
            self.reason = str(error)
            return self
        self._nvml = pynvml
        numbers = range(self._query("nvmlDeviceGetCount") or 0)
        for handle in filter(None, (self._query("nvmlDeviceGetHandleByIndex", number) for number in numbers)):
            clock = self._query("nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK)
            power = self._query("nvmlDeviceGetPowerManagementDefaultLimit", handle)
            self._devices.append((handle, None if clock is None else float(clock), _watts(power)))
        return self

    def __exit__(self, *_: object) -> None:
        if self._nvml is not None:
            self._query("nvmlShutdown")

    def _query(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, name)(*arguments)
        except Exception:  # noqa: BLE001 - a binding that does not fit its driver raises anything
            return None

    def describe(self) -> list[dict[str, Any]]:
        """`{"index", "name", "memory_bytes", "uuid", "numa_node"}` per device, with its highest clock and power, and
        whether it counts energy and is divided: `mig`, `virtualization`."""
        devices = []
        for index, (handle, clock_mhz, power_w) in enumerate(self._devices):
            memory = self._query("nvmlDeviceGetMemoryInfo", handle)
            mig, mode = (self._query(f"nvmlDeviceGet{name}Mode", handle) for name in ("Mig", "Virtualization"))
            devices.append(
                {
                    "index": index,
                    "name": _text(self._query("nvmlDeviceGetName", handle)),
                    "memory_bytes": None if memory is None else int(memory.total),
                    "uuid": _text(self._query("nvmlDeviceGetUUID", handle)),
                    "numa_node": numa_node(_text(getattr(self._query("nvmlDeviceGetPciInfo", handle), "busId", None))),
                    "sm_clock_max_mhz": clock_mhz,
                    "power_default_w": power_w,
                    "energy_counter": None if self._energy_mj(handle) is None else True,
                    "mig": bool(mig[0]) if isinstance(mig, (list, tuple)) and mig else None,
                    "virtualization": None if mode not in range(len(_VIRTUALIZATION)) else _VIRTUALIZATION[mode],
                }
            )
        return devices

    def driver_version(self) -> str | None:
        return None if self._nvml is None else _text(self._query("nvmlSystemGetDriverVersion"))

    def _energy_mj(self, handle: Any) -> int | None:
        """Since the driver was loaded; of the whole board, whoever uses it."""
        value = self._query("nvmlDeviceGetTotalEnergyConsumption", handle)
        return value if isinstance(value, int) and 0 <= value < _NO_LIMIT else None

    def energy(self, since: Since) -> list[Metric]:
        """The counter of every device that has one."""
        found: list[Metric] = []
        for index, (handle, _, _) in enumerate(self._devices):
            found += counter_metrics("gpu_energy_mj", "mJ", f"gpu:{index}", partial(self._energy_mj, handle), since)
        return found

    def metrics(self) -> list[Metric]:
        """One reading of every device but for its energy.

        `device` is the NVML index as `cuda:N` is not known from outside.
        """
        found: list[Metric] = []
        with_processes = self._readings % _PROCESSES_EVERY == 0
        self._readings += 1
        for index, (handle, clock_mhz, power_w) in enumerate(self._devices):
            device = f"gpu:{index}"
            utilization = self._query("nvmlDeviceGetUtilizationRates", handle)
            memory = self._query("nvmlDeviceGetMemoryInfo", handle)
            readings = (
                ("gpu_util_pct", "%", None if utilization is None else utilization.gpu),
                ("gpu_memory_bytes", "bytes", None if memory is None else memory.used),
                ("gpu_power_w", "W", _watts(self._query("nvmlDeviceGetPowerUsage", handle))),
                ("gpu_power_limit_w", "W", _watts(self._query("nvmlDeviceGetEnforcedPowerLimit", handle))),
                ("gpu_power_default_w", "W", power_w),
                ("gpu_temperature_c", "C", self._query("nvmlDeviceGetTemperature", handle, 0)),
                ("gpu_sm_clock_mhz", "MHz", self._query("nvmlDeviceGetClockInfo", handle, _SM_CLOCK)),
                ("gpu_sm_clock_max_mhz", "MHz", clock_mhz),
                ("gpu_clock_reasons", "bitmask", self._query("nvmlDeviceGetCurrentClocksThrottleReasons", handle)),
            )
            found += [(name, unit, float(value), None, device) for name, unit, value in readings if value is not None]
            # who computes on it, whoever started it; the driver may hide how much memory each has
            for process in self._query("nvmlDeviceGetComputeRunningProcesses", handle) or () if with_processes else ():
                used, pid = getattr(process, "usedGpuMemory", None), int(process.pid)
                found.append(("gpu_process", "count", 1.0, pid, device))
                if used is not None:
                    found.append(("gpu_process_bytes", "bytes", float(used), pid, device))
        return found


def numa_node(bus_id: str | None, folder: Path = _PCI_DEVICES) -> int | None:
    """The node whose memory is next to a PCI device; None where the machine has one node or does not tell."""
    match = _BUS_ID.fullmatch((bus_id or "").strip("\0 "))
    if match is None:
        return None
    node = _integer(folder / f"{match[1][-4:]}:{match[2]}".lower() / "numa_node")
    return node if node is not None and node >= 0 else None


def _watts(milliwatts: Any) -> float | None:
    return None if milliwatts is None else milliwatts / 1000.0


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else None


BYTES = 8 << 20  # of one mapping, as large as tensors that glibc maps anew; threads share it as those of an operator do
BUDGET_NS = 20_000_000  # for one thread, and as much for several
MOST_FAULTING = 16
NICENESS = 10


def page_fault_cost(threads: int) -> dict[str, Any] | None:
    """What a page fault costs here, in processor time: memory is mapped, written and given back. None: not measurable.

    `ns_alone` of a fault on one thread, `ns_beside` of each where `threads` fault at once, `ns_returned` of a page. The
    training is never part of it: the launcher measures once the command has ended, at low priority, for some 50 ms.
    """
    from concurrent.futures import ThreadPoolExecutor

    def work() -> dict[str, Any] | None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread alone
            count = max(1, min(threads, MOST_FAULTING, len(os.sched_getaffinity(0))))
            alone = _rounds(1)
            beside = _rounds(count) if count > 1 else alone
        except (OSError, AttributeError, ValueError, statistics.StatisticsError):
            return None
        figures = {"ns_alone": alone[0], "ns_beside": beside[0], "ns_returned": alone[1]}
        return {
            "page_bytes": mmap.PAGESIZE,
            "threads": count,
            **{name: round(value, 1) for name, value in figures.items()},
        }

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _rounds(count: int) -> tuple[float, float]:
    """Medians over rounds: (ns of a fault to each of `count` threads at once, ns to give a page back)."""
    from concurrent.futures import ThreadPoolExecutor

    part = BYTES // count
    faults: list[float] = []
    returns: list[float] = []
    gate = threading.Barrier(count)

    def fault_ns(start: int) -> float:
        """Of the first write to a stretch of memory what a second write does not take."""
        gate.wait()
        began = time.thread_time_ns()
        ctypes.memset(start, 1, part)  # lets go of the interpreter lock, so that threads fault side by side
        written = time.thread_time_ns()
        ctypes.memset(start, 2, part)
        return 2.0 * written - began - time.thread_time_ns()

    end_ns = time.monotonic_ns() + BUDGET_NS
    with ThreadPoolExecutor(count) as pool:
        while not faults or (time.monotonic_ns() < end_ns and len(faults) < 9):
            memory = mmap.mmap(-1, BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_NOHUGEPAGE)  # so that a page is a page
            held = ctypes.c_char.from_buffer(memory)
            start = ctypes.addressof(held)
            spent = list(pool.map(fault_ns, range(start, start + count * part, part)))
            del held
            began = time.thread_time_ns()
            memory.close()
            returns.append((time.thread_time_ns() - began) / (BYTES // mmap.PAGESIZE))
            faults.append(max(0.0, statistics.mean(spent)) / (part // mmap.PAGESIZE))
    return statistics.median(faults), statistics.median(returns)


def huge_pages(root: Path = ROOT) -> str | None:
    """`always`, `madvise` or `never`, as the kernel is set."""
    text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    return text.partition("[")[2].partition("]")[0] or None


def page_fault_facts(threads: int | None) -> dict[str, Any]:
    """The manifest's `page_faults`: what a fault costs with so many `threads`, and what could be done about it."""
    from stepscope.record.agent.knobs import launched

    libc = None  # such as "glibc 2.36"; where it is another C library it is unknown
    with contextlib.suppress(OSError, ValueError, AttributeError):
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    return {
        "cost": None if threads is None else page_fault_cost(threads),
        "huge_pages": huge_pages(),
        "libc": libc,
        "installed": [name for name in launched.LIBRARIES if launched.installed(name) is not None],
    }
