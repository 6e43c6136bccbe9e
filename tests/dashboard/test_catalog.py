"""The list of runs: what is found, what stands in an entry, what comes and goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.dashboard.server import catalog
from stepscope.dashboard.server.catalog import Catalog
from stepscope.errors import UnreadableInputError
from tests import gpu_traces
from tests.builders import MS, T0
from tests.dashboard.client import Dashboard
from tests.run_folders import make_run_folder


def names(shown: Dashboard, query: str = "") -> list[str]:
    return [entry["name"] for entry in shown.json(f"api/runs{query}")["runs"]]


def catalog_of(path: Path) -> Catalog:
    return Catalog([path], lambda _: pytest.fail("not to be read"))


def test_a_folder_of_runs_is_a_list_newest_first(tmp_path: Path, dashboard_of: Callable[..., Dashboard]) -> None:
    for number in (2, 1, 3):
        manifest = {"command": ["python", f"train_{number}.py"], "tags": [f"tag{number}"]}
        make_run_folder(tmp_path, name=f"run-{number}", manifest={"started_ns": T0 + number * MS, **manifest})
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / ".hidden").mkdir()
    gpu_traces.write(tmp_path / "logs" / "worker0.1.pt.trace.json")
    shown = dashboard_of(tmp_path)
    assert names(shown)[1:] == ["run-3", "run-2", "run-1"]
    assert names(shown)[0] == "logs"
    assert names(shown, "?q=train_2.py") == ["run-2"]
    assert names(shown, "?q=TAG3+run") == ["run-3"]
    assert names(shown, "?q=nothing") == []
    entry = shown.json("api/runs?q=run-1")["runs"][0]
    assert (entry["kind"], entry["state"], entry["command"]) == ("run", "finished", "python train_1.py")
    assert entry["note"] == "demo tag1"


def test_an_entry_shows_what_a_report_says(tmp_path: Path) -> None:
    run = make_run_folder(tmp_path, name="a")
    report = {"steps": {"count": 90, "mean_ms": 12.5, "excluded": {"warm-up": 10}, "other": [1]}, "findings": []}
    report["findings"] = [{"title": "The loader is late", "where": []}, {"title": "second"}]
    (run / "report.json").write_text(json.dumps(report))
    listed = catalog_of(tmp_path)
    entry = listed.runs()[0]
    assert (entry["steps"], entry["mean_ms"], entry["first_finding"]) == (100, 12.5, "The loader is late")
    (run / "report.json").write_text("{ broken")
    entry = listed.runs()[0]
    assert (entry["steps"], entry["mean_ms"], entry["first_finding"]) == (None, None, None)


def test_many_runs_are_listed_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        make_run_folder(tmp_path, name=f"run-{number}", steps=[])
    monkeypatch.setattr(catalog, "MAX_SHOWN", 3)
    document = catalog_of(tmp_path).document()
    assert (document["total"], len({entry["id"] for entry in document["runs"]})) == (5, 3)


def test_an_experiment_is_listed_with_its_runs(tmp_path: Path) -> None:
    experiment = tmp_path / "tries"
    make_run_folder(experiment / "runs", name="002-workers-2")
    make_run_folder(experiment / "runs", name="001-pilot")
    (experiment / "experiment.json").write_text(json.dumps({"finished": True}))
    listed = catalog_of(tmp_path)
    found = {place.name: place for place in listed.places()}
    assert set(found) == {"tries", "tries/001-pilot", "tries/002-workers-2"}
    assert found["tries"].kind == "experiment"
    assert found["tries"].folder == experiment / "runs" / "001-pilot"
    assert listed.experiment(found["tries"].key) == experiment
    assert listed.experiment(found["tries/001-pilot"].key) is None


def test_traces_side_by_side_and_folders_of_ranks_are_one_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        gpu_traces.write(tmp_path / "ranks" / f"rank{rank}" / "a.pt.trace.json")
        gpu_traces.write(tmp_path / "logs" / f"worker{rank}.1.pt.trace.json")
        gpu_traces.write(tmp_path / "two" / f"with_{rank}_x" / "worker0.1.pt.trace.json")
    assert [place.name for place in catalog_of(tmp_path / "ranks").places()] == ["ranks"]
    assert [place.name for place in catalog_of(tmp_path / "logs").places()] == ["logs"]
    assert [place.name for place in catalog_of(tmp_path / "two").places()] == ["with_0_x", "with_1_x"]


def test_a_path_that_is_not_there_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match="no such file or folder"):
        catalog_of(tmp_path / "nothing")


def test_what_cannot_be_read_is_said_on_its_pages(tmp_path: Path, dashboard_of: Callable[..., Dashboard]) -> None:
    (tmp_path / "x.json").write_text("no trace")
    shown = dashboard_of(tmp_path / "x.json")
    run = shown.json("api/runs")["runs"][0]["id"]
    while (answer := shown.ask(f"api/runs/{run}/pages/findings")).status == 202:
        pass
    assert answer.status == 422
    head = shown.json(f"api/runs/{run}")
    assert head["state"] == "unreadable"
    assert head["error"] == answer.json["error"]
