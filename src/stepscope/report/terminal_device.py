"""The devices' part of the terminal report: where their time goes by kind, and which lines of the user's it is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.model import Report
from stepscope.report import sentences, words
from stepscope.report.escape import plain
from stepscope.report.glyphs import Glyphs
from stepscope.report.places import Shortener

TRACES = 4  # rows of the table of times
LINES = 5
LINES_BESIDE_FINDINGS = 3
# (heading, key): compute, exposed communication, exposed copies and idle sum to the span
COLUMNS = (
    ("span", "total_ns"),
    ("compute", "compute_ns"),
    ("+ comm.", "exposed_communication_ns"),
    ("+ copies", "exposed_memcpy_ns"),
    ("idle", "idle_ns"),
)


def device_blocks(report: Report, shorten: Shortener, glyphs: Glyphs) -> Iterator[RenderableType]:
    """The table of times and the lines, each only where there is something to show."""
    rows = sentences.device_rows(report)
    if rows:
        yield Group(*_times(rows))
    view = report.views.get("device_lines")
    # what stacks sampled on the host says more about the host than operators do
    if view and view["total_ns"] and (view["basis"] == "device" or not report.views.get("stacks")):
        yield Group(*_lines(report, view, shorten, glyphs))


def _times(rows: list[dict[str, Any]]) -> Iterator[RenderableType]:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=34)
    for _ in range(len(COLUMNS) + 1):
        table.add_column(justify="right", no_wrap=True)
    table.add_row(Text("Device time", style="bold"), *(Text(name, style="dim") for name, _ in COLUMNS), "busy")
    for row in rows[:TRACES]:
        figures = [words.nanoseconds(row[key]) for _, key in COLUMNS]
        table.add_row(plain(row["label"], 80), *figures, Text(words.percent(row["busy_share"]), style="bold"))
    yield table
    said = "+ is what no compute hides; these four sum to the span"
    more = f"{len(rows) - TRACES} more rows in the report's files; " if len(rows) > TRACES else ""
    yield Text(f"{more}{said}", style="dim")


def _lines(report: Report, view: dict[str, Any], shorten: Shortener, glyphs: Glyphs) -> Iterator[RenderableType]:
    yield Text(sentences.DEVICE_LINES[view["basis"]], style="bold")
    for row in view["lines"][: LINES_BESIDE_FINDINGS if report.findings else LINES]:
        place = row["place"]
        text = f"{words.percent(row['share']):>7}  {shorten(place['file'], place['line'])}"
        text += f"  {plain(place['function'] or '', 60)}"
        notes = sentences.line_notes(row)
        line = Text(text, no_wrap=True, overflow="ellipsis")
        yield line + Text(f"  {notes}" if notes else "", style="dim")
        if row.get("code") and row["exact_line"]:
            yield Text(f"{'':9}{glyphs.quote} {plain(row['code'])}", style="dim", no_wrap=True, overflow="ellipsis")
    if not view["lines"]:
        yield Text("no line could be found:", style="dim")
    for why, share in sentences.unattributed(view):
        yield Text(f"{words.percent(share):>7}  {plain(why, 120)}", style="dim", no_wrap=True, overflow="ellipsis")
    footer = sentences.line_footer(view)
    if footer:
        yield Text(footer, style="dim")
