"""Who is who among the processes of a run: roles, claimed rank folders, and whether the agent inside ever spoke.

Two sources are merged by pid: processes.jsonl (seen from outside) and agents.jsonl (said from inside). A Python process
with torch that claimed no folder and in whose tree nobody did is still a rank: it is analysed from stacks alone. What a
rank's journal names as started by the script loads nothing, however much it looks like a loader's worker from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import polars as pl
from msgspec import Struct, field
from msgspec.structs import asdict

from stepscope.read.raw import RawHost, RawRank, Row
from stepscope.read.text import boolean, integer, moment_ns, string
from stepscope.tables.schema import SCHEMAS

RANK, WORKER, LAUNCHER, HELPER, OTHER = "rank", "loader_worker", "launcher", "helper", "other"
_ROOT = "root"
_SEEN: dict[str, Callable[[Any], object]] = {
    "ppid": integer,
    "role": string,
    "command": string,
    "python": boolean,
    "torch": boolean,
}
ANY_FILE = -1  # in a run that was recorded all files of stacks name the same processes
_MAX_GENERATIONS = 64  # a chain of parents longer than this is a cycle of reused pids


class Process(Struct):
    """One process of a host. Fields are None where neither source knew."""

    pid: int
    ppid: int | None = None
    role: str | None = None
    command: str | None = None
    python: bool | None = None
    torch: bool | None = None
    reported: bool = False
    claimed: str | None = None  # rank folder
    by_script: bool = False  # started by the script, and not by a DataLoader
    start_ns: int | None = None
    end_ns: int | None = None


class HostProcesses(Struct):
    """The processes of a host by the file that names them (or `ANY_FILE`) and pid, and all in order of appearance.

    Where a pid was reused it is that of the latest process. None is the pid of one that its file does not name.
    """

    host: str
    by_pid: dict[tuple[int, int | None], Process] = field(default_factory=dict)
    all: list[Process] = field(default_factory=list)

    def owner(self, file: int, pids: Sequence[int]) -> str | None:
        """The rank folder of the innermost of `pids` (ancestors first), or of its recorded ancestors."""
        above = (process for pid in tuple(reversed(pids)) or (None,) for process in self.ancestry(file, pid))
        return next((process.claimed for process in above if process.claimed), None)

    def ancestry(self, file: int, pid: int | None) -> list[Process]:
        chain: list[Process] = []
        while len(chain) < _MAX_GENERATIONS:
            process = self.by_pid.get((file, pid))
            if process is None or process in chain:
                break
            chain.append(process)
            if process.ppid is None:
                break
            pid = process.ppid
        return chain


def host_processes(host: RawHost, ranks: Iterable[RawRank], only_host: bool) -> HostProcesses:
    """Merge what is known of a host's processes. `only_host` lets rank.json name the pid where no claim was read."""
    found = HostProcesses(host.name)
    for row in host.processes:
        _from_outside(found, row)
    for row in host.agents:
        _from_inside(found, row)
    claimed = {process.claimed for process in found.all}
    for rank in ranks:
        info = rank.info or {}
        pid = integer(info.get("pid"))
        here = only_host or info.get("host") == host.name
        if rank.name not in claimed and here and pid is not None:
            process = _get(found, pid)
            process.claimed, process.reported = rank.name, True
            process.command = process.command or _joined(info.get("argv"))
        if here or rank.name in claimed:
            for row in rank.journal:
                child = found.by_pid.get((ANY_FILE, integer(row.get("pid")))) if row["kind"] == "child" else None
                if child is not None:
                    child.by_script = True
    _settle_roles(found)
    return found


def processes_table(hosts: Iterable[HostProcesses]) -> pl.DataFrame:
    rows = [{"host": host.host, "process": one.claimed, **asdict(one)} for host in hosts for one in host.all]
    return pl.DataFrame([{name: row[name] for name in SCHEMAS["processes"]} for row in rows], SCHEMAS["processes"])


def _get(found: HostProcesses, pid: int) -> Process:
    process = found.by_pid.get((ANY_FILE, pid))
    if process is None:
        process = found.by_pid[ANY_FILE, pid] = Process(pid)
        found.all.append(process)
    return process


def _from_outside(found: HostProcesses, row: Row) -> None:
    pid = row["pid"]
    ended = moment_ns(row.get("ended_ns"))
    started = moment_ns(row.get("start_ns"))
    known = found.by_pid.get((ANY_FILE, pid))
    if known is not None and ended is None:
        apart_ns = 0 if known.start_ns is None or started is None else abs(known.start_ns - started)
        if known.end_ns is not None or apart_ns > 10**9:
            del found.by_pid[ANY_FILE, pid]  # the pid was reused
    process = _get(found, pid)
    if ended is not None:
        process.end_ns = ended
        return
    process.start_ns = started if started is not None else process.start_ns
    for name, check in _SEEN.items():
        value = check(row.get(name))
        if value is not None:
            setattr(process, name, value)


def _from_inside(found: HostProcesses, row: Row) -> None:
    process = _get(found, row["pid"])
    process.reported = True
    process.python = True
    folder = string(row.get("folder"))
    if folder is not None:
        process.claimed = folder
        process.torch = True
        return
    if row.get("torch") is not None:
        process.torch = True
    process.ppid = process.ppid if process.ppid is not None else integer(row.get("ppid"))
    process.command = process.command or _joined(row.get("argv"))
    if row.get("role") == "worker" and process.role in (None, _ROOT, OTHER):
        process.role = WORKER
    process.by_script = process.by_script or row.get("role") == "fork"


def _joined(argv: Any) -> str | None:
    return " ".join(str(part) for part in argv) if isinstance(argv, list) else None


def _settle_roles(found: HostProcesses) -> None:
    for process in found.all:
        if process.claimed:
            process.role = RANK
        elif process.by_script and process.role in (WORKER, HELPER):  # of a fork server it has the server's command
            process.role = OTHER
    parents_of_torch = {
        ancestor.pid
        for process in found.all
        if process.torch and process.role not in (WORKER, HELPER)
        for ancestor in found.ancestry(ANY_FILE, process.pid)[1:]
    }
    parents = {process.ppid for process in found.all}
    below_rank = {
        process.pid
        for process in found.all
        if any(parent.claimed for parent in found.ancestry(ANY_FILE, process.pid)[1:])
    }
    for process in found.all:
        if process.role not in (None, _ROOT, OTHER):
            continue
        trains = process.torch and process.python is not False
        if trains and process.pid not in below_rank and process.pid not in parents_of_torch:
            process.role = RANK
        elif process.pid in parents_of_torch or (process.role == _ROOT and process.pid in parents):
            process.role = LAUNCHER
        else:
            process.role = OTHER
