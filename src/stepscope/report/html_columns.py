"""What a table of report.html is made of: columns, cells, and where in the document the rows are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from stepscope.model import Report
from stepscope.report import words
from stepscope.report.places import Shortener

Row = dict[str, Any]
Cell = Callable[[Row, Shortener], Any]


class Column(Struct, frozen=True):
    """`style`: "" for words, "right" for figures, "code" for names, "line" for whole ones, "source" for cut ones."""

    heading: str
    cell: Cell
    style: str = ""


class View(Struct, frozen=True):
    """A table under a fold: its title, what a row is, where its rows are in the document, and its columns.

    `total` is the view that counts the rows, where the document has only the first of them.
    """

    title: str
    caption: str
    rows: Callable[[Report], Sequence[Row] | None]
    columns: tuple[Column, ...]
    total: str | None = None


def place(row: Row, shorten: Shortener) -> str:
    """The cell of a row with a `place`, or that is one; "~" before a line that need not be the call's."""
    found = row.get("place") if "place" in row else row
    guess = "" if row.get("place_exact", True) else "~"
    return guess + shorten(found["file"], found["line"]) if found else words.MISSING


def field(key: str) -> Cell:
    """The value as it is."""
    return lambda row, _: row.get(key)


def figure(key: str, show: Callable[[Any], str]) -> Cell:
    """The value as `show` puts it."""
    return lambda row, _: show(row.get(key))


def arguments(row: Row, _: Shortener) -> str:
    """The arguments of a call."""
    return ", ".join(f"{name}={value}" for name, value in (row.get("arguments") or {}).items())


def view(name: str) -> Callable[[Report], Sequence[Row] | None]:
    """The rows of a view of the document."""
    return lambda report: report.views.get(name)


def inside(name: str, key: str) -> Callable[[Report], Sequence[Row] | None]:
    """The rows in a part of a view."""
    return lambda report: (report.views.get(name) or {}).get(key)
