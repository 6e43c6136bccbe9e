"""Blocks on a terminal: sentences, figures, tables and findings; pictures are left to pages.

On a screen sentences are broken over lines and names are cut at its edge; in a file or a pipe neither is, so that
each statement and each row is one whole line. Colour only supports what characters already say, so a log file or a
colour-blind reader loses nothing. Every text of a run has passed `escape.plain` and is put into `rich.text.Text`, which
interprets no markup.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TextIO

from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepscope.dashboard import blocks, summary
from stepscope.dashboard.blocks import Alone, Block, value_text
from stepscope.dashboard.static_page import numbered
from stepscope.dashboard.text_columns import GAP, TextColumn, soft
from stepscope.dashboard.text_columns import lines as lines_of
from stepscope.model import Report
from stepscope.report import outputs, sentences, words
from stepscope.report.escape import one_line, plain
from stepscope.report.words import Shortener

if TYPE_CHECKING:
    from stepscope.report.table import TableDocument

MAX_WIDTH = 100  # longer lines are hard to read
LONG = 60  # characters: a text of a table from which on it is broken over lines instead of being cut
QUOTED = 7  # characters before a line of source below a row
MAX_NOTES = 4  # below a table in full
RANKED, LISTED = 5, 12  # rows of changed figures, and of any other list, when no number was asked for
Item = Mapping[str, Any]
Rows = Iterator[RenderableType | None]
Steps = Iterable[tuple[str, str]]  # (what for, command or path) of what comes next


class Screen(Struct, frozen=True):
    """What blocks are drawn on. `wraps`: texts of tables are broken over lines rather than cut; `whole`: neither."""

    width: int
    glyphs: Glyphs
    wraps: bool
    whole: bool

    def line(self, text: str, style: str = "") -> Text:
        """A line that is cut at the terminal's edge; elsewhere it is whole."""
        return Text(text, style=style, no_wrap=True, overflow="ignore" if self.whole else "ellipsis")


def show_report(
    report: Report, stream: TextIO | None = None, *, page: str | None = None, again: str | None = None
) -> None:
    """Print the report to `stream` (stdout by default); on stderr, a blank line ends what came before."""
    target = outputs.console(stream or sys.stdout)
    if stream is sys.stderr:
        target.print()
    render(report, target, page=page, again=again)


def render(report: Report, console: Console, *, page: str | None = None, again: str | None = None) -> None:
    """Print `report` to `console`.

    `page` is where the HTML report lies, if it was written; `again` is the command that would write it.
    """
    cwd = _cwd()
    folder = shlex.quote(plain(words.near(str(report.run.get("folder") or "RUN"), cwd)))
    everything = plain(words.near(page, cwd) if page else again or f"stepscope analyze {folder} --html report.html")
    show(summary.sections(report), console, [*sentences.next_steps(report, cwd), ("everything", everything)])


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:  # deleted meanwhile
        return os.sep


def show_comparison(document: dict[str, Any], console: Console, *, top: int | None = None) -> None:
    """Print what `compare` found; `top` rows of each kind, 0 for all, a few by default."""
    from stepscope.dashboard.pages import compare

    rows = Alone(LISTED, RANKED) if top is None else Alone(top or sys.maxsize)
    show([compare.comparison(rows, document)], console, most=140)


def show_search(document: Item, sections: Iterable[Iterable[Block]], console: Console, *, page: str = "") -> None:
    """Print what came of an experiment or a sweep; `page` is where its report lies, if one was written."""
    steps = [("repeat", document["repeat"]), ("everything", words.near(page or document["folder"] or "", _cwd()))]
    show(sections, console, [(label, plain(text, 4000)) for label, text in steps if text])


def show_replay(document: Item, console: Console, shorten: Shortener) -> None:
    show([summary.replayed(Alone(shorten=shorten), document)], console)


def show_table(found: TableDocument, console: Console, shorten: Shortener, *, define: bool = False) -> None:
    """Print a table in full, as pages lay it out; with `define`, what its columns mean below it."""
    from stepscope.dashboard.pages import traced
    from stepscope.report.table import CURVE_VALUES, METRICS

    if found.absent is not None:
        console.print(Text(f"{found.title}: {one_line(found.absent)}\n"), soft_wrap=True)
        return
    by = next((heading for heading, key in found.shown.columns if key == found.sorted_by), found.sorted_by)
    title = f"{found.title}, by {words.term(by)}" if by else found.title
    said = [one_line(note) for note in found.notes[:MAX_NOTES]]
    if len(found.notes) > MAX_NOTES:
        said.append(f"and {len(found.notes) - MAX_NOTES} more notes with --json")
    tree = any("depth" in row or "level" in row for row in found.rows)
    whole = Alone(sys.maxsize, shorten=shorten)
    made = traced.laid(whole, found, id="", title=title, total=found.total, notes=said, open_depth=tree or None)
    for row in made["rows"] if found.table == "overview" else ():
        row["part"] = words.part(row["part"])
    if found.table == METRICS:  # values of any size, and such that JSON has no number for
        for row, values in zip(made["rows"], found.rows, strict=True):
            row |= {key: f"{values[key]:.4g}" for key in CURVE_VALUES if isinstance(values.get(key), float)}
    meanings = (each for each in made["columns"] if each["help"] and (define or found.shown.define))
    shown = [made, *(blocks.text(f"{each['key']}: {each['help']['text']}", "note") for each in meanings)]
    show_rows(shown, console)


def show_rows(shown: Iterable[Block], console: Console) -> None:
    """Print tables of which every row is a line, however wide the terminal is."""
    show([shown], console, most=sys.maxsize, wraps=False)


def show(
    sections: Iterable[Iterable[Block]],
    console: Console,
    steps: Steps = (),
    *,
    most: int = MAX_WIDTH,
    wraps: bool = True,
) -> None:
    """Print the sections, an empty line between them and around each titled block, then the next `steps`.

    Lines take up to `most` characters of a terminal, and as many as they need elsewhere. Unless `wraps`, texts of
    tables are cut on a terminal.
    """
    whole = not console.is_terminal
    if whole:
        most = sys.maxsize
        console.size = (most, console.height)  # or Rich asks the system for it, several times a line
    screen = Screen(min(console.width, most), glyphs_for(console.encoding), wraps and not whole, whole)
    rows = (row for section in sections for row in (*_section(section, screen), None))
    after = [
        Text.assemble(("    " if number else "Next", "bold"), (f"  {label:<14}  ", "dim"), text)
        for number, (label, text) in enumerate(steps)
    ]
    _print(rows, after, console, screen.width)


def _section(section: Iterable[Block], screen: Screen) -> Rows:
    for block in section:
        if block["kind"] in _BLOCKS:
            apart = (None,) if block.get("title") else ()
            yield from apart
            yield from _BLOCKS[block["kind"]](block, screen)
            yield from apart


def _text(block: Block, screen: Screen) -> Rows:  # noqa: ARG001
    said, tone = one_line(block["text"]), block["tone"]
    if tone == "warning":
        yield warned(said)
    elif tone == "head":
        head, colon, rest = said.partition(": ")
        yield Text.assemble((head, "bold"), colon, rest)
    else:
        yield Text(said, style={"note": "dim", "good": "bold green"}.get(tone, ""))


def _empty(block: Block, screen: Screen) -> Rows:  # noqa: ARG001
    yield Text.assemble((block["title"], "bold"), f": {one_line(block['why'])}")


def _figures(block: Block, screen: Screen) -> Rows:
    parts = [(item["label"], value_text(item["value"], item["unit"])) for item in block["items"]]
    yield _pairs(parts, screen)


def _pairs(parts: Iterable[tuple[str, str]], screen: Screen) -> Text:
    return soft(screen.glyphs.separator).join(Text.assemble((f"{label}: ", "dim"), value) for label, value in parts)


def _facts(block: Block, screen: Screen) -> Rows:  # noqa: ARG001
    yield head(block["title"])
    notes = (f"  ({row['note']})" if row["note"] else "" for row in block["rows"])
    rows = zip(block["rows"], notes, strict=True)
    said = ((row["label"], Text.assemble(row["value"] or words.MISSING, (note, "dim"))) for row, note in rows)
    yield indented(labelled(said))


def _table(block: Block, screen: Screen) -> Rows:
    rows, columns = block["rows"], block["columns"]
    if block["title"]:
        some = f", {len(rows)} of {words.count(block['total'])}" if block["total"] > len(rows) else ""
        yield Text.assemble((block["title"], "bold"), (some, "dim"))
    if block.get("stacked"):
        yield from _stacked(rows, screen)
        yield from (soft(note) for note in block["notes"])
        return
    shown, cells = _columns(columns, rows)
    if block.get("tree"):
        cells[0] = [f"{'  ' * row.get('depth', 0)}{cell}" for row, cell in zip(rows, cells[0], strict=True)]
    lines: list[Text] = []
    if not any(each["label"] for each in shown):
        lines = _list(shown, cells, screen)
    elif screen.wraps and _wraps(shown, cells, screen):
        yield _wrapped(shown, cells)
    else:
        named = zip(shown, cells, strict=True)
        made = [TextColumn(each["label"], column, flexible=not each["numeric"]) for each, column in named]
        heading, *lines = lines_of(made, screen.width, wraps=screen.wraps)
        yield heading
    for line, row in zip(lines, rows, strict=False):
        yield line
        code = next((cell["code"] for cell in row.values() if isinstance(cell, Mapping) and cell["code"]), None)
        yield from [quoted(code, QUOTED, screen)] if code else []
    yield from (soft(note) for note in block["notes"])


def _columns(columns: Sequence[Item], rows: Sequence[Item]) -> tuple[list[Item], list[list[str]]]:
    """The columns that say anything, with their cells; both limits of an interval stand in one."""
    shown: list[Item] = []
    cells: list[list[str]] = []
    for each in columns:
        if not any(row.get(each["key"]) is not None for row in rows):
            continue
        made = [_cell(row.get(each["key"]), row, each) for row in rows]
        if each["key"].partition("_")[0] == "high" and shown and shown[-1]["key"].partition("_")[0] == "low":
            shown[-1] = {**each, "label": "95 % interval"}
            cells[-1] = [
                "" if high == words.MISSING else f"{low} to {high}" for low, high in zip(cells[-1], made, strict=True)
            ]
        else:
            shown.append(each)
            cells.append(made)
    return shown, cells


def _wraps(columns: Sequence[Item], cells: Sequence[Sequence[str]], screen: Screen) -> bool:
    """Whether texts are broken over lines: sentences at the end of a row, or a few words that do not fit. Long names
    are cut instead."""
    longest = [max(map(len, (each["label"], *column))) for each, column in zip(columns, cells, strict=True)]
    texts = [size for size, each in zip(longest, columns, strict=True) if not each["numeric"]]
    if any(each["place"] for each in columns):
        return False
    if longest[-1] > LONG and not columns[-1]["numeric"]:
        return True
    over, most = sum(longest) + GAP * (len(longest) - 1) - screen.width, max(texts, default=0)
    return 0 < over <= most // 2 and most <= LONG


def _cell(value: Any, row: Item, column: Item) -> str:
    if value is None and not column["numeric"]:
        return ""
    if isinstance(value, Mapping):
        function = value["function"] if "function" not in row else None  # a column of its own says it
        return f"{value_text(value, '')}  {function or ''}".rstrip()
    unit = str(row.get(column["unit_key"])) if "unit_key" in column else column["unit"]
    return value_text(value, unit, signed=bool(column.get("signed")))


def _list(columns: Sequence[Item], cells: Sequence[Sequence[str]], screen: Screen) -> list[Text]:
    widths = [max(map(len, column)) if each["numeric"] else 0 for each, column in zip(columns, cells, strict=True)]
    rows = zip(*cells, strict=True)
    said = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True) if cell) for row in rows)
    return [screen.line(f"{'  ' if columns[0]['numeric'] else ''}{text}") for text in said]


def _wrapped(columns: Sequence[Item], cells: Sequence[Sequence[str]]) -> Table:
    """A table whose texts go on below; what the row above begins with is not said again."""
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for column in columns:
        justify: Any = "right" if column["numeric"] else "left"
        table.add_column(Text(column["label"], style="dim"), justify=justify, no_wrap=bool(column["numeric"]))
    above = ""
    for first, *others in zip(*cells, strict=True):
        table.add_row(*map(Text, ("" if first == above else first, *others)))
        above = first
    return table


def _stacked(parts: Sequence[Item], screen: Screen) -> Rows:
    bar, width = Text(), min(screen.width, MAX_WIDTH)
    edge = 0.0
    for index, part in enumerate(parts):
        edge += part["share"]
        sign, colour = screen.glyphs.part(index)
        bar.append(sign * (min(width, round(edge * width)) - len(bar)), style=colour)
    yield bar
    longest = max(len(part["part"]) for part in parts)
    cell = 2 + longest + 2 + 8 + 1 + 7
    columns = max(1, min(len(parts), (width + 4) // (cell + 4)))
    table = Table.grid(padding=(0, 4, 0, 0))
    texts = [
        Text.assemble(
            (f"{sign} ", colour),
            part["part"].ljust(longest),
            f"  {words.milliseconds(part['ms']):>8} ",
            (f"{words.percent(part['share']):>7}", "bold" if part["share"] >= 0.25 else ""),
        )
        for part, (sign, colour) in zip(parts, map(screen.glyphs.part, range(len(parts))), strict=True)
    ]
    for first in range(0, len(texts), columns):
        table.add_row(*texts[first : first + columns])
    yield table


IN_FULL = 3  # what fits a screen
LISTED = 8
MAX_EVIDENCE = 5
MAX_EXPLAINED = 3
RISKS_SHOWN = 3
RISK_EVIDENCE = 4
REASONED = 3  # different reasons, of rules that were not judged, from which on a screen has the rules alone
SEVERITY_STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "bold cyan"}


def _findings(block: Block, screen: Screen) -> Rows:
    """The first few in full, the others one line each, then the rules with nothing to go by, and risks.

    What a finding explains stands below it, in one line: it is no loss in addition.
    """
    numbers = [number for number, _ in numbered(block["findings"])]
    causes = [
        [card for _, card in cards]
        for _, cards in groupby(zip(numbers, block["findings"], strict=True), lambda each: each[0].partition(".")[0])
    ]
    for index, (card, *explained) in enumerate(causes[:LISTED], start=1):
        yield _title(index, card, screen)
        if index <= IN_FULL:
            yield indented(*_where(card["where"], screen), labelled(_details(card, explained, screen)))
            yield None
        elif explained:
            rules = ", ".join(each["rule"] for each in explained)
            yield indented(soft(f"explains, not in addition: {rules}"))
    if len(causes) > LISTED:
        yield soft(f"and {len(causes) - LISTED} smaller findings")
    for label, said in (
        ("Not judged", [(row["rule"], f"needs {one_line(row['needs'])}") for row in block["abstained"]]),
        ("Ignored by configuration", [(row["rule"], one_line(row["reason"])) for row in block["ignored"]]),
    ):
        if said:
            yield soft(f"{label}: {_reasoned(said, screen)}")
    if block["risks"]:
        yield None
        yield head("Risks, without a measured cost")
    for risk in block["risks"][:RISKS_SHOWN]:
        yield from _risk(risk, screen)
    if len(block["risks"]) > RISKS_SHOWN:
        yield soft(f"and {len(block['risks']) - RISKS_SHOWN} more in the report's files")


def _reasoned(said: Sequence[tuple[str, str]], screen: Screen) -> str:
    """Rules, those of one reason together, with it; without reasons where they would fill a screen."""
    rules: dict[str, list[str]] = {}
    for rule, reason in said:
        rules.setdefault(reason, []).append(rule)
    if len(rules) > REASONED and not screen.whole:
        return f"{', '.join(rule for rule, _ in said)}; the report's files say why"
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in rules.items())


def _title(number: int, card: Item, screen: Screen) -> Table:
    title = head(one_line(card["title"]))
    if card["confidence"] != "high":
        title.append(f"  ({card['confidence']} confidence)", style="not bold dim")
    table = Table.grid(padding=(0, 2, 0, 0), expand=not screen.whole)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, justify="right")
    severity = Text.assemble((f"{number} ", "bold"), (card["severity"], SEVERITY_STYLES[card["severity"]]))
    table.add_row(severity, title, head(card["cost"]))
    return table


def _where(places: Sequence[Item], screen: Screen) -> Iterator[RenderableType]:
    if not places:
        return
    first = places[0]
    line = screen.line(value_text(first, ""), "cyan")
    if first["function"]:
        line.append(f"  {plain(first['function'])}", style="default")
    if first["share"] is not None and first["share"] < words.WHOLE:
        line.append(f"  {words.percent(first['share'])} of it", style="dim")
    yield line
    for each in first["source"] or ():
        if each["here"]:
            quote = screen.line(f"{each['line']:>5} {screen.glyphs.quote} ", "dim")
            quote.append(each["text"].strip(), style="default")
            if first["edited"]:
                quote.append("   (edited since the run)", style="yellow")
            yield quote
    if len(places) > 1:
        others = ", ".join(value_text(place, "") for place in places[1:3])
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        yield screen.line(f"also {others}{more}", "dim")


def _details(card: Item, explained: Sequence[Item], screen: Screen) -> Iterator[tuple[str, Text]]:
    said = (words.milliseconds(card["cost_ms_per_step"]), words.percent(card["share"]))  # by the title's line
    seen = [(row["metric"], row["text"]) for row in card["evidence"] if row["text"] not in said]
    if seen:
        yield "Seen", _pairs(seen[:MAX_EVIDENCE], screen)
    for text in card["disagreements"]:
        yield "Sources", Text(one_line(text), style="yellow")
    if card["ranks"]:
        yield "Ranks", Text(", ".join(str(rank) for rank in card["ranks"][:16]))
    yield "Fix", Text(one_line(card["fix"]))
    if card["caveat"]:
        yield "Note", soft(one_line(card["caveat"]))
    tried = [f"{row['knob']}={row['value']}" for row in card["try"]]
    yield "Try" if tried else "Gain", Text(screen.glyphs.separator.join([*tried, card["gain"]]))
    for index, each in enumerate(explained[:MAX_EXPLAINED]):
        text = f"{each['title']} ({each['cost']}; not in addition)"
        yield "" if index else "Explains", Text(one_line(text))
    if len(explained) > MAX_EXPLAINED:
        yield "", soft(f"and {len(explained) - MAX_EXPLAINED} more")


def _risk(card: Item, screen: Screen) -> Iterator[RenderableType]:
    sure = "" if card["confidence"] == "high" else f"  ({card['confidence']} confidence)"
    title = Text.assemble(one_line(card["title"]), (sure, "dim"))
    yield warned(title, style="yellow" if card["severity"] != "info" else "cyan")
    places = ", ".join(value_text(place, "") for place in card["where"][:RISKS_SHOWN])
    seen = [(row["metric"], row["text"]) for row in card["evidence"][:RISK_EVIDENCE]]
    rows = [("At", Text(places, style="cyan"))] if places else []
    rows += [("Seen", _pairs(seen, screen))] if seen else []
    yield indented(labelled([*rows, ("Fix", Text(one_line(card["fix"])))]))


_BLOCKS = {
    "text": _text,
    "empty": _empty,
    "figures": _figures,
    "facts": _facts,
    "table": _table,
    "findings": _findings,
}


# Colours of the parts of a step by position; basic ones, which every terminal theme defines readably.
COLOURS = ("red", "blue", "green", "magenta", "cyan", "yellow", "bright_black")
WARNING = "!"
ESCAPE = "\x1b"  # of what is coloured
# twins of the same width first, so that columns stay aligned; arrows and the like stand in sentences
TWINS = {ord("–"): "-", ord("…"): "~", ord("→"): "->", ord("±"): "+-"}


class Glyphs(Struct, frozen=True):
    """`fills` tell the parts of the bar apart without colour."""

    fills: str
    quote: str
    separator: str

    def part(self, index: int) -> tuple[str, str]:
        """The character that fills part `index` of the bar, and its style."""
        return self.fills[index % len(self.fills)], COLOURS[index % len(COLOURS)]

    def encodable(self, line: str) -> str:
        """`line` in characters that the terminal has: signs of ours by their twins, others as escapes."""
        if self is UNICODE:
            return line
        return line.translate(TWINS).encode("ascii", errors="backslashreplace").decode("ascii")


UNICODE = Glyphs(fills="█▓▒░▞=+", quote="│", separator=" · ")
ASCII = Glyphs(fills="#=+-:o.", quote="|", separator=", ")


def glyphs_for(encoding: str) -> Glyphs:
    try:
        UNICODE.fills.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def _print(rows: Iterable[RenderableType | None], after: Iterable[Text], console: Console, width: int) -> None:
    """Print the rows, an empty line for None (one, where nothing stands between two), then lines that may be longer
    than `width`: a path or a command broken over lines cannot be copied."""
    stretches: list[list[RenderableType]] = [[]]
    for row in rows:
        if row is None:
            stretches.append([])
        else:
            stretches[-1].append(row)
    with console.capture() as captured:
        for stretch in filter(None, stretches[:-1]):
            console.print(Group(*stretch), width=width, crop=False)
            console.print()
        if stretches[-1]:
            console.print(Group(*stretches[-1]), width=width, crop=False)
        for line in after:
            console.print(line, soft_wrap=True)
    # tables pad their cells; a report pasted elsewhere should not carry that along
    glyphs = glyphs_for(console.encoding)
    for shown in map(glyphs.encodable, captured.get().splitlines()):
        if ESCAPE not in shown:
            console.file.write(shown.rstrip() + "\n")
            continue
        text = Text.from_ansi(shown)
        text.rstrip()
        console.print(text, soft_wrap=True)
    console.file.flush()


def head(text: str) -> Text:
    return Text(text, style="bold")


def quoted(code: str, indent: int, screen: Screen) -> Text:
    return screen.line(f"{'':{indent}}{screen.glyphs.quote} {plain(code)}", "dim")


def warned(text: str | Text, style: str = "yellow") -> Table:
    """A paragraph that hangs behind a sign."""
    table = Table.grid()
    table.add_row(Text(f"{WARNING} ", style=style), text if isinstance(text, Text) else Text(one_line(text)))
    return table


def indented(*rows: RenderableType) -> Padding:
    """Rows moved to the right, however they are broken over lines."""
    return Padding(Group(*rows), (0, 0, 0, 2), expand=False)


def labelled(rows: Iterable[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    for label, text in rows:
        table.add_row(Text(label), text)
    return table
