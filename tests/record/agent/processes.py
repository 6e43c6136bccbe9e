"""Runs a script the way the launcher does, with the agent's environment set by hand, and reads what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stepscope.model import STEP_COLUMNS
from stepscope.read.run_folder import read_series

SOURCE = Path(__file__).parents[3] / "src"
PACKAGE = SOURCE / "stepscope"
SCRIPTS = Path(__file__).parent / "scripts"
PLAIN = Path(__file__).parents[2] / "integration" / "scripts"  # where scripts find `plain_sgd`
START = Path(__file__).parents[2] / "start"  # where Python finds its `sitecustomize`


OLD = Path.home() / ".pyenv" / "versions" / "3.8.18" / "bin" / "python"
PYTHONS = [
    sys.executable,
    pytest.param(str(OLD), marks=pytest.mark.skipif(not OLD.exists(), reason="no Python 3.8 here")),
]


def line_of(source: str, text: str) -> int:
    """The number of the first line of `source` that holds `text`."""
    return next(number for number, line in enumerate(source.splitlines(), 1) if text in line)


@dataclass
class Outcome:
    """How a process ended and what the run folder holds."""

    status: int
    stdout: str
    stderr: str
    run: Path
    ranks: list[str] = field(default_factory=list)

    def steps(self, rank: str = "rank-0") -> list[dict[str, Any]]:
        lines = (self.run / rank / "steps.jsonl").read_text().splitlines()
        assert tuple(json.loads(lines[0])["columns"]) == STEP_COLUMNS
        return [dict(zip(STEP_COLUMNS, json.loads(line), strict=True)) for line in lines[1:]]

    def events(self, kind: str, rank: str = "rank-0") -> list[dict[str, Any]]:
        path = self.run / rank / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def kept(self, name: str, rank: str = "rank-0") -> list[float]:
        """The values of a metric as they were recorded, in order of time."""
        read = [one for event in self.events("metrics", rank) for one in read_series(event)]
        points = [zip(one.times_ns, one.values, strict=True) for one in read if one is not None and one.name == name]
        return [float(value) for _, value in sorted(point for stretch in points for point in stretch)]

    def agents(self) -> list[dict[str, Any]]:
        path = self.run / "host-h" / "agents.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_script(
    tmp_path: Path,
    script: str | Path,
    *arguments: str,
    recorded: bool = True,
    python: str = sys.executable,
    path: tuple[Path, ...] = (),
    environment: dict[str, str] | None = None,
    **config: Any,
) -> Outcome:
    """Run `script` (a name under scripts/) with the agent injected, or without it when `recorded` is False."""
    run = tmp_path / "run"
    (run / "host-h").mkdir(parents=True, exist_ok=True)
    settings = {"run": str(run), "host_dir": str(run / "host-h")}
    settings.update({"epoch_offset_ns": 1_700_000_000_000_000_000, "window": {"mode": "off"}}, **config)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("STEPSCOPE", "PYTHON", "RANK"))}
    entries = [*map(str, path), str(PLAIN), str(START)]
    if recorded:
        entries.insert(0, str(PACKAGE / "record" / "agent" / "bootstrap"))
        env["STEPSCOPE_RECORD"] = json.dumps(settings)
    env.update(environment or {}, PYTHONPATH=os.pathsep.join(entries), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [python, str(SCRIPTS / script), *arguments], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    ranks = sorted(folder.name for folder in run.glob("rank-*"))
    return Outcome(done.returncode, done.stdout, done.stderr, run, ranks)
