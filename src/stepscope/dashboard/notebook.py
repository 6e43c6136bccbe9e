"""Findings as a piece of HTML that a notebook shows below a cell: one element, no script, nothing from a network.

Its style sheet is bound to that element and takes text and background from the notebook, bright or dark. Where a viewer
drops style sheets (a notebook that is not trusted) what is left is still in order: headings, lists, lines of source.
"""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

from stepscope.dashboard import blocks, static_page, summary
from stepscope.model import Report
from stepscope.report.escape import LONGEST
from stepscope.report.words import Shortener

SHOWN = 8  # findings, with what they explain; the rest is counted
LEVEL = static_page.Level(rows=20, cards=SHOWN, text=600, cell=LONGEST)
COLUMNS = 100  # of the plain text twin
_CELL = re.compile(r"/notebook/cell_(\d+)\.py$")  # where the magic keeps the source of cell N
_ROOT = "stepscope-findings"
_STYLE = "\n" + Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


class CellShortener(Shortener):
    """Places as `Shortener` shows them, and those in cells of a notebook by the number of the cell."""

    def __call__(self, file: str, line: int | None = None) -> str:
        """`file:line` or `cell [3], line 7`, harmless to print."""
        cell = _CELL.search(file)
        if cell is None:
            return super().__call__(file, line)
        return f"cell [{cell[1]}]" + (f", line {line}" if line is not None else "")


def fragment(report: Report, *, page: str | None = None) -> str:
    """One HTML element with the headline and the findings; `page` is where everything else can be seen."""
    chosen = (summary.headline, summary.partition, summary.findings)
    sections = summary.sections(report, CellShortener(report.run), chosen)
    sections.append([blocks.text(f"Everything else: {page}", "note")] if page else [])
    shown = "\n".join(static_page.drawn(section, LEVEL) for section in sections)
    shown = shown.replace("</dt>", ":</dt>")  # labels that read as such without a style sheet
    return f"<section class='{_ROOT}' aria-label='stepscope findings'><style>{_STYLE}</style>{shown}</section>"


def text(report: Report) -> str:
    """The same for where no HTML is shown: the terminal's report, without colour."""
    from rich.console import Console

    from stepscope.dashboard import terminal

    stream = StringIO()
    # whatever a notebook's environment says of colours and of itself
    console = Console(file=stream, width=COLUMNS, color_system=None, force_terminal=False, force_jupyter=False)
    terminal.render(report, console)
    return stream.getvalue()
