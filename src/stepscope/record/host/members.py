"""Which of the launchers of one job reports, once its own command has ended.

They share a run folder and end one by one. None waits for another: whoever finds that all others have ended makes the
report, of the whole job; before that the first task says where the recording lies and how to report it later. In a
large job nobody reports: the nodes would stay occupied while one of them reads.
"""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

LARGEST_REPORTED_JOB = 16  # launchers; beyond it, reading all their recordings can take minutes of every node's time
CLAIM = ".reported-by-{ended}"  # taken once per number of ended launchers, so two that end together make one report


class Part(enum.Enum):
    """What this launcher does at its end: make the report, say one line, or be silent."""

    REPORT = "report"
    WORD = "word"
    SILENT = "silent"


def part_in_report(run: Path, host_dir: Path) -> Part:
    """The part of the launcher that owns `host_dir`, after its manifest has been completed; never raises OSError."""
    scheduler = _manifest(host_dir).get("scheduler")
    folders = _host_folders(run)
    if not isinstance(scheduler, dict) or not scheduler.get("identity"):
        return Part.REPORT
    if len(folders) <= 1 and (scheduler.get("members") or 1) <= 1:
        return Part.REPORT
    if len(folders) <= LARGEST_REPORTED_JOB and _all_ended(folders) and _claim(run, len(folders)):
        return Part.REPORT
    return Part.SILENT if scheduler.get("index") else Part.WORD


def _host_folders(run: Path) -> list[Path]:
    try:
        return [path for path in run.glob("host-*") if path.is_dir()]
    except OSError:
        return []


def _all_ended(folders: list[Path]) -> bool:
    return all(_manifest(folder).get("ended_ns") is not None for folder in folders)


def _claim(run: Path, ended: int) -> bool:
    try:
        (run / CLAIM.format(ended=ended)).open("x").close()
    except OSError:
        return False  # another has it, or nothing can be written, the report neither
    return True


def _manifest(host_dir: Path) -> dict[str, Any]:
    try:
        found = json.loads((host_dir / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
