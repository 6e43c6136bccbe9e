"""The devices' tables of report.html: time by kind for each trace, and lines by the device time they cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stepscope.report import sentences, words
from stepscope.report.html_columns import Column, Row
from stepscope.report.html_tables import table
from stepscope.report.places import Shortener

_TIMES = "Compute, exposed communication, exposed copies and idle sum to the span; exposed is what no compute hides."
_LINES = "Every slice counts for one line only; a backward operator for the line of its forward operator."


def device_times(rows: Sequence[Row], shorten: Shortener, limit: int) -> str:
    """Time of the devices by kind, a row for each trace and scope."""
    return table(_TIMES, _TIME_COLUMNS, rows, shorten, limit)


def device_lines(view: dict[str, Any], shorten: Shortener, limit: int) -> str:
    """Lines of the user's by device time."""
    return table(_LINES, _LINE_COLUMNS, view["lines"], shorten, limit)


def _nanoseconds(key: str) -> Callable[[Row, Shortener], Any]:
    return lambda row, _: words.nanoseconds(row[key])


def _place(row: Row, shorten: Shortener) -> str:
    return shorten(row["place"]["file"], row["place"]["line"])


def _top(row: Row, _: Shortener) -> str:
    return ", ".join(f"{name} {words.nanoseconds(ns)}" for name, ns in row["top"])


_TIME_COLUMNS = (
    Column("Trace", lambda row, _: row["label"], "line"),
    Column("Span", _nanoseconds("total_ns"), "right"),
    Column("Busy", lambda row, _: words.percent(row["busy_share"]), "right"),
    Column("Compute", _nanoseconds("compute_ns"), "right"),
    Column("Communication", _nanoseconds("communication_ns"), "right"),
    Column("exposed", _nanoseconds("exposed_communication_ns"), "right"),
    Column("Copies", _nanoseconds("memcpy_ns"), "right"),
    Column("exposed copies", _nanoseconds("exposed_memcpy_ns"), "right"),
    Column("Idle", _nanoseconds("idle_ns"), "right"),
    Column("Slices", lambda row, _: words.count(row["events"]), "right"),
)
_LINE_COLUMNS = (
    Column("Share", lambda row, _: words.percent(row["share"]), "right"),
    Column("Time", _nanoseconds("ns"), "right"),
    Column("Line", _place, "line"),
    Column("Function", lambda row, _: row["place"]["function"], "line"),
    Column("Source", lambda row, _: row.get("code"), "source"),
    Column("Note", lambda row, _: sentences.line_notes(row)),
    Column("Slices", lambda row, _: words.count(row["events"]), "right"),
    Column("Mostly", _top, "source"),
)
