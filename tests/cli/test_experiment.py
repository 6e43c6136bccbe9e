"""`stepscope experiment` as a user types it, around a real training: what it finds, and how it can be stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope.experiment.folder import JOURNAL, fold
from tests.integration.harness import end_session, environment

SLEEPY = Path(__file__).parents[1] / "experiment" / "scripts" / "sleepy.py"
FAILS = "raise SystemExit('no data to train on')"
SHORT = ("--steps", "15", "--warmup", "3")
AWKWARD = "a b, \"c\" 'd' $HOME;e=f"
TIMEOUT_S = 150
GONE_S = 30  # for the processes of a killed experiment to follow it

real = pytest.mark.process


def line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "stepscope", "experiment", *arguments]


def experiment(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line(*arguments), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )


@contextlib.contextmanager
def started(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (cwd / "stderr").open("ab") as log:
        process = subprocess.Popen(
            line(*arguments),
            cwd=cwd,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_session(process)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The journal so far."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(text) for text in (folder / JOURNAL).read_text().splitlines()]
    return []


def count(folder: Path, kind: str) -> int:
    return sum(row["kind"] == kind for row in rows(folder))


def wait_for(folder: Path, kind: str, number: int, process: subprocess.Popen[bytes]) -> None:
    """Until the journal holds so many rows of a kind."""
    deadline = time.monotonic() + TIMEOUT_S
    while count(folder, kind) < number:
        assert process.poll() is None, (folder.parent / "stderr").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def processes_of(folder: Path) -> list[int]:
    """Processes that were started for a run in `folder`, the training itself included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            record = process.environ().get("STEPSCOPE_RECORD", "")
            if str(folder) in record or any(str(folder) in word for word in process.cmdline()):
                found.append(process.pid)
    return [pid for pid in found if pid != os.getpid()]


@real
@pytest.mark.torch
def test_a_change_that_helps_is_found_and_settings_arrive_as_they_were_typed(tmp_path: Path) -> None:
    seen = tmp_path / "seen.jsonl"
    base = ("--base", f"env:SLEEPY={AWKWARD}", "--base", f"arg:--note={AWKWARD}")
    command = ("--", sys.executable, str(SLEEPY), "--slow", "--seen", str(seen))
    options = ("--try", "loader.num_workers=2", "--pairs", "3:3", "--out", "e", "--json", "found.json")
    done = experiment(*options, *base, *SHORT, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == json.loads((tmp_path / "e" / "experiment.json").read_text())
    (candidate,) = found["candidates"]
    assert (candidate["verdict"], candidate["pairs"], found["finished"]) == ("faster", 3, True)
    assert candidate["effect"]["high"] < 1
    assert any("num_workers=2" in text and "sleepy.py" in text for text in candidate["change"])
    # every run but the dropped pilot is in the result, and all of them saw the same
    runs = [json.loads(text) for text in seen.read_text().splitlines()]
    assert runs == [{"note": AWKWARD, "variable": AWKWARD, "stdin": ""}] * 7
    assert len(found["baseline"]["runs"]) == 3
    assert (tmp_path / "e" / "report.html").stat().st_size > 1000
    assert "loader.num_workers=2" in done.stdout
    assert done.stderr.count("stepscope: run ") == 7
    # the same command line is finished here, and would not write over it
    again = experiment(*options[:-2], *base, *SHORT, *command, cwd=tmp_path)
    assert again.returncode == 2
    assert "finished" in again.stderr


@real
@pytest.mark.torch
def test_it_can_be_killed_and_interrupted_and_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    arguments = ("--try", "env:SLEEPY=1", "--pairs", "3:3", "--out", "e", *SHORT, "--", sys.executable, str(SLEEPY))
    with started(*arguments, cwd=tmp_path) as process:
        wait_for(folder, "process", 3, process)
        process.send_signal(signal.SIGSTOP)  # so that it finishes no run while the second one is refused
        second = experiment(*arguments, cwd=tmp_path)
        assert second.returncode == 2
        assert str(process.pid) in second.stderr
        process.kill()
        process.wait()
        deadline = time.monotonic() + GONE_S
        while processes_of(folder) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert processes_of(folder) == []
    made = count(folder, "finished")
    assert 2 <= made <= 3
    with started(*arguments, cwd=tmp_path) as process:
        wait_for(folder, "finished", made + 1, process)
        wait_for(folder, "process", count(folder, "finished") + 2, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGINT
    state = fold((folder / JOURNAL).read_bytes())
    assert not state.open
    assert {path.name for path in (folder / "runs").iterdir() if path.is_dir()} == {run.folder for run in state.made}
    found = json.loads((folder / "experiment.json").read_text())
    assert not found["finished"]
    assert "SIGINT" in found["stopped"]
    # no run fits into this budget: what is known is reported, and nothing is lost
    done = experiment("--budget", "0.001", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "going on" in done.stderr
    ended = json.loads((folder / "experiment.json").read_text())
    assert ended["runs"] == found["runs"] == len(state.made)
    assert "budget" in ended["stopped"]


@real
def test_a_command_that_fails_is_one_line_with_its_last_words(tmp_path: Path) -> None:
    done = experiment("--try", "gc=freeze", "--", sys.executable, "-c", FAILS, cwd=tmp_path)
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert "status 1" in last
    assert "no data to train on" in last
    assert "Traceback" not in done.stderr
