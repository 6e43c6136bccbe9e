"""Who is who in files of stacks that others recorded: nothing tells it but the chains of process ids and what ran.

A launcher's children, and processes that nobody else started, train: they are the ranks, numbered by file and process
id, for no file names ranks. A process whose child trains while it does not is a launcher too. One seen in a loader
worker's loop is one, and so is a child that multiprocessing started. Process ids of different files (of different
hosts, perhaps) are never taken for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import field

from stepscope.read.raw import RawHost, RawRank
from stepscope.tables.processes import HELPER, LAUNCHER, OTHER, RANK, WORKER, HostProcesses, Process
from stepscope.tables.stacks import Taken

_ROLE_OF_HINT = {"launcher": LAUNCHER, "helper": HELPER}
_Key = tuple[int, int]  # position of the file, pid


class ForeignProcesses(HostProcesses):
    """The processes of files, which share no process ids."""

    by_file: dict[tuple[int, int | None], Process] = field(default_factory=dict)

    def process_of(self, segment: int, pid: int | None) -> Process | None:
        return self.by_file.get((segment, pid))

    def owner_of(self, segment: int, pids: Sequence[int]) -> str | None:
        found = (self.by_file.get((segment, pid)) for pid in (*reversed(pids), *((None,) if not pids else ())))
        return next((process.claimed for process in found if process is not None and process.claimed), None)


def foreign_processes(host: RawHost, taken: Taken, first_rank: int = 0) -> tuple[ForeignProcesses, tuple[RawRank, ...]]:
    """The processes of the host's files, and their ranks, numbered from `first_rank` on."""
    found = ForeignProcesses(host.name)
    roles = _roles(taken)
    for key in sorted(taken.parents):
        process = Process(key[1], ppid=taken.parents[key], role=roles[key], python=True)
        found.by_file[key] = process
        found.all.append(process)
    named = {segment for segment, _ in taken.parents}
    for segment in sorted(taken.anonymous - named):
        found.by_file[(segment, None)] = Process(-1, role=RANK, python=True)
    ranks: list[RawRank] = []
    for segment, pid in sorted(found.by_file, key=lambda key: (key[0], key[1] or 0)):
        process = found.by_file[(segment, pid)]
        if process.role != RANK:
            continue
        number = first_rank + len(ranks)
        process.claimed = f"rank-{number}"
        process.reported = True  # no agent was asked to
        info = {"rank": number, "pid": pid, "device": None, "host": host.name}
        ranks.append(RawRank(process.claimed, number, info, (), (), ()))
    return found, tuple(ranks)


def _roles(taken: Taken) -> dict[_Key, str]:
    roles: dict[_Key, str] = {}
    trains = taken.training - {key for key in taken.workers if key[1] is not None}
    launches = {parent for key in trains for parent in _ancestors(key, taken) if parent not in trains}
    for key in sorted(taken.parents, key=lambda key: len(list(_ancestors(key, taken)))):
        hint = taken.hints.get(key)
        above = [roles.get(parent) for parent in _ancestors(key, taken)]
        if key in taken.workers:
            roles[key] = WORKER
        elif hint in _ROLE_OF_HINT:
            roles[key] = _ROLE_OF_HINT[hint]
        elif key in launches:
            roles[key] = LAUNCHER
        elif RANK not in above and WORKER not in above:
            roles[key] = RANK
        else:
            roles[key] = WORKER if hint == "spawned" else OTHER
    return roles


def _ancestors(key: _Key, taken: Taken) -> Iterable[_Key]:
    """The processes above, nearest first."""
    seen = {key}
    while True:
        parent = taken.parents.get(key)
        if parent is None or (key[0], parent) in seen:
            return
        key = (key[0], parent)
        seen.add(key)
        yield key
