"""The machine and its noise: processors, affinity, sibling threads, limits, GPUs, governor.

`root` prefixes every path read, so that tests can show other machines. Unknown is None.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.record.host.gpu import Gpus

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
    """`hardware.gpus` of the manifest."""
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
    """Logical processors this process may run on."""
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


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Processor numbers in the form `taskset -c` takes."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


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
    no_turbo = read_text(root / "sys/devices/system/cpu/intel_pstate/no_turbo")
    if no_turbo is not None:
        return no_turbo == "0"
    boost = read_text(root / "sys/devices/system/cpu/cpufreq/boost")
    return None if boost is None else boost == "1"


def smt_active(root: Path = ROOT) -> bool | None:
    text = read_text(root / "sys/devices/system/cpu/smt/active")
    return None if text is None else text == "1"


def frequency_mhz(cpus: Iterable[int], root: Path = ROOT) -> float | None:
    """The present frequency, averaged over at most 16 of `cpus`; None where the machine hides it."""
    wanted = sorted(cpus)[:16]
    paths = (root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in wanted)
    texts = (read_text(path) for path in paths)
    values = [int(text) / 1000.0 for text in texts if text and text.isdecimal()] or _cpuinfo_mhz(set(wanted), root)
    return sum(values) / len(values) if values else None


def _cpuinfo_mhz(wanted: set[int], root: Path) -> list[float]:
    values, cpu = [], -1
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        name = name.strip()
        if name == "processor" and value.strip().isdecimal():
            cpu = int(value)
        elif name == "cpu MHz" and cpu in wanted:
            try:
                values.append(float(value))
            except ValueError:
                continue
    return values


def read_text(path: Path) -> str | None:
    """A small file's stripped text, None when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


_NO_LIMIT_BYTES = 1 << 60  # version 1 writes "no limit" as a number near 2^63


@dataclass(frozen=True)
class Cgroups:
    """Folders from the process's own cgroup up to the mount, per controller. Empty tuples where there is none."""

    version: int | None
    cpu: tuple[Path, ...]
    memory: tuple[Path, ...]

    def cpu_limit_cores(self) -> float | None:
        """The tightest CPU quota in cores, None without one."""
        limits = [limit for folder in self.cpu if (limit := _cpu_limit(folder)) is not None]
        return min(limits, default=None)

    def memory_limit_bytes(self) -> int | None:
        """The tightest memory limit, None without one."""
        names = ("memory.max", "memory.limit_in_bytes")
        limits = [limit for folder in self.memory for name in names if (limit := _integer(folder / name)) is not None]
        return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)

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


def _cpu_limit(folder: Path) -> float | None:
    words = (_lines(folder / "cpu.max") or [""])[0].split()
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
        return int(words[0]) / int(words[1])
    quota, period = _integer(folder / "cpu.cfs_quota_us"), _integer(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period else None


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
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
