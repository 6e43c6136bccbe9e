"""The same input gives the same bytes: twice in one process, and in processes that hash strings differently."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stepscope.api import ReadOptions, open_run
from stepscope.report.document import report_bytes
from tests.diagnose.recorded import without
from tests.diagnose.test_abstention import loses_in_many_ways
from tests.integration.harness import PYTHON, TIMEOUT_S, environment

SEEDS = ("1", "2")


def document(path: Path) -> bytes:
    """report.json as this process makes it, read anew."""
    return report_bytes(open_run(path, options=ReadOptions(cache=False, workers=1)).report())


def elsewhere(path: Path, seed: str, folder: Path) -> bytes:
    """report.json as a process of its own makes it."""
    out = folder / f"report-{seed}.json"
    line = [PYTHON, "-m", "stepscope", "analyze", str(path), "--no-cache", "--json", str(out)]
    env = environment({"PYTHONHASHSEED": seed})
    done = subprocess.run(line, env=env, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return out.read_bytes()


def assert_same(path: Path, folder: Path) -> None:
    first = document(path)
    assert b'"findings": [' in first
    assert document(path) == first
    assert {elsewhere(path, seed, folder) for seed in SEEDS} == {first}


def test_a_run_of_plain_values(tmp_path: Path) -> None:
    assert_same(without(loses_in_many_ways(tmp_path), tmp_path / "copy"), tmp_path)


@pytest.mark.thorough
@pytest.mark.process
@pytest.mark.torch
def test_a_recorded_run(losses: Path, tmp_path: Path) -> None:
    assert_same(without(losses, tmp_path / "run"), tmp_path)
