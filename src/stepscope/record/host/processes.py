"""The process tree of the command, read from /proc, with a role for every process.

A process once seen below the root stays in the tree when its parent dies. One whose parent died before anybody looked
is known by its environment. Discovery reads the names in /proc and only the entries that are new, so it can run
several times a second.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stepscope.record.host.command import PYTHON

_LAUNCHER = re.compile(
    r"(?:^|[/ ])(torchrun|deepspeed|mpirun|mpiexec|srun|horovodrun)(?: |$)|[/ ]accelerate launch|"
    r"torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch|torch/distributed/(?:run|launch)\.py"
)
_HELPER = re.compile(
    r"multiprocessing\.(?:resource_tracker|semaphore_tracker|forkserver)|compile_worker|multiprocessing/resource_tracker"
)
# Looking into a process's memory map holds a lock of that process, so the looks get rarer with its age in seconds.
_LIBRARY_LOOKS = (0.3, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
_SAMPLED_ROLES = ("rank", "root", "loader_worker", "other")
_DEEPEST_CHAIN = 32


@dataclass(frozen=True)
class Stat:
    """The fields of /proc/PID/stat in use. Times are clock ticks; `start_ticks` counts from boot."""

    comm: str
    state: str
    ppid: int
    minor_faults: int
    major_faults: int
    cpu_ticks: int
    threads: int
    start_ticks: int
    processor: int
    block_io_ticks: int = 0  # waiting for a disk; the kernel counts it only where it was told to


def read_proc(pid: int, name: str, most: int = -1) -> bytes:
    """A file of a process in /proc; empty where the process is gone or another user's."""
    return read_file(f"/proc/{pid}/{name}", most)


def read_file(path: str, most: int = -1) -> bytes:
    """A file of /proc, unbuffered, for there are many, once a second; empty where it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall() if most < 0 else file.read(most)
    except OSError:
        return b""


def read_stat(pid: int, thread: int | None = None) -> Stat | None:
    """Of a process, or of one of its threads alone. None when it is gone or the line cannot be understood."""
    text = read_proc(pid, "stat" if thread is None else f"task/{thread}/stat").decode("utf-8", "replace")
    try:
        head, _, tail = text.rpartition(")")
        comm = head.partition("(")[2]
        part = tail.split()
        return Stat(
            comm=comm,
            state=part[0],
            ppid=int(part[1]),
            minor_faults=int(part[7]),
            major_faults=int(part[9]),
            cpu_ticks=int(part[11]) + int(part[12]),
            threads=int(part[17]),
            start_ticks=int(part[19]),
            processor=int(part[36]),
            block_io_ticks=int(part[39]),
        )
    except (ValueError, IndexError):
        return None


def ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal, as what a shell has started in the background does with SIGINT."""
    mask = re.search(rb"^SigIgn:\s*([0-9a-f]+)", read_proc(pid, "status"), re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def read_command(pid: int) -> list[str]:
    """argv as the kernel has it; empty for a process that is gone or a kernel thread."""
    data = read_proc(pid, "cmdline", 65536)
    return [part.decode("utf-8", "replace") for part in data.rstrip(b"\0").split(b"\0")] if data else []


def read_executable(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return None


@dataclass
class Process:
    """A process of the tree. `torch` and `python` are None until they could be seen."""

    pid: int
    ppid: int
    start_ticks: int
    first_seen_ns: int
    comm: str = ""
    executable: str | None = None
    argv: tuple[str, ...] = ()
    python: bool | None = None
    torch: bool | None = None
    role: str = "other"
    looks: int = 0
    alive: bool = True


class ProcessTree:
    """The root, everything started below it, and what the agents inside said about themselves."""

    def __init__(self, root: int, mark: bytes | None = None) -> None:
        """`mark` stands in the environment of every process of the run, and of no other."""
        self.root = root
        self._mark = mark
        self.members: dict[int, Process] = {}
        self._strangers: dict[int, int] = {}  # pid outside the tree -> its parent, so it is read once
        self._claims: dict[int, str] = {}
        self._agent_roles: dict[int, str] = {}

    def hear(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Lines of agents.jsonl: processes that reported, and the rank folders they claimed."""
        for row in rows:
            pid = row.get("pid")
            if not isinstance(pid, int):
                continue
            if isinstance(row.get("folder"), str):
                self._claims[pid] = row["folder"]
            # Whether the number means the same process to us as to the agent; in a container of its own it may not.
            told, seen = row.get("executable"), None if pid in self.members else read_executable(pid)
            same = (
                told is None or seen is None or os.path.basename(seen) == os.path.basename(os.path.realpath(str(told)))
            )
            if isinstance(row.get("role"), str) and same:
                self._agent_roles[pid] = row["role"]

    def discover(self, now_ns: int) -> list[Process]:
        """Add processes that appeared since the last call; returns the new ones."""
        present: set[int] = set()
        with contextlib.suppress(OSError):
            present = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
        self._strangers = {pid: ppid for pid, ppid in self._strangers.items() if pid in present}
        fresh = {pid: stat for pid in present if (stat := self._new_stat(pid)) is not None}
        added: list[Process] = []
        grown = True
        while grown:
            grown = False
            for pid in sorted(fresh):
                stat = fresh[pid]
                known = pid == self.root or stat.ppid in self.members or pid in self._agent_roles
                mark = None if known or stat.ppid in fresh else self._mark
                if known or (mark is not None and mark in read_proc(pid, "environ")):
                    member = Process(pid, stat.ppid, stat.start_ticks, now_ns, comm=stat.comm)
                    self.members[pid] = member
                    added.append(member)
                    del fresh[pid]
                    grown = True
        self._strangers.update({pid: stat.ppid for pid, stat in fresh.items()})
        return added

    def _new_stat(self, pid: int) -> Stat | None:
        """The stat of a process we do not know yet; not of a zombie, nor of a dead member that is still listed."""
        member = self.members.get(pid)
        if pid in self._strangers:
            if pid not in self._agent_roles:  # else an agent spoke from it: it is ours after all
                return None
        elif member is not None and member.alive:
            return None
        stat = read_stat(pid)
        if stat is None or stat.state in "ZX" or (member is not None and member.start_ticks == stat.start_ticks):
            return None
        return stat

    def refresh(self, process: Process, age_seconds: float) -> bool:
        """Look at a living member again; returns whether anything that is written down has changed."""
        before = replace(process)
        argv = tuple(read_command(process.pid))
        if argv and argv != process.argv:
            if process.argv:
                process.looks, process.torch = 0, None  # it has started another program
            process.argv = argv
            process.executable = read_executable(process.pid)
            base = os.path.basename(process.executable or argv[0])
            process.python = bool(PYTHON.fullmatch(base)) if base else None
        while process.looks < len(_LIBRARY_LOOKS) and age_seconds >= _LIBRARY_LOOKS[process.looks]:
            process.looks += 1
            maps = b"" if process.torch else read_proc(process.pid, "maps")
            if maps:
                process.torch = b"/libtorch" in maps
                process.python = True if b"/libpython" in maps else process.python
        process.role = self.role_of(process)
        return replace(before, looks=process.looks) != process

    def sampling_order(self) -> list[int]:
        """Living Python processes worth sampling: ranks, then the root, loader workers and others.

        Launchers wait and helpers serve; their stacks would say nothing and cost as much.
        """
        found = [p for p in self.members.values() if p.alive and p.python and p.role in _SAMPLED_ROLES]
        return [p.pid for p in sorted(found, key=lambda p: (_SAMPLED_ROLES.index(p.role), p.first_seen_ns, p.pid))]

    def chain(self, pid: int) -> list[tuple[int, tuple[str, ...]]]:
        """(pid, argv) from the root down to `pid`."""
        found: list[tuple[int, tuple[str, ...]]] = []
        member = self.members.get(pid)
        while member is not None and len(found) < _DEEPEST_CHAIN:
            found.insert(0, (member.pid, member.argv))
            member = self.members.get(member.ppid) if member.pid != self.root else None
        return found

    def role_of(self, process: Process) -> str:
        command = " ".join(process.argv)
        if process.pid in self._claims:
            return "rank"
        if process.comm == "pt_data_worker" or self._agent_roles.get(process.pid) == "worker":
            return "loader_worker"
        if _HELPER.search(command):
            return "helper"
        if process.comm == "pt_elastic" or _LAUNCHER.search(command[:4096]):
            return "launcher"
        # a multiprocessing child of a rank: forked with its command line, spawned, or through a fork server
        parent = self.members.get(process.ppid)
        if parent is not None:
            spawned = "--multiprocessing-fork" in process.argv or "forkserver" in " ".join(parent.argv)
            if spawned and parent.role == "helper":
                parent = self.members.get(parent.ppid, parent)
            if parent.pid in self._claims and (spawned or process.argv == parent.argv):
                return "loader_worker"
        return "root" if process.pid == self.root else "other"
