"""A whole and its exclusive parts on the terminal: a bar, and its legend in columns."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.report import words
from stepscope.report.glyphs import Glyphs


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
