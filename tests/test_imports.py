"""What costs much is imported late: seen in a fresh interpreter, by module names, never by time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import stepscope

HEAVY = ("torch", "polars", "numpy", "rich", "psutil", "isal", "pynvml")
REPORT = f"print([name for name in {HEAVY!r} if name in __import__('sys').modules])"


def loaded_after(statement: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{REPORT}"], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "statement",
    [
        "import stepscope",
        "import stepscope.record",
        "import stepscope.model, stepscope.errors",
        "import stepscope.api",
        "import stepscope.report",
        "import stepscope.cli.analyze",
        "from stepscope import cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass",
        "from stepscope import cli\ntry:\n    cli.main(['run', '--help'])\nexcept SystemExit:\n    pass",
    ],
)
def test_it_imports_nothing_heavy(statement: str) -> None:
    assert loaded_after(statement) == "[]"


def test_the_probe_sees_what_is_imported() -> None:
    assert loaded_after("import psutil") == "['psutil']"


def test_what_runs_beside_training_needs_the_standard_library_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import stepscope.errors, stepscope.schema, stepscope.record.agent.core"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(Path(stepscope.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
