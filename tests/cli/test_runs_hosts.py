"""`stepscope runs --hosts`: hosts over several runs, of the verdicts that reports keep."""

from __future__ import annotations

import csv
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.report.document import report_bytes
from tests.builders import T0, step_rows
from tests.cli.calls import call, json_of
from tests.dashboard.served_runs import EVIL
from tests.reduced_runs import Made, reduced_run
from tests.run_folders import make_run_folder

main = partial(call, "runs")


def reported(run: Path) -> Path:
    report = api.open_run(run, options=api.ReadOptions(cache=False, keep=False)).report()
    (run / "report.json").write_bytes(report_bytes(report))
    return run


def few(folder: Path, name: str, *, hosts: tuple[str, ...], late: int | None) -> Path:
    """A run of one rank on each host that is read in full."""
    for rank, host in enumerate(hosts):
        wait_ms = 8 if rank == late else 1
        rows = step_rows(60, data_wait_ms=wait_ms, backward_ms=12 - wait_ms)
        make_run_folder(
            folder, name=name, rank=rank, pid=100 + rank, host=host, steps=rows, rank_json={"host": host},
            manifest={"started_ns": T0 + 10**15, "ended_ns": T0 + 2 * 10**15},
        )  # fmt: skip
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_who_was_late_how_often_by_how_much_and_why(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = json_of(capfd, "runs", "--hosts", folder)
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


def test_what_was_not_judged_counts_for_nobody_and_is_shown(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    left = {row["run"]: row["reason"] for row in json_of(capfd, "runs", "--hosts", folder)["not_judged"]}
    assert set(left) == {"short", "unread", "alone"}
    assert "5 steps count" in left["short"]
    assert "no report yet" in left["unread"]
    assert "one host alone" in left["alone"]
    assert main("--hosts", folder) == 0
    shown = capfd.readouterr().out
    assert "Not judged: short: 5 steps count, at least 20 are needed" in shown
    assert "node2" in shown
    assert "67 %" in shown


def test_csv_has_the_same_rows(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(json_of(capfd, "runs", "--hosts", folder))
    assert main("--hosts", folder, "--csv", "-") == 0
    read = {row["host"]: row for row in csv.DictReader(io.StringIO(capfd.readouterr().out))}
    assert read.keys() == rows.keys()
    assert float(read["node2"]["cost_ms"]) == pytest.approx(rows["node2"]["cost_ms"])
    assert read["node2"]["causes"] in ("data: 1; unknown: 1", "unknown: 1; data: 1")
    assert read["node1"]["cost_ms"] == ""


def test_the_filters_of_the_list_choose_the_runs(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = json_of(capfd, "runs", "--hosts", folder, "--search", "healthy")
    assert (document["runs"], rows_of(document)["node2"]["late"]) == (1, 0)


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
def test_what_makes_no_sense_is_refused(
    folder: Path, words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(*words, folder) == 2
    assert said in capfd.readouterr().err
