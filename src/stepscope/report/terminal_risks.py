"""The risks of the terminal report: what may end or slow down the run later, and has no measured cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepscope.model import Report
from stepscope.report import words
from stepscope.report.escape import one_line, plain
from stepscope.report.glyphs import Glyphs
from stepscope.report.places import Shortener

SHOWN = 3
MAX_EVIDENCE = 4


def risks_block(report: Report, shorten: Shortener, glyphs: Glyphs) -> Iterator[RenderableType]:
    """One block: each risk with its line, what was seen and what to do."""
    if not report.risks:
        return
    rows: list[RenderableType] = [Text("Risks, without a measured cost", style="bold")]
    for risk in report.risks[:SHOWN]:
        rows += _risk(risk, shorten, glyphs)
    if len(report.risks) > SHOWN:
        rows.append(Text(f"and {len(report.risks) - SHOWN} more in the report's files", style="dim"))
    yield Group(*rows)


def _risk(risk: dict[str, Any], shorten: Shortener, glyphs: Glyphs) -> Iterator[RenderableType]:
    sure = "" if risk["confidence"] == "high" else f"  ({plain(risk['confidence'])} confidence)"
    style = "yellow" if risk["severity"] != "info" else "cyan"
    head = Table.grid()
    head.add_row(Text(f"{glyphs.warning} ", style=style), Text.assemble(one_line(risk["title"], 240), (sure, "dim")))
    yield head
    details = Table.grid(padding=(0, 2, 0, 0))
    details.add_column(no_wrap=True, style="dim")
    details.add_column()
    places = ", ".join(shorten(place["file"], place["line"]) for place in risk["where"][:SHOWN])
    if places:
        details.add_row("At", Text(places, style="cyan"))
    seen = [words.evidence(row) for row in risk["evidence"][:MAX_EVIDENCE]]
    if seen:
        parts = [Text.assemble((f"{metric}: ", "dim"), value) for metric, value in seen]
        details.add_row("Seen", Text(glyphs.separator, style="dim").join(parts))
    details.add_row("Fix", Text(one_line(risk["fix"], 400)))
    yield Padding(details, (0, 0, 0, 2))
