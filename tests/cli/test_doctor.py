"""`stepscope doctor` on the terminal and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that has no torch, whatever this one has, and is quick about it."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    script.chmod(0o755)
    return str(script)


def doctor(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "stepscope", "doctor", *arguments],
        cwd=cwd,
        capture_output=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "80"},
    )


def test_the_table_fits_a_terminal_and_says_what_to_do(tmp_path: Path, python: str) -> None:
    done = doctor("--python", python, "--json", "facts.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode().splitlines()
    assert max(len(line) for line in lines) <= 80
    text = " ".join(" ".join(lines).split())
    assert "PyTorch missing" in text
    assert "costs:" in text
    assert "get it:" in text
    assert "taskset -c" in text
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["schema"] == "stepscope.doctor/1"
    assert {"name", "state", "finding", "cost", "remedy"} == set(facts["checks"][0])
    again = doctor("--python", python, "--json", "facts.json", cwd=tmp_path)
    assert again.returncode == 2


def test_json_alone_on_stdout(tmp_path: Path, python: str) -> None:
    done = doctor("--python", python, "--json", "-", cwd=tmp_path)
    assert done.returncode == 0
    states = {check["name"]: check["state"] for check in json.loads(done.stdout)["checks"]}
    assert states["PyTorch"] == "missing"
