"""What SLURM's accounting says of the job that recorded a run, kept as RUN/sacct.txt.

A job is accounted for when it has ended, so whoever reads the run later asks again, until the end is in the file. Who
has no `sacct` where runs are read can write the file with the same command on a machine that has it (docs/cluster.md).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepscope.files import read_small
from stepscope.record.host.folder import read_json
from stepscope.record.host.pyspy import output_of
from stepscope.schema import ACCOUNTING, ACCOUNTING_FIELDS, MAX_ACCOUNTING_BYTES

SECONDS = 5.0  # a database that does not answer must not hold up a report
# other words (RUNNING, PENDING, COMPLETING, REQUEUED ...) may still change
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    "TIMEOUT",
)


def command(job: str) -> list[str]:
    """Every attempt of a job and of its steps, in fields that all versions of SLURM have."""
    return ["sacct", "-j", job, "-P", "-D", f"--format={','.join(ACCOUNTING_FIELDS)}"]


def keep(run: Path) -> None:
    """Ask `sacct` and write RUN/sacct.txt, unless the job's end is in it; does nothing where there is no job, no
    `sacct` or no answer."""
    job = _job(run.glob("host-*/manifest.json"))
    if job is None or _has_ended(run / ACCOUNTING, job):
        return
    # times as seconds: those without a zone cannot be compared with those of another machine
    said = output_of(command(job), SECONDS, {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"})
    data = (said or "").encode()
    if data.count(b"\n") == 0 or len(data) > MAX_ACCOUNTING_BYTES:  # nothing but the head: the job is not known
        return
    part = run / f".{ACCOUNTING}.{os.getpid()}.part"
    with contextlib.suppress(OSError):
        part.write_bytes(data + b"\n")
        part.replace(run / ACCOUNTING)
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)


def _job(manifests: Iterable[Path]) -> str | None:
    """The job's number, by the first manifest that tells one."""
    for path in sorted(manifests):
        found: Any = (read_json(path) or {}).get("scheduler")
        job = found.get("job_id") if isinstance(found, dict) else None
        if isinstance(job, str) and job.isascii() and job.isdecimal() and len(job) < 19:
            return job
    return None


def _has_ended(path: Path, job: str) -> bool:
    """Whether the last row of the job itself says how it ended."""
    try:
        head, *lines = read_small(path, MAX_ACCOUNTING_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        return False
    names = head.split("|")
    rows = (dict(zip(names, line.split("|"), strict=False)) for line in lines)
    states = [row.get("State", "") for row in rows if job in (row.get("JobIDRaw"), row.get("JobID"))]
    return bool(states) and states[-1].partition(" ")[0] in _ENDED
