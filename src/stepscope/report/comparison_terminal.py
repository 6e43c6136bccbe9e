"""A comparison on a terminal: the verdict, the figures, where the difference is, what changed beside it.

Colour only supports what characters already say. Every text of a run passes `escape`, and is put into
`rich.text.Text`, which interprets no markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from stepscope.report import comparison_words as said
from stepscope.report.comparison_words import Row
from stepscope.report.escape import one_line, plain
from stepscope.report.terminal_parts import TextColumn, glyphs_for, lines

ROWS = 5  # of a kind, when no number was asked for
LISTED = 12  # rows of text
MAX_NAME = 90  # characters
SENTENCE = 240  # characters of a finding's title
MIN_WIDTH = 110  # of a comparison that goes to a file or a pipe
MAX_WIDTH = 140
STYLES = {"good": "bold green", "bad": "bold red", "": "bold"}


def render(document: Row, console: Console, *, top: int | None = None) -> None:
    """Print the document that `comparison_document` made. `top` rows of each kind, 0 for all; a few by default."""
    width = min(console.width if console.is_terminal else max(console.width, MIN_WIDTH), MAX_WIDTH)
    glyphs = glyphs_for(console.encoding)
    blocks = [
        list(_head(document, width)),
        list(_phases(document, width)),
        *(list(_kind(title, rows, width, top)) for title, rows in said.amounts(document)),
        list(_findings(document, top)),
        list(_texts(document, "environment", said.ENVIRONMENT, width, top)),
        list(_texts(document, "window", said.WINDOW, width, top)),
        list(_tail(document)),
    ]
    for index, block in enumerate(block for block in blocks if block):
        if index:
            console.print()
        for line in block:
            shown = Text(glyphs.encodable(line.plain), style=line.style, spans=line.spans)
            console.print(shown, soft_wrap=True)


def _head(document: Row, width: int) -> Iterator[Text]:
    yield Text(one_line(said.title(document)), style="bold")
    yield Text(one_line(said.verdict(document)), style=STYLES[said.verdict_style(document)])
    for text in said.warnings(document):
        yield Text(f"! {one_line(text)}", style="yellow")
    figures = said.figures(document)
    if figures:
        yield Text("")
        heading = "95 % interval" if any(row.interval for row in figures) else ""
        columns = [
            TextColumn("", [row.label for row in figures], True),
            TextColumn("baseline", [row.baseline for row in figures], False),
            TextColumn("candidate", [row.candidate for row in figures], False),
            TextColumn("change", [row.change for row in figures], False),
            *([TextColumn(heading, [row.interval for row in figures], False)] if heading else []),
        ]
        yield from lines(columns, width)
    equal = said.equivalence(document)
    if equal:
        yield Text(one_line(equal), style="dim")


def _phases(document: Row, width: int) -> Iterator[Text]:
    rows = said.phases(document)
    if not rows:
        return
    limits = [said.phase_limits(row) for row in rows]
    yield Text(said.PHASES, style="bold")
    columns = [
        TextColumn("", [plain(said.phase(row["category"])) for row in rows], True),
        TextColumn("baseline", [said.amount(row["baseline_ms"], said.MS) for row in rows], False),
        TextColumn("candidate", [said.amount(row["candidate_ms"], said.MS) for row in rows], False),
        TextColumn("difference", [said.phase_difference(row) for row in rows], False),
        *([TextColumn("95 % interval", limits, False)] if any(limits) else []),
    ]
    yield from lines(columns, width)


def _kind(title: str, rows: Sequence[Row], width: int, top: int | None) -> Iterator[Text]:
    shown = rows[: _limit(top, ROWS)]
    yield _heading(title, len(shown), len(rows))
    yield from lines(_amounts(shown), width)


def _amounts(rows: Sequence[Row]) -> list[TextColumn]:
    """Rows of figures: the difference first, because the table is in its order."""
    places = [plain(said.place(row), MAX_NAME) for row in rows]
    code = [plain(row.get("code") or "", MAX_NAME) for row in rows]
    status = [said.status(row) for row in rows]
    return [
        TextColumn("difference", [said.difference(row) for row in rows], False),
        TextColumn("baseline", [said.amount(row["baseline"], row["unit"]) for row in rows], False),
        TextColumn("candidate", [said.amount(row["candidate"], row["unit"]) for row in rows], False),
        TextColumn("", [plain(said.name(row), MAX_NAME) for row in rows], True),
        *([TextColumn("", places, True)] if any(places) else []),
        *([TextColumn("", code, True)] if any(code) else []),
        *([TextColumn("", status, True)] if any(status) else []),
    ]


def _findings(document: Row, top: int | None) -> Iterator[Text]:
    rows = said.of_kind(document, "finding")
    if not rows:
        return
    shown = rows[: _limit(top, LISTED)]
    yield _heading(said.FINDINGS, len(shown), len(rows))
    costs = [said.difference(row) for row in shown]
    widest = max(map(len, costs))
    for row, cost in zip(shown, costs, strict=True):
        yield Text(f"{row['status']:<6}  {cost:>{widest}}  {one_line(said.name(row), SENTENCE)}")


def _texts(document: Row, kind: str, title: str, width: int, top: int | None) -> Iterator[Text]:
    rows = said.of_kind(document, kind)
    if not rows:
        return
    shown = rows[: _limit(top, LISTED)]
    yield _heading(title, len(shown), len(rows))
    columns = [
        TextColumn("", [plain(row["name"], MAX_NAME) for row in shown], True),
        TextColumn("baseline", [plain(said.value(row["baseline"]), MAX_NAME) for row in shown], True),
        TextColumn("candidate", [plain(said.value(row["candidate"]), MAX_NAME) for row in shown], True),
    ]
    yield from lines(columns, width)


def _tail(document: Row) -> Iterator[Text]:
    for text in said.notes(document):
        yield Text(f"Note: {one_line(text)}", style="dim")
    for what, why in said.absent(document):
        yield Text(f"{said.ABSENT}: {plain(what)} ({one_line(why)})", style="dim")


def _heading(title: str, shown: int, total: int) -> Text:
    some = f", {shown} of {total}" if shown < total else ""
    return Text.assemble((title, "bold"), (some, "dim"))


def _limit(top: int | None, usual: int) -> int | None:
    return usual if top is None else top or None
