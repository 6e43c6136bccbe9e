"""What lies at the top of the repository: a file that got there by accident fails here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import stepscope

ROOT = Path(__file__).parents[1]
KNOWN = {
    *(".ci", ".github", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md"),
    *("action.yml", "benchmarks", "constraints.txt", "docs", "examples", "hatch_build.py", "mkdocs.yml"),
    *("pyproject.toml", "scripts"),
    *("src", "tests", "web"),
}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")
def test_nothing_unknown_lies_at_the_top() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name.partition("/")[0] for name in listed.stdout.split("\0") if name} == KNOWN


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


PUBLIC = [
    "ReadOptions",
    "Run",
    "__version__",
    "compare",
    "display",
    "log",
    "mark",
    "open_run",
    "profile",
    "reduce_run",
    "region",
    "step",
]


def test_the_public_names() -> None:
    assert sorted(stepscope.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_had_and_says_what_it_does(name: str) -> None:
    assert name in dir(stepscope)
    assert name.startswith("__") or (getattr(stepscope, name).__doc__ or "").strip()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        stepscope.nonsense  # noqa: B018
