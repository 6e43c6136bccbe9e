"""The pages on findings, steps, system, environment and comparisons, as documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from stepscope import api, report
from stepscope.dashboard import pages, selectors
from stepscope.dashboard.pages import PAGES, PageContext, Scope
from stepscope.errors import UsageError
from stepscope.model import Report, StepFacts
from stepscope.report.experiment_document import document as experiment_document
from tests import builders, gpu_traces
from tests.builders import MS, T0, step_rows
from tests.comparison.run_sets import make_run
from tests.dashboard import page_shapes, served_runs
from tests.report import fabricate
from tests.report.fabricate_experiment import experiment
from tests.run_folders import make_run_folder

KEYS = ("findings", "steps", "system", "compare", "environment")
OPTIONS = api.ReadOptions(cache=False)
EVIL = "</script>\x1b[31m\u202ename"


@dataclass
class Runs:
    """A catalog of runs that are open already."""

    opened: Mapping[str, api.Run] = field(default_factory=dict)
    experiments: Mapping[str, Path] = field(default_factory=dict)

    def runs(self, text: str = "") -> Sequence[Mapping[str, Any]]:
        return [
            {"id": key, "name": f"run {key}", "kind": "run", "state": "finished", "mean_ms": 10.0}
            for key in self.opened
            if text in key
        ]

    def run(self, key: str) -> api.Run:
        if key not in self.opened:
            raise UsageError(f"{key}: no such run")
        return self.opened[key]

    def experiment(self, key: str) -> Path | None:
        return self.experiments.get(key)


def page(run: api.Run, key: str, *, limit: int = 1_000, **given: Any) -> dict[str, Any]:
    """A checked page. Scope, catalog, base, `embedded`, `source` and `own` by name, everything else is a parameter."""
    scope = Scope(given.pop("worker", None), given.pop("span", None), given.pop("steps", None))
    own = {name: given.pop(name) for name in ("catalog", "embedded", "source") if name in given}
    base, id_ = given.pop("base", run), given.pop("own", "this")
    context = PageContext(run, base, scope, params=given, limit=limit, key=id_, **own)
    document = pages.page(context, key)
    page_shapes.check(document)
    return document


def part(document: Mapping[str, Any], id: str) -> dict[str, Any]:
    (found,) = [block for block in document["blocks"] if block.get("id") == id]
    return found


def kinds(document: Mapping[str, Any]) -> list[str]:
    return [block["kind"] for block in document["blocks"]]


def said(document: Mapping[str, Any], tone: str | None = None) -> str:
    return " ".join(b["text"] for b in document["blocks"] if b["kind"] == "text" and tone in (None, b["tone"]))


def figures(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        item["label"]: item for block in document["blocks"] if block["kind"] == "figures" for item in block["items"]
    }


def series(block: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {each["name"]: each["values"] for each in block["series"]}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """Two ranks of 120 steps with a stall, telemetry, stacks and a window."""
    return api.open_run(served_runs.small(tmp_path_factory.mktemp("small") / "runs"), options=OPTIONS)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """Traces of two workers that something else recorded."""
    folder = tmp_path_factory.mktemp("traces")
    for worker in ("worker0", "worker1"):
        gpu_traces.write(folder / f"{worker}.pt.trace.json", steps=3)
    return api.open_run(folder, options=OPTIONS)


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    return api.open_run(served_runs.empty(tmp_path_factory.mktemp("nothing")), options=OPTIONS)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, api.Run]:
    """A run and one whose loader takes longer."""
    folder = tmp_path_factory.mktemp("slow")
    made = {"before": make_run(folder / "before"), "after": make_run(folder / "after", data_wait_ms=4)}
    return {name: api.open_run(path, options=OPTIONS) for name, path in made.items()}


@pytest.fixture
def fabricated(tmp_path: Path) -> Report:
    fabricate.write_script(tmp_path)
    return report.build(fabricate.analysis(tmp_path), fabricate.diagnosis(tmp_path))


# ------------------------------------------------------------------------------------------------------ the registry


def test_pages_stand_in_their_order() -> None:
    order = ["findings", "steps", "timeline", "flame", "operators", "kernels", "modules", "memory", "compiles", "gpu"]
    assert list(PAGES) == [*order, "system", "compare", "environment"]
    groups = [page.group for page in PAGES.values()]
    assert [group for at, group in enumerate(groups) if group not in groups[:at]] == sorted(
        set(groups), key=groups.index
    )
    assert all(groups[at] == groups[at - 1] for at in range(1, len(groups)) if groups[at] in groups[:at])


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


def test_selectors_offer_workers_spans_and_steps(small: api.Run, traces: api.Run) -> None:
    assert [row["key"] for row in selectors.workers(small)] == ["rank-0", "rank-1"]
    assert selectors.step_range(small) == {"first": 0, "last": 119}
    assert [row["key"] for row in selectors.workers(traces)] == ["worker0", "worker1"]
    assert selectors.spans(traces)[0] == {"key": "worker0/span1", "label": "span 1", "worker": "worker0"}


@pytest.mark.parametrize("key", KEYS)
def test_names_from_a_run_are_harmless_text(tmp_path: Path, key: str) -> None:
    run = api.open_run(served_runs.fuzzed(tmp_path / "runs"), options=OPTIONS)
    text = json.dumps(page(run, key, catalog=Runs({EVIL: run})), ensure_ascii=False)
    assert not any(character in text for character in "\x00\x1b\u202e\u2028")


@pytest.mark.parametrize("key", KEYS)
def test_a_run_without_anything_has_every_page(nothing: api.Run, key: str) -> None:
    found = page(nothing, key)
    empty = pages.empty(PageContext(nothing, nothing), key)
    assert empty == (key != "environment")
    assert ("empty" in kinds(found)) == empty
    assert all(b["why"] and b["record"] and b["command"] for b in found["blocks"] if b["kind"] == "empty")


# ------------------------------------------------------------------------------------------------------ findings


def test_cards_hold_what_the_report_says(fabricated: Report, nothing: api.Run) -> None:
    found = page(nothing.showing(fabricated), "findings")
    block = next(block for block in found["blocks"] if block["kind"] == "findings")
    first = block["findings"][0]
    assert [card["severity"] for card in block["findings"]] == ["critical", "warning", "info"]
    assert (first["cost_ms_per_step"], first["share"], first["gain_ceiling"]) == (41.2, 0.672, 0.672)
    assert first["where"][0]["shown"].endswith("/train.py:7")
    assert [line["line"] for line in first["where"][0]["source"] if line["here"]] == [7]
    assert first["evidence"][0] == {
        "metric": "data_wait",
        "text": "41.2 ms",
        "source": "steps.jsonl, inside the iterator's __next__",
    }
    assert first["try"] == [{"knob": "loader.workers", "value": "4"}]
    assert first["command"] == "stepscope run --knob loader.workers=4 -- python train.py --lr 0.1"
    assert block["findings"][1]["command"] is None
    assert block["findings"][1]["expected_gain"] == {"low": 0.05, "high": 0.075}
    assert block["abstained"] == [{"rule": "memory.fragmented", "needs": "a CUDA device"}]
    assert block["ignored"] == [{"rule": "io.logging", "reason": "we need every line"}]
    assert block["healthy"] is None
    assert figures(found)["Mean step"]["value"] == 61.3
    assert "1 torn line" in said(found, "warning")


def test_causes_stand_before_what_they_explain(fabricated: Report, nothing: api.Run) -> None:
    cause, effect, _ = (dict(row) for row in fabricated.findings)
    rows = ({**effect, "explains": [cause["id"]]}, {**cause, "explains": []})
    found = page(nothing.showing(replace(fabricated, findings=rows)), "findings")
    cards = next(block for block in found["blocks"] if block["kind"] == "findings")["findings"]
    assert [card["id"] for card in cards] == [effect["id"], cause["id"]]
    assert cards[0]["explains"] == [{"id": cause["id"], "title": cause["title"]}]
    assert cards[1]["explained_by"] == [{"id": effect["id"], "title": effect["title"]}]


def test_risks_have_no_cost(fabricated: Report, nothing: api.Run) -> None:
    row = {key: value for key, value in fabricated.findings[0].items() if key not in ("cost_ms_per_step", "share")}
    del row["gain_ceiling"], row["expected_gain"], row["disagreements"]
    found = page(nothing.showing(replace(fabricated, findings=(), risks=(row,))), "findings")
    (card,) = next(block for block in found["blocks"] if block["kind"] == "findings")["risks"]
    assert (card["cost_ms_per_step"], card["share"], card["gain_ceiling"], card["expected_gain"]) == (None,) * 4


def test_a_healthy_run_says_so(fabricated: Report, nothing: api.Run) -> None:
    found = page(nothing.showing(replace(fabricated, findings=(), abstained=())), "findings")
    block = next(block for block in found["blocks"] if block["kind"] == "findings")
    assert block["healthy"].startswith("Nothing worth fixing above")


def test_findings_lead_to_pages_that_hold_something(small: api.Run) -> None:
    found = page(small, "findings")
    cards = next(block for block in found["blocks"] if block["kind"] == "findings")["findings"]
    linked = {card["category"]: [link["page"] for link in card["links"]] for card in cards}
    assert "timeline" in linked["sync"]
    assert not any(pages.empty(PageContext(small, small), key) for keys in linked.values() for key in keys)


# ------------------------------------------------------------------------------------------------------ steps


def test_steps_are_stacked_of_their_phases_and_the_stall_stays(small: api.Run) -> None:
    found = page(small, "steps", embedded=True)
    chart = part(found, "steps")
    at = chart["x"]["values"].index(served_runs.STALL)
    parts = series(chart)
    assert parts["data wait"][at] == 150
    assert sum(values[at] for values in parts.values()) == pytest.approx(159)
    assert (chart["type"], chart["select"], chart["sync"]) == ("stacked_bars", "steps", "steps")
    assert {"from": 0, "to": 3, "label": "under the profiler"} in chart["marks"]
    assert (
        f"the longest after the warm-up is step {served_runs.STALL} with 159 ms, most of it data wait"
        in chart["sentence"]
    )


def test_figures_are_the_ones_of_the_report(small: api.Run) -> None:
    facts: StepFacts = small.analysis.steps[0]
    shown = figures(page(small, "steps"))
    assert shown["Mean step"]["value"] == facts.mean_ms
    assert shown["95th percentile"]["value"] == facts.p95_ms
    assert shown["Mean step"]["help"]["text"].startswith("Mean wall time")


def test_a_worker_has_its_own_steps(small: api.Run) -> None:
    first, second = (series(part(page(small, "steps", worker=f"rank-{n}"), "steps")) for n in (0, 1))
    assert (first["backward"][-1], second["backward"][-1]) == (4, 6)
    assert part(page(small, "steps", worker="rank-1"), "longest")["total"] == 120
    assert part(page(small, "steps"), "longest")["total"] == 240


def test_long_runs_are_thinned_with_their_stalls(tmp_path: Path) -> None:
    rows = step_rows(5_000)
    rows[3_333] = {**rows[3_333], "wall_ns": 900 * MS, "other_ns": 891 * MS}
    run = api.open_run(make_run_folder(tmp_path, steps=rows), options=OPTIONS)
    chart = part(page(run, "steps"), "steps")
    assert len(chart["x"]["values"]) <= 600
    at = chart["x"]["values"].index(3_333)
    assert sum(values[at] for values in series(chart).values()) == pytest.approx(900)
    assert "of 5,000 steps" in chart["notes"][0]


def test_the_longest_steps_say_what_was_long(tmp_path: Path) -> None:
    rows = step_rows(60)
    rows[30] = {**rows[30], "wall_ns": 60 * MS, "optimizer_ns": 51 * MS}
    save = {"kind": "save", "path": "best.pt", "step": 30, "time_ns": T0, "duration_ns": 50 * MS}
    noted = [save, {"kind": "gc", "generation": 2, "step": 30, "time_ns": T0, "duration_ns": MS // 100}]
    run = api.open_run(make_run_folder(tmp_path, steps=rows, events=noted), options=OPTIONS)
    block = part(page(run, "steps"), "longest")
    first = block["rows"][0]
    assert (first["step"], first["phase"], first["reason"]) == (30, "optimizer", "steady")
    assert first["phase_extra_ms"] == pytest.approx(50)
    assert first["extra_ms"] == pytest.approx(50)
    assert first["events"] == "torch.save best.pt 50.0 ms"
    link = next(column["link"] for column in block["columns"] if column["key"] == "step")
    assert (link["page"], link["param"], first[link["key"]]) == ("timeline", "steps", "30:30")


def test_the_distribution_counts_every_step_once(small: api.Run) -> None:
    chart = part(page(small, "steps"), "distribution")
    assert sum(sum(each["values"]) for each in chart["series"]) == 240
    assert chart["series"][0]["values"][-1] == 2  # the stall of either rank lies behind the last edge
    assert chart["marks"][0]["label"] == "and longer"


def test_equal_steps_have_a_distribution_too(tmp_path: Path) -> None:
    run = api.open_run(make_run_folder(tmp_path, steps=step_rows(20)), options=OPTIONS)
    chart = part(page(run, "steps"), "distribution")
    assert sum(sum(each["values"]) for each in chart["series"]) == 20


def test_kinds_of_steps_are_chosen(tmp_path: Path) -> None:
    evals = step_rows(30, first_step=60, data_wait_ms=5, start_ns=T0 + 1000 * MS, kind="eval")
    run = api.open_run(make_run_folder(tmp_path, steps=[*step_rows(60), *evals]), options=OPTIONS)
    choice = next(block for block in page(run, "steps")["blocks"] if block["kind"] == "choice")
    assert [option["value"] for option in choice["options"]] == ["train", "eval"]
    assert part(page(run, "steps", kind="eval"), "steps")["x"]["values"][0] == 60
    assert part(page(run, "steps", kind="nonsense"), "steps")["x"]["values"][0] == 0
    assert {row["kind"] for row in part(page(run, "steps"), "processes")["rows"]} == {"train", "eval"}
    assert "choice" not in kinds(page(run, "steps", embedded=True))


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


def test_sampled_lines_stand_below(small: api.Run) -> None:
    rows = part(page(small, "steps"), "hot-lines")["rows"]
    assert rows[0]["place"]["shown"] == "data.py:20"
    assert len(part(page(small, "steps", limit=1), "hot-lines")["rows"]) == 1


# ------------------------------------------------------------------------------------------------------ system


def test_telemetry_stands_beside_the_steps(small: api.Run) -> None:
    found = page(small, "system")
    times = part(found, "cpu")["x"]["values"]
    assert [time - times[0] for time in times] == pytest.approx([0, 1, 2, 3, 4])
    assert series(part(found, "cpu"))["rank-0"] == [95, 96, 97, 98, 99]
    gpu = part(found, "gpu-utilisation")
    assert series(gpu) == {"gpu:0": [40, 41, 42, 43, 44]}
    assert (gpu["help"]["picture"], gpu["y"]["max"]) == ("utilisation", 100)
    steps = part(found, "steps-over-time")
    assert max(steps["series"][0]["values"]) == pytest.approx(159)
    assert {block["sync"] for block in found["blocks"] if block["kind"] == "chart"} == {"time"}


def test_counters_are_shown_as_growth(tmp_path: Path) -> None:
    readings = [
        {"time_ns": T0 + second * 1000 * MS, "metrics": [["read_bytes", "bytes", second * 5e6, builders.PID, None]]}
        for second in (0, 1, 2, 4)
    ]
    readings.append({"time_ns": T0 + 5000 * MS, "metrics": [["read_bytes", "bytes", 0, builders.PID, None]]})
    run = api.open_run(make_run_folder(tmp_path, steps=step_rows(30), system=readings), options=OPTIONS)
    chart = part(page(run, "system"), "io")
    assert chart["series"][0]["values"] == [5e6, 5e6, 5e6]  # the counter that fell is left out
    assert chart["y"]["unit"] == "bytes_per_s"


def test_workers_are_summed_and_long_recordings_averaged(tmp_path: Path) -> None:
    workers = [
        {"pid": pid, "ppid": builders.PID, "role": "loader_worker", "time_ns": T0, "start_ns": T0, "command": "python"}
        for pid in (201, 202)
    ]
    root = {"pid": builders.PID, "ppid": 1, "role": "root", "time_ns": T0, "start_ns": T0, "command": "python train.py"}
    readings = [
        {
            "time_ns": T0 + second * 1000 * MS,
            "metrics": [["cpu_pct", "pct", 50.0, pid, None] for pid in (builders.PID, 201, 202)],
        }
        for second in range(2_000)
    ]
    folder = make_run_folder(tmp_path, steps=step_rows(30), system=readings, processes=[root, *workers])
    chart = part(page(api.open_run(folder, options=OPTIONS), "system"), "cpu")
    assert len(chart["x"]["values"]) <= 500
    assert set(series(chart)["loader workers"]) == {100.0}
    assert set(series(chart)["rank-0"]) == {50.0}


def test_a_range_of_steps_cuts_the_telemetry(small: api.Run) -> None:
    chosen = api.open_run(small.folder, options=replace(OPTIONS, steps=(4, 10)))
    found = page(chosen, "system", base=small, steps=(4, 10))
    whole = part(page(small, "system"), "cpu")["x"]["values"]
    assert part(found, "cpu")["x"]["values"] == whole[:2]
    assert len(part(found, "steps-over-time")["x"]["values"]) == 7


def test_traces_have_no_telemetry_and_say_what_would(traces: api.Run) -> None:
    found = page(traces, "system")
    assert found["blocks"][0]["kind"] == "empty"
    assert pages.empty(PageContext(traces, traces), "system")
    assert not pages.empty(PageContext(traces, traces), "steps")


# ------------------------------------------------------------------------------------------------------ environment


def test_the_environment_names_what_ran_and_what_was_lost(fabricated: Report, nothing: api.Run) -> None:
    found = page(nothing.showing(fabricated), "environment")
    facts = {row["label"]: row["value"] for b in found["blocks"] if b["kind"] == "facts" for row in b["rows"]}
    assert facts["Command"] == "python train.py --lr 0.1"
    assert (facts["torch"], facts["cpu model"], facts["governor"]) == ("2.13.0", "Some CPU", "powersave")
    assert "1 torn line" in said(found, "warning")
    assert "sampled at 100 Hz" in said(found, "note")
    assert part(found, "windows")["rows"][0]["overhead_ratio"] == 1.4
    assert part(found, "sites")["rows"][0]["arguments"] == "batch_size=32"
    assert figures(found)["torn lines"]["value"] == 1


def test_traces_say_how_well_they_could_be_read(traces: api.Run) -> None:
    found = page(traces, "environment")
    assert figures(found)["Traces"]["value"] == 2
    assert len(part(found, "traces")["rows"]) == 2
    assert said(found, "warning") or said(found, "good")


# ------------------------------------------------------------------------------------------------------ compare


def test_another_run_is_chosen_and_laid_beside(slow: dict[str, api.Run]) -> None:
    catalog = Runs(slow)
    before = page(slow["after"], "compare", catalog=catalog, own="after")
    (choice,) = [block for block in before["blocks"] if block["kind"] == "choice"]
    assert [option["value"] for option in choice["options"]] == ["", "before"]
    found = page(slow["after"], "compare", catalog=catalog, own="after", **{"with": "before"})
    rows = {row["label"]: row for row in part(found, "figures")["rows"]}
    assert (rows["mean step"]["baseline"], rows["mean step"]["candidate"]) == pytest.approx((10, 13), rel=0.05)
    phases = part(found, "phases")["rows"]
    assert (phases[0]["name"], phases[0]["difference_ms"]) == ("data wait", pytest.approx(3, rel=0.05))
    assert series(part(found, "parts"))["data wait"] == pytest.approx([1, 4], rel=0.05)
    assert "after against before" in said(found)


def test_sides_can_be_turned_round(slow: dict[str, api.Run]) -> None:
    found = page(slow["after"], "compare", catalog=Runs(slow), own="after", side="baseline", **{"with": "before"})
    assert "before against after" in said(found)
    assert part(found, "phases")["rows"][0]["difference_ms"] == pytest.approx(-3, rel=0.05)


@pytest.mark.parametrize("other", ["nope", "after"])
def test_what_cannot_be_compared_says_why(slow: dict[str, api.Run], other: str) -> None:
    found = page(slow["after"], "compare", catalog=Runs(slow), own="after", **{"with": other})
    (why,) = [block for block in found["blocks"] if block["kind"] == "empty"]
    assert why["why"]


def test_an_experiment_shows_intervals_beside_ceilings(fabricated: Report, nothing: api.Run) -> None:
    document = experiment_document(experiment())
    shown = nothing.showing(replace(fabricated, views={**fabricated.views, "experiment": document}))
    found = page(shown, "compare", embedded=True)
    chart = part(found, "intervals")
    measured = chart["series"][0]
    assert chart["type"] == "interval"
    assert all(
        low is None or low <= value <= high
        for low, value, high in zip(measured["low"], measured["values"], measured["high"], strict=True)
    )
    (best,) = [row for row in document["candidates"] if row["verdict"] == "faster"]
    assert chart["series"][1]["role"] == "ceiling"
    assert chart["series"][1]["values"][0] == pytest.approx(-best["ceiling"])
    rows = part(found, "candidates")["rows"]
    assert {row["verdict"].split(",")[0].split(" >")[0] for row in rows} == {
        "faster",
        "no difference",
        "undecided",
        "void",
    }
    assert rows[0]["change"] == pytest.approx(best["effect"]["ratio"] - 1)
    assert "makes training faster" in said(found, "good")
    assert {"verdict", "loss", "doubt"} <= {row["about"] for row in part(found, "candidate-notes")["rows"]}
    assert all(column.get("signed") for column in part(found, "candidates")["columns"] if column["unit"] == "share")
    assert not pages.empty(PageContext(shown, shown), "compare")


def test_an_experiment_can_be_chosen_like_a_run(tmp_path: Path, slow: dict[str, api.Run]) -> None:
    from stepscope.report.experiment_document import dumps

    (tmp_path / "experiment.json").write_bytes(dumps(experiment()))
    catalog = Runs({"trial": slow["before"]}, {"trial": tmp_path})
    found = page(slow["after"], "compare", catalog=catalog, own="after", **{"with": "trial"})
    assert part(found, "candidates")["rows"]
    (tmp_path / "experiment.json").write_bytes(b"{}")
    found = page(slow["after"], "compare", catalog=catalog, own="after", **{"with": "trial"})
    assert "empty" in kinds(found)


def test_alone_there_is_nothing_to_compare(small: api.Run) -> None:
    found = page(small, "compare", catalog=Runs({"this": small}))
    assert kinds(found) == ["empty"]
    assert "only run" in found["blocks"][0]["why"]
