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

from stepscope.dashboard.server.catalog import Catalog
from stepscope.experiment.folder import JOURNAL, fold
from tests.cli.calls import call
from tests.integration.harness import end_session, environment

SLEEPY = Path(__file__).parents[1] / "experiment" / "scripts" / "sleepy.py"
STEPS = "import stub_torch; list(stub_torch.steps(4000, 0.02))"
FAILS = "raise SystemExit('no data to train on')"
SHORT = ("--steps", "10", "--warmup", "2")
AWKWARD = "a b, \"c\" 'd' $HOME;e=f"
TIMEOUT_S = 150
GONE_S = 30  # for the processes of a killed experiment to follow it

real = pytest.mark.process


def line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "stepscope", "experiment", *arguments]


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
def test_a_change_that_helps_is_found_and_settings_arrive_as_they_were_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = tmp_path / "seen.jsonl"
    base = ("--base", f"env:SLEEPY={AWKWARD}", "--base", f"arg:--note={AWKWARD}")
    command = ("--", sys.executable, str(SLEEPY), "--slow", "--seen", str(seen))
    options = ("--try", "loader.num_workers=2", "--pairs", "2:4", "--out", "e", "--json", "found.json")
    done = subprocess.run(
        line(*options, *base, *SHORT, *command),
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == json.loads((tmp_path / "e" / "experiment.json").read_text())
    (candidate,) = found["candidates"]
    assert (candidate["verdict"], found["finished"]) == ("faster", True)
    assert candidate["effect"]["high"] < 1
    assert any("num_workers=2" in text and "sleepy.py" in text for text in candidate["change"])
    # every run but the dropped pilot is in the result, and all of them saw the same
    runs = [json.loads(text) for text in seen.read_text().splitlines()]
    assert runs == [{"note": AWKWARD, "variable": AWKWARD, "stdin": ""}] * (1 + 2 * candidate["pairs"])
    assert len(found["baseline"]["runs"]) == candidate["pairs"]
    assert (tmp_path / "e" / "report.html").stat().st_size > 1000
    assert "loader.num_workers=2" in done.stdout
    assert done.stderr.count("stepscope: run ") == len(runs)
    # the same command line is finished here, and would not write over it
    assert call("experiment", *options[:-2], *base, *SHORT, *command) == 2
    assert "finished" in capsys.readouterr().err


@real
def test_it_can_be_killed_and_interrupted_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "e"
    arguments = ("--try", "env:X=1", "--pairs", "3:3", "--out", "e", *SHORT, "--", sys.executable, "-c", STEPS)
    with started(*arguments, cwd=tmp_path) as process:
        wait_for(folder, "process", 3, process)
        process.send_signal(signal.SIGSTOP)  # so that it finishes no run while the second one is refused
        assert call("experiment", *arguments) == 2
        assert str(process.pid) in capsys.readouterr().err
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
    assert call("experiment", "--budget", "0.001", *arguments) == 0
    assert "going on" in capsys.readouterr().err
    ended = json.loads((folder / "experiment.json").read_text())
    assert ended["runs"] == found["runs"] == len(state.made)
    assert "budget" in ended["stopped"]


@real
def test_a_command_that_fails_is_one_line_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("experiment", "--try", "gc=freeze", "--", sys.executable, "-c", FAILS) == 3
    said = capsys.readouterr().err
    assert "status 1" in said.splitlines()[-1]
    assert "no data to train on" in said.splitlines()[-1]
    assert "Traceback" not in said


SCRIPT = """
import argparse, stub_torch, stepscope
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--wait", type=float)
given = parser.parse_args()
for step in stub_torch.steps(12, given.wait):
    stepscope.log("val/loss", given.lr - step)
"""
LINE = ("--param", "arg:--lr=1,nan,3", "--metric", "val/loss:min", "--sampler", "grid")


def kill_in_the_second_trial(line: list[str], folder: Path) -> None:
    with (folder / "stderr").open("wb") as log:
        process = subprocess.Popen(line, cwd=folder, env=environment(), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not list(folder.glob("s/runs/002-*/rank-*/steps.jsonl")):
            assert process.poll() is None, (folder / "stderr").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
        while processes_of(folder / "s"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        end_session(process)


@pytest.mark.process
def test_it_can_be_killed_and_goes_on_and_a_trial_without_a_number_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["--base", "arg:--wait=0.1", "--out", "s", "--json", "found.json", "--html", "found.html"]
    line = [sys.executable, "-m", "stepscope", "sweep", *LINE, *command, "--", sys.executable, "train.py"]
    kill_in_the_second_trial(line, tmp_path)
    killed = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert [trial["number"] for trial in killed["trials"]] == [0]
    done = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "going on with the unfinished sweep" in done.stderr
    assert done.stderr.count("stepscope: trial ") == 2
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert found["finished"]
    assert found["trials"][0] == killed["trials"][0]
    by_lr = {trial["params"]["arg:--lr"]: trial for trial in found["trials"]}
    assert sorted(by_lr) == ["1", "3", "nan"]
    assert [by_lr[lr]["values"][0] for lr in "13"] == [-10.0, -8.0]
    assert (by_lr["nan"]["state"], by_lr["nan"]["reason"]) == ("failed", "val/loss is nan, not a finite number")
    assert found["best"] == by_lr["1"]
    assert (found["importance"], found["importance_note"][:15]) == ([], "too few to rank")
    assert len(list((tmp_path / "s" / "runs").glob("*-lr-*.log"))) == 3
    assert "Best by val/loss" in (tmp_path / "found.html").read_text()
    # it is listed with its trials, and shown by its best
    listed = Catalog((tmp_path,), lambda place: pytest.fail(f"{place} is not opened"))
    (entry,) = [entry for entry in listed.runs() if entry["kind"] == "sweep"]
    assert (entry["name"], entry["state"]) == ("s", "finished")
    assert listed.place(entry["id"]).folder == tmp_path / "s" / "runs" / by_lr["1"]["folder"]
    assert len(listed.runs()) == 4
    # finished here, it is not written over; more trials of a grid there are none
    assert call(*line[3:-3], "--force", *line[-3:]) == 2
    assert "finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--metric", "loss:min"], "nothing to vary; add --param"),
        (["--param", "arg:--lr=1..2", "--metric", "loss"], "say what is better, loss:min or :max"),
        (["--param", "arg:--lr=1..2", "--metric", "a:min", "--base", "arg:--lr=3"], "is in --base and in --param"),
        (["--param", "arg:--lr=1..2", "--metric", "a:min", "--", "no-such-program"], "no-such-program"),
    ],
)
def test_what_cannot_be_searched_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("sweep", *words, *([] if "--" in words else ["--", sys.executable, "train.py"])) in (2, 4)
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_optuna_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    line = ("--param", "arg:--lr=1..2", "--metric", "loss:min", "--", sys.executable, "train.py")
    assert call("sweep", *line) == 4
    assert capsys.readouterr().err == (
        "stepscope: a sweep needs Optuna, which is not installed; pip install 'stepscope[sweep]'\n"
    )
