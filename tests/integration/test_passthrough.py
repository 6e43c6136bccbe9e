"""The command's own status, streams and results come through as if we were not there."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.conftest import NO_WINDOW
from tests.integration.harness import (
    PYTHON,
    SCRIPTS,
    Recorded,
    record,
    step_rows,
)

pytestmark = pytest.mark.process

LOOP = [PYTHON, str(SCRIPTS / "loop.py")]


@pytest.mark.torch
def test_stdout_is_byte_identical(plain_loop: Recorded, loop_result: bytes) -> None:
    assert plain_loop.status == 0, plain_loop.text
    assert plain_loop.stdout == loop_result
    assert loop_result.startswith(b"result ")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param("raise", 1, marks=pytest.mark.thorough),
        pytest.param("os_exit", 5, marks=pytest.mark.thorough),
        pytest.param("kill", 128 + signal.SIGKILL, marks=pytest.mark.thorough),  # `test_signals` kills it from outside
        ("fork", 0),
    ],
)
def test_steps_are_there_however_the_script_ends(tmp_path: Path, loop_result: bytes, end: str, status: int) -> None:
    # the 40 steps last 2.4 s, so what an abrupt end may lose, the last second, is not all of them
    recorded = record(tmp_path / "run", [*LOOP, "--pause", "0.06", "--end", end], options=NO_WINDOW)
    assert recorded.status == status, recorded.text
    assert recorded.stdout == loop_result + (b"child ended with 7\n" if end == "fork" else b"")
    ours = recorded.text.partition("a line for stderr")[2]
    if end == "raise":
        assert ours.count("Traceback") == 1, "the script's own traceback and none of ours"
        assert "told to raise" in ours
    else:
        assert "Traceback" not in ours, ours
    steps = recorded.report["steps"]
    numbers = [row["step"] for row in step_rows(tmp_path / "run" / "rank-0")]
    assert len(numbers) >= (20 if end in {"os_exit", "kill"} else 39)
    assert numbers == list(range(len(numbers))), "a forked child keeps out of its parent's journal"
    assert steps["count"] + sum(steps["excluded"].values()) == len(numbers)


@pytest.mark.torch
def test_a_recorder_that_raises_everywhere_changes_nothing(tmp_path: Path, loop_result: bytes) -> None:
    recorded = record(tmp_path / "run", LOOP, env={"STEPSCOPE_FAULTS": "*"})
    assert recorded.status == 0, recorded.text
    assert recorded.stdout == loop_result
    assert "Traceback" not in recorded.text
