"""What the terminal reports are drawn with: lines, labels, bars and tables, in characters that the terminal has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepscope.report import words
from stepscope.report.escape import one_line, plain

# Colours of the parts of a step by position; basic ones, which every terminal theme defines readably.
COLOURS = ("red", "blue", "green", "magenta", "cyan", "yellow", "bright_black")
WARNING = "!"
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
    """The set that `encoding` can carry."""
    try:
        UNICODE.fills.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def show(rows: Iterable[RenderableType | None], after: Iterable[Text], console: Console, width: int) -> None:
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
            console.print(Group(*stretch), width=width)
            console.print()
        if stretches[-1]:
            console.print(Group(*stretches[-1]), width=width)
        for line in after:
            console.print(line, soft_wrap=True)
    # tables pad their cells; a report pasted elsewhere should not carry that along
    glyphs = glyphs_for(console.encoding)
    for shown in captured.get().splitlines():
        text = Text.from_ansi(glyphs.encodable(shown))
        text.rstrip()
        console.print(text, soft_wrap=True)


def head(text: str) -> Text:
    """The heading of a block."""
    return Text(text, style="bold")


def soft(text: str) -> Text:
    """What is worth less attention."""
    return Text(text, style="dim")


def clipped(text: str, style: str = "") -> Text:
    """A line that is cut at the terminal's edge."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def quoted(code: str, indent: int, glyphs: Glyphs) -> Text:
    """A line of source below its place."""
    return clipped(f"{'':{indent}}{glyphs.quote} {plain(code)}", "dim")


def warned(text: str | Text, limit: int = 300, style: str = "yellow") -> Table:
    """A paragraph that hangs behind a sign."""
    table = Table.grid()
    table.add_row(Text(f"{WARNING} ", style=style), text if isinstance(text, Text) else Text(one_line(text, limit)))
    return table


def indented(*rows: RenderableType, by: int = 2) -> Padding:
    """Rows moved to the right, however they are broken over lines."""
    return Padding(Group(*rows), (0, 0, 0, by))


def labelled(rows: Iterable[tuple[str, Text]]) -> Table:
    """A label before each text."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    for label, text in rows:
        table.add_row(Text(label), text)
    return table


def next_lines(steps: Iterable[tuple[str, str]]) -> Iterable[Text]:
    """(what for, command or path) of what comes next."""
    for number, (label, text) in enumerate(steps):
        yield Text.assemble(("    " if number else "Next", "bold"), (f"  {label:<14}  ", "dim"), text)


def bar(parts: list[dict[str, Any]], width: int, glyphs: Glyphs) -> Text:
    """The parts as stretches of one line, each as long as its share."""
    bar = Text()
    edge = 0.0
    for index, part in enumerate(parts):
        edge += part["share"]
        sign, colour = glyphs.part(index)
        bar.append(sign * (min(width, round(edge * width)) - len(bar)), style=colour)
    return bar


def legend(parts: list[dict[str, Any]], width: int, glyphs: Glyphs) -> RenderableType:
    """The parts in as many aligned columns as fit."""
    names = [words.term(part["category"]) for part in parts]
    longest = max(len(name) for name in names)
    cell = 2 + longest + 2 + 8 + 1 + 7
    columns = max(1, min(len(parts), (width + 4) // (cell + 4)))
    table = Table.grid(padding=(0, 4, 0, 0))
    texts = [
        Text.assemble(
            (f"{sign} ", colour),
            name.ljust(longest),
            f"  {words.milliseconds(part['ms']):>8} ",
            (f"{words.percent(part['share']):>7}", "bold" if part["share"] >= 0.25 else ""),
        )
        for name, part, (sign, colour) in zip(names, parts, map(glyphs.part, range(len(parts))), strict=True)
    ]
    for first in range(0, len(texts), columns):
        table.add_row(*texts[first : first + columns])
    return table


GAP = 2
NARROWEST = 14  # of a column of names


class TextColumn(Struct, frozen=True):
    """A heading and its cells; `flexible` ones are names, left-aligned, and may be cut."""

    heading: str
    cells: Sequence[str]
    flexible: bool = False

    @property
    def natural(self) -> int:
        return max(map(cell_len, (self.heading, *self.cells)))


def figures(rows: Sequence[Mapping[str, Any]], columns: Iterable[tuple[str, str, Any]]) -> list[TextColumn]:
    """Columns of figures by (heading, key, what shows a value)."""
    return [TextColumn(heading, [show(row[key]) for row in rows]) for heading, key, show in columns]


def lines(columns: Sequence[TextColumn], width: int) -> list[Text]:
    """The headings and the rows; wider than `width` only where figures alone need it."""
    widths = _widths(columns, width)
    rows = [[column.heading for column in columns], *zip(*(column.cells for column in columns), strict=True)]
    found = []
    for number, row in enumerate(rows):
        text = "".join(
            _cell(cell, size, column) + " " * GAP for cell, size, column in zip(row, widths, columns, strict=True)
        )
        found.append(Text(text.rstrip(), style="dim" if number == 0 else ""))
    return found


def _widths(columns: Sequence[TextColumn], width: int) -> list[int]:
    widths = [column.natural for column in columns]
    room = width - GAP * (len(columns) - 1)
    flexible = [at for at, column in enumerate(columns) if column.flexible]
    while sum(widths) > room:
        widest = max(flexible, key=lambda at: widths[at], default=None)
        if widest is None or widths[widest] <= NARROWEST:
            break
        widths[widest] -= min(sum(widths) - room, max(1, widths[widest] - _second(widths, flexible, widest)))
    return [
        max(size, NARROWEST if at in flexible and column.natural > NARROWEST else 0)
        for at, (size, column) in enumerate(zip(widths, columns, strict=True))
    ]


def _second(widths: list[int], flexible: list[int], widest: int) -> int:
    """The width that the widest column may be cut to at once: that of the next one."""
    return max([NARROWEST, *(widths[at] for at in flexible if at != widest)])


def _cell(text: str, size: int, column: TextColumn) -> str:
    if not column.flexible:
        return " " * (size - cell_len(text)) + text
    if cell_len(text) <= size:
        return set_cell_size(text, size)
    tail = (size - 1) // 3  # a path or a template says most at both ends
    return set_cell_size(text, size - 1 - tail) + "…" + text[-tail:]
