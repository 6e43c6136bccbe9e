"""Which batch system or launcher this process runs under, from its environment alone.

Several hosts of one job must agree on one run folder without talking to each other, so the identity is made of
names every member of the job sees alike.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SLURM_FACTS = ("SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK")


@dataclass(frozen=True)
class Scheduler:
    """`identity` is equal for all members of one job step; None where members cannot recognise each other.

    `local_index` numbers the members on one host (0 for the first or only one).
    """

    kind: str
    label: str
    identity: tuple[str, ...] | None
    local_index: int
    facts: dict[str, Any]

    def for_manifest(self) -> dict[str, Any]:
        """The `scheduler` object of the manifest."""
        return {"kind": self.kind, "identity": list(self.identity) if self.identity else None, **self.facts}


def detect_scheduler(
    environ: Mapping[str, str], *, now: datetime.datetime, parent_started: datetime.datetime | None = None
) -> Scheduler | None:
    """SLURM or torchrun, seen from inside a job; None on an ordinary shell.

    `parent_started` is when the parent process started: equal for all processes that one torchrun has started.
    """
    if environ.get("SLURM_JOB_ID"):
        return _slurm(environ, now)
    if environ.get("TORCHELASTIC_RUN_ID"):
        return _torchrun(environ, parent_started or now)
    return None


def _slurm(environ: Mapping[str, str], now: datetime.datetime) -> Scheduler:
    job, step = environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID")
    attempt = environ.get("SLURM_RESTART_COUNT", "0")
    facts: dict[str, Any] = {"job_id": job, "step_id": step, "restart_count": _number(attempt)}
    facts.update({name.lower()[6:]: environ[name] for name in _SLURM_FACTS if name in environ})
    again = "" if attempt == "0" else f"-restart{attempt}"
    if step is None or not step.isdecimal():
        # The batch script itself: one host, and perhaps several recordings one after the other. The time tells them
        # apart.
        return Scheduler("slurm", f"slurm-{job}{again}-{now:%Y%m%d-%H%M%S}", None, 0, facts)
    local = _number(environ.get("SLURM_LOCALID")) or 0
    return Scheduler("slurm", f"slurm-{job}.{step}{again}", ("slurm", job, step, attempt), local, facts)


def _torchrun(environ: Mapping[str, str], started: datetime.datetime) -> Scheduler:
    run_id = environ["TORCHELASTIC_RUN_ID"]
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    facts: dict[str, Any] = {"run_id": run_id, "restart_count": _number(attempt)}
    local = _number(environ.get("LOCAL_RANK")) or 0
    again = "" if attempt == "0" else f"-restart{attempt}"
    if run_id == "none":
        # The default rendezvous has no name of its own; the start of the launcher tells its run from the next one on
        # this host, while the hosts of such a job each get a folder.
        label = f"{started:%Y%m%d-%H%M%S}"
        return Scheduler("torchrun", f"torchrun-{label}{again}", ("torchrun", label, attempt), local, facts)
    return Scheduler("torchrun", f"torchrun-{run_id}{again}", ("torchrun", run_id, attempt), local, facts)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
