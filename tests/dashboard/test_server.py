"""What the server answers: heads, pages, timeline, cut traces, errors, files of the front end."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.dashboard.pages import PAGES
from tests import gpu_traces
from tests.dashboard.client import Dashboard
from tests.dashboard.opened import harmful

Served = Callable[[str], str]


def test_a_head_lists_what_can_be_chosen(dashboard: Dashboard, served: Served) -> None:
    run = served("small")
    dashboard.json(f"api/runs/{run}/pages/findings")
    head = dashboard.json(f"api/runs/{run}")
    assert (head["state"], head["kind"], head["preparing"], head["error"]) == ("finished", "run", None, None)
    assert [page["key"] for page in head["pages"]] == list(PAGES)
    empty = {page["key"] for page in head["pages"] if page["empty"]}
    assert not empty & {"findings", "steps", "timeline", "operators", "kernels"}
    assert "compiles" in empty
    assert head["steps"] == {"first": 0, "last": 119}
    assert "rank-0" in {worker["key"] for worker in head["workers"]}
    assert {span["worker"] for span in head["spans"]} == {"rank-0"}


def test_a_range_of_steps_reads_these_alone(dashboard: Dashboard, served: Served) -> None:
    run = served("small")
    whole = dashboard.json(f"api/runs/{run}/pages/steps")
    part = dashboard.json(f"api/runs/{run}/pages/steps?steps=50:69")
    assert part["scope"]["steps"] == [50, 69]
    assert part["scope"]["note"] is None
    assert json.dumps(part["blocks"]) != json.dumps(whole["blocks"])
    everything = dashboard.json(f"api/runs/{run}/pages/steps?steps=0:119")
    assert everything["blocks"] == whole["blocks"]
    other = dashboard.json(f"api/runs/{run}/pages/environment?steps=50:69")
    assert "range of steps" in other["scope"]["note"]


@pytest.mark.parametrize(
    ("query", "word"),
    [("steps=9:3", "range"), ("steps=x", "range"), ("steps=900:901", "0 to 119"), ("worker=" + "x" * 400, "longer")],
)
def test_a_selection_that_makes_no_sense_is_an_error_in_a_line(
    dashboard: Dashboard, served: Served, query: str, word: str
) -> None:
    run = served("small")
    dashboard.json(f"api/runs/{run}/pages/steps")
    answer = dashboard.ask(f"api/runs/{run}/pages/steps?{query}")
    assert answer.status == 400
    assert answer.json["schema"] == "stepscope.error/1"
    assert word in answer.json["error"]
    assert "Traceback" not in answer.json["error"]


@pytest.mark.parametrize(
    "target",
    ["api/runs/no-such-run", "api/runs/no-such-run/live", "api/runs/no-such-run/pages/findings", "api", "x.js"],
)
def test_what_there_is_not_is_not_found(dashboard: Dashboard, target: str) -> None:
    answer = dashboard.ask(target)
    assert answer.status == 404
    assert answer.json["schema"] == "stepscope.error/1"


def test_what_is_asked_before_the_run_was_read(tmp_path: Path, dashboard_of: Callable[..., Dashboard]) -> None:
    shown = dashboard_of(gpu_traces.write(tmp_path / "a.pt.trace.json"))
    run = shown.json("api/runs")["runs"][0]["id"]
    cut = shown.ask(f"api/runs/{run}/slice?steps=1:1")
    assert (cut.status, cut.json["schema"]) == (409, "stepscope.error/1")
    page = shown.ask(f"api/runs/{run}/pages/findings")
    if page.status != 200:  # it may have been quick
        assert (page.status, page.json["schema"]) == (202, "stepscope.preparing/1")
        assert page.json["text"]
    assert shown.json(f"api/runs/{run}/pages/findings")["schema"] == "stepscope.page/1"


def test_a_mistake_of_ours_is_a_line(
    dashboard: Dashboard, served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = served("small")
    dashboard.json(f"api/runs/{run}/pages/findings")

    def broken(*_: object) -> None:
        raise KeyError("oh\n\x1b[31m")

    monkeypatch.setattr("stepscope.dashboard.pages.page", broken)
    answer = dashboard.ask(f"api/runs/{run}/pages/findings?x=1")
    assert answer.status == 500
    assert "KeyError" in answer.json["error"]
    assert harmful(answer.json) == []
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "pages/findings" in said


def test_windows_slices_and_searches(dashboard: Dashboard, served: Served) -> None:
    run = served("gpu")
    block = next(b for b in dashboard.json(f"api/runs/{run}/pages/timeline")["blocks"] if b["kind"] == "timeline")
    window = dashboard.json(f"api/runs/{run}/timeline?from=0&to={block['to_ns']}&width=800")
    assert (window["schema"], window["from_ns"], window["to_ns"]) == ("stepscope.timeline/1", 0, block["to_ns"])
    found = dashboard.json(f"api/runs/{run}/timeline/search?text=sgemm&limit=2")
    assert (found["total"], len(found["hits"])) == (6, 2)
    detail = dashboard.json(f"api/runs/{run}/slices/{found['hits'][0]['id']}")
    assert ("sgemm" in detail["name"], detail["operator"]["name"]) == (True, "aten::mm")


@pytest.mark.parametrize(
    ("target", "status"),
    [
        *((f"timeline{query}", 400) for query in ("?from=x&to=5", "?from=5&to=5", "?width=-1", "/search?text=")),
        *((f"slice?steps={steps}", 400) for steps in ("4:2", "900:901")),
        *((f"slices/{number}", 404) for number in ("999999999", "x")),
    ],
)
def test_questions_about_the_timeline_that_make_no_sense(
    dashboard: Dashboard, served: Served, target: str, status: int
) -> None:
    run = served("gpu")
    dashboard.json(f"api/runs/{run}/pages/timeline")
    answer = dashboard.ask(f"api/runs/{run}/{target}")
    assert (answer.status, answer.json["schema"]) == (status, "stepscope.error/1")


def test_a_cut_trace_is_a_file_for_perfetto(dashboard: Dashboard, served: Served) -> None:
    run = served("gpu")
    dashboard.json(f"api/runs/{run}/pages/timeline")
    answer = dashboard.ask(f"api/runs/{run}/slice?steps=2:3")
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/gzip"
    assert re.fullmatch(r'attachment; filename="[\w.-]+\.json\.gz"', answer.headers["content-disposition"])
    found = {event.get("name") for event in json.loads(gzip.decompress(answer.body))["traceEvents"]}
    assert {"ProfilerStep#2", "ProfilerStep#3"} <= found
    assert not {"ProfilerStep#1", "ProfilerStep#4"} & found


def test_files_of_the_front_end_are_sent_and_no_others(
    tmp_path: Path, small_run: Path, dashboard_of: Callable[..., Dashboard]
) -> None:
    files = tmp_path / "static"
    (files / "assets").mkdir(parents=True)
    (files / "index.html").write_text("<!doctype html><title>x</title>")
    (files / "assets" / "index-abc.js").write_text("1")
    (tmp_path / "secret.txt").write_text("secret")
    shown = dashboard_of(small_run, files=files)
    index = shown.ask("/")
    assert (index.status, index.headers["content-type"]) == (200, "text/html; charset=utf-8")
    script = shown.ask("assets/index-abc.js")
    assert (script.body, script.headers["content-type"]) == (b"1", "text/javascript; charset=utf-8")
    assert script.headers["cache-control"] == "no-cache"
    for path in ("assets/other.js", "secret.txt", "assets/", "assets"):
        assert shown.ask(path).status == 404
    assert shown.ask("/", token=False).status == 403


def test_without_a_front_end_the_documents_are_there(small_run: Path, dashboard_of: Callable[..., Dashboard]) -> None:
    shown = dashboard_of(small_run, files=None)
    answer = shown.ask("/")
    assert answer.status == 500
    assert "no dashboard" in answer.json["error"]
    assert shown.ask("api/runs").status == 200
