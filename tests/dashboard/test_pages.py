"""Pages as documents: what holds for all of them, and what each says of runs whose truth is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.dashboard import pages
from stepscope.dashboard.pages import PageContext, flame, timeline
from stepscope.errors import UsageError
from stepscope.model import Report
from stepscope.report.experiment_report import dumps
from tests.builders import step_rows
from tests.dashboard import served_runs
from tests.dashboard.opened import OPTIONS, Runs, figures, harmful, is_empty, page, part, parts, said
from tests.records import replace
from tests.report import fabricate_compilers
from tests.report.fabricate_experiment import experiment
from tests.run_folders import make_run_folder

EVIL = "</script>\x1b[31m\u202ename"
OF_TRACES = ("operators", "kernels", "modules", "memory", "gpu")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """A recorded run without windows, stacks or compilers."""
    manifest = {"command": ["python", "my train.py"]}
    return api.open_run(make_run_folder(tmp_path_factory.mktemp("plain"), manifest=manifest))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """A recording in which everything that has a name has a hostile one."""
    return api.open_run(served_runs.fuzzed(tmp_path_factory.mktemp("fuzzed") / "runs"), options=OPTIONS)


def test_a_page_that_there_is_not_is_named(small: api.Run) -> None:
    with pytest.raises(UsageError, match="no such page"):
        pages.page(PageContext(small, small), "nope")


def test_a_page_says_what_it_cannot_follow(small: api.Run) -> None:
    found = page(small, "environment", worker="rank-0", steps=(1, 2))
    assert found["scope"]["steps"] == [1, 2]
    assert found["scope"]["note"] == "This page does not follow the choice of a worker or range of steps: it shows all."
    assert page(small, "steps", worker="rank-0")["scope"]["note"] is None


@pytest.mark.parametrize("span", ["worker0/span9x", "nope", "/span", "1/span9999999999"])
def test_a_span_that_is_none_is_an_error(workers: api.Run, span: str) -> None:
    with pytest.raises(UsageError):
        page(workers, "steps", span=span)


@pytest.mark.parametrize("key", pages.PAGES)
def test_names_from_a_run_are_harmless_text(fuzzed: api.Run, key: str) -> None:
    document = page(fuzzed, key, catalog=Runs({EVIL: fuzzed}))
    assert not harmful(document)


@pytest.mark.parametrize("key", [*OF_TRACES, "compiles", "flame"])
def test_every_page_says_why_it_is_empty_and_what_to_record(plain: api.Run, key: str) -> None:
    assert is_empty(plain, key)
    (empty,) = parts(page(plain, key), "empty")
    assert empty["why"].endswith(".")
    assert empty["record"]
    assert empty["command"].startswith("stepscope run ")
    assert empty["command"].endswith("-- python 'my train.py'")


def test_what_no_trace_holds_of_a_choice_is_said(workers: api.Run) -> None:
    few = api.open_run(workers.folder, options=replace(OPTIONS, steps=(50, 60)))
    for key in OF_TRACES:
        (elsewhere,) = parts(page(workers, key, worker="rank-7"), "empty")
        assert "all" in elsewhere["why"]
        (earlier,) = parts(page(few, key, base=workers, steps=(50, 60)), "empty")
        assert "steps 50 to 60" in earlier["why"]
        assert "between 1 and 2" in earlier["why"]


def test_a_run_that_nobody_explained_is_not_called_healthy(fabricated: Report, nothing: api.Run) -> None:
    asleep = {"what": "asleep", "ms": 30.0, "share": 0.3, "source": "system.jsonl"}
    row = {"ms": 30.0, "share": 0.3, "parts": [asleep], "unseen": [], "large": True}
    found = page(nothing.showing(replace(fabricated, findings=(), abstained=(), unexplained=row)), "findings")
    assert parts(found, "findings")[0]["healthy"] is None
    assert "No finding explains 30 % of the step (30.0 ms): asleep 30 %." in said(found, "warning")


def test_a_range_of_steps_is_what_was_read(small: api.Run) -> None:
    def chosen(first: int, last: int, key: str = "steps", **more: Any) -> dict[str, Any]:
        run = api.open_run(small.folder, options=replace(OPTIONS, steps=(first, last)))
        return page(run, key, base=small, steps=(first, last), **more)

    found = chosen(30, 50)
    assert part(found, "steps")["x"]["values"] == list(range(30, 51))
    assert part(found, "steps")["marks"] == []  # the first that was read is no warm-up for that
    assert figures(found)["Steady steps"]["value"] == 42
    assert figures(chosen(1, 2, worker="rank-0"))["Mean step"]["value"] > 0
    assert "None of the steps that are chosen" in chosen(900, 950)["blocks"][0]["why"]
    machine = chosen(4, 10, "system")
    whole = part(page(small, "system"), "cpu")["x"]["values"]
    assert part(machine, "cpu")["x"]["values"] == whole[:2]
    assert len(part(machine, "steps-over-time")["x"]["values"]) == 7


def test_one_operator_shows_what_lies_behind_it_however_it_is_called(workers: api.Run) -> None:
    document = page(workers, "operators", operator="aten::mm")
    (stack,) = part(document, "stacks")["rows"]
    assert "train.py:7" in stack["stack"]
    (launched,) = part(document, "launched")["rows"]
    assert (launched["calls"], launched["total_ns"]) == (4, 900_000)
    # a click names it as it is shown
    rows = part(page(workers, "operators"), "operators")["rows"]
    (shown,) = [row["name"] for row in rows if row["name"].startswith("aten::\\x1b")]
    assert part(page(workers, "operators", operator=shown), "stacks")["rows"]


def test_of_compilers_no_source_is_quoted_where_none_is_wanted(plain: api.Run) -> None:
    text = "s.calls == 0  # self.calls += 1  # train.py:7 in mean"
    file = served_runs.PROJECT + "/train.py"
    view = fabricate_compilers.view(file)

    def run(**changes: Any) -> api.Run:
        copy = api.open_run(plain.folder)
        # where the property keeps it
        copy.__dict__["analysis"] = replace(plain.analysis, compilers=replace(view, **changes))
        return copy

    quoted = run(causes=(fabricate_compilers.cause(file, text=text),))
    found = [part(page(quoted, "compiles", source=source), "compiles")["rows"][0]["text"] for source in (True, False)]
    assert found == [text, "s.calls == 0"]
    (row,) = part(page(run(), "compiles"), "compile-limits")["rows"]
    assert (row["place"]["line"], row["before_ms"], row["after_ms"]) == (14, 52.0, 61.0)


def test_flame_graphs_of_two_runs_and_of_one_rank(small: api.Run, fuzzed: api.Run) -> None:
    document = page(small, "flame", catalog=Runs({"one": small, "two": fuzzed}), key="one", **{"with": "two"})
    (block,) = parts(document, "flame")
    assert block["document"]["sides"] is not None
    assert all(tree["base"] is not None for tree in block["document"]["trees"])
    choice = parts(document, "choice")[-1]
    assert (choice["param"], choice["value"]) == ("with", "two")
    (refused,) = parts(page(small, "flame", catalog=Runs({"two": fuzzed}), **{"with": "../x"}), "empty")
    assert "no such run" in refused["why"]
    (silent,) = parts(page(small, "flame", worker="rank-1"), "empty")
    assert "rank-1" in silent["why"]
    assert parts(page(small, "flame", worker="rank-0"), "flame")


def test_trees_have_as_many_boxes_as_fit(tmp_path: Path) -> None:
    frames = [f"work{number} (/home/user/project/a.py:{number})" for number in range(30)]
    before = 'process 100:"python train.py";thread (100): MainThread;<module> (/home/user/project/t.py:1)'
    text = "".join(f"{before};{one};{other} 1\n" for one in frames for other in frames)
    run = api.open_run(make_run_folder(tmp_path, steps=step_rows(500), stacks_raw=text))

    def boxes(most: int) -> list[int]:
        (block,) = parts(page(run, "flame", boxes=most), "flame")
        return [len(tree["parent"]) for tree in block["document"]["trees"]]

    every, fewer = boxes(120_000), boxes(700)
    assert max(every) > 900
    assert max(fewer) <= 700
    assert sum(fewer) <= max(700, flame.LEAST_BOXES * len(fewer))


def test_sides_can_be_turned_round(slow: dict[str, api.Run]) -> None:
    found = page(slow["after"], "compare", catalog=Runs(slow), key="after", side="baseline", **{"with": "before"})
    assert "before against after" in said(found)
    assert part(found, "phases")["rows"][0]["difference_ms"] == pytest.approx(-3, rel=0.05)


@pytest.mark.parametrize("other", ["nope", "after"])
def test_what_cannot_be_compared_says_why(slow: dict[str, api.Run], other: str) -> None:
    (why,) = parts(page(slow["after"], "compare", catalog=Runs(slow), key="after", **{"with": other}), "empty")
    assert why["why"]


def test_an_experiment_can_be_chosen_like_a_run(tmp_path: Path, slow: dict[str, api.Run]) -> None:
    catalog = Runs({"trial": slow["before"]}, {"trial": tmp_path})
    (tmp_path / "experiment.json").write_bytes(dumps(experiment()))
    found = page(slow["after"], "compare", catalog=catalog, key="after", **{"with": "trial"})
    assert part(found, "candidates")["rows"]
    (tmp_path / "experiment.json").write_bytes(b"{}")
    assert parts(page(slow["after"], "compare", catalog=catalog, key="after", **{"with": "trial"}), "empty")


def test_the_timeline_begins_at_the_steps_or_the_moments_asked_for(small: api.Run, workers: api.Run) -> None:
    def window(**given: Any) -> tuple[int, int]:
        found = parts(page(workers, "timeline", **given), "timeline")[0]["window"]
        return found["from_ns"], found["to_ns"]

    (whole,) = parts(page(workers, "timeline"), "timeline")
    numbers = {step["step"]: step for step in whole["steps"]}
    assert window(steps=(2, 2)) == (numbers[2]["from_ns"], numbers[2]["to_ns"])
    assert window(at="1000:50000") == (1_000, 50_000)
    for nonsense in ("5:1", "a:b", "-1:4", "1:99999999999999999999"):
        assert window(at=nonsense) == window()
    (own,) = parts(page(small, "timeline", worker="rank-1"), "timeline")
    assert {track["group"] for track in own["tracks"]} == {step["process"] for step in own["steps"]} == {"rank-1"}
    assert {track["key"].split("/")[0] for track in own["window"]["tracks"]} <= {"rank-1"}


def test_names_that_are_found_are_harmless_text(fuzzed: api.Run) -> None:
    hits = timeline.search(fuzzed, "alert")["hits"]
    details = [timeline.detail(fuzzed, hit["id"]) for hit in hits]
    assert hits
    assert not harmful([hits, details])


def test_a_run_without_a_trace_says_so(plain: api.Run) -> None:
    found = page(plain, "timeline")["blocks"]
    assert [block["kind"] for block in found] == ["text", "timeline"]
    assert found[1]["sliceable"] is False
    with pytest.raises(UsageError, match="no trace"):
        timeline.slice_of_trace(plain, None, Path("never.json.gz"))


def test_what_pages_of_a_large_run_need_is_made_before_they_are_asked_for(
    gpu_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = api.open_run(gpu_trace, options=OPTIONS)
    monkeypatch.setattr(timeline, "LARGE", 1)
    timeline.prepare(run)

    def too_late(*_: Any) -> None:
        raise AssertionError("was not prepared")

    for name in ("table", "flame_graph"):
        monkeypatch.setattr(run, name, too_late)
    for key, params in (*timeline.SLOW_PAGES, ("timeline", {})):
        assert page(run, key, **params)["blocks"]
