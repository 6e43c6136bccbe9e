"""The pages on findings and steps, as documents, and what holds for all pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope import api
from stepscope.dashboard import pages
from stepscope.dashboard.pages import PageContext
from stepscope.errors import UsageError
from stepscope.model import Report
from tests.builders import MS, T0, step_rows
from tests.dashboard import served_runs
from tests.dashboard.opened import EVIL, KEYS, OPTIONS, Runs, figures, page, part, series
from tests.records import replace
from tests.run_folders import make_run_folder

# ------------------------------------------------------------------------------------------------------ the registry


def test_a_page_that_there_is_not_is_named(small: api.Run) -> None:
    with pytest.raises(UsageError, match="no such page"):
        pages.page(PageContext(small, small), "nope")


def test_a_page_says_what_it_cannot_follow(small: api.Run) -> None:
    found = page(small, "environment", worker="rank-0", steps=(1, 2))
    assert found["scope"]["steps"] == [1, 2]
    assert found["scope"]["note"] == "This page does not follow the choice of a worker or range of steps: it shows all."
    assert page(small, "steps", worker="rank-0")["scope"]["note"] is None


@pytest.mark.parametrize("span", ["worker0/span9x", "nope", "/span", "1/span9999999999"])
def test_a_span_that_is_none_is_an_error(traces: api.Run, span: str) -> None:
    with pytest.raises(UsageError):
        page(traces, "steps", span=span)


@pytest.mark.parametrize("key", KEYS)
def test_names_from_a_run_are_harmless_text(tmp_path: Path, key: str) -> None:
    run = api.open_run(served_runs.fuzzed(tmp_path / "runs"), options=OPTIONS)
    text = json.dumps(page(run, key, catalog=Runs({EVIL: run})), ensure_ascii=False)
    assert not any(character in text for character in "\x00\x1b\u202e\u2028")


# ------------------------------------------------------------------------------------------------------ findings


def test_a_run_that_nobody_explained_is_not_called_healthy(fabricated: Report, nothing: api.Run) -> None:
    part = {"what": "asleep", "ms": 30.0, "share": 0.3, "source": "system.jsonl"}
    row = {"ms": 30.0, "share": 0.3, "parts": [part], "unseen": [], "large": True}
    found = page(nothing.showing(replace(fabricated, findings=(), abstained=(), unexplained=row)), "findings")
    block = next(block for block in found["blocks"] if block["kind"] == "findings")
    assert block["healthy"] is None
    warnings = [block["text"] for block in found["blocks"] if block["kind"] == "text" and block["tone"] == "warning"]
    assert "Nobody explained 30 % of the step (30.0 ms): asleep 30 %." in warnings


# ------------------------------------------------------------------------------------------------------ steps


def test_long_runs_are_thinned_with_their_stalls(tmp_path: Path) -> None:
    rows = step_rows(5_000)
    rows[3_333] = {**rows[3_333], "wall_ns": 900 * MS, "other_ns": 891 * MS}
    run = api.open_run(make_run_folder(tmp_path, steps=rows), options=OPTIONS)
    chart = part(page(run, "steps"), "steps")
    assert len(chart["x"]["values"]) <= 600
    at = chart["x"]["values"].index(3_333)
    assert sum(values[at] for values in series(chart).values()) == pytest.approx(900)
    assert "of 5,000 steps" in chart["notes"][0]


def test_a_range_of_steps_is_what_was_read(small: api.Run) -> None:
    chosen = api.open_run(small.folder, options=replace(OPTIONS, steps=(30, 50)))
    found = page(chosen, "steps", base=small, steps=(30, 50))
    assert part(found, "steps")["x"]["values"] == list(range(30, 51))
    assert part(found, "steps")["marks"] == []  # the first that was read is no warm-up for that
    assert figures(found)["Steady steps"]["value"] == 42
    profiled = api.open_run(small.folder, options=replace(OPTIONS, steps=(1, 2)))
    assert figures(page(profiled, "steps", base=small, steps=(1, 2), worker="rank-0"))["Mean step"]["value"] > 0
    nowhere = api.open_run(small.folder, options=replace(OPTIONS, steps=(900, 950)))
    found = page(nowhere, "steps", base=small, steps=(900, 950))
    assert "None of the steps that are chosen" in found["blocks"][0]["why"]


def test_traces_tell_what_devices_did_in_each_step(traces: api.Run) -> None:
    found = page(traces, "steps")
    chart = part(found, "profiled")
    (overview,) = [s.overview for s in traces.analysis.views.spans if s.span.worker == "worker0"]
    assert chart["x"]["values"] == [int(step.step) for step in overview.steps]
    assert [sum(v) for v in zip(*series(chart).values(), strict=True)] == pytest.approx(
        [step.wall_ns for step in overview.steps], rel=0.001
    )
    rows = part(found, "profiled-means")["rows"]
    assert {row["split"] for row in rows} == {"stepscope", "TensorBoard plugin"}
    assert {row["span"] for row in rows} == {"worker0/span1", "worker1/span1"}
    one = page(traces, "steps", span="worker1/span1")
    assert {row.get("span") for row in part(one, "profiled-means")["rows"]} == {"worker1/span1"}


def test_logged_values_are_drawn_over_the_steps(tmp_path: Path) -> None:
    logged = [
        {"kind": "scalar", "name": "loss", "value": 2.0 - s / 100, "step": s, "time_ns": T0 + s} for s in range(50)
    ]
    run = api.open_run(make_run_folder(tmp_path, steps=step_rows(50), events=logged), options=OPTIONS)
    chart = part(page(run, "steps"), "logged-0")
    assert (chart["title"], chart["x"]["values"][-1], chart["series"][0]["values"][0]) == ("loss", 49, 2.0)
