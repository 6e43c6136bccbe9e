"""`stepscope compare` as a user types it: what it prints and writes, and what it ends with."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.cli.calls import call, json_of
from tests.comparison.run_sets import make_run, make_set

main = partial(call, "compare")
pytestmark = pytest.mark.usefixtures("elsewhere")
TRAIN = """
import stub_torch, sys, time

def prepare(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass

for _ in stub_torch.steps(40, 0.0):
    prepare(float(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sets of three runs: "equal" is the same program as "base", "slow" a third slower."""
    folder = tmp_path_factory.mktemp("sets")
    for name, wait in (("base", 1.0), ("equal", 1.0), ("slow", 4.0)):
        make_set(folder / name, runs=3, data_wait_ms=wait)
    return folder


def test_files_hold_what_is_shown_and_are_not_overwritten(sets: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = ("--json", "c.json", "--html", "c.html", "--csv", "c.csv")
    sides = sets / "base" / "run-0", sets / "slow" / "run-0"
    assert main(*sides, *files) == 0
    assert capfd.readouterr().err.count("Wrote ") == 3
    changes = json.loads(Path("c.json").read_text())["changes"]
    rows = list(csv.DictReader(io.StringIO(Path("c.csv").read_text())))
    assert [(row["kind"], row["name"], row["status"]) for row in rows] == [
        (row["kind"], row["name"], row["status"]) for row in changes
    ]
    assert main(*sides, *files) == 2
    assert "--force" in capfd.readouterr().err
    assert main(*sides, *files, "--force") == 0


@pytest.mark.parametrize(
    ("a", "b", "check", "status", "words"),
    [
        ("base", "slow", "slower=3%", 1, "check failed: slower=3%: +30 %"),
        ("base", "slow", "slower=50 %", 0, "check passed: slower=50%"),
        ("base", "equal", "slower=3%", 0, "check passed"),
        ("base/run-0", "slow/run-1", "slower=3%", 4, "slower=3% cannot be judged"),
    ],
)
def test_fail_on(
    sets: Path, a: str, b: str, check: str, status: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(sets / a, sets / b, "--fail-on", check) == status
    shown = capfd.readouterr().err
    assert shown.count("\n") == 1
    assert words in shown


def test_odd_names_are_text_everywhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    odd = "<script>alert(1)</script>\x1b[31m[bold]=cmd\u202e"
    a = make_run(tmp_path / "a", manifest={"environment": {odd: "1"}, "command": ["python", odd]})
    b = make_run(tmp_path / "b [red]", manifest={"command": ["python", "=1+1"]})
    assert main(a, b, "--html", "c.html", "--csv", "c.csv", "--json", "c.json") == 0
    shown = capfd.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[bold]" in shown
    assert "b [red]" in shown
    page = Path("c.html").read_text()
    assert not [part for part in ("<script", "\u202e", "src=", "href=", "url(") if part in page]
    cells = [cell for row in csv.reader(io.StringIO(Path("c.csv").read_text())) for cell in row]
    assert all(cell[:1] not in ("=", "+", "@") for cell in cells)
    json.loads(Path("c.json").read_text())


@pytest.mark.process
def test_two_recorded_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    for name, seconds in (("a", "0.02"), ("b", "0.06")):
        # of few samples nothing is said to have grown, and on a busy machine there are fewer
        options = ["--quiet", "--no-window", "--no-report", "--rate", "100", "--out", name]
        command = [sys.executable, "-m", "stepscope", "run", *options, "--", sys.executable, "train.py"]
        subprocess.run([*command, seconds], cwd=tmp_path, timeout=120, check=True)
    document = json_of(capfd, "compare", "a", "b")
    (candidate,) = document["candidates"]
    assert candidate["effect"]["ratio"] > 1.5
    assert candidate["effect"]["low"] is None
    grew = {(row["kind"], row["name"]) for row in document["changes"] if row["status"] == "grew"}
    assert ("function", "prepare") in grew
    quoted = [row.get("code") for row in document["changes"] if row["kind"] == "line"]
    assert any("perf_counter" in (text or "") for text in quoted)
    shutil.rmtree(tmp_path / "a" / "tables")
    plain = json_of(capfd, "compare", "a", "b", "--no-source")
    assert not any(row.get("code") for row in plain["changes"])
    assert any(row["name"] == "command" for row in plain["changes"])
