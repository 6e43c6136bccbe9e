"""The page of metrics: every curve of a run in its chart, what is not a number, what happened meanwhile, other runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stepscope import api
from tests.builders import MS, T0, step_rows
from tests.dashboard.opened import OPTIONS, Runs, is_empty, page, part, parts, said, series
from tests.run_folders import make_run_folder, metrics_event

STEPS = 300
START = T0 + 10 * MS  # of the first step; the run began before


def trained(folder: Path, name: str = "run", *, steps: int = STEPS, higher: float = 0.0, **more: Any) -> api.Run:
    """A run of three epochs whose loss is no number in step 120 and infinite in 130."""
    rows = [{**row, "epoch": at // 100} for at, row in enumerate(step_rows(steps, start_ns=START))]
    times = [row["start_ns"] + 5 * MS for row in rows]
    loss = [2 * math.exp(-at / 80) + 0.1 + higher for at in range(steps)]
    loss[120], loss[130] = math.nan, math.inf
    norms = [1 + at % 2 for at in range(steps)]
    layers = [
        (f"watch/grad/blocks.{layer}.weight", "watch", times[::10], [10.0**-layer + at for at in range(steps // 10)])
        for layer in range(3)
    ]
    layers[1][3][12] = math.nan
    events = [
        metrics_event(
            ("train/loss", "log", times, loss),
            ("train/grad_norm", "clipping", times, norms),
            ("train/lr/0", "optimizer", [times[0], times[200]], [1e-3, 1e-4]),
            ("train/lr/1", "optimizer", times[:1], [1e-2]),
            ("eval/loss", "log", [times[99] + 4 * MS, times[199] + 4 * MS], [1.5, 0.5]),
            *layers,
        ),
        {"kind": "save", "path": "x.pt", "time_ns": times[150], "duration_ns": MS, "step": 150},
        {"kind": "region", "name": "evaluation", "time_ns": times[99] + 2 * MS, "duration_ns": MS, "step": 99},
    ]
    path = make_run_folder(folder, name=name, steps=rows, events=events, manifest={"started_ns": T0}, **more)
    return api.open_run(path, options=OPTIONS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    return trained(tmp_path_factory.mktemp("trained"))


def test_curves_stand_in_charts_by_group(run: api.Run) -> None:
    found = page(run, "metrics")
    titles = [chart["title"] for chart in parts(found, "chart")]
    assert titles[:4] == ["train/loss", "train/grad_norm", "train/lr", "eval/loss"]
    assert "perf/step_ms" in titles
    assert said(found, "plain").startswith("train: 3 charts. eval: 1 chart. perf: 6 charts")
    assert {chart["title"] for chart in parts(page(run, "metrics", group="eval"), "chart")} == {"eval/loss"}
    (options,) = [block["options"] for block in parts(found, "choice") if block["param"] == "group"]
    assert [option["value"] for option in options] == ["", "train", "eval", "perf", "layers"]

    validated = part(found, "m-eval-loss")
    assert (validated["x"]["values"], validated["series"][0]["values"]) == ([99, 199], [1.5, 0.5])
    step_ms = part(found, "m-perf-step-ms")
    assert (step_ms["y"]["unit"], step_ms["series"][0]["values"][0]) == ("ms", 10)
    rows = {row["name"]: row for row in part(found, "curves")["rows"]}
    assert rows["train/loss"] | {"points": STEPS, "not_finite": 2, "not_finite_step": 120} == rows["train/loss"]
    assert (rows["perf/step_ms"]["unit"], rows["perf/step_ms"]["last"]) == ("ms", 10)


def test_what_is_no_number_is_a_mark_and_no_gap_is_drawn_over(run: api.Run) -> None:
    loss = part(page(run, "metrics"), "m-train-loss")
    (line,) = loss["series"]
    assert line["odd"] == [[120, "NaN"], [130, "inf"]]
    assert [at for at, value in enumerate(line["values"]) if value is None] == [120, 130]
    assert "2 not finite, the first NaN at step 120 (log)." in loss["sentence"]


def test_a_learning_rate_holds_until_the_next(run: api.Run) -> None:
    rates = part(page(run, "metrics", smooth="50"), "m-train-lr")
    assert all(each["held"] for each in rates["series"])
    assert rates["x"]["values"] == [0, 200, STEPS - 1]
    assert series(rates) == {"0": [1e-3, 1e-4, 1e-4], "1": [1e-2, None, 1e-2]}
    assert "over 2 steps" in rates["sentence"]


def test_smoothing_says_so_and_leaves_the_values(run: api.Run) -> None:
    chart = part(page(run, "metrics", smooth="10"), "m-train-loss")
    values, smooth = chart["series"]
    assert (values["name"], values["faint"]) == ("train/loss", True)
    assert (smooth["name"], "faint" in smooth) == ("train/loss, mean of the last 10 values", False)
    assert "Smoothed: mean of the last 10 values" in chart["sentence"]
    finite = [value for value in values["values"][:126] if value is not None]
    assert smooth["values"][125] == pytest.approx(sum(finite[-10:]) / 10)  # of the ten that are numbers
    assert smooth["values"][120] is None


def test_what_happened_is_marked(run: api.Run, tmp_path: Path) -> None:
    marks = part(page(run, "metrics"), "m-train-loss")["marks"]
    assert [(mark["from"], mark["label"]) for mark in marks] == [
        (99, "evaluation"),
        (100, "epoch 1"),
        (150, "checkpoint"),
        (200, "epoch 2, learning rate × 0.1"),
    ]
    assert all(mark["event"] and mark["from"] == mark["to"] for mark in marks)

    rows = [{**row, "epoch": at // 2} for at, row in enumerate(step_rows(100))]
    many = page(api.open_run(make_run_folder(tmp_path, steps=rows), options=OPTIONS), "metrics")
    assert len(part(many, "m-perf-step-ms")["marks"]) == 7
    assert "Marked: one in 7 of 49 epochs." in said(many, "note")


def test_steps_that_count_for_no_timing_are_marked_as_left_out(tmp_path: Path) -> None:
    rows = [{**row, "in_window": 20 <= at < 23} for at, row in enumerate(step_rows(40))]
    monitor = {"kind": "monitor", "step": 30, "time_ns": rows[30]["start_ns"]}
    loss = metrics_event(("train/loss", "log", [row["start_ns"] + MS for row in rows], [1.0] * 40))
    run = api.open_run(make_run_folder(tmp_path, steps=rows, events=[loss, monitor]), options=OPTIONS)
    found = page(run, "metrics")
    drawn = part(found, "m-perf-step-ms")
    assert drawn["x"]["values"] == [at for at in range(40) if at not in (20, 21, 22, 30)]
    assert [(mark["from"], mark["to"], mark["label"]) for mark in drawn["marks"]] == [
        (20, 22, "left out: under the profiler"),
        (30, 30, "left out: with monitors, of --watch or an alarm"),
    ]
    assert drawn["notes"] == ["Left out: 3 steps under the profiler, 1 step with monitors, of --watch or an alarm."]
    assert part(found, "m-train-loss")["marks"] == []
    over_time = part(page(run, "metrics", over="time"), "m-perf-step-ms")["marks"][0]
    assert over_time["to"] - over_time["from"] == pytest.approx(0.03)


def test_runs_are_laid_over_each_other(run: api.Run, tmp_path: Path) -> None:
    other = trained(tmp_path, "other", higher=1.0)
    catalog = Runs({"one": run, "two": other, "three": other})
    found = page(run, "metrics", catalog=catalog, key="one", **{"with": "two", "with2": "three"})
    drawn = series(part(found, "m-train-loss"))
    assert list(drawn) == ["train/loss", "train/loss: run two", "train/loss: run three"]
    assert drawn["train/loss: run two"][7] == pytest.approx(drawn["train/loss"][7] + 1)
    asked = [block["param"] for block in parts(found, "choice")]
    assert asked == ["over", "smooth", "with", "with2", "with3", "group"]

    part_of = page(run, "metrics", catalog=catalog, key="one", steps=(10, 20), base=run, **{"with": "two"})
    own, others = series(part(part_of, "m-train-loss")).values()
    assert [value for value in others if value is not None] == pytest.approx([value + 1 for value in own[10:21]])
    (refused,) = parts(page(run, "metrics", catalog=catalog, **{"with": "gone"}), "empty")
    assert "gone: no such run" in refused["why"].lower()


def test_layers_are_a_map_and_small_charts(run: api.Run) -> None:
    found = page(run, "metrics", group="layers")
    heat, small = parts(found, "chart")
    names = [f"blocks.{layer}.weight" for layer in range(3)]
    assert (heat["type"], list(series(heat)), heat["x"]["values"][:3]) == ("heat", names, [0, 10, 20])
    assert heat["series"][1]["odd"] == [[12, "NaN"]]
    assert "NaN first in blocks.1.weight at step 120" in heat["sentence"]
    assert (small["type"], list(series(small))) == ("multiples", names)
    assert not any(chart["title"].startswith("watch/") for chart in parts(page(run, "metrics"), "chart"))


def test_long_curves_are_thinned_with_what_stands_out(tmp_path: Path) -> None:
    rows = step_rows(6_000)
    times = [row["start_ns"] for row in rows]
    values = [1.0] * 6_000
    values[2_777] = 9.0
    values[4_503:] = [math.nan] * len(values[4_503:])
    events = [metrics_event(("loss", "log", times, values))]
    run = api.open_run(make_run_folder(tmp_path, steps=rows, events=events), options=OPTIONS)
    chart = part(page(run, "metrics"), "m-loss")
    assert len(chart["x"]["values"]) < 1_300
    (line,) = chart["series"]
    assert line["values"][chart["x"]["values"].index(2_777)] == 9
    assert chart["x"]["values"][line["odd"][0][0]] == 4_503
    assert "of 6,000 points" in chart["notes"][0]


def test_a_range_of_steps_holds_for_all_curves(run: api.Run) -> None:
    few = api.open_run(run.folder, options=replace(OPTIONS, steps=(90, 110)))
    found = page(few, "metrics", base=run, steps=(90, 110))
    assert part(found, "m-train-loss")["x"]["values"] == list(range(90, 111))
    assert part(found, "m-eval-loss")["x"]["values"] == [99]
    rates = series(part(found, "m-train-lr"))
    assert rates == {"0": [1e-3, 1e-3], "1": [1e-2, 1e-2]}  # as they were before
    assert [mark["label"] for mark in part(found, "m-train-loss")["marks"]] == ["evaluation", "epoch 1"]


def test_a_run_without_curves_says_what_to_record(nothing: api.Run, run: api.Run) -> None:
    assert is_empty(nothing, "metrics")
    assert not is_empty(run, "metrics")
    (empty,) = parts(page(nothing, "metrics"), "empty")
    assert "stepscope.log" in empty["record"]
    assert empty["command"].startswith("stepscope run ")


def test_a_file_holds_few_points_and_no_choice(run: api.Run) -> None:
    found = page(run, "metrics", embedded=True, limit=20)
    assert parts(found, "choice") == []
    assert len(part(found, "m-train-loss")["x"]["values"]) <= 152
    assert [chart["type"] for chart in parts(found, "chart")][-2:] == ["heat", "multiples"]
