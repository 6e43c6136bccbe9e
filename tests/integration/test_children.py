"""Processes that the script starts and that hold the cores: they are the finding, with their lines, in a real run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.harness import PYTHON, SCRIPTS, line_of, record

pytestmark = [pytest.mark.process, pytest.mark.torch]
SCRIPT = SCRIPTS / "children.py"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the processes have to share a core")
def test_processes_of_the_script_that_hold_the_core_are_named(tmp_path: Path) -> None:
    done = record(tmp_path / "run", [PYTHON, str(SCRIPT), "2.5"], options=["--no-window"])
    assert done.status == 0
    (found,) = (row for row in done.findings if row["rule"] == "system.children_hold_cores")
    lines = {place["line"] for place in found["where"]}
    assert lines == {line_of(SCRIPT, "for _ in range(2)"), line_of(SCRIPT, "shell = subprocess")}
    named = " ".join(row["metric"] for row in found["evidence"])
    assert "(2 processes)" in named
    assert "while [ $i -lt" in named
    assert "Nothing worth fixing" not in done.text
