"""`stepscope runs` on the command line: the list of the dashboard, its filters, and deleting what is ours alone."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.report.document import report_bytes
from tests.builders import MS, T0, step_rows
from tests.cli.calls import call, json_of
from tests.dashboard.served_runs import EVIL
from tests.reduced_runs import Made, reduced_run
from tests.run_folders import make_run_folder

main = partial(call, "runs")


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
    os.link(trace, folder / "run-0" / "replay.json")
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


def reported(run: Path) -> Path:
    report = api.open_run(run, options=api.ReadOptions(cache=False, keep=False)).report()
    (run / "report.json").write_bytes(report_bytes(report))
    return run


def few(hosts_folder: Path, name: str, *, hosts: tuple[str, ...], late: int | None) -> Path:
    """A run of one rank on each host that is read in full."""
    for rank, host in enumerate(hosts):
        wait_ms = 8 if rank == late else 1
        rows = step_rows(60, data_wait_ms=wait_ms, backward_ms=12 - wait_ms)
        make_run_folder(
            hosts_folder, name=name, rank=rank, pid=100 + rank, host=host, steps=rows, rank_json={"host": host},
            manifest={"started_ns": T0 + 10**15, "ended_ns": T0 + 2 * 10**15},
        )  # fmt: skip
    return hosts_folder / name


@pytest.fixture(scope="module")
def hosts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """node2 is late in two of three judged runs; one run is too short, one has no report, one is of one host."""
    made = tmp_path_factory.mktemp("hosts") / "runs"
    reported(reduced_run(made / "first"))
    reported(reduced_run(made / "healthy", Made(late=())))
    reported(reduced_run(made / "short", Made(steps=5)))
    reported(few(made, "few", hosts=("node1", "node2", "node3"), late=1))
    reduced_run(made / "unread")
    reported(few(made, "alone", hosts=("node1",), late=None))
    return made


def rows_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["host"]: row for row in document["hosts"]}


def test_who_was_late_how_often_by_how_much_and_why(hosts_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = json_of(capfd, "runs", "--hosts", hosts_folder)
    assert (document["schema"], document["runs"]) == ("stepscope.hosts/1", 6)
    rows = rows_of(document)
    assert document["hosts"][0]["host"] == "node2"
    late = rows["node2"]
    assert (late["runs"], late["judged"], late["late"]) == (5, 3, 2)
    assert late["late_share"] == pytest.approx(2 / 3)
    assert 12 < late["excess_ms"] < 15
    assert late["most_cost_ms"] > 18
    assert late["causes"] == {"data": 1, "unknown": 1}
    assert (late["last_seen_ns"], late["last_late_ns"]) == (T0 + 10**15, T0 + 10**15)
    assert (rows["node1"]["runs"], rows["node1"]["judged"], rows["node1"]["late"]) == (6, 3, 0)
    assert (rows["node1"]["excess_ms"], rows["node1"]["last_late_ns"]) == (None, None)
    assert rows["node4"]["last_seen_ns"] == T0


def test_what_was_not_judged_counts_for_nobody_and_is_shown(
    hosts_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    left = {row["run"]: row["reason"] for row in json_of(capfd, "runs", "--hosts", hosts_folder)["not_judged"]}
    assert set(left) == {"short", "unread", "alone"}
    assert "5 steps count" in left["short"]
    assert "no report yet" in left["unread"]
    assert "one host alone" in left["alone"]
    assert main("--hosts", hosts_folder) == 0
    shown = capfd.readouterr().out
    assert "Not judged: short: 5 steps count, at least 20 are needed" in shown
    assert "node2" in shown
    assert "67 %" in shown


def test_csv_has_the_same_rows(hosts_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(json_of(capfd, "runs", "--hosts", hosts_folder))
    assert main("--hosts", hosts_folder, "--csv", "-") == 0
    read = {row["host"]: row for row in csv.DictReader(io.StringIO(capfd.readouterr().out))}
    assert read.keys() == rows.keys()
    assert float(read["node2"]["cost_ms"]) == pytest.approx(rows["node2"]["cost_ms"])
    assert read["node2"]["causes"] in ("data: 1; unknown: 1", "unknown: 1; data: 1")
    assert read["node1"]["cost_ms"] == ""


@pytest.mark.parametrize("kind", ["stage", "rotating", "global"])
def test_what_is_no_hosts_fault_is_not_counted(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = reported(reduced_run(tmp_path / "runs" / "one")) / "report.json"
    report = json.loads(path.read_text())
    report["views"]["many_ranks"]["stragglers"][0]["kind"] = kind
    path.write_text(json.dumps(report))
    rows = rows_of(json_of(capfd, "runs", "--hosts", tmp_path / "runs"))
    assert (rows["node2"]["judged"], rows["node2"]["late"]) == (1, 0)


@pytest.mark.parametrize("text", ["", "[]", '{"views": {"many_ranks": 3}}', '{"views": {"many_ranks": {}}}', "\0" * 99])
def test_a_damaged_report_is_a_run_that_was_not_judged(
    tmp_path: Path, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (reduced_run(tmp_path / "runs" / "one") / "report.json").write_text(text)
    document = json_of(capfd, "runs", "--hosts", tmp_path / "runs")
    assert "cannot be read" in document["not_judged"][0]["reason"]
    assert {row["judged"] for row in document["hosts"]} == {0}


def test_hostile_names_are_harmless(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hosts = tuple(name.replace("/", "\\") for name in EVIL)
    reported(reduced_run(tmp_path / "runs" / "one", Made(hosts=hosts)))
    assert main("--hosts", tmp_path / "runs") == 0
    assert "\x1b[31m" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "--history"], "--hosts is a table of its own"),
        (["--hosts", "--prune", "--keep", "1"], "--hosts is a table of its own"),
        (["--csv", "-"], "--csv writes the table of --hosts"),
    ],
)
def test_what_makes_no_sense_of_hosts_is_refused(
    hosts_folder: Path, words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(*words, hosts_folder) == 2
    assert said in capfd.readouterr().err
