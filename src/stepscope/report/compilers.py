"""Compilers on the terminal: what they did, what it took of which steps, and the causes no finding has told.

The block is left out where nothing was compiled. The words are those of `compiler_words`, shared with the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepscope.model import Report
from stepscope.report import compiler_words as said
from stepscope.report import words
from stepscope.report.escape import one_line, plain
from stepscope.report.places import Shortener
from stepscope.report.sentences import members
from stepscope.report.terminal_findings import LISTED
from stepscope.report.terminal_parts import Glyphs, TextColumn, lines

CAUSES = 5
WARNINGS = 4
NOTES = 4
MAX_WHAT = 60  # characters of what happened, before where
QUIET_KINDS = ("fallback",)  # told in a sentence for all of them
_INDENT = " " * 2


def compiler_blocks(report: Report, shorten: Shortener, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """At most one block."""
    view = said.view_of(report)
    if view is None:
        return
    findings = members(report, LISTED)
    rows: list[RenderableType] = [Text("Compilers", style="bold")]
    rows += [Text(one_line(said.backend(facts), 400)) for facts in view["backends"]]
    rows += _kinds(view, width)
    rows += [Text(one_line(text), style="dim") for row in view["steps"] if (text := said.after_warmup(row))]
    rows += _warnings(view, findings, glyphs)
    rows += _causes(view, findings, shorten, glyphs)
    rows += _rest(view, findings)
    yield Group(*rows)


def _kinds(view: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """A row for each kind of steps: what compiling took, and how long a step is with and without it."""
    rows = view["steps"]
    if not any(row["compiling_steps"] or row["compile_ms"] for row in rows):
        return
    several = len({row["backend"] for row in rows}) > 1
    names = [f"{row['backend']}, {row['kind']}" if several else row["kind"] for row in rows]
    figures = (
        ("steps", "steps", words.count),
        ("compiled", "compiling_steps", words.count),
        ("compile time", "compile_ms", words.milliseconds),
        ("share", "share", words.percent),
        ("a compiling step", "mean_compiling_ms", words.milliseconds),
        ("another", "mean_quiet_ms", words.milliseconds),
    )
    columns = [TextColumn("", [_INDENT + plain(name, 40) for name in names], flexible=True)]
    for heading, key, show in figures:
        if any(row[key] is not None for row in rows):
            columns.append(TextColumn(heading, [show(row[key]) for row in rows], flexible=False))
    yield from lines(columns, width)


def _warnings(view: Mapping[str, Any], findings: Sequence[Any], glyphs: Glyphs) -> Iterator[RenderableType]:
    titles = [finding["title"] for finding in findings]
    rows = [row for row in view["warnings"] if not any(row["text"] in title for title in titles)]
    for row in rows[:WARNINGS]:
        text, note = said.warning(row)
        table = Table.grid()
        line = Text.assemble(one_line(text, 300), (f"  ({one_line(note, 80)})", "dim"))
        table.add_row(Text(f"{glyphs.warning} ", style="yellow"), line)
        yield table
    if len(rows) > WARNINGS:
        yield Text(
            f"{_INDENT}and {words.count(len(rows) - WARNINGS)} more such lines in the report's files", style="dim"
        )


def _causes(
    view: Mapping[str, Any], findings: Sequence[Any], shorten: Shortener, glyphs: Glyphs
) -> Iterator[RenderableType]:
    """Causes worth a line. A first compile is nobody's fault, unless the source cannot tell it from another."""
    blurred = {facts["backend"] for facts in view["backends"] if facts["recompiles"] is None}
    limits = {limit["cause"]: limit for limit in view["limits"]}
    rows = [
        row
        for row in view["causes"]
        if row["kind"] not in QUIET_KINDS and (row["kind"] != "compile" or row["backend"] in blurred)
    ]
    left = [row for row in rows if not (said.told(row, findings) or said.says_nothing(row))]
    for row in left[:CAUSES]:
        yield from _cause(row, view, shorten, glyphs, limits.get(row["id"]))
    if len(left) > CAUSES:
        yield Text(f"{_INDENT}and {words.count(len(left) - CAUSES)} more causes: --table compiles", style="dim")


def _cause(
    row: Mapping[str, Any],
    view: Mapping[str, Any],
    shorten: Shortener,
    glyphs: Glyphs,
    limit: Mapping[str, Any] | None,
) -> Iterator[RenderableType]:
    place = row["place"] or row["definition"] or row["call"]
    where = f"  {shorten(place['file'], place['line'])}" if place else ""
    ranks = said.of_ranks(row, view)
    line = Text(f"{_INDENT}{one_line(said.what(row), MAX_WHAT)}", no_wrap=True, overflow="ellipsis")
    line.append(where, style="cyan")
    line.append(f"  {one_line(said.often(row), 100)}{f', {ranks}' if ranks else ''}", style="dim")
    yield line
    if row.get("code"):
        yield Text(f"{'':5}{glyphs.quote} {plain(row['code'])}", style="dim", no_wrap=True, overflow="ellipsis")
    if limit is not None:
        yield Padding(Text(one_line(said.eager(limit), 200)), (0, 0, 0, 5))


def _rest(view: Mapping[str, Any], findings: Sequence[Any]) -> Iterator[RenderableType]:
    """Operators on the host, storms, and what was not seen."""
    untold = [row for row in view["causes"] if row["kind"] in QUIET_KINDS and not said.told(row, findings)]
    for text in said.operators(untold):
        yield Text(_INDENT + one_line(text, 300))
    if not any(finding["category"] == "compile" for finding in findings):
        for storm in view["storms"]:
            yield from (Text(_INDENT + one_line(text, 300)) for text in said.storm(storm))
    for note in view["notes"][:NOTES]:
        yield Padding(Text(one_line(note, 300), style="dim"), (0, 0, 0, 2))
