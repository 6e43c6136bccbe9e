"""The job that a run was recorded in, from its manifests and the scheduler's accounting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.model import Note
from stepscope.model.run_facts import JobFacts, JobStep
from stepscope.read.raw import RawRun, Row
from stepscope.read.text import integer, moment_ns, string

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
    lists = [nodes for _, found in told if isinstance(nodes := found.get("nodes"), list)]
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
    failed = [row for row in attempts if str(row["State"]).partition(" ")[0] == "NODE_FAIL"]
    return JobFacts(
        kind=string(first.get("kind")) or "",
        id=number,
        step=string(first.get("step_id")),
        attempt=max((integer(found.get("restart_count")) or 0 for _, found in told), default=0),
        members=integer(first.get("members")),
        cluster=string(first.get("cluster_name")) or "",
        partition=string(first.get("job_partition")) or "",
        nodes=tuple(map(str, max(lists, key=len, default=[])[:MOST_NODES])),
        topology=topology,
        topology_pattern=string(first.get("topology_addr_pattern")) or "",
        requeues=None if rows is None or not attempts else len(attempts) - 1,
        node_failures=None if rows is None else len(failed),
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
