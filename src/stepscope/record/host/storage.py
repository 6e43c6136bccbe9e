"""Where a process's data lies: the kind of file system of the files it has open and of the paths its command names.

Only links and the table of mounts are read, never the files: a file system that hangs cannot hold the reader up. Files
are open for moments, so a few processes are looked at in turn, once a second.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from stepscope.record.host.gpu import Metric

LOOKS_PER_READING = 4  # processes; each costs some 2 us per open file
_MOST_FILES = 256  # of a process: more are sockets of a server, not data
_MOST_WORDS = 256
_NO_DATA = re.compile(r"\.(?:py[co]?|so(?:\.[\d.]+)?|pth|egg)$| \(deleted\)$|^/(?:dev|proc|sys|run|memfd:)")
_PSEUDO = ("proc", "sysfs", "devtmpfs", "devpts", "mqueue", "securityfs", "debugfs", "tracefs", "bpf", "configfs")
_ESCAPED = re.compile(r"\\([0-7]{3})")
_WRITE_ONLY, _ACCESS, _DIRECTORY = os.O_WRONLY, os.O_ACCMODE, os.O_DIRECTORY

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
            mounts = self._of(pid)
            if not mounts:
                continue
            found += _counted("open_files", pid, mounts, self._open(pid))
            if pid not in self._named:
                self._named.add(pid)
                found += _counted("named_paths", pid, mounts, named_paths(pid))
        return found

    def _of(self, pid: int) -> Mounts:
        try:
            space = os.readlink(f"/proc/{pid}/ns/mnt")
            if space not in self._mounts:
                with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="replace") as file:
                    self._mounts[space] = parse_mounts(file)
        except OSError:
            return []
        return self._mounts[space]

    def _open(self, pid: int) -> list[str]:
        """Paths of files that the process may be reading."""
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
                        text = file.read(256)
                    if _readable(text):
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
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(65536).decode("utf-8", "replace").split("\0")
    except OSError:
        return []
    values = [word.partition("=")[2] if word.startswith("-") and "=" in word else word for word in words[1:_MOST_WORDS]]
    return [os.path.normpath(value) for value in values if value.startswith("/") and not _NO_DATA.search(value)]


def _readable(text: str) -> bool:
    """Whether the `flags` of an fdinfo file say that a file, no folder, can be read through it."""
    match = re.search(r"^flags:\s*([0-7]+)", text, re.MULTILINE)
    if match is None:
        return False
    flags = int(match[1], 8)
    return flags & _ACCESS != _WRITE_ONLY and not flags & _DIRECTORY


def _counted(name: str, pid: int, mounts: Mounts, paths: Iterable[str]) -> list[Metric]:
    places = Counter(place for path in paths if (place := mount_of(path, mounts)) is not None)
    return [(name, "count", float(count), pid, f"{kind}:{point}") for (point, kind), count in sorted(places.items())]
