"""The published schema is the types', and every kept report is of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from stepscope.report import json_schema
from stepscope.report.document import build, report_bytes
from tests.golden.kept import FOLDER
from tests.report.fabricate import analysis, diagnosis

PUBLISHED = Path(__file__).parents[2] / "docs" / "report.schema.json"
SCHEMA = json.loads(PUBLISHED.read_text())
VALID = Draft202012Validator(SCHEMA)


def kept() -> dict[str, dict[str, Any]]:
    """The reports of the golden inputs, as report.json has them."""
    found = {}
    for path in sorted(FOLDER.glob("*.json.gz")):
        parts = json.loads(gzip.decompress(path.read_bytes()))
        report: dict[str, Any] = {"schema": "stepscope.report/1", "views": {}}
        for name, text in parts.items():
            kind, _, key = name.partition("/")
            if kind == "report":
                view = key.removeprefix("views/")
                (report["views"] if view != key else report)[view] = json.loads(text)
        if "findings" in report:
            found[path.name] = report
    return found


KEPT = kept()


def test_the_page_is_made_from_the_types() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert PUBLISHED.read_text() == json_schema.page()


@pytest.mark.parametrize("name", KEPT)
def test_a_report_is_of_the_schema(name: str) -> None:
    assert [f"{error.json_path}: {error.message[:200]}" for error in VALID.iter_errors(KEPT[name])] == []


def test_reports_have_all_that_the_schema_could_refuse(folder: Path) -> None:
    report = json.loads(report_bytes(build(analysis(folder), diagnosis(folder))))
    assert list(VALID.iter_errors(report)) == []
    report["findings"][0]["cost_ms_per_step"] = None  # a finding has a cost
    report["views"]["stacks"]["samples"] = "many"
    del report["run"]["command"]
    places = {error.json_path for error in VALID.iter_errors(report)}
    assert places == {"$.findings[0].cost_ms_per_step", "$.views.stacks", "$.run"}
    named = {name for of in KEPT.values() for name in of["views"]}
    assert named - set(SCHEMA["$defs"]["ReportViews"]["properties"]) <= {"trial"}
