"""The batch system or launcher this process runs under: which, from its environment alone, its nodes, its accounting.

Several hosts of one job must agree on one run folder without talking to each other, so the identity is made of
names every member of the job sees alike. Launchers nest (torchrun in a step of a SLURM job): the innermost one says who
the members are, the outer one gives the name that users know.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from stepscope.files import read_small
from stepscope.record.host.jsonlines import read_json, write_text
from stepscope.record.host.pyspy import output_of
from stepscope.schema import ACCOUNTING, ACCOUNTING_FIELDS, MAX_ACCOUNTING_BYTES

_SLURM_FACTS = (
    "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NTASKS",
    "SLURM_CPUS_PER_TASK", "SLURM_CLUSTER_NAME", "SLURM_NODEID", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN",
)  # fmt: skip
# The components of a heterogeneous job have ids of their own; the leader's is the one they share.
_SLURM_JOBS = (
    "SLURM_HET_JOB_ID", "SLURM_PACK_JOB_ID", "SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID", "SLURM_JOBID",
)  # fmt: skip
# From here on step ids are SLURM's own: the batch script, an interactive shell, the container of foreign processes.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# What tells one start of Open MPI from the next on the same hosts; its versions differ in the name.
_MPI_NAMESPACES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")


@dataclass(frozen=True)
class Scheduler:
    """What a launcher says about this process.

    `identity` is equal for all members of one start of a job step; its last part is the attempt. None where members
    cannot recognise each other. `local_index` numbers the members on one host (0 for the first or only one), `index`
    all of them, of which there are `members`. `host` is the name the scheduler gives this node.
    """

    kind: str
    label: str
    identity: tuple[str, ...] | None
    local_index: int
    facts: dict[str, Any]
    host: str | None = None
    members: int | None = None
    index: int | None = None

    def for_manifest(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "identity": list(self.identity) if self.identity else None,
            "members": self.members,
            "index": self.index,
            **self.facts,
        }


def detect_scheduler(
    environ: Mapping[str, str], *, now: datetime.datetime, parent_started: datetime.datetime | None = None
) -> Scheduler | None:
    """SLURM, torchrun or MPI, seen from inside a job; None on an ordinary shell.

    `parent_started` is when the parent process started: equal for all processes that one torchrun has started.
    """
    started = f"{parent_started or now:%Y%m%d-%H%M%S}"
    slurm = _SlurmPlace(environ) if environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") else None
    if environ.get("TORCHELASTIC_RUN_ID"):
        return _torchrun(environ, slurm, started)
    local, members, index = _numbers(
        environ, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    )
    if index is not None:
        if slurm is not None:
            # Open MPI's daemons on the other nodes are a step, the one beside the batch script is not: no member may
            # look at it.
            slurm.step = slurm.facts["step_id"] = None
        space = next((environ[name] for name in _MPI_NAMESPACES if environ.get(name)), None)
        return _nested("mpi", space or started, slurm, {"run_id": space}, local, members, index)
    local, members, index = _numbers(environ, "MPI_LOCALRANKID", "PMI_SIZE", "PMI_RANK")
    if index is not None and local is not None:
        # MPICH and its relatives (Hydra); SLURM's numbers are then those of one helper per node.
        run_id = started if slurm is None or slurm.step is None else "hydra"
        return _nested("mpi", run_id, slurm, {"run_id": None}, local, members, index)
    if slurm is None:
        return None
    again = _again(slurm.restart)
    if slurm.step is None:
        # The batch script itself: one host, and perhaps several recordings one after the other. The time tells them
        # apart.
        return Scheduler("slurm", f"{slurm.name}{again}-{now:%Y%m%d-%H%M%S}", None, 0, slurm.facts)
    local, index = _numbers(environ, "SLURM_LOCALID", "SLURM_PROCID")
    return Scheduler(
        kind="slurm",
        label=f"{slurm.name}.{slurm.step}{again}",
        identity=("slurm", slurm.job, slurm.step, str(slurm.restart)),
        local_index=local or 0,
        facts=slurm.facts,
        host=slurm.host,
        members=whole_number(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")),
        index=index,
    )


def job_in_manifest(scheduler: Mapping[str, Any]) -> tuple[tuple[str, ...] | None, int]:
    """Of the `scheduler` object of a manifest, whatever is in it: the job, and how often it had been started before.

    The job stays the same when it is started again after an interruption.
    """
    identity, number, count = (scheduler.get(name) for name in ("identity", "job_id", "restart_count"))
    job: tuple[str, ...] | None = ("slurm", str(number)) if number else None
    if isinstance(identity, list) and identity:
        job = tuple(str(part) for part in identity[:-1])
    return job, count if isinstance(count, int) else 0


class _SlurmPlace:
    """Where in a SLURM job this process runs. `step` is None in the batch script and in interactive shells."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.job = next(environ[name] for name in _SLURM_JOBS if environ.get(name))
        step = whole_number(environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID"))
        self.step = None if step is None or step >= _FIRST_SPECIAL_STEP else str(step)
        self.restart = whole_number(environ.get("SLURM_RESTART_COUNT")) or 0
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        self.name = f"slurm-{array}_{task}" if array and task else f"slurm-{self.job}"
        self.facts: dict[str, Any] = {"job_id": self.job, "step_id": self.step, "restart_count": self.restart}
        if array and task:
            self.facts.update(array_job_id=array, array_task_id=task)
        self.facts.update({name.lower()[6:]: environ[name] for name in _SLURM_FACTS if name in environ})
        # Outside of a step this is where the batch script runs, whatever the host of this process.
        self.host = environ.get("SLURMD_NODENAME") or None if self.step is not None else None


def _torchrun(environ: Mapping[str, str], slurm: _SlurmPlace | None, started: str) -> Scheduler:
    run_id = environ["TORCHELASTIC_RUN_ID"]
    restart, local, here, members, index = _numbers(
        environ, "TORCHELASTIC_RESTART_COUNT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK"
    )
    # The default rendezvous has no name of its own; the start of the launcher tells its run from the next one on this
    # host, while the hosts of such a job each get a folder, unless a SLURM step gives them a name in common.
    named = started if run_id == "none" and (slurm is None or slurm.step is None) else run_id
    if slurm is not None:
        local = (local or 0) + (whole_number(environ.get("SLURM_LOCALID")) or 0) * (here or 0)
    return _nested("torchrun", named, slurm, {"run_id": run_id}, local, members, index, restart=restart or 0)


def _nested(
    kind: str,
    run_id: str,
    slurm: _SlurmPlace | None,
    facts: dict[str, Any],
    local_index: int | None,
    members: int | None,
    index: int | None,
    *,
    restart: int = 0,
) -> Scheduler:
    """A launcher in its own right, or one inside a SLURM job, which then gives the name."""
    label, total = f"{kind}-{run_id}", restart
    identity: tuple[str, ...] = (kind, run_id, str(restart))
    if slurm is not None:
        label = f"{slurm.name}-{run_id}" if slurm.step is None else f"{slurm.name}.{slurm.step}"
        total = slurm.restart + restart
        identity = ("slurm", slurm.job, slurm.step or "batch", kind, run_id, f"{slurm.restart}.{restart}")
        facts = {**slurm.facts, **facts}
    return Scheduler(
        kind=kind,
        label=label + _again(total),
        identity=identity,
        local_index=local_index or 0,
        facts={**facts, "restart_count": total},
        # MPI can hand one node's environment to the processes on all of them
        host=slurm.host if slurm is not None and kind == "torchrun" else None,
        members=members,
        index=index,
    )


def _again(restart: int) -> str:
    return f"-restart{restart}" if restart else ""


def _numbers(environ: Mapping[str, str], *names: str) -> list[int | None]:
    return [whole_number(environ.get(name)) for name in names]


def whole_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 19 else None


MOST_NODES = 20_000  # the largest machines have fewer
_PART = r"(?:[A-Za-z0-9._-]|\[[0-9,-]+\])+"
_LIST = re.compile(f"{_PART}(?:,{_PART})*")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def nodes_of(text: str) -> tuple[str, ...]:
    """The names in a list of nodes as SLURM writes it, `gpu[01-03,7],login`; `01-03` keeps its zeros.

    Empty where it is none, or of more than `MOST_NODES`.
    """
    names: list[str] = []
    for part in re.findall(_PART, text) if _LIST.fullmatch(text) else ():
        pieces = [
            _node_numbers(bracket) if bracket else [fixed]
            for fixed, bracket in re.findall(r"([A-Za-z0-9._-]+)|\[([0-9,-]+)\]", part)
        ]
        if not 0 < prod(map(len, pieces)) <= MOST_NODES - len(names):
            return ()
        names += map("".join, product(*pieces))
    return tuple(dict.fromkeys(names))


def _node_numbers(text: str) -> list[str]:
    words: list[str] = []
    for each in text.split(","):
        found = _RANGE.fullmatch(each)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if found is None or last < first or len(words) + last - first >= MOST_NODES:
            return []
        words += (f"{number:0{len(found[1])}d}" for number in range(first, last + 1))
    return words


SACCT_SECONDS = 5.0  # a database that does not answer must not hold up a report
# other words (RUNNING, PENDING, COMPLETING, REQUEUED ...) may still change
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    "TIMEOUT",
)


def keep_accounting(run: Path) -> None:
    """Ask `sacct` what it says of the job that recorded a run, and write RUN/sacct.txt.

    A job is accounted for when it has ended, so whoever reads the run later asks again, until the end is in the file.
    Who has no `sacct` where runs are read can write the file with the same command where it is (docs/cluster.md).
    Nothing is done where there is no job, no `sacct` or no answer.
    """
    job = ""
    for path in sorted(run.glob("host-*/manifest.json")):
        found = scheduler_of(read_json(path)).get("job_id")
        if not job and isinstance(found, str) and whole_number(found) is not None:
            job = found
    if not job or _has_ended(run / ACCOUNTING, job):
        return
    # every attempt of the job and of its steps, in fields that all versions of SLURM have
    command = ["sacct", "-j", job, "-P", "-D", f"--format={','.join(ACCOUNTING_FIELDS)}"]
    # times as seconds: those without a zone cannot be compared with those of another machine
    said = output_of(command, SACCT_SECONDS, {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"})
    if said and "\n" in said and len(said) <= MAX_ACCOUNTING_BYTES:  # more than the head: the job is known
        with contextlib.suppress(OSError):
            write_text(run / ACCOUNTING, said + "\n")


def scheduler_of(manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a manifest says of its launcher's job; empty where it says nothing."""
    found = (manifest or {}).get("scheduler")
    return found if isinstance(found, dict) else {}


def _has_ended(path: Path, job: str) -> bool:
    try:
        head, *lines = read_small(path, MAX_ACCOUNTING_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        return False
    rows = (dict(zip(head.split("|"), line.split("|"), strict=False)) for line in lines)
    states = [row.get("State", "") for row in rows if job in (row.get("JobIDRaw"), row.get("JobID"))]
    return bool(states) and states[-1].partition(" ")[0] in _ENDED
