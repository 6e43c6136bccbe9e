"""The command's own status, streams and results come through as if we were not there."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from tests.integration.conftest import NO_WINDOW
from tests.integration.harness import (
    PYTHON,
    SCRIPTS,
    TIMEOUT_S,
    Recorded,
    environment,
    plain,
    record,
    run_line,
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
def test_quiet_keeps_stderr_byte_identical(tmp_path: Path, loop_result: bytes) -> None:
    recorded = record(tmp_path / "run", LOOP, options=["--quiet"])
    assert recorded.stdout == loop_result
    assert recorded.stderr == b"a line for stderr\n"  # all that the loop writes there
    assert recorded.findings is not None


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", 128 + signal.SIGABRT),
    ],
)
def test_exit_status_is_the_commands_own(tmp_path: Path, code: str, status: int) -> None:
    recorded = record(tmp_path / "run", [PYTHON, "-c", code], options=NO_WINDOW)
    assert recorded.status == status, recorded.text
    assert "Traceback" not in recorded.text


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run", ["no-such-command-here"])
    assert recorded.status == 127
    assert len(recorded.text.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


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


def test_streams_are_inherited_not_piped(tmp_path: Path) -> None:
    command = [PYTHON, str(SCRIPTS / "streams.py")]
    seen = []
    for line in (command, run_line(tmp_path / "run", command, ["--quiet"])):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 133, 0, 0))
        variables = {name: value for name, value in environment().items() if name != "COLUMNS"}
        done = subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, cwd=tmp_path)
        os.close(theirs)
        output = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # EIO: the last writer has closed its end
                break
            if not part:
                break
            output += part
        os.close(ours)
        assert done.wait(TIMEOUT_S) == 0
        seen.append(output)
    assert seen[0] == seen[1] == b"[True, True, True] 133\r\n"


@pytest.mark.thorough
@pytest.mark.torch
def test_the_compiler_makes_the_same_graphs(tmp_path: Path) -> None:
    command = [PYTHON, str(SCRIPTS / "compiled.py")]
    without = plain(command, cwd=tmp_path)
    recorded = record(tmp_path / "run", command)
    assert without.returncode == 0, without.stderr.decode()
    assert recorded.status == 0, recorded.text
    assert recorded.stdout == without.stdout


@pytest.mark.torch
def test_a_recorder_that_raises_everywhere_changes_nothing(tmp_path: Path, loop_result: bytes) -> None:
    recorded = record(tmp_path / "run", LOOP, env={"STEPSCOPE_FAULTS": "*"})
    assert recorded.status == 0, recorded.text
    assert recorded.stdout == loop_result
    assert "Traceback" not in recorded.text
