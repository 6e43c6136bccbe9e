"""What the terminal reports are drawn with: characters with twins for terminals that lack them, bars, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from rich.cells import cell_len, set_cell_size
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.report import words

# Colours of the parts of a step by position; basic ones, which every terminal theme defines readably.
COLOURS = ("red", "blue", "green", "magenta", "cyan", "yellow", "bright_black")


class Glyphs(Struct, frozen=True):
    """`fills` tell the parts of the bar apart without colour."""

    fills: str
    quote: str
    separator: str
    warning: str

    def fill(self, index: int) -> str:
        """The character that fills part `index` of the bar."""
        return self.fills[index % len(self.fills)]

    def colour(self, index: int) -> str:
        """The style of part `index` of the bar."""
        return COLOURS[index % len(COLOURS)]

    def encodable(self, line: str) -> str:
        """`line` in characters that the terminal has: signs of ours by their twins, others as escapes."""
        if self is UNICODE:
            return line
        return line.translate(TWINS).encode("ascii", errors="backslashreplace").decode("ascii")


TWINS = {ord("–"): "-", ord("…"): "~"}  # of the same width, so that columns stay aligned
UNICODE = Glyphs(fills="█▓▒░▞=+", quote="│", separator=" · ", warning="!")
ASCII = Glyphs(fills="#=+-:o.", quote="|", separator=", ", warning="!")


def glyphs_for(encoding: str) -> Glyphs:
    """The set that `encoding` can carry."""
    try:
        UNICODE.fills.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def bar(parts: list[dict[str, Any]], width: int, glyphs: Glyphs) -> Text:
    """The parts as stretches of one line, each as long as its share."""
    bar = Text()
    edge, start = 0.0, 0
    for index, part in enumerate(parts):
        edge += part["share"]
        end = min(width, round(edge * width))
        bar.append(glyphs.fill(index) * (end - start), style=glyphs.colour(index))
        start = end
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
            (glyphs.fill(index) + " ", glyphs.colour(index)),
            name.ljust(longest),
            f"  {words.milliseconds(part['ms']):>8} ",
            (f"{words.percent(part['share']):>7}", "bold" if part["share"] >= 0.25 else ""),
        )
        for index, (name, part) in enumerate(zip(names, parts, strict=True))
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
    flexible: bool

    @property
    def natural(self) -> int:
        return max(map(cell_len, (self.heading, *self.cells)))


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
