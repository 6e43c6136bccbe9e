"""Windows in real training processes: short runs, runs that end inside a window, compilation inside a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.record.agent.processes import Outcome
from tests.record.agent.window_harness import CYCLES, read_events, read_steps, read_trace, run_script

pytestmark = [pytest.mark.torch, pytest.mark.process]


def run_loop(folder: Path, what: str, window: dict[str, Any]) -> tuple[Outcome, list[dict[str, Any]]]:
    pytest.importorskip("torch")
    done = run_script(folder, "loop.py", what, window=window)
    return done, read_events(done.run, "window")


def test_a_run_too_short_to_become_steady_gets_a_low_confidence_window(tmp_path: Path) -> None:
    done, windows = run_loop(tmp_path, "short", {"mode": "auto"})
    assert (done.status, done.stdout, done.stderr) == (0, "done\n", "")
    (window,) = windows
    assert (window["status"], window["confidence"]) == ("kept", "low")
    assert window["steps"] >= 1
    assert "epoch ends" in window["reason"]
    assert any(event.get("cat") == "python_function" for event in read_trace(done.run / "rank-0" / window["trace"]))
    assert len(read_steps(done.run)) == 6


def test_a_process_that_ends_inside_a_window_keeps_it_and_its_status(tmp_path: Path) -> None:
    done, windows = run_loop(tmp_path, "raise", CYCLES)
    assert (done.status, done.stdout, done.stderr) == (3, "", "")
    (window,) = windows
    assert (window["status"], window["confidence"], window["steps"]) == ("kept", "low", 2)
    assert "process ended" in window["reason"]
    assert read_trace(done.run / "rank-0" / window["trace"])


def test_a_forked_child_ends_as_it_would_without_us(tmp_path: Path) -> None:
    """What torch's profiler keeps for good would have its destructor wait for a thread that the child has not got."""
    plain = run_script(tmp_path / "plain", "loop.py", "fork", recorded=False)
    done, windows = run_loop(tmp_path, "fork", CYCLES)
    assert windows
    assert "child ended with 4" in plain.stdout
    assert (done.status, done.stdout, done.stderr) == (plain.status, plain.stdout, plain.stderr)
