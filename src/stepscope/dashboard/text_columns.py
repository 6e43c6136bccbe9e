"""Columns of text on a terminal, and what is worth less attention than the rest."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from rich.cells import cell_len, set_cell_size
from rich.console import OverflowMethod
from rich.text import Text

GAP = 2
NARROWEST = 14  # of a column of names


def soft(text: str) -> Text:
    """What is worth less attention."""
    return Text(text, style="dim")


class TextColumn(Struct, frozen=True):
    """A heading and its cells; `flexible` ones are names, left-aligned, and may be cut."""

    heading: str
    cells: Sequence[str]
    flexible: bool = False

    @property
    def natural(self) -> int:
        return max(map(cell_len, (self.heading, *self.cells)))


def lines(columns: Sequence[TextColumn], width: int, *, wraps: bool = True) -> list[Text]:
    """The headings and the rows; wider than `width` where figures alone need it. Lines stay whole unless `wraps`."""
    widths = _widths(columns, width)
    rows = [[column.heading for column in columns], *zip(*(column.cells for column in columns), strict=True)]
    found = []
    for number, row in enumerate(rows):
        text = "".join(
            _cell(cell, size, column) + " " * GAP for cell, size, column in zip(row, widths, columns, strict=True)
        )
        style = "dim" if number == 0 else ""
        overflow: OverflowMethod | None = None if wraps else "ignore"
        found.append(Text(text.rstrip(), style=style, no_wrap=not wraps, overflow=overflow))
    return found


def _widths(columns: Sequence[TextColumn], width: int) -> list[int]:
    widths = [column.natural for column in columns]
    room = width - GAP * (len(columns) - 1)
    flexible = [at for at, column in enumerate(columns) if column.flexible]
    while sum(widths) > room:
        widest = max(flexible, key=lambda at: widths[at], default=None)
        if widest is None or widths[widest] <= NARROWEST:
            break
        second = max([NARROWEST, *(widths[at] for at in flexible if at != widest)])  # so far it may be cut at once
        widths[widest] -= min(sum(widths) - room, max(1, widths[widest] - second))
    return [
        max(size, NARROWEST if at in flexible and column.natural > NARROWEST else 0)
        for at, (size, column) in enumerate(zip(widths, columns, strict=True))
    ]


def _cell(text: str, size: int, column: TextColumn) -> str:
    if not column.flexible:
        return " " * (size - cell_len(text)) + text
    if cell_len(text) <= size:
        return set_cell_size(text, size)
    tail = (size - 1) // 3  # a path or a template says most at both ends
    return set_cell_size(text, size - 1 - tail) + "…" + text[-tail:]
