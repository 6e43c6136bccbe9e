"""The devices' part of the terminal report: where their time goes by kind, and which lines of the user's it is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope.model import Report
from stepscope.report import sentences, words
from stepscope.report.escape import plain
from stepscope.report.glyphs import Glyphs
from stepscope.report.places import Shortener
from stepscope.report.text_table import TextColumn, lines

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


def device_blocks(report: Report, shorten: Shortener, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """The table of times and the lines, each only where there is something to show."""
    rows = sentences.device_rows(report)
    if rows:
        yield Group(*_times(rows, width))
    view = report.views.get("device_lines")
    # what stacks sampled on the host says more about the host than operators do
    if view and view["total_ns"] and (view["basis"] == "device" or not report.views.get("stacks")):
        yield Group(*_lines(report, view, shorten, glyphs))


def _times(rows: list[dict[str, Any]], width: int) -> Iterator[RenderableType]:
    shown = rows[:TRACES]
    columns = [TextColumn("Device time", [plain(row["label"], 80) for row in shown], flexible=True)]
    for name, key in COLUMNS:
        columns.append(TextColumn(name, [words.nanoseconds(row[key]) for row in shown], flexible=False))
    columns.append(TextColumn("busy", [words.percent(row["busy_share"]) for row in shown], flexible=False))
    yield from lines(columns, width)
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
