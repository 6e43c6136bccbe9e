"""Runs a script with knobs, as `stepscope run --knob …` does, and reads what became of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.harness import run_line
from tests.record.agent.processes import Outcome, run_script

OF_THE_LAUNCHER = ("env:", "arg:", "allocator.", "host.")


class Recorded(Outcome):
    """How the command ended and what the run folder says."""

    def knobs(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.events("knob") if row["knob"] == name]

    def knob(self, name: str) -> dict[str, Any]:
        """The one report of a knob."""
        (row,) = self.knobs(name)
        return row

    def manifest(self) -> dict[str, Any]:
        (path,) = self.run.glob("host-*/manifest.json")
        value = json.loads(path.read_text())
        assert isinstance(value, dict)
        return value

    def printed(self) -> Any:
        """What the script printed last, as JSON."""
        return json.loads(self.stdout.splitlines()[-1])


def recorded(
    tmp_path: Path,
    script: str,
    *knobs: str,
    options: tuple[str, ...] = (),
    arguments: tuple[str, ...] = (),
    environ: dict[str, str] | None = None,
    faults: str | None = None,
) -> Recorded:
    """`script` (source text) run to its end: by the launcher where that has a part in it, else with the agent alone."""
    file, run = tmp_path / "train.py", tmp_path / "run"
    file.write_text(script)
    if not options and not any(knob.startswith(OF_THE_LAUNCHER) for knob in knobs):
        pairs = [knob.partition("=")[::2] for knob in knobs]
        done = run_script(tmp_path, file, *arguments, environment=environ, knobs=pairs, faults=faults)
        return Recorded(**vars(done))
    words = [word for knob in knobs for word in ("--knob", knob)]
    line = run_line(
        run,
        [sys.executable, str(file), *arguments],
        ["--quiet", "--no-window", "--no-report", *words, *options],
    )
    ended = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, timeout=180, env={**os.environ, **(environ or {})}
    )
    return Recorded(ended.returncode, ended.stdout, ended.stderr, run)
