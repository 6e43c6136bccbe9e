"""Signals reach the command, and what was recorded survives the death of either side."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import NO_WINDOW
from tests.integration.harness import PYTHON, SCRIPTS, TIMEOUT_S, analyze, finish, start, step_rows, wait_for_steps

pytestmark = [pytest.mark.process, pytest.mark.torch]

ENDLESS = [PYTHON, str(SCRIPTS / "loop.py"), "--steps", "100000", "--pause", "0.02", "--tell"]


def children_of(pid: int, fragment: str) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children(recursive=True) if fragment in " ".join(child.cmdline())]


def told_steps(stdout: bytes) -> int:
    """The last step the script itself said it finished."""
    return max(int(line.split()[1].rstrip(b":")) for line in stdout.splitlines() if line.startswith(b"step "))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_command_and_the_report_can_be_made(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    out = tmp_path / "run"
    process = start(out, ENDLESS, options=NO_WINDOW)
    wait_for_steps(out, 60, process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as the terminal does
    else:
        process.send_signal(number)
    recorded = finish(process, out)
    assert recorded.status == status, recorded.text
    if number == signal.SIGINT:
        assert recorded.text.count("KeyboardInterrupt") == 1, recorded.text
    assert told_steps(recorded.stdout) - len(step_rows(out / "rank-0")) <= 1 / 0.02
    shown = analyze(out, "--json", "-")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["steps"]["count"] > 0
    assert json.loads(shown.stdout)["run"]["exit_status"] == status


def test_kill_of_the_training_process_leaves_its_steps(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out, ENDLESS, options=NO_WINDOW)
    wait_for_steps(out, 80, process)
    (training,) = [child for child in children_of(process.pid, "loop.py") if child.ppid() == process.pid]
    training.kill()
    recorded = finish(process, out)
    assert recorded.status == 137, recorded.text
    assert told_steps(recorded.stdout) - len(step_rows(out / "rank-0")) <= 1 / 0.02
    assert recorded.report["run"]["exit_status"] == 137
    assert recorded.report["steps"]["count"] > 0


def test_kill_of_stepscope_leaves_training_and_its_steps_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out, [*ENDLESS[:3], "300", *ENDLESS[4:]], options=NO_WINDOW)
    wait_for_steps(out, 40, process)
    (training,) = [child for child in children_of(process.pid, "loop.py") if child.ppid() == process.pid]
    others = [child for child in psutil.Process(process.pid).children(recursive=True) if child != training]
    process.kill()
    process.wait(TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while training.is_running() and training.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.1)
    stdout = Path(f"{out}.stdout").read_bytes()
    assert b"result " in stdout, "training went on to its end"
    assert len(step_rows(out / "rank-0")) in {299, 300}
    _, alive = psutil.wait_procs(others, timeout=30)
    assert not alive, f"our helpers outlive us: {[child.cmdline() for child in alive]}"
    shown = analyze(out, "--json", "-")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert report["steps"]["count"] > 0
    assert report["run"]["exit_status"] is None, "nobody saw the end, so it is unknown"


def test_max_steps_ends_the_command(tmp_path: Path) -> None:
    out = tmp_path / "run"
    recorded = finish(start(out, ENDLESS, options=[*NO_WINDOW, "--max-steps", "30"]), out)
    assert 30 <= told_steps(recorded.stdout) < 300
    assert recorded.report["steps"]["count"] > 0
    assert recorded.status == 130, recorded.text
