"""`stepscope sweep` as a user types it, around real trainings: killed, continued, and what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepscope.dashboard.server.catalog import Catalog
from tests.cli.calls import call
from tests.cli.test_experiment import TIMEOUT_S, processes_of
from tests.integration.harness import end_session, environment

SCRIPT = """
import argparse, time, torch, stepscope
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--wait", type=float)
given = parser.parse_args()
weight = torch.nn.Parameter(torch.tensor(1.0))
for step in range(12):
    (weight * given.lr).backward()
    stepscope.log("val/loss", given.lr - step)
    stepscope.step()
    time.sleep(given.wait)
"""
LINE = ("--param", "arg:--lr=1,nan,3", "--metric", "val/loss:min", "--metric", "seconds", "--sampler", "grid")


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
@pytest.mark.torch
def test_it_can_be_killed_and_goes_on_and_a_trial_without_a_number_failed(tmp_path: Path) -> None:
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
    assert 0.1 * 10 < by_lr["1"]["values"][1] < by_lr["1"]["wall_s"]
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
    again = subprocess.run(
        [*line[:-3], "--force", *line[-3:]], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert again.returncode == 2
    assert "finished" in again.stderr


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
