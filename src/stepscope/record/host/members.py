"""What each launcher of a job does at its end: reduce what its machine recorded, report on the job, or be silent.

Launchers see each other's manifests in the run folder and nothing else: nobody waits for another, and nothing goes over
the network. Who was killed leaves no word, and then none of the others makes the report.
"""

from __future__ import annotations

import contextlib
import enum
import os
import socket
from pathlib import Path
from typing import Any

from stepscope.record.host.folder import read_json, scheduler_of

# launchers: one of them reads the recordings of so many in some seconds. Of more each reduces its machine's, and the
# last one reads the reduced tables.
LARGEST_READ_JOB = 16
DONE = ".done"  # in a launcher's folder, when it has done its part but for the report


class Part(enum.Enum):
    """What a launcher does at its end: make the report, say one line, or be silent."""

    REPORT = "report"
    WORD = "word"
    SILENT = "silent"


def reduces(run: Path, host_dir: Path) -> bool:
    """Whether the launcher that owns `host_dir` reduces what its machine recorded, after its manifest was completed.

    That is so in a job of many launchers, for the one of a machine that ends last; true once. Never raises OSError.
    """
    members = scheduler_of(read_json(host_dir / "manifest.json")).get("members")
    folders = _folders(run)
    if max(members if isinstance(members, int) else 0, len(folders)) <= LARGEST_READ_JOB:
        return False
    base = _machine(host_dir.name, folders)
    mine = [folder for folder in folders if _machine(folder.name, folders) == base]
    if not all(_has_ended(read_json(folder / "manifest.json") or {}) for folder in mine):
        return False
    with contextlib.suppress(OSError):  # another of the machine has it, who ended in the same moment
        (run / f".{base}-reduced-by-{len(mine)}").open("x").close()
        return True
    return False


def say_done(host_dir: Path) -> None:
    """Say that nothing but the report is left to do; never raises OSError."""
    with contextlib.suppress(OSError):
        (host_dir / DONE).touch()


def part_in_report(run: Path, host_dir: Path) -> Part:
    """The part of the launcher that owns `host_dir`, after `say_done`; never raises OSError."""
    scheduler = scheduler_of(read_json(host_dir / "manifest.json"))
    if not scheduler.get("identity"):
        return Part.REPORT
    folders = _folders(run)
    members = scheduler.get("members")
    if len(folders) <= 1 and (members or 1) <= 1:
        return Part.REPORT
    ended = ((read_json(folder / "manifest.json") or {}).get("ended_ns") for folder in folders)
    large = len(folders) > LARGEST_READ_JOB
    if all(time is not None for time in ended) and (
        not large or (all((folder / DONE).exists() for folder in folders) and len(folders) >= (members or 0))
    ):
        # Taken once per number of ended launchers, so that two that end together make one report. Where the claim fails
        # another has it, or nothing can be written, the report neither.
        with contextlib.suppress(OSError):
            (run / f".reported-by-{len(folders)}").open("x").close()
            return Part.REPORT
    return Part.SILENT if scheduler.get("index") else Part.WORD


def _folders(run: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in run.glob("host-*") if path.is_dir()]
    return []


def _machine(name: str, folders: list[Path]) -> str:
    """host-NODE of host-NODE.2, where there is such a folder."""
    base, _, number = name.rpartition(".")
    return base if number.isdecimal() and any(folder.name == base for folder in folders) else name


def _has_ended(manifest: dict[str, Any]) -> bool:
    """Whether a launcher of this machine has ended, or is gone without a word."""
    if manifest.get("ended_ns") is not None:
        return True
    pid = manifest.get("launcher_pid")
    if not isinstance(pid, int) or pid <= 0 or manifest.get("host") != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        pass
    return False
