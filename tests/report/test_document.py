"""The document has the keys of the report's schema, plain values, and no figure that the facts did not hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.model import Diagnosis, Note, Quality
from stepscope.model.comparison import AppliedKnob, TrialFacts
from stepscope.report.document import KEY_ORDER, build, read_report, report_bytes
from tests.report.fabricate import ITEM_LINE, analysis, diagnosis, finding, run_facts


def test_json_round_trip_keeps_the_document(folder: Path) -> None:
    report = build(analysis(folder), diagnosis(folder))

    data = report_bytes(report)

    assert read_report(data) == report
    assert list(json.loads(data)) == list(KEY_ORDER)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"schema": 3}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_report_is_refused(data: bytes) -> None:
    with pytest.raises(UnreadableInputError):
        read_report(data)


def test_a_report_of_another_schema_is_refused_by_name(folder: Path) -> None:
    data = report_bytes(build(analysis(folder), diagnosis(folder))).replace(
        b"stepscope.report/1", b"stepscope.report/9"
    )
    with pytest.raises(UnreadableInputError, match=r"stepscope\.report/9"):
        read_report(data)


def test_missing_stays_missing(folder: Path) -> None:
    empty = analysis(folder, steps=(), stacks=None, loader=None, views=None, loops=None, io=None)
    report = build(empty, Diagnosis((), ()))

    assert report.steps is None
    assert [report.views[key] for key in ("stacks", "loader", "operators", "loops", "io")] == [None] * 5
    assert report.views["fixed_costs"]["windows_s"] is None


def test_what_json_cannot_carry_becomes_null_or_an_escape(folder: Path) -> None:
    facts = analysis(
        folder,
        run=run_facts(folder, name="bad\udcff name"),
        system={"load": math.nan, "big": 10**40, "nested": {"a": (1, {2})}, 3: Path("/x")},
    )
    report = build(facts, diagnosis(folder))

    assert report.run["name"] == "bad\\udcff name"
    assert report.views["system"] == {"load": None, "big": 1e40, "nested": {"a": [1, [2]]}, "3": "/x"}
    assert read_report(report_bytes(report)) == report


def test_lists_are_bounded(folder: Path) -> None:
    file = str(folder / "train.py")
    notes = tuple(Note("info", "x" * 100_000, "s") for _ in range(5_000))
    facts = analysis(folder, quality=Quality({}, notes), regions=tuple({"name": str(i)} for i in range(10_000)))
    report = build(facts, Diagnosis(tuple(finding(file) for _ in range(1_000)), ()))

    assert len(report_bytes(report)) < 3_000_000
    assert 10 <= len(report.findings) < 1_000
    assert len(report.views["regions"]) < 10_000


def test_a_finding_quotes_its_line(folder: Path) -> None:
    report = build(analysis(folder), diagnosis(folder))

    source = _source(report.findings[0])
    assert source["first_line"] == ITEM_LINE - 2
    assert source["lines"][2].strip().startswith("image = Image.open")
    assert len(source["lines"]) == 5
    assert source["changed_since"] is False
    assert report.findings[2]["where"][0]["source"] is None  # outside the user's roots
    assert report.views["stacks"]["hot_lines"][0]["code"].startswith("image = Image.open")


def test_no_source_leaves_no_line_of_it(folder: Path) -> None:
    report = build(analysis(folder), diagnosis(folder), source=False)

    assert all(place["source"] is None for row in report.findings for place in row["where"])
    assert b"Image.open" not in report_bytes(report)


def _source(row: dict[str, Any]) -> dict[str, Any]:
    source: dict[str, Any] = row["where"][0]["source"]
    return source


def test_knobs_stand_with_their_line(folder: Path) -> None:
    knob = AppliedKnob("gc", "off", True, rank=0, file=str(folder / "train.py"), line=7)
    report = build(analysis(folder, trial=TrialFacts((knob,), 5)), diagnosis(folder))
    view = json.loads(report_bytes(report))["views"]["trial"]

    assert (view["seed"], view["skipped"], view["standing"]) == (5, 0, {"gc": "applied"})
    assert view["knobs"][0]["place"] == {"file": str(folder / "train.py"), "line": 7}
    assert view["knobs"][0]["code"].startswith("image = Image.open")
    assert read_report(report_bytes(report)) == report
