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
from tests.integration.harness import PYTHON, SCRIPTS, TIMEOUT_S, Recorded, environment, plain, record, run_line

pytestmark = pytest.mark.process

LOOP = [PYTHON, str(SCRIPTS / "loop.py")]


@pytest.mark.torch
def test_stdout_is_byte_identical(plain_loop: Recorded) -> None:
    without = plain(LOOP, cwd=plain_loop.folder.parent)
    assert plain_loop.status == without.returncode == 0, plain_loop.text
    assert plain_loop.stdout == without.stdout


@pytest.mark.torch
def test_quiet_keeps_stderr_byte_identical(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run", [*LOOP, "--tell"], options=["--quiet"])
    without = plain([*LOOP, "--tell"], cwd=tmp_path)
    assert recorded.stdout == without.stdout
    assert recorded.stderr == without.stderr
    assert recorded.findings is not None


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(0)", 0),
        ("import sys; sys.exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", 128 + signal.SIGABRT),
        ("import os; os._exit(5)", 5),
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
    [("exit3", 3), ("raise", 1), ("os_exit", 5), ("kill", 128 + signal.SIGKILL), ("fork", 0)],
)
def test_every_step_is_there_however_the_script_ends(tmp_path: Path, end: str, status: int) -> None:
    # the steps last longer than a second in all, so that what an abrupt end may lose is less than everything
    command = [*LOOP, "--steps", "60", "--pause", "0.04", "--end", end]
    recorded = record(tmp_path / "run", command, options=NO_WINDOW)
    assert recorded.status == status, recorded.text
    assert recorded.stdout == plain(command, cwd=tmp_path).stdout
    ours = recorded.text.partition("a line for stderr")[2]
    if end == "raise":
        assert ours.count("Traceback") == 1, "the script's own traceback and none of ours"
        assert "told to raise" in ours
    else:
        assert "Traceback" not in ours, ours
    counted = recorded.report["steps"]["count"] + sum(recorded.report["steps"]["excluded"].values())
    assert counted >= (20 if end in {"os_exit", "kill"} else 59), recorded.report["steps"]


@pytest.mark.torch
def test_a_training_fork_child_keeps_out_of_its_parents_journal(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run", [*LOOP, "--end", "fork"], options=NO_WINDOW)
    assert b"child ended with 7" in recorded.stdout
    from tests.integration.harness import step_rows

    numbers = [row["step"] for row in step_rows(tmp_path / "run" / "rank-0")]
    assert numbers == sorted(set(numbers))
    assert len(numbers) in {39, 40}


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


@pytest.mark.torch
def test_the_compiler_makes_the_same_graphs(tmp_path: Path) -> None:
    command = [PYTHON, str(SCRIPTS / "compiled.py")]
    without = plain(command, cwd=tmp_path)
    recorded = record(tmp_path / "run", command)
    assert without.returncode == 0, without.stderr.decode()
    assert recorded.status == 0, recorded.text
    assert recorded.stdout == without.stdout


@pytest.mark.torch
@pytest.mark.parametrize("faults", ["*"])
def test_a_recorder_that_raises_everywhere_changes_nothing(tmp_path: Path, plain_loop: Recorded, faults: str) -> None:
    recorded = record(tmp_path / "run", LOOP, env={"STEPSCOPE_FAULTS": faults})
    assert recorded.status == 0, recorded.text
    assert recorded.stdout == plain_loop.stdout
    assert "Traceback" not in recorded.text
