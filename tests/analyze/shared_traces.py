"""Real traces that lie beside the repository, read once for all tests that use them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from stepscope import api
from stepscope.model import Analysis

SHARED = Path(__file__).resolve().parents[3] / "shared"
TRACES = SHARED / "traces"
FOLDERS = ("kineto_tb_plugin", "hta", "tracelens")
NOT_A_TRACE = "memory_timeline"
PRESENT = TRACES.is_dir()
needs_traces = pytest.mark.skipif(not PRESENT, reason=f"the real traces are not at {TRACES}")


def files() -> list[str]:
    """Every trace of the three collections, relative to `TRACES`."""
    found = [path for folder in FOLDERS for path in (TRACES / folder).rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(TRACES)) for path in found if NOT_A_TRACE not in path.name)


@cache
def run_of(name: str) -> api.Run:
    """The opened trace; what was computed of it is kept."""
    return api.open_run(TRACES / name, options=api.ReadOptions(cache=False))


def analysis_of(name: str) -> Analysis:
    return run_of(name).analysis
