"""Commands that record, as a user types them: `stepscope run`, `attach`, `slurm` and `doctor`.

Whose exit status they end with, which streams they may use, what they write, what they never touch, Ctrl-C.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.record.host.pyspy import find_pyspy
from tests.cli.calls import call, json_of

STEPSCOPE = [sys.executable, "-m", "stepscope"]
ATTACHES = pytest.mark.skipif(find_pyspy() is None or os.geteuid() != 0, reason="needs py-spy and the right to attach")
JOB = """
import time
def hot_line():
    while True:
        sum(range(2000))
print(flush=True)
hot_line()
"""
SCRIPT = "#!/bin/bash\n#SBATCH --ntasks=2\nsrun python train.py\nnsys profile python other.py\n"
SWITCHED = SCRIPT.replace("srun python", "srun stepscope run -- python")


def stepscope(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*STEPSCOPE, *arguments], cwd=cwd, capture_output=True, timeout=120)


@pytest.mark.process
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


@pytest.mark.process
def test_without_a_report_the_recording_is_there_and_the_status_the_commands(tmp_path: Path) -> None:
    done = stepscope("run", "--no-report", "--out", "r", "--", "sh", "-c", "exit 5", cwd=tmp_path)
    assert done.returncode == 5
    assert b"stepscope analyze" in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert list((tmp_path / "r").glob("host-*/manifest.json"))
    assert not list((tmp_path / "r").glob("report.*"))


@pytest.mark.process
@pytest.mark.parametrize("nowhere", ["/dev/full", "pipe"])
def test_the_status_is_the_commands_when_nobody_can_read_what_we_say(tmp_path: Path, nowhere: str) -> None:
    line = f"{shlex.join(STEPSCOPE)} run --out r --json r.json --fail-on recompile -- sh -c 'exit 3'"
    if nowhere == "pipe":
        line = f"({line}; echo $? > status) 2> >(true); cat status"
    else:
        line = f"{line} 2> {nowhere}; echo $?"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, timeout=120)
    assert (done.stdout, done.stderr) == (b"3\n", b"")
    assert list((tmp_path / "r").glob("report.html"))
    assert (tmp_path / "r.json").stat().st_size


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "job.py").write_text(JOB)
    process = subprocess.Popen([sys.executable, "job.py"], cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.mark.process
@ATTACHES
def test_the_hot_function_is_shown_and_the_folder_named(tmp_path: Path, job: subprocess.Popen[bytes]) -> None:
    line = [*STEPSCOPE, "attach", str(job.pid), "--seconds", "2", "--out", "run", "--json", "hot.json"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert b"hot_line" in done.stdout
    assert b"run" in done.stderr
    assert b"Traceback" not in done.stderr
    rows = json.loads((tmp_path / "hot.json").read_text())["rows"]
    assert (rows[0]["name"], Path(rows[0]["path"]).name) == ("hot_line", "job.py")
    assert job.poll() is None


@pytest.mark.process
@ATTACHES
def test_ctrl_c_reports_what_there_is_and_json_has_stdout_alone(tmp_path: Path, job: subprocess.Popen[bytes]) -> None:
    line = [*STEPSCOPE, "attach", str(job.pid), "--seconds", "600", "--out", "run", "--json", "-"]
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


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("train.sbatch")
    path.write_text(SCRIPT)
    path.chmod(0o750)
    return path


def test_a_copy_is_written_and_the_difference_shown(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("slurm", "train.sbatch") == 0
    assert call("slurm", "train.sbatch") == 2
    assert call("slurm", "train.sbatch", "--force") == 0
    copy = Path("train.stepscope.sbatch")
    assert copy.read_text() == SWITCHED
    assert copy.stat().st_mode & 0o777 == 0o750
    assert script.read_text() == SCRIPT
    shown = capsys.readouterr()
    assert "-srun python train.py\n+srun stepscope run -- python train.py\n" in shown.out
    assert "--force" in shown.err
    assert shown.out.startswith("--- train.sbatch\n+++ train.stepscope.sbatch\n")
    assert "left alone: line 4: it runs under nsys" in shown.err
    assert "sbatch train.stepscope.sbatch" in shown.err


def test_a_script_that_records_already_says_so(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(SWITCHED)
    assert call("slurm", script) == 0
    assert "records already (line 3)" in capsys.readouterr().err
    assert list(Path.cwd().iterdir()) == [Path.cwd() / script]


def test_bytes_that_are_no_text_and_control_characters_survive_and_are_not_printed(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_bytes(b"# caf\xe9 \x1b[2J\r\nsrun python train.py\r\n")
    assert call("slurm", script) == 0
    written = Path("train.stepscope.sbatch").read_bytes()
    assert written == b"# caf\xe9 \x1b[2J\r\nsrun stepscope run -- python train.py\r\n"
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out
    assert "\\x1b[2J" in shown.out


@pytest.mark.process
@pytest.mark.usefixtures("elsewhere")
def test_the_table_fits_a_terminal_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of an interpreter that has no torch, whatever this one has, and is quick about it."""
    monkeypatch.setenv("COLUMNS", "80")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    assert call("doctor", "--python", python, "--json", "facts.json") == 0
    shown = capfd.readouterr()
    assert shown.err == ""
    assert max(len(line) for line in shown.out.splitlines()) <= 80
    text = " ".join(shown.out.split())
    assert [words for words in ("PyTorch missing", "costs:", "get it:", "taskset -c") if words not in text] == []
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert {"name", "state", "finding", "cost", "remedy"} == set(facts["checks"][0])
    assert call("doctor", "--json", "facts.json") == 2


@pytest.mark.process
@pytest.mark.usefixtures("elsewhere")
def test_everything_of_this_machine_gets_a_verdict(capfd: pytest.CaptureFixture[str]) -> None:
    facts = json_of(capfd, "doctor", "--python", sys.executable)
    assert facts["schema"] == "stepscope.doctor/1"
    assert {check["state"] for check in facts["checks"]} <= {"ok", "limited", "missing", "unknown"}
    assert all(check["cost"] for check in facts["checks"] if check["state"] in ("limited", "missing"))
    assert facts["pinned_command"] is not None
