"""`stepscope attach` as a user types it: what goes to which stream, the exit status, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.record.host.pyspy import find_pyspy

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(find_pyspy() is None or os.geteuid() != 0, reason="needs py-spy and the right to attach"),
]

JOB = """
import time
def hot_line():
    while True:
        sum(range(2000))
print(flush=True)
hot_line()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "job.py").write_text(JOB)
    process = subprocess.Popen([sys.executable, "job.py"], cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "stepscope", "attach", *arguments]


def test_the_hot_function_is_shown_and_the_folder_named(tmp_path: Path, job: subprocess.Popen[bytes]) -> None:
    line = command(str(job.pid), "--seconds", "2", "--out", "run", "--json", "hot.json")
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert b"hot_line" in done.stdout
    assert b"run" in done.stderr
    assert b"Traceback" not in done.stderr
    rows = json.loads((tmp_path / "hot.json").read_text())["rows"]
    assert (rows[0]["name"], Path(rows[0]["path"]).name) == ("hot_line", "job.py")
    assert job.poll() is None


def test_ctrl_c_reports_what_there_is_and_json_has_stdout_alone(tmp_path: Path, job: subprocess.Popen[bytes]) -> None:
    line = command(str(job.pid), "--seconds", "600", "--out", "run", "--json", "-")
    process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("run/host-*/stacks.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["rows"][0]["name"] == "hot_line"
    assert b"Ctrl-C" in stderr
