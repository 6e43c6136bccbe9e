"""Starts the scripts of the zoo: recorded, plain and under TraceML. Standard library only.

Every process gets a time limit and a session of its own, of which nothing is left when the limit has passed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import traceml_peer
from common import RESULT, TRACEML
from table import Entry
from tests.frameworks.catalogue import interpreter

TIMEOUT_S = 180
TERM_S = 10  # from asking a session to end to killing it


class Failed(Exception):
    """A process did not do what it was started for; the message says which, and the last line it wrote."""


def own_steps(entry: Entry) -> int:
    """The default of the script's `--steps`."""
    found = re.search(r"parse\(steps=(\d+)\)", entry.script.read_text())
    if found is None:
        raise Failed(f"{entry.script.name} does not say its steps")
    return int(found[1])


def recorded(entry: Entry, folder: Path, part: float) -> dict[str, Any]:
    """The report of the planted form under `stepscope run`, with `part` of the script's steps."""
    report = folder / "report.json"
    line = [sys.executable, "-m", "stepscope", "run", "--quiet", "--out", str(folder / "run"), "--json", str(report)]
    _run([*line, "--", *_training(entry, part, fixed=False)], folder)
    if not report.exists():
        raise Failed("stepscope wrote no report")
    document: dict[str, Any] = json.loads(report.read_text())
    return document


def plain(entry: Entry, folder: Path, part: float, *, fixed: bool) -> float:
    """Mean time of the script's steady steps, in milliseconds, by its own watch."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    _run(_training(entry, part * entry.plain_part, fixed=fixed), folder, {RESULT: str(result)})
    return float(json.loads(result.read_text())["mean_ms"])


def under_traceml(entry: Entry, folder: Path, part: float, launcher: Path) -> traceml_peer.Said:
    """What TraceML says first of the planted form."""
    logs = folder / "traceml"
    arguments = [*_steps(entry, part), *entry.arguments]
    try:
        _run(traceml_peer.command(launcher, entry.script, arguments, entry.ranks, logs), folder, {TRACEML: "1"})
    except Failed as failed:
        return traceml_peer.Said(None, problem=str(failed))
    return traceml_peer.said(logs)


def _training(entry: Entry, part: float, *, fixed: bool) -> list[str]:
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={entry.ranks}"]
    python = str(interpreter()) if entry.needs else sys.executable
    start = [python, *(ranks if entry.ranks > 1 else [])]
    return [*start, str(entry.script), *_steps(entry, part), *entry.arguments, *(entry.fixed if fixed else ())]


def _steps(entry: Entry, part: float) -> list[str]:
    return ["--steps", str(max(20, round(own_steps(entry) * part)))]


def _run(line: Sequence[str], folder: Path, environ: dict[str, str] | None = None) -> None:
    """Run `line` in `folder`, what it prints in `output.txt` there; `Failed` unless it ends with 0 in time."""
    output = folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            line,
            cwd=folder,
            env={**os.environ, **(environ or {})},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"not done after {TIMEOUT_S} s") from None
        finally:
            _end(process)
    if status:
        said = output.read_text(errors="replace").strip().splitlines() or ["nothing printed"]
        raise Failed(f"status {status}: {said[-1][:200]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of the session behind, however it came to its end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(TERM_S)
        except subprocess.TimeoutExpired:
            continue
