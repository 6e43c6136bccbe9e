"""Every figure that a report or a table can show is defined, and docs/metrics.md is the list of the definitions."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stepscope.model
from stepscope.report.metrics import SECTIONS
from stepscope.report.metrics.__main__ import page
from stepscope.report.table_columns import SHOWN
from tests.records import annotated

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
FIGURE = re.compile(r"\b(int|float)\b")
# records that no report and no table holds
INTERNAL = {"MemoryRecording", "BlockRows"}
UNITS = {"_ns": "ns", "_ms": "ms", "_s": "s", "bytes": "bytes", "_pct": "percent", "share": "share"}


def records() -> Iterator[Any]:
    """All records of the model."""
    for item in pkgutil.walk_packages(stepscope.model.__path__, "stepscope.model."):
        module = importlib.import_module(item.name)
        for value in vars(module).values():
            if isinstance(value, type) and annotated(value) and value.__module__ == item.name:
                yield value


def names_of(record: Any) -> tuple[str, str]:
    """As a section may name it: with its module where two records have one name."""
    return f"{record.__module__.rpartition('.')[2]}.{record.__name__}", record.__name__


def test_every_figure_of_the_model_is_defined() -> None:
    sections = {section.record: section.metrics for section in SECTIONS}
    known = {
        record: next((sections[name] for name in names_of(record) if name in sections), {}) for record in records()
    }
    missing = [
        f"{record.__name__}.{name}"
        for record in records()
        if record.__name__ not in INTERNAL
        for name, kind in annotated(record).items()
        if FIGURE.search(kind) and name not in known[record]
    ]
    assert missing == []


def test_nothing_is_defined_that_there_is_not() -> None:
    named = {section.record for section in SECTIONS}
    fields = {
        next((name for name in names_of(record) if name in named), record.__name__): set(annotated(record))
        for record in records()
    }
    unknown = [
        f"{section.record}.{name}"
        for section in SECTIONS
        if section.record in fields
        for name in section.metrics
        if name not in fields[section.record]
    ]
    assert unknown == []


def test_units_are_those_of_the_names() -> None:
    wrong = [
        (section.record, name, metric.unit)
        for section in SECTIONS
        for name, metric in section.metrics.items()
        for end, unit in UNITS.items()
        if name.endswith(end) and not name.endswith(("_per_s", "s_ns")) and metric.unit != unit
    ]
    assert wrong == []


@pytest.mark.parametrize("table", SHOWN)
def test_a_table_has_a_section(table: str) -> None:
    assert any(table in section.tables for section in SECTIONS)


def test_the_page_is_the_list() -> None:
    assert PAGE.read_text() == page(), "run: python -m stepscope.report.metrics > docs/metrics.md"
