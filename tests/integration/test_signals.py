"""Signals reach the command, and what was recorded survives the death of either side."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import termios
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import NO_WINDOW
from tests.integration.harness import (
    PYTHON,
    SCRIPTS,
    TIMEOUT_S,
    analyze,
    end_session,
    environment,
    finish,
    record,
    run_line,
    started,
    step_rows,
    wait_for_steps,
)

pytestmark = pytest.mark.process

ENDLESS = [PYTHON, str(SCRIPTS / "loop.py"), "--steps", "100000", "--pause", "0.02", "--tell"]
STUB = [PYTHON, str(SCRIPTS / "steps.py")]  # what is no matter of PyTorch
STEPS_PER_SECOND = 50  # at most, with that pause: what may be lost


def training_process(process: subprocess.Popen[bytes]) -> psutil.Process:
    """The command itself, a direct child of stepscope."""
    children = psutil.Process(process.pid).children()
    (training,) = [child for child in children if child.cmdline()[:2] == STUB]
    return training


def told_steps(stdout: bytes) -> int:
    """The last step the script itself said it finished."""
    return max(int(line.split()[1].rstrip(b":")) for line in stdout.splitlines() if line.startswith(b"step "))


def check_report(out: Path, status: int | None) -> None:
    """`stepscope analyze` makes the report from what is there."""
    shown = analyze(out, "--json", "-")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert report["steps"]["count"] > 0
    assert report["run"]["exit_status"] == status


@pytest.mark.torch
def test_ctrl_c_reaches_the_command_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ours, theirs = pty.openpty()
    with open(f"{out}.stdout", "wb") as stdout, open(f"{out}.stderr", "wb") as stderr:
        process = subprocess.Popen(
            run_line(out, ENDLESS, NO_WINDOW),
            env=environment(),
            cwd=tmp_path,
            stdin=theirs,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
    try:
        wait_for_steps(out, 60, process)
        os.write(ours, b"\x03")  # the terminal signals its whole foreground group
        recorded = finish(process, out)
    finally:
        end_session(process)
        os.close(ours)
        os.close(theirs)
    assert recorded.status == 130, recorded.text
    assert recorded.text.count("KeyboardInterrupt") == 1, recorded.text
    assert told_steps(recorded.stdout) - len(step_rows(out / "rank-0")) <= STEPS_PER_SECOND
    check_report(out, 130)


def test_sigterm_reaches_the_command_and_the_report_can_be_made(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(out, [*STUB, "100000", "0.02"], options=NO_WINDOW) as process:
        wait_for_steps(out, 60, process)
        process.send_signal(signal.SIGTERM)
        recorded = finish(process, out)
    assert recorded.status == 143, recorded.text
    assert "stepscope analyze" in recorded.text, "the report is left to a later command, which is named"
    assert told_steps(recorded.stdout) - len(step_rows(out / "rank-0")) <= STEPS_PER_SECOND
    check_report(out, 143)


def test_kill_of_the_training_process_leaves_its_steps(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(out, [*STUB, "100000", "0.02"], options=NO_WINDOW) as process:
        wait_for_steps(out, 60, process)
        training_process(process).kill()
        recorded = finish(process, out)
    assert recorded.status == 137, recorded.text
    assert told_steps(recorded.stdout) - len(step_rows(out / "rank-0")) <= STEPS_PER_SECOND
    assert recorded.report["run"]["exit_status"] == 137
    assert recorded.report["steps"]["count"] > 0


def test_kill_of_stepscope_leaves_training_and_its_steps_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(out, [*STUB, "120", "0.02"], options=NO_WINDOW) as process:
        wait_for_steps(out, 20, process)
        training = training_process(process)
        helpers = [child for child in psutil.Process(process.pid).children(recursive=True) if child != training]
        process.kill()
        process.wait(TIMEOUT_S)
        # nobody is left to collect the training process: what it prints at its end is the sign
        deadline = time.monotonic() + TIMEOUT_S
        while b"result " not in Path(f"{out}.stdout").read_bytes() and time.monotonic() < deadline:
            time.sleep(0.1)
        _, alive = psutil.wait_procs([training, *helpers], timeout=30)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    assert b"result " in Path(f"{out}.stdout").read_bytes(), "training went on to its end"
    assert len(step_rows(out / "rank-0")) == 120
    check_report(out, None)


@pytest.mark.torch
def test_a_signal_that_the_script_waits_for_is_taken_by_no_thread_of_a_library(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, signal, torch\nsignal.pthread_sigmask(signal.SIG_BLOCK, {10})\nos.kill(os.getpid(), 10)\n"
        "print(int(signal.sigwait({10})))\n"
    )
    recorded = record(tmp_path / "run", [PYTHON, str(script)], options=["--no-report", "--quiet"])
    assert (recorded.status, recorded.stdout) == (0, b"10\n"), recorded.text
