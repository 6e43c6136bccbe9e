"""Who is who among the processes of a run: roles, claimed rank folders, and whether the agent inside ever spoke.

Two sources are merged by pid: processes.jsonl (seen from outside) and agents.jsonl (said from inside). A Python process
with torch that claimed no folder and in whose tree nobody did is still a rank: it is analysed from stacks alone. What a
rank's journal names as started by the script loads nothing, however much it looks like a loader's worker from outside.

The job that a run was recorded in, from its manifests and the scheduler's accounting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import polars as pl
from msgspec import Struct, field
from msgspec.structs import asdict

from stepscope.model import Note
from stepscope.model.run_facts import JobFacts, JobStep
from stepscope.read.raw import RawHost, RawRank, RawRun, Row
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
    foreign: str | None = None  # the script's own module by our name, which keeps the agent out
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
    process.foreign = string(row.get("foreign"))
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


SLURM = "slurm"
SOURCE = "sacct.txt"
MOST_NODES = 20_000
MOST_STEPS = 200  # of the accounting, this run's own step and the last attempts first
NEAR_NS = 3_600 * 10**9  # the job's time and that of the recording: clocks of a site differ by less
_UNITS = {unit: 1024**power for power, unit in enumerate(("", "K", "M", "G", "T", "P"))}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMGTP]?)")
_STATES_TOLD = {
    "NODE_FAIL": "a node of it failed",
    "OUT_OF_MEMORY": "it ran out of memory",
    "TIMEOUT": "it came to its time limit",
    "PREEMPTED": "it was preempted",
    "BOOT_FAIL": "its nodes did not start",
    "DEADLINE": "it came to its deadline",
}


def job_facts(raw: RawRun) -> JobFacts | None:
    """None where no launcher said that it is a member of a job."""
    told = [(host.name, found) for host in raw.hosts if (found := _scheduler(host.manifest))]
    if not told:
        return None
    first = told[0][1]
    number = string(first.get("job_id"))
    nodes = max((_texts(found.get("nodes")) for _, found in told), key=len)
    topology = {host: place for host, found in told if (place := string(found.get("topology_addr")))}
    rows = raw.accounting
    absent = ""
    if number is None:
        rows, absent = None, "outside of SLURM there is none"
    elif rows is None:
        absent = "sacct was not there when this report was made, or did not know the job"
    elif reason := _not_ours(rows, number, raw):
        rows, absent = None, reason
    own = [row for row in rows or () if _number(row["id"]) == number]
    attempts = [row for row in own if row["id"] == number]  # the job's own rows, not its steps
    return JobFacts(
        kind=string(first.get("kind")) or "",
        id=number,
        step=string(first.get("step_id")),
        attempt=max((integer(found.get("restart_count")) or 0 for _, found in told), default=0),
        members=integer(first.get("members")),
        cluster=string(first.get("cluster_name")) or "",
        partition=string(first.get("job_partition")) or "",
        nodes=nodes,
        topology=topology,
        topology_pattern=string(first.get("topology_addr_pattern")) or "",
        requeues=None if rows is None or not attempts else len(attempts) - 1,
        node_failures=None if rows is None else sum(str(row["State"]).startswith("NODE_FAIL") for row in attempts),
        steps=tuple(_step(row) for row in own[-MOST_STEPS:]),
        absent=absent,
    )


def job_notes(raw: RawRun) -> Iterator[Note]:
    """What of the accounting a reader has to know before any figure."""
    job = job_facts(raw)
    if job is None or job.requeues is None:
        return
    if job.requeues:
        times = "once" if job.requeues == 1 else f"{job.requeues} times"
        yield Note("warning", f"the job was started again {times}; what was recorded is of one attempt", SOURCE)
    last = next((step for step in reversed(job.steps) if step.id == job.id), None)
    own = next((step for step in reversed(job.steps) if job.step and step.id == f"{job.id}.{job.step}"), None)
    for what, step in (("the job", last), ("the recorded step", own)):
        word = step.state.partition(" ")[0] if step is not None else ""
        if word in _STATES_TOLD:
            yield Note("warning", f"{what} ended as {word}: {_STATES_TOLD[word]}", SOURCE)
            return


def _scheduler(manifest: Mapping[str, Any] | None) -> Mapping[str, Any]:
    found = (manifest or {}).get("scheduler")
    return found if isinstance(found, dict) else {}


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value[:MOST_NODES])) if isinstance(value, list) else ()


def _number(id: str) -> str:
    return id.partition(".")[0]


def _not_ours(rows: Sequence[Row], number: str, raw: RawRun) -> str:
    """Why the rows are of another job: another machine counts its jobs, too; else empty."""
    own = [row for row in rows if _number(row["id"]) == number]
    if not own:
        return f"sacct.txt does not have job {number}"
    names = {name for host in raw.hosts if (name := string(_scheduler(host.manifest).get("cluster_name")))}
    clusters = {str(row["Cluster"]) for row in own if row.get("Cluster")}
    if names and clusters and not names & clusters:
        return f"sacct.txt is of another cluster ({', '.join(sorted(clusters))})"
    started = min(
        (at for host in raw.hosts if (at := moment_ns((host.manifest or {}).get("started_ns")))), default=None
    )
    ends = [int(row["End"]) * 10**9 for row in own if _digits(row.get("End"))]
    begins = [int(row["Start"]) * 10**9 for row in own if _digits(row.get("Start"))]
    late = bool(ends) and len(ends) == len(own) and started is not None and max(ends) < started - NEAR_NS
    early = bool(begins) and started is not None and min(begins) > started + NEAR_NS
    return "sacct.txt is of a job of that number at another time" if late or early else ""


def _digits(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 12


def _step(row: Row) -> JobStep:
    status, _, number = str(row.get("ExitCode") or "").partition(":")
    elapsed = row.get("ElapsedRaw")
    return JobStep(
        id=str(row["id"]),
        state=str(row["State"]),
        exit_status=int(status) if _digits(status) else None,
        exit_signal=int(number) if _digits(number) else None,
        max_rss_bytes=_size(row.get("MaxRSS")),
        max_rss_node=str(row.get("MaxRSSNode") or ""),
        nodes=str(row.get("NodeList") or ""),
        elapsed_s=float(elapsed) if elapsed is not None and _digits(elapsed) else None,
    )


def _size(text: Any) -> int | None:
    """`14083556K` in bytes; None for an empty one."""
    found = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])
