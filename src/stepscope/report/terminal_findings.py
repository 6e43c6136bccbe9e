"""The findings of the terminal report: the first few in full, the others one line each.

What a finding explains stands below it, in one line: it is no loss in addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepscope.model import Report
from stepscope.report import sentences, words
from stepscope.report.escape import one_line, plain
from stepscope.report.places import Shortener
from stepscope.report.sentences import Group as Cause
from stepscope.report.sentences import groups
from stepscope.report.terminal_parts import Glyphs

IN_FULL = 3  # what fits a screen
LISTED = 8
MAX_EVIDENCE = 5
MAX_EXPLAINED = 3
SEVERITY_STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "bold cyan"}


def findings_block(report: Report, shorten: Shortener, glyphs: Glyphs) -> Iterator[RenderableType]:
    """One block a finding, then the rules that had nothing to go by."""
    everywhere = report.run.get("ranks") or []
    causes = groups(report)
    for index, cause in enumerate(causes[:IN_FULL]):
        yield Group(*_full(index + 1, cause, shorten, glyphs, everywhere))
    tail: list[RenderableType] = []
    for index, cause in enumerate(causes[IN_FULL:LISTED], start=IN_FULL + 1):
        tail.append(_title(index, cause.finding))
        if cause.explained:
            names = ", ".join(plain(row["rule"], 60) for row in cause.explained)
            line = Text(f"explains, not in addition: {names}", style="dim", no_wrap=True, overflow="ellipsis")
            tail.append(Padding(line, (0, 0, 0, 2)))
    if len(causes) > LISTED:
        tail.append(Text(f"and {len(causes) - LISTED} smaller findings", style="dim"))
    overlap = sentences.overlap(report)
    if overlap:
        tail.append(Text(overlap, style="yellow"))
    healthy = sentences.healthy(report) if not report.findings and sentences.is_judged(report) else None
    if healthy:
        tail.append(Text(healthy, style="bold green"))
    if unexplained := sentences.unexplained(report):
        tail.append(Text(unexplained, style="yellow"))
    if report.abstained:
        tail.append(_abstained(report))
    if report.ignored:
        names = ", ".join(plain(row["rule"], 60) for row in report.ignored)
        tail.append(Text(f"Ignored by configuration: {names}", style="dim"))
    if tail:
        yield Group(*tail)


def _abstained(report: Report) -> Text:
    """One line: the names of the rules, and what a rule lacked where it is the only one."""
    names = ", ".join(plain(row["rule"], 60) for row in report.abstained)
    needs = f" (needs {one_line(report.abstained[0]['needs'], 120)})" if len(report.abstained) == 1 else ""
    return Text(f"Not judged: {names}{needs}", style="dim", no_wrap=True, overflow="ellipsis")


def _full(
    number: int, cause: Cause, shorten: Shortener, glyphs: Glyphs, everywhere: list[int]
) -> Iterator[RenderableType]:
    yield _title(number, cause.finding)
    body: list[RenderableType] = list(_where(cause.finding["where"], shorten, glyphs))
    details = _details(cause.finding, glyphs, everywhere)
    for index, row in enumerate(cause.explained[:MAX_EXPLAINED]):
        details.add_row("" if index else "Explains", Text(one_line(sentences.explained(row), 240)))
    if len(cause.explained) > MAX_EXPLAINED:
        details.add_row("", Text(f"and {len(cause.explained) - MAX_EXPLAINED} more", style="dim"))
    body.append(details)
    yield Padding(Group(*body), (0, 0, 0, 2))


def _title(number: int, finding: dict[str, Any]) -> Table:
    severity = plain(finding["severity"])
    title = Text(one_line(finding["title"], 160), style="bold")
    if finding["confidence"] != "high":
        title.append(f"  ({plain(finding['confidence'])} confidence)", style="not bold dim")
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, justify="right")
    head = Text.assemble((f"{number} ", "bold"), (severity, SEVERITY_STYLES.get(severity, "bold")))
    table.add_row(head, title, Text(sentences.cost(finding), style="bold"))
    return table


def _where(places: list[dict[str, Any]], shorten: Shortener, glyphs: Glyphs) -> Iterator[RenderableType]:
    if not places:
        return
    first = places[0]
    line = Text(shorten(first["file"], first["line"]), style="cyan", no_wrap=True, overflow="ellipsis")
    if first.get("function"):
        line.append(f"  {plain(first['function'], 80)}", style="default")
    if first.get("share") is not None and first["share"] < words.WHOLE:
        line.append(f"  {words.percent(first['share'])} of it", style="dim")
    yield line
    source = first.get("source")
    if source:
        text = source["lines"][first["line"] - source["first_line"]].strip()
        quote = Text(f"{first['line']:>5} {glyphs.quote} ", style="dim", no_wrap=True, overflow="ellipsis")
        quote.append(plain(text), style="default")
        if source["changed_since"]:
            quote.append("   (edited since the run)", style="yellow")
        yield quote
    if len(places) > 1:
        others = ", ".join(shorten(place["file"], place["line"]) for place in places[1:3])
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        yield Text(f"also {others}{more}", style="dim", no_wrap=True, overflow="ellipsis")


def _details(finding: dict[str, Any], glyphs: Glyphs, everywhere: list[int]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    evidence = [text for row in finding["evidence"] if (text := _evidence(row, finding))]
    if evidence:
        table.add_row("Seen", Text(glyphs.separator, style="dim").join(evidence[:MAX_EVIDENCE]))
    for row in finding.get("disagreements") or ():
        table.add_row("Sources", Text(one_line(sentences.disagreement(row), 300), style="yellow"))
    ranks = finding["ranks"]
    if ranks and len(everywhere) > 1 and set(ranks) != set(everywhere):
        table.add_row("Ranks", Text(", ".join(str(rank) for rank in ranks[:16])))
    table.add_row("Fix", Text(one_line(finding["fix"], 400)))
    if finding["caveat"]:
        table.add_row("Note", Text(one_line(finding["caveat"], 200), style="dim"))
    tried = [plain(f"{row['knob']}={row['value']}") for row in finding["try"]]
    gain = sentences.gain(finding)
    table.add_row("Try" if tried else "Gain", Text(glyphs.separator.join([*tried, gain])))
    return table


def _evidence(row: dict[str, Any], finding: dict[str, Any]) -> Text | None:
    """One figure; None where the finding's title line gives the same one already."""
    metric, value = words.evidence(row)
    if value in (words.milliseconds(finding["cost_ms_per_step"]), words.percent(finding["share"])):
        return None
    return Text.assemble((f"{metric}: ", "dim"), value)


RISKS_SHOWN = 3
RISK_EVIDENCE = 4


def risks_block(report: Report, shorten: Shortener, glyphs: Glyphs) -> Iterator[RenderableType]:
    """One block: each risk with its line, what was seen and what to do."""
    if not report.risks:
        return
    rows: list[RenderableType] = [Text("Risks, without a measured cost", style="bold")]
    for risk in report.risks[:RISKS_SHOWN]:
        rows += _risk(risk, shorten, glyphs)
    if len(report.risks) > RISKS_SHOWN:
        rows.append(Text(f"and {len(report.risks) - RISKS_SHOWN} more in the report's files", style="dim"))
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
    places = ", ".join(shorten(place["file"], place["line"]) for place in risk["where"][:RISKS_SHOWN])
    if places:
        details.add_row("At", Text(places, style="cyan"))
    seen = [words.evidence(row) for row in risk["evidence"][:RISK_EVIDENCE]]
    if seen:
        parts = [Text.assemble((f"{metric}: ", "dim"), value) for metric, value in seen]
        details.add_row("Seen", Text(glyphs.separator, style="dim").join(parts))
    details.add_row("Fix", Text(one_line(risk["fix"], 400)))
    yield Padding(details, (0, 0, 0, 2))
