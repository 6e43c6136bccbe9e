"""The cgroup this process lives in, version 1 or 2: CPU and memory limits, throttling, out-of-memory events, pressure.

Limits are hierarchical, so every level up to the mount is asked and the tightest counts. `root` prefixes all paths,
which is how tests show other machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
        for folder in self.cpu[:1]:
            values = read_pairs(folder / "cpu.stat")
            if "throttled_usec" in values:
                return values["throttled_usec"] * 1000
            if "throttled_time" in values:
                return values["throttled_time"]
        return None

    def oom_events(self) -> int | None:
        """Processes killed in this cgroup because memory ran out; a counter."""
        for folder in self.memory[:1]:
            for name in ("memory.events", "memory.oom_control"):
                values = read_pairs(folder / name)
                if "oom_kill" in values:
                    return values["oom_kill"]
        return None

    def pressure_file(self, resource: str) -> Path | None:
        """`cpu.pressure`, `io.pressure` or `memory.pressure` of this cgroup (version 2 below the root)."""
        if self.version != 2:
            return None
        for folder in self.cpu[:1]:
            path = folder / f"{resource}.pressure"
            if path.is_file():
                return path
        return None


def find_cgroups(root: Path = Path("/")) -> Cgroups:
    """Where the current process is limited. Never raises: an unreadable system has no known limits."""
    lines = _lines(root / "proc/self/cgroup")
    mount = root / "sys/fs/cgroup"
    paths: dict[str, str] = {}
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(",") if controllers else [""]:
            paths[controller] = path
    if (mount / "cgroup.controllers").is_file():
        folders = tuple(_levels(mount, paths.get("", "/")))
        return Cgroups(2, folders, folders)
    cpu = _version_1(mount, paths, ("cpu", "cpu,cpuacct"), "cpu")
    memory = _version_1(mount, paths, ("memory",), "memory")
    return Cgroups(1 if cpu or memory else None, cpu, memory)


def _version_1(mount: Path, paths: dict[str, str], names: tuple[str, ...], controller: str) -> tuple[Path, ...]:
    for name in names:
        if (mount / name).is_dir() and controller in paths:
            return tuple(_levels(mount / name, paths[controller]))
    return ()


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
    pairs = {}
    for line in _lines(path):
        words = line.split()
        if len(words) == 2 and words[1].isdecimal():
            pairs[words[0]] = int(words[1])
    return pairs


def read_pressure_some(path: Path) -> float | None:
    """`some avg10` of a pressure file, in percent of the last ten seconds."""
    for line in _lines(path):
        if line.startswith("some "):
            for word in line.split()[1:]:
                if word.startswith("avg10="):
                    try:
                        return float(word[6:])
                    except ValueError:
                        return None
    return None


def _integer(path: Path) -> int | None:
    text = (_lines(path) or [""])[0].strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
