"""`stepscope run` as a user types it: options, the streams it may use, and whose exit status it ends with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def stepscope(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "stepscope", *arguments], cwd=cwd, capture_output=True, timeout=120)


def test_everything_of_ours_is_on_stderr_and_the_status_is_the_commands(tmp_path: Path) -> None:
    program = "print('out'); raise SystemExit(3)"
    done = stepscope(
        "run", "--out", "r", "--name", "n", "--tag", "a", "--tag", "b", sys.executable, "-c", program, cwd=tmp_path
    )
    assert done.returncode == 3
    assert done.stdout == b"out\n"
    assert b"Traceback" not in done.stderr
    assert done.stderr
    (found,) = (tmp_path / "r").glob("host-*/manifest.json")
    manifest = json.loads(found.read_text())
    assert (manifest["name"], manifest["tags"], manifest["exit"]["shell_status"]) == ("n", ["a", "b"], 3)


def test_quiet_leaves_both_streams_to_the_command(tmp_path: Path) -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr)"
    done = stepscope("run", "--quiet", "--", sys.executable, "-c", program, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"out\n", b"err\n")
    assert len(list((tmp_path / "stepscope-runs").iterdir())) == 1


def test_without_a_report_the_recording_is_there_and_the_status_the_commands(tmp_path: Path) -> None:
    done = stepscope("run", "--no-report", "--out", "r", "--", "sh", "-c", "exit 5", cwd=tmp_path)
    assert done.returncode == 5
    assert b"stepscope analyze" in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert list((tmp_path / "r").glob("host-*/manifest.json"))
    assert not list((tmp_path / "r").glob("report.*"))


@pytest.mark.parametrize("nowhere", ["/dev/full", "pipe"])
def test_the_status_is_the_commands_when_nobody_can_read_what_we_say(tmp_path: Path, nowhere: str) -> None:
    line = f"{sys.executable} -m stepscope run --out r --json r.json --fail-on recompile -- sh -c 'exit 3'"
    if nowhere == "pipe":
        line = f"({line}; echo $? > status) 2> >(true); cat status"
    else:
        line = f"{line} 2> {nowhere}; echo $?"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, timeout=120)
    assert (done.stdout, done.stderr) == (b"3\n", b"")
    assert list((tmp_path / "r").glob("report.html"))
    assert (tmp_path / "r.json").stat().st_size
