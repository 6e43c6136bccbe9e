"""The same step has the same figures wherever it is told: terminal, JSON, pages, notebook and comparison."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stepscope
from stepscope import api
from stepscope.dashboard import pages, single
from stepscope.dashboard.pages import PageContext
from stepscope.report import comparison_report, sentences, words
from stepscope.report.document import report_bytes
from stepscope.report.sentences import groups
from tests.analyze.shared_traces import TRACES
from tests.builders import MS, T0, Row, step_rows
from tests.comparison.run_sets import make_run
from tests.on_terminal import on_terminal
from tests.run_folders import make_run_folder

ROUNDING = 1e-6
COPIED = 2**20  # bytes of the largest recording that is copied to be compared with itself


def _with_loader(folder: Path) -> Path:
    return make_run(folder, data_wait_ms=6, steps=60)


def _epochs(folder: Path) -> Path:
    """First batches of an epoch that stall, a slow warm-up and steps in a window: much that is not steady."""
    rows = [dict(row) for row in step_rows(80, data_wait_ms=2, forward_ms=3, backward_ms=4, optimizer_ms=1, other_ms=1)]
    for at in (20, 40, 60):
        rows[at] |= {"first_batch": True, "epoch": at // 20, "data_wait_ns": 60 * MS}
    for at in (0, 1):
        rows[at] |= {"forward_ns": 400 * MS}
    for at in (30, 31, 32):
        rows[at] |= {"in_window": True, "forward_ns": 9 * MS}
    return make_run_folder(folder.parent, name=folder.name, steps=_restarted(rows))


def _compiling(folder: Path) -> Path:
    """A first step that compiles for longer than all others take."""
    rows = [dict(row) for row in step_rows(60, data_wait_ms=1, forward_ms=2, backward_ms=1, optimizer_ms=1)]
    rows[0] |= {"forward_ns": 70_000 * MS}
    rows[1] |= {"forward_ns": 9 * MS}
    event = {"kind": "compile", "step": 0, "time_ns": T0 + 100 * MS, "duration_ns": 69_000 * MS, "function": "f"}
    return make_run_folder(folder.parent, name=folder.name, steps=_restarted(rows), events=[event])


def _evaluating(folder: Path) -> Path:
    rows = [dict(row) for row in step_rows(60, data_wait_ms=1, forward_ms=3, backward_ms=4, optimizer_ms=1)]
    for row in rows[40:]:
        row |= {"kind": "eval", "backward_ns": 0, "optimizer_ns": 0, "forward_ns": 5 * MS}
    return make_run_folder(folder.parent, name=folder.name, steps=_restarted(rows))


def _two_ranks(folder: Path) -> Path:
    for rank in (0, 1):
        rows = step_rows(72, data_wait_ms=1 + rank, forward_ms=3, backward_ms=4, optimizer_ms=1)
        made = make_run_folder(folder.parent, name=folder.name, steps=rows, rank=rank, pid=100 + rank)
    return made


def _one_step(folder: Path) -> Path:
    return make_run_folder(folder.parent, name=folder.name, steps=step_rows(1, forward_ms=3, backward_ms=4))


def _restarted(rows: list[Row]) -> list[Row]:
    """Rows whose starts and walls follow from their phases anew."""
    for row in rows:
        row.pop("start_ns", None)
        row.pop("wall_ns", None)
    return rows


def _shared(name: str) -> Callable[[Path], Path]:
    def find(_: Path) -> Path:
        found = sorted(TRACES.glob(name))
        if not found:
            pytest.skip(f"no {name} at {TRACES}")
        return found[0]

    return find


RECORDINGS: dict[str, Callable[[Path], Path]] = {
    "with_loader": _with_loader,
    "epochs": _epochs,
    "compiling": _compiling,
    "evaluating": _evaluating,
    "two_ranks": _two_ranks,
    "one_step": _one_step,
    "resnet50_workers_4": _shared("kineto_tb_plugin/resnet50_num_workers_4"),
    "hta_dropped_step": _shared("hta/amd_trace/*.json.gz"),
}


@pytest.fixture(scope="module", params=RECORDINGS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RECORDINGS[request.param](tmp_path_factory.mktemp(request.param) / request.param)


@pytest.fixture(scope="module")
def run(path: Path) -> api.Run:
    return api.open_run(path, options=api.ReadOptions(cache=False))


@pytest.fixture(scope="module")
def document(run: api.Run) -> dict[str, Any]:
    """`report.json`."""
    found: dict[str, Any] = json.loads(report_bytes(run.report()))
    return found


@pytest.fixture(scope="module")
def shown(run: api.Run) -> str:
    """The terminal, its lines joined."""
    return _joined(on_terminal(run.report(), 200))


def _joined(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _blocks(run: api.Run, key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pages.page(PageContext(run, run), key)["blocks"]
    return found


def _figures(blocks: list[dict[str, Any]]) -> dict[str, float]:
    return {item["label"]: item["value"] for block in blocks if block["kind"] == "figures" for item in block["items"]}


def _table(blocks: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return next((block["rows"] for block in blocks if block.get("id") == key and block["kind"] == "table"), [])


def _page(run: api.Run) -> str:
    return single.plain(run.report(), single.documents(run, run.report()))


HEAD = {"Mean step": "mean_ms", "Median": "median_ms", "95th percentile": "p95_ms", "Steady steps": "count"}


def test_every_surface_tells_the_same_mean_median_and_percentile(
    run: api.Run, document: dict[str, Any], shown: str
) -> None:
    steps = document["steps"]
    mean, median, p95 = (words.number(steps[key]) for key in ("mean_ms", "median_ms", "p95_ms"))
    assert f"{mean} ms a step (median {median}, p95 {p95})" in shown
    (overview,) = _blocks(run, "overview")
    for shown_blocks in ([overview["figures"]], _blocks(run, "steps")):
        figures = _figures(shown_blocks)
        assert {label: figures[label] for label in HEAD} == pytest.approx({k: steps[v] for k, v in HEAD.items()})
    assert words.milliseconds(steps["mean_ms"]) in _page(run)
    assert f"{mean} ms a step (median {median}, p95 {p95})" in single.fragment(run.report())
    longest = _table(_blocks(run, "steps"), "longest")
    assert longest
    if steps["count"] == longest_total(document):  # nothing but steady steps: none is longer than the longest of them
        assert max(row["wall_ms"] for row in longest) == pytest.approx(max(ms for _, ms in steps["series"]))


def longest_total(document: dict[str, Any]) -> int:
    steps = document["steps"]
    return int(steps["count"] + sum(steps["excluded"].values()))


def test_findings_cost_the_same_share_of_the_step_they_name(run: api.Run, document: dict[str, Any], shown: str) -> None:
    cards = {
        card["id"]: card
        for block in _blocks(run, "findings")
        if block["kind"] == "findings"
        for card in block["findings"]
    }
    mean = document["steps"]["mean_ms"]
    for finding in document["findings"]:
        assert finding["cost_ms_per_step"] == pytest.approx(finding["share"] * finding["step_ms"], rel=1e-3)
        if finding["basis"] == "steady":
            assert finding["step_ms"] == pytest.approx(mean, rel=2e-3)
        assert finding["gain_ceiling"] >= finding["share"] - ROUNDING
        if finding["expected_gain"]:
            low, high = finding["expected_gain"]["low"], finding["expected_gain"]["high"]
            assert 0 <= low <= high <= finding["gain_ceiling"] + ROUNDING
        card = cards[finding["id"]]
        assert (card["cost_ms_per_step"], card["share"]) == (finding["cost_ms_per_step"], finding["share"])
        assert card["gain"] == sentences.gain(finding)
    for group in groups(run.report())[:3]:
        assert sentences.cost(group.finding) in shown
        assert sentences.gain(group.finding) in shown


def test_findings_that_are_more_than_the_step_say_that_they_overlap(document: dict[str, Any], shown: str) -> None:
    below = {name for finding in document["findings"] for name in finding["explains"]}
    own = [one for one in document["findings"] if one["id"] not in below and one["basis"] != "all"]
    counted = sum(one["share"] for one in own)
    assert document["views"]["findings_share"] == pytest.approx(counted)
    assert ("These findings overlap" in shown) == (counted > 1)


def test_a_comparison_tells_the_step_as_the_report_does(path: Path, document: dict[str, Any], tmp_path: Path) -> None:
    size = path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.rglob("*"))
    if size > COPIED:
        pytest.skip("too large to be copied")
    again = tmp_path / "again" / path.name
    (shutil.copytree if path.is_dir() else _copy)(path, again)
    found = comparison_report.comparison_document(stepscope.compare(path, again, options=api.ReadOptions(cache=False)))
    steps = document["steps"]
    for side in ("baseline", "candidate"):
        (measure,) = found[side]["measures"]
        if measure["steady"] is None:  # traces: every step is measured, and all that is known
            own = measure
            assert own["dropped"] == 0
        else:
            own = measure["steady"]
            assert own["of"] == longest_total(document)
            assert found[side]["figures"]["steady_ms"] == pytest.approx(steps["mean_ms"])
        assert own["mean_ms"] == pytest.approx(steps["mean_ms"])
        assert own["median_ms"] == pytest.approx(steps["median_ms"])
        assert own["p95_ms"] == pytest.approx(steps["p95_ms"])
        assert own["steps"] == steps["count"]
        assert measure["fixed_cost_s"] == document["views"]["fixed_costs"]["before_first_step_s"]


def _copy(path: Path, again: Path) -> None:
    again.parent.mkdir(parents=True)
    shutil.copy(path, again)
