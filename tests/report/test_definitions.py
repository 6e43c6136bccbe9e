"""What is made from the types: the definitions of figures, and the schema of reports.

Every figure that a report or a table can show is defined, docs/definitions.md is the list of the definitions; the
published schema is the types', and every kept report is of it.
"""

from __future__ import annotations

import gzip
import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import stepscope.model
from stepscope.report import json_schema
from stepscope.report.definitions import SECTIONS, figures, page
from stepscope.report.document import build, report_bytes
from stepscope.report.table import SHOWN
from tests.golden.kept import FOLDER
from tests.records import annotated
from tests.report.fabricate import analysis, diagnosis

PAGE = Path(__file__).resolve().parents[2] / "docs" / "definitions.md"
FIGURE = re.compile(r"\b(int|float)\b")
# records that no report and no table holds
INTERNAL = {"MemoryRecording", "BlockRows", "Statement"}


def records() -> Iterator[type]:
    """All records of the model."""
    for item in pkgutil.walk_packages(stepscope.model.__path__, "stepscope.model."):
        module = importlib.import_module(item.name)
        for value in vars(module).values():
            if isinstance(value, type) and annotated(value) and value.__module__ == item.name:
                yield value


def test_every_figure_of_the_model_is_declared_and_nothing_else() -> None:
    missing, unknown = [], []
    for record in records():
        fields, declared = annotated(record), figures(record.__doc__ or "")
        counted = {name for name, kind in fields.items() if FIGURE.search(kind)} - declared.keys()
        missing += [f"{record.__name__}.{name}" for name in counted if record.__name__ not in INTERNAL]
        unknown += [f"{record.__name__}.{name}" for name in declared.keys() - fields.keys()]
    assert (missing, unknown) == ([], [])


def test_a_figure_is_declared_in_the_last_paragraph() -> None:
    declared = figures("""A record.

        level: Depth, of
            a tree.
        total_ns: All of it: everything.
        low (share): The lower end.
        """)
    assert {name: (one.unit, one.definition) for name, one in declared.items()} == {
        "level": ("count", "Depth, of a tree."),
        "total_ns": ("ns", "All of it: everything."),
        "low": ("share", "The lower end."),
    }
    assert figures("A record.\n\nWhat `level` is: prose.") == {}


def test_a_table_has_a_section() -> None:
    assert set(SHOWN) - {table for section in SECTIONS for table in section.tables} == set()


def test_the_page_is_the_list() -> None:
    assert PAGE.read_text() == page(), "run: python -m stepscope.report.definitions > docs/definitions.md"


PUBLISHED = Path(__file__).parents[2] / "docs" / "report.schema.json"
SCHEMA = json.loads(PUBLISHED.read_text())
VALID = Draft202012Validator(SCHEMA)


def kept_reports() -> dict[str, dict[str, Any]]:
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


KEPT = kept_reports()


def test_the_schema_is_made_from_the_types() -> None:
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
