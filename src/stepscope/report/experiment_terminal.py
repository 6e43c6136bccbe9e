"""An experiment on a terminal: what came of it, the table of candidates, what to change, and how to repeat it.

Shows the dictionary of `experiment_document`. Every text passes `escape`, colour supports what the words say already,
and what is meant to be copied is never broken over lines.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepscope.model.comparison import FASTER, NO_DIFFERENCE, SLOWER, UNDECIDED, VOID
from stepscope.report import experiment_words as say
from stepscope.report import words
from stepscope.report.escape import one_line, plain
from stepscope.report.terminal_parts import GAP, UNICODE, Glyphs, TextColumn, glyphs_for, lines

MAX_WIDTH = 100
IN_FULL = 4  # candidates with their phases and pairs
SKIPPED_SHOWN = 6
FLAGS_SHOWN = 3
SETTINGS_SHOWN = 8
TWINS = {ord("→"): "->", ord("±"): "+-"}
STYLES = {FASTER: "bold green", SLOWER: "bold red", NO_DIFFERENCE: "", UNDECIDED: "yellow", VOID: "dim"}

Row = Mapping[str, Any]


def render(document: Row, console: Console, *, page: str | None = None) -> None:
    """Print the experiment to `console`; `page` is where its report lies, if one was written."""
    width = min(console.width, MAX_WIDTH)
    glyphs = glyphs_for(console.encoding)
    blocks = [
        Group(*_head(document, glyphs)),
        *_table(document, width),
        *_in_full(document, glyphs),
        *_effects(document, width),
        *_changes(document),
        *_left_alone(document),
        *_noise(document),
    ]
    with console.capture() as captured:
        for index, block in enumerate(blocks):
            if index:
                console.print()
            console.print(block, width=width)
        console.print()
        for line in _next(document, page):
            console.print(line, soft_wrap=True)
    for row in captured.get().splitlines():
        text = Text.from_ansi(_encodable(row, glyphs))
        text.rstrip()
        console.print(text, soft_wrap=True)


def experiment_blocks(document: Row | None, width: int) -> Iterator[RenderableType]:
    """The block of a run's report: what an experiment on it has shown, and what to change."""
    if not document:
        return
    texts = [Text(one_line(text, 800)) for text in say.conclusion(document)]
    yield Group(Text("Experiment", style="bold"), *texts)
    yield from _table(document, width)
    yield from _changes(document)


def _encodable(line: str, glyphs: Glyphs) -> str:
    return line if glyphs is UNICODE else glyphs.encodable(line.translate(TWINS))


def _head(document: Row, glyphs: Glyphs) -> Iterator[RenderableType]:
    command = shlex.join(str(word) for word in document["protocol"]["command"])
    yield Text.assemble(("Experiment", "bold"), f": {plain(command, 160)}")
    yield Text(one_line(say.protocol(document)), style="dim")
    source = say.source(document)
    if source:
        yield Text(one_line(source), style="dim")
    for note in document.get("notes") or ():
        yield _hanging(glyphs.warning, "yellow", note)
    unfinished = say.state(document)
    if unfinished:
        yield _hanging(glyphs.warning, "yellow", unfinished)
    yield Text("")
    for number, text in enumerate(say.conclusion(document)):
        yield Text(one_line(text, 800), style="bold" if number == 0 else "")


def _hanging(sign: str, style: str, text: object, limit: int = 400) -> Table:
    table = Table.grid()
    table.add_row(Text(f"{sign} ", style=style), Text(one_line(text, limit)))
    return table


def _table(document: Row, width: int) -> Iterator[RenderableType]:
    """One line for each candidate."""
    rows = say.ranked(document)
    if not rows:
        return
    words_ = [plain(say.VERDICTS.get(str(row.get("verdict")), row.get("verdict")), 20) for row in rows]
    columns = [
        TextColumn("Verdict", words_, flexible=True),
        TextColumn(_compared(rows), [say.change(row) for row in rows], flexible=False),
        TextColumn("Pairs", [words.count(row["pairs"]) for row in rows], flexible=False),
    ]
    if any(row.get("ceiling") is not None for row in rows):
        columns.append(TextColumn("Ceiling", [say.ceiling(row) for row in rows], flexible=False))
    shown = _named("Candidate", [say.name(row) for row in rows], columns, width)
    for part, row in zip(shown[1:], rows, strict=True):
        for line in part:
            line.stylize(STYLES.get(str(row.get("verdict")), ""))
    yield Group(*(line for part in shown for line in part))


def _named(heading: str, names: Sequence[str], columns: Sequence[TextColumn], width: int) -> list[list[Text]]:
    """The headings and the rows with a name before each; one that leaves no room goes on below, knob by knob."""
    room = width - sum(column.natural + GAP for column in columns)
    parts = [[plain(name, 200)] if len(name) <= room else _broken(name) for name in names]
    first = TextColumn(heading, [part[0] for part in parts], flexible=True)
    rows = lines([first, *columns], width)
    more = [[], *([Text(text, no_wrap=True, overflow="ellipsis") for text in part[1:]] for part in parts)]
    return [[row, *below] for row, below in zip(rows, more, strict=True)]


def _broken(name: str) -> list[str]:
    first, *others = (plain(part, 200) for part in name.split(" + "))
    return [first, *(f"  + {part}" for part in others)]


def _compared(rows: Sequence[Row]) -> str:
    headlines = {row.get("headline") for row in rows}
    if headlines == {"samples_per_second"}:
        return "Samples a second (95 %)"
    return "Step time (95 %)" if headlines <= {"mean_ms", None} else "Change (95 %)"


def _in_full(document: Row, glyphs: Glyphs) -> Iterator[RenderableType]:
    """The first candidates with what stands behind their line."""
    for row in say.ranked(document)[:IN_FULL]:
        details = list(_details(row, glyphs))
        if details:
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(no_wrap=True, style="dim")
            table.add_column()
            for label, text in details:
                table.add_row(label, text)
            yield Group(Text(plain(say.name(row), 200), style="bold"), Padding(table, (0, 0, 0, 2)))


def _details(row: Row, glyphs: Glyphs) -> Iterator[tuple[str, Text]]:
    yield "Verdict", Text(one_line(row.get("text") or say.verdict(row), 400))
    phases = say.phases(row)
    if phases:
        yield "Step", Text(glyphs.separator.join(phases))
    pairs = say.blocks(row)
    if pairs:
        yield "Pairs, ms", Text(glyphs.separator.join(pairs))
    for text in (say.beyond(row), say.rate_note(row)):
        if text:
            yield "Note", Text(one_line(text, 300))
    alike = say.trains_alike(row)
    if alike:
        yield "Loss", Text(one_line(alike, 300))
    flags = say.flags(row)
    for number, text in enumerate(flags[:FLAGS_SHOWN]):
        yield "" if number else "Flags", Text(one_line(text, 300), style="yellow")
    if len(flags) > FLAGS_SHOWN:
        yield "", Text(f"and {len(flags) - FLAGS_SHOWN} more", style="dim")


def _effects(document: Row, width: int) -> Iterator[RenderableType]:
    """What each knob does by itself, of a screening."""
    rows = [say.main_effect(row) for row in document.get("main_effects") or ()]
    if not rows:
        return
    names, changes, ceilings, runs = (list(column) for column in zip(*rows, strict=True))
    columns = [
        TextColumn("Step time (95 %)", changes, flexible=False),
        TextColumn("Runs", runs, flexible=False),
    ]
    if any(text != words.MISSING for text in ceilings):
        columns.append(TextColumn("Ceiling", ceilings, flexible=False))
    table = (line for part in _named("Knob", names, columns, width) for line in part)
    yield Group(Text("Main effects, over all settings of the other knobs", style="bold"), *table)


def _changes(document: Row) -> Iterator[RenderableType]:
    """What to write into the script for the best candidate, or by hand where none helps."""
    best = say.winners(document)
    if best and best[0].get("change"):
        texts = [Text(one_line(text, 600)) for text in best[0]["change"]]
        yield Group(Text("What to change", style="bold"), *(Padding(text, (0, 0, 0, 2)) for text in texts))
    by_hand = say.by_hand(document)
    if by_hand:
        texts = [Text(one_line(text, 500)) for text in by_hand[:IN_FULL]]
        yield Group(Text("What no knob reaches either", style="bold"), *(Padding(text, (0, 0, 0, 2)) for text in texts))


def _left_alone(document: Row) -> Iterator[RenderableType]:
    rows = document.get("skipped") or ()
    if not rows:
        return
    parts: list[RenderableType] = [Text("Left out", style="bold")]
    for row in rows[:SKIPPED_SHOWN]:
        text = Text.assemble(plain(say.name(row), 120), (f": {one_line(row['reason'], 240)}", "dim"))
        parts.append(Padding(text, (0, 0, 0, 2)))
    if len(rows) > SKIPPED_SHOWN:
        parts.append(Text(f"  and {len(rows) - SKIPPED_SHOWN} more in experiment.json", style="dim"))
    yield Group(*parts)


def _noise(document: Row) -> Iterator[RenderableType]:
    """What was set to keep the machine quiet, and what was not; the smallest effect."""
    found = document.get("noise")
    if not found:
        return
    parts: list[RenderableType] = []
    smallest = say.noise(document)
    if smallest and not say.is_self_test(document):
        parts.append(Text(smallest))
    for title, key in (("Set for every run", "settings"), ("Left as it is", "unchanged")):
        rows = found.get(key) or ()
        if rows:
            parts.append(Text(title, style="bold"))
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(no_wrap=True, style="dim")
            table.add_column()
            for name, text in rows[:SETTINGS_SHOWN]:
                table.add_row(plain(name, 40), Text(one_line(text, 240)))
            parts.append(Padding(table, (0, 0, 0, 2)))
    if parts:
        yield Group(*parts)


def _next(document: Row, page: str | None) -> Iterator[Text]:
    steps = [("repeat", document.get("repeat"))]
    steps.append(("everything", page or document.get("folder")))
    shown = [(label, text) for label, text in steps if text]
    for number, (label, text) in enumerate(shown):
        yield Text.assemble(("    " if number else "Next", "bold"), (f"  {label:<14}  ", "dim"), plain(text, 4000))
