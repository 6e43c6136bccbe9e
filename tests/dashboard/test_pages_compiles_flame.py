"""The pages on compiles and the flame graph as documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.dashboard.pages import flame
from stepscope.errors import UsageError
from tests.builders import step_rows
from tests.dashboard import served_runs
from tests.dashboard.page_shapes import is_empty, page, part, parts
from tests.records import replace
from tests.report import fabricate_compilers
from tests.run_folders import make_run_folder

COMPILES = Path(__file__).resolve().parents[1] / "data" / "compiles"


@dataclass
class Runs:
    """A catalog of runs that are open already."""

    opened: Mapping[str, api.Run] = field(default_factory=dict)

    def runs(self, text: str = "") -> Sequence[Mapping[str, Any]]:
        return [{"id": key, "name": f"run {key}", "kind": "run"} for key in self.opened if text in key]

    def run(self, key: str) -> api.Run:
        if key not in self.opened:
            raise UsageError(f"{key}: no such run")
        return self.opened[key]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """A recorded run without windows, stacks or compilers."""
    manifest = {"command": ["python", "my train.py"]}
    return api.open_run(make_run_folder(tmp_path_factory.mktemp("plain"), manifest=manifest))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, api.Run]:
    """Two recorded runs with stacks, of which one reads its data elsewhere, and a window of a GPU."""
    folder = tmp_path_factory.mktemp("sampled")
    for name in ("one", "two"):
        (folder / name).mkdir()
    return {name: api.open_run(served_runs.small(folder / name)) for name in ("one", "two")}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """The recording of a script whose compiled functions compile again and again."""
    events = [json.loads(line) for line in (COMPILES / "torch-2.13.jsonl").read_text("utf-8").splitlines()]
    head, *lines = (json.loads(line) for line in (COMPILES / "torch-2.13.steps.jsonl").read_text("utf-8").splitlines())
    steps = [dict(zip(head["columns"], line, strict=True)) for line in lines if isinstance(line, list)]
    return api.open_run(make_run_folder(tmp_path_factory.mktemp("compiled"), steps=steps, events=events))


# ------------------------------------------------------------------------------------------------------- compiles


def test_compiles_by_cause_and_step(compiled: api.Run):
    assert not is_empty(compiled, "compiles")
    document = page(compiled, "compiles")
    rows = part(document, "compiles")["rows"]
    assert sum(row["count"] for row in rows) == sum(row["count"] for row in compiled.table("compiles").rows)
    chart = part(document, "compile-steps-train")
    assert chart["select"] == "steps"
    assert chart["x"]["values"] == sorted(chart["x"]["values"])
    assert part(document, "compile-changes")["rows"]
    assert part(document, "graph-breaks")["rows"]
    figures = {item["label"]: item for item in parts(document, "figures")[0]["items"]}
    assert figures["Compiles"]["value"] == compiled.analysis.compilers.backends[0].compiles
    assert "union" in figures["Compile time"]["help"]["text"]


def with_compilers(run: api.Run, **changes: Any) -> api.Run:
    """The run as if compilers had done what `fabricate_compilers` says."""
    view = replace(fabricate_compilers.view(served_runs.PROJECT + "/train.py"), **changes)
    copy = api.open_run(run.folder)
    copy.__dict__["analysis"] = replace(run.analysis, compilers=view)  # where the property keeps it
    return copy


def test_reasons_quote_no_source_where_none_is_wanted(plain: api.Run):
    text = "s.calls == 0  # self.calls += 1  # train.py:7 in mean"
    cause = fabricate_compilers.cause(served_runs.PROJECT + "/train.py", text=text)
    run = with_compilers(plain, causes=(cause,))
    said = [part(page(run, "compiles", source=source), "compiles")["rows"][0]["text"] for source in (True, False)]
    assert said == [text, "s.calls == 0"]


def test_a_function_at_its_limit_and_what_went_on(plain: api.Run):
    document = page(with_compilers(plain), "compiles")
    (row,) = part(document, "compile-limits")["rows"]
    assert (row["place"]["line"], row["before_ms"], row["after_ms"]) == (14, 52.0, 61.0)
    (warning, *_) = [block for block in parts(document, "text") if "after warm-up" in block["text"]]
    assert "410" in warning["text"]
    assert any("profiler windows" in block["text"] for block in parts(document, "text"))


# ------------------------------------------------------------------------------------------------------- flame graph


def test_flame_graphs_of_two_runs(sampled: dict[str, api.Run]):
    catalog = Runs({"one": sampled["one"], "two": sampled["two"]})
    document = page(sampled["one"], "flame", catalog=catalog, **{"with": "two"})
    (block,) = parts(document, "flame")
    assert block["document"]["sides"] is not None
    assert all(tree["base"] is not None for tree in block["document"]["trees"])
    choice = parts(document, "choice")[-1]
    assert (choice["param"], choice["value"]) == ("with", "two")


def test_a_run_to_compare_with_that_is_not_there(sampled: dict[str, api.Run]):
    document = page(sampled["one"], "flame", catalog=Runs({"two": sampled["two"]}), **{"with": "../x"})
    (said,) = parts(document, "empty")
    assert "no such run" in said["why"]


def test_a_rank_that_was_not_sampled(sampled: dict[str, api.Run]):
    (said,) = parts(page(sampled["one"], "flame", worker="rank-1"), "empty")
    assert "rank-1" in said["why"]
    assert parts(page(sampled["one"], "flame", worker="rank-0"), "flame")


def test_trees_have_as_many_boxes_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    frames = [f"work{number} (/home/user/project/a.py:{number})" for number in range(30)]
    before = 'process 100:"python train.py";thread (100): MainThread;<module> (/home/user/project/t.py:1)'
    text = "".join(f"{before};{one};{other} 1\n" for one in frames for other in frames)
    run = api.open_run(make_run_folder(tmp_path, steps=step_rows(500), stacks_raw=text))

    def boxes() -> list[int]:
        (block,) = parts(page(run, "flame", by=next(by)), "flame")
        return [len(tree["parent"]) for tree in block["document"]["trees"]]

    by = iter(("function", "line"))  # what was drawn is kept
    every = boxes()
    monkeypatch.setattr(flame, "SERVED_BOXES", 700)
    fewer = boxes()
    assert max(every) > 900
    assert max(fewer) <= 700
    assert sum(fewer) <= max(700, flame.LEAST_BOXES * len(fewer))
