"""`stepscope runs` on the command line: the list of the dashboard, its filters, and deleting what is ours alone."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.builders import MS, T0
from tests.cli.calls import call, json_of
from tests.run_folders import make_run_folder

main = partial(call, "runs")
DAY_NS = 86_400 * 10**9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four runs, the oldest first by number; the last began just now, and goes on on this machine."""
    for number, knobs in enumerate(([], [["loader.num_workers", "4"]], [["loader.num_workers", "2"]])):
        manifest: dict[str, Any] = {"started_ns": T0 + number * MS, "ended_ns": T0 + 10**9, "options": {"knobs": knobs}}
        make_run_folder(tmp_path, name=f"run-{number}", manifest={**manifest, "tags": [f"tag{number}", "nightly"]})
    going = {"started_ns": time.time_ns(), "ended_ns": None, "launcher_pid": os.getpid(), "host": os.uname().nodename}
    make_run_folder(tmp_path, name="run-3", manifest=going)
    return tmp_path


def names(capfd: pytest.CaptureFixture[str], *words: object) -> list[str]:
    return [row["name"] for row in json_of(capfd, "runs", *words)["runs"]]


def test_the_list_and_its_filters(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert names(capfd, folder) == ["run-3", "run-2", "run-1", "run-0"]
    assert names(capfd, folder, "--tag", "nightly", "--tag", "tag1") == ["run-1"]
    assert names(capfd, folder, "--tag", "night") == []
    assert names(capfd, folder, "--knob", "loader.num_workers") == ["run-2", "run-1"]
    assert names(capfd, folder, "--knob", "loader.num_workers=4") == ["run-1"]
    assert names(capfd, folder, "--search", "TAG0 run") == ["run-0"]
    assert names(capfd, folder, "--state", "running") == ["run-3"]
    assert names(capfd, folder, "--older-than", "1", "--state", "finished") == ["run-2", "run-1", "run-0"]
    assert main(folder, "--knob", "loader.num_workers") == 0
    shown = capfd.readouterr().out
    assert "loader.num_workers=4" in shown
    assert "run-0" not in shown


def test_prune_says_what_it_would_free_and_deletes_when_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = folder / "run-0" / "rank-0" / "trace-0.pt.trace.json.gz"
    trace.write_bytes(b"x" * 1_000_000)
    os.link(trace, trace.with_name("again"))
    told = json_of(capfd, "runs", folder, "--prune", "--keep", "2")
    assert [row["name"] for row in told["runs"]] == ["run-1", "run-0"]
    assert 1_000_000 < told["runs"][1]["bytes"] < 1_500_000  # one file of two names
    assert told["freed_bytes"] == sum(row["bytes"] for row in told["runs"])
    assert not told["deleted"]
    assert trace.exists()
    assert main(folder, "--prune", "--keep", "2") == 0
    assert "nothing was deleted" in capfd.readouterr().err
    assert json_of(capfd, "runs", folder, "--prune", "--keep", "2", "--yes")["deleted"]
    assert names(capfd, folder) == ["run-3", "run-2"]
    assert not (folder / "run-0").exists()


def test_what_is_not_ours_stays(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outside = folder.parent / f"{folder.name}-outside"
    outside.mkdir()
    (outside / "data.bin").write_bytes(b"data")
    (folder / "run-0" / "rank-0" / "link").symlink_to(outside)
    (folder / "run-1" / "checkpoint.pt").write_bytes(b"weights")
    (folder / "linked").symlink_to(folder / "run-2")
    make_run_folder(folder / "tries" / "runs", name="001-pilot", manifest={"ended_ns": T0 + 1})
    (folder / "tries" / "experiment.json").write_text(json.dumps({"finished": True}))
    told = json_of(capfd, "runs", folder, "--prune", "--search", str(folder), "--yes")
    stays = {row["name"]: row["stays"] for row in told["runs"]}
    assert "goes on" in stays.pop("run-3")
    assert "experiment" in stays.pop("tries/001-pilot")
    assert "link" in stays.pop("linked")
    assert set(stays) == {"run-0", "run-1", "run-2", "tries"}
    assert not any(stays.values())
    assert next(row for row in told["runs"] if row["name"] == "run-1")["others"] == ["checkpoint.pt"]
    assert [path.name for path in (folder / "run-1").iterdir()] == ["checkpoint.pt"]
    assert (outside / "data.bin").read_bytes() == b"data"
    assert {path.name for path in folder.iterdir()} == {"run-1", "run-3", "linked"}


def test_a_trace_of_others_is_never_deleted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "logs" / "worker0.1.pt.trace.json"
    trace.parent.mkdir()
    trace.write_text("{}")
    (row,) = json_of(capfd, "runs", tmp_path, "--prune", "--search", "logs", "--yes")["runs"]
    assert (row["bytes"], row["stays"]) == (None, "stepscope did not record it")
    assert trace.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prune"], "would take every run"),
        (["--yes"], "are about --prune"),
        (["--state", "odd"], "there are running, finished"),
        (["--older-than", "-1"], "no number below 0"),
        (["--older-than", "nan"], "no number below 0"),
        (["nowhere"], "no such file or folder"),
    ],
)
def test_what_makes_no_sense_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    paths = [] if words == ["nowhere"] else [folder]
    assert main(*paths, *words) in (2, 3)
    shown = capfd.readouterr()
    assert said in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_times_that_no_clock_shows_are_missing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_run_folder(tmp_path, name="odd", manifest={"started_ns": 2**62, "ended_ns": 2**62 + 1})
    make_run_folder(tmp_path, name="broken").joinpath("host-a/manifest.json").write_text("{")
    assert main(tmp_path) == 0
    assert {"odd", "broken"} <= set(capfd.readouterr().out.split())
