"""What lies at the top of the repository: a file that got there by accident fails here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

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
