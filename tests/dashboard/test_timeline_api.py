"""The documents of the timeline: as the front end expects them, with harmless names, of whatever a run holds."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.dashboard.pages import PageContext, Scope, page, timeline
from stepscope.errors import UsageError
from tests.dashboard.served_runs import EVIL, START

UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u202e\u2028]")


def opened(path: Path) -> api.Run:
    return api.open_run(path, options=api.ReadOptions(cache=False, keep=False))


@pytest.fixture(scope="module")
def small(small_run: Path) -> api.Run:
    return opened(small_run)


@pytest.fixture(scope="module")
def gpu(gpu_trace: Path) -> api.Run:
    return opened(gpu_trace)


def document(run: api.Run, **more: Any) -> Any:
    """The page's block as JSON carries it."""
    made = page(PageContext(run=run, base=run, **more), "timeline")
    return json.loads(json.dumps(made))["blocks"][-1]


def texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (*texts(key), *texts(item))]
    return [text for item in value for text in texts(item)] if isinstance(value, list) else []


def test_the_page_of_a_recorded_run_has_all_its_tracks(small: api.Run) -> None:
    block = document(small)

    groups = list(dict.fromkeys(track["group"] for track in block["tracks"]))
    assert groups == ["rank-0", "rank-1"]
    kinds = [track["kind"] for track in block["tracks"] if track["group"] == "rank-0"]
    assert kinds[:2] == ["steps", "phases"]
    assert {"thread", "stream"} <= set(kinds)
    assert block["from_ns"] == 0
    assert block["to_ns"] > 1_000_000_000
    assert block["sliceable"] is True
    assert block["details"] is None
    assert {step["process"] for step in block["steps"]} == {"rank-0", "rank-1"}


def test_the_page_begins_at_the_steps_the_span_or_the_moments_asked_for(gpu: api.Run) -> None:
    whole = document(gpu)["window"]
    steps = document(gpu, scope=Scope(steps=(2, 3)))["window"]
    assert (steps["to_ns"] - steps["from_ns"]) < (whole["to_ns"] - whole["from_ns"])
    numbers = {step["step"]: step for step in document(gpu)["steps"]}
    assert (steps["from_ns"], steps["to_ns"]) == (numbers[2]["from_ns"], numbers[3]["to_ns"])
    at = document(gpu, params={"at": "1000:50000"})["window"]
    assert (at["from_ns"], at["to_ns"]) == (1_000, 50_000)
    for nonsense in ("5:1", "a:b", "-1:4", "1:99999999999999999999"):
        assert document(gpu, params={"at": nonsense})["window"]["to_ns"] == whole["to_ns"]


def test_a_worker_has_its_own_tracks_and_steps(small: api.Run) -> None:
    block = document(small, scope=Scope(worker="rank-1"))
    assert {track["group"] for track in block["tracks"]} == {"rank-1"}
    assert {step["process"] for step in block["steps"]} == {"rank-1"}
    assert {track["key"].split("/")[0] for track in block["window"]["tracks"]} <= {"rank-1"}


def test_a_search_and_the_slice_that_it_finds(gpu: api.Run) -> None:
    found = timeline.search(gpu, "LINEAR")
    assert found["schema"] == "stepscope.search/1"
    assert found["total"] == len(found["hits"]) == 6
    hit = found["hits"][0]
    assert hit["name"] == "aten::linear"
    told = timeline.detail(gpu, hit["id"])
    assert told["schema"] == "stepscope.slice/1"
    assert (told["name"], told["start_ns"], told["step"]) == (hit["name"], hit["start_ns"], hit["step"])
    assert told["launched"]
    kernel = timeline.detail(gpu, told["launched"][0]["id"])
    assert kernel["operator"] is not None
    assert kernel["place"]["shown"].endswith("train.py:7")
    assert [fact["unit"] for fact in kernel["facts"] if fact["label"] == "from launch to start"] == ["ns"]
    with pytest.raises(UsageError):
        timeline.detail(gpu, 10**9)


def test_hostile_names_are_harmless_text(fuzzed_run: Path) -> None:
    run = opened(fuzzed_run)
    block = document(run)
    hits = timeline.search(run, "alert")["hits"]
    details = [timeline.detail(run, hit["id"]) for hit in hits]
    assert hits
    assert any(EVIL[0] == name for name in block["window"]["names"])
    assert [text for text in texts([block, hits, details]) if UNSAFE.search(text)] == []


def test_the_single_file_holds_a_few_steps_with_details(gpu: api.Run) -> None:
    block = document(gpu, embedded=True)
    assert (block["window"]["from_ns"], block["window"]["to_ns"]) == (block["from_ns"], block["to_ns"])
    assert 0 < len(block["steps"]) <= 3
    assert block["sliceable"] is False
    drawn = {str(identifier) for track in block["window"]["tracks"] for identifier in track["id"]}
    assert block["details"]
    assert set(block["details"]) <= drawn
    assert any("stepscope view" in note for note in block["notes"])
    assert len(json.dumps(block)) < 500_000


def test_a_run_without_a_trace_says_so(growing_run: Any) -> None:
    run = opened(growing_run.folder)
    blocks = page(PageContext(run=run, base=run), "timeline")["blocks"]
    assert [block["kind"] for block in blocks] == ["text", "timeline"]
    assert blocks[1]["sliceable"] is False
    with pytest.raises(UsageError, match="no trace"):
        timeline.slice_of_trace(run, None, Path("never.json.gz"))


def test_a_slice_of_the_trace_holds_the_steps_asked_for(gpu: api.Run, tmp_path: Path) -> None:
    out = timeline.slice_of_trace(gpu, (2, 3), tmp_path / "cut.json.gz")
    with gzip.open(out) as file:
        events = json.load(file)["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}
    with pytest.raises(UsageError) as refused:
        timeline.slice_of_trace(gpu, (50, 60), tmp_path / "none.json.gz")
    assert not str(refused.value).startswith("-")


def test_what_pages_of_a_large_run_need_is_made_before_they_are_asked_for(
    gpu_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(gpu_trace)
    monkeypatch.setattr(timeline, "LARGE", 1)
    timeline.prepare(run)

    def too_late(*_: Any) -> None:
        raise AssertionError("was not prepared")

    for name in ("table", "flame_graph"):
        monkeypatch.setattr(run, name, too_late)
    for key, params in (*timeline.SLOW_PAGES, ("timeline", {})):
        assert page(PageContext(run=run, base=run, params=params), key)["blocks"]


def test_the_origin_is_the_first_instant_of_the_run(small: api.Run) -> None:
    assert small.timeline.origin_ns <= START
    assert min(step.from_ns for step in small.timeline.steps) >= 0
