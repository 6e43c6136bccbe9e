"""Runs a script under `stepscope run --knob …` and reads what became of the knobs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.harness import SCRIPTS, run_line
from tests.record.agent.processes import Outcome


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
) -> Recorded:
    """`script` (source text) run to its end under the public command line."""
    file, run = tmp_path / "train.py", tmp_path / "run"
    file.write_text(script)
    shutil.copy(SCRIPTS / "plain_sgd.py", tmp_path)
    words = [word for knob in knobs for word in ("--knob", knob)]
    line = run_line(
        run,
        [sys.executable, str(file), *arguments],
        ["--quiet", "--no-window", "--no-report", *words, *options],
    )
    done = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, timeout=180, env={**os.environ, **(environ or {})}
    )
    return Recorded(done.returncode, done.stdout, done.stderr, run)
