"""Copies of run folders, to change."""

from __future__ import annotations

import shutil
from pathlib import Path


def without(run: Path, copy: Path, patterns: tuple[str, ...] = ()) -> Path:
    """A copy of a run folder in which nothing is derived, and no file that one of `patterns` matches."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("tables", "report.*"))
    files = [file for pattern in patterns for file in copy.glob(pattern)]
    assert files or not patterns, patterns
    for file in files:
        file.unlink()
    return copy
