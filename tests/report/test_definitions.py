"""Every figure that a report or a table can show is defined, and docs/definitions.md is the list of the definitions."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepscope.model
from stepscope.report.definitions import SECTIONS, figures, page
from stepscope.report.table import SHOWN
from tests.records import annotated

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


@pytest.mark.parametrize("table", SHOWN)
def test_a_table_has_a_section(table: str) -> None:
    assert any(table in section.tables for section in SECTIONS)


def test_the_page_is_the_list() -> None:
    assert PAGE.read_text() == page(), "run: python -m stepscope.report.definitions > docs/definitions.md"
