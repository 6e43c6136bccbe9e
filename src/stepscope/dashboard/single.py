"""report.html as one file: the front end and the documents of all pages in it, and nothing that asks a network.

The file forbids itself everything but the scripts and style sheets it was made with, which its Content-Security-Policy
names by their hashes; documents stand in it as JSON in which nothing can be read as HTML, compressed where they are
long. Browsers that run no scripts show the same documents as plain HTML (`static_page`), which is also what there is
where no front end was built. A file that would be too large has fewer rows of each table and its flame graph is drawn
with fewer boxes; at last flame graph and timeline are left out. Totals stay those of the whole.

`fragment` is a piece of HTML with the findings that a notebook shows below a cell: one element, no script. Its style
sheet is bound to that element and takes text and background from the notebook, bright or dark. Where a viewer drops
style sheets (a notebook that is not trusted) what is left is still in order: headings, lists, lines of source.
"""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Mapping
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from msgspec.structs import replace

from stepscope.dashboard import blocks, bundle, pages, static_page, summary
from stepscope.dashboard.pages import EMBEDDED_BOXES, EMBEDDED_ROWS, ONLY, PAGES, PageContext
from stepscope.dashboard.server import live
from stepscope.dashboard.static_page import STYLE
from stepscope.errors import StepscopeError
from stepscope.model import Report
from stepscope.report.escape import LONGEST, markup
from stepscope.report.escape import plain as harmless
from stepscope.report.words import Shortener, command_line

if TYPE_CHECKING:
    from stepscope import api
    from stepscope.model.sampled import FlameGraph
    from stepscope.report.outputs import Render

SCHEMA = "stepscope.embedded/1"
FIRST, TRIED = ("overview", "findings"), "compare"  # pages that are open where there is no script
MAX_BYTES = 3_000_000
PLAIN_DATA = 400_000  # characters of documents that stand in the file uncompressed
UNMADE = "This page could not be made, which is a mistake in stepscope"
NO_SCRIPT_BYTES = 300_000  # of the plain pages for browsers without scripts
# (rows of a table, boxes of a flame graph) from the largest file to the smallest; 0 leaves out flame graph and timeline
LEVELS = ((100, 8_000), (60, 3_000), (30, 1_000), (15, 0))
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; base-uri 'none'; form-action 'none'"
)
_TITLE = re.compile(r"<title>.*?</title>", re.DOTALL)
_END_OF_SCRIPT = re.compile(r"</(?=script)", re.IGNORECASE)
_END_OF_STYLE = re.compile(r"</(?=style)", re.IGNORECASE)
_TOO_LARGE = "It is left out of this file, which would have become too large."
_DRAWN = {"flame": ("Flame graph", "stepscope flamegraph RUN"), "timeline": ("Timeline", "stepscope view RUN")}

Documents = Mapping[str, dict[str, Any]]


def renderer(run: api.Run, *, source: bool = True) -> Render:
    """What makes a page of a report of `run`, or of that report with more in it; `source` as in `Run.report`."""
    return partial(render, run, source=source)


def render(run: api.Run, report: Report, *, source: bool = True) -> str:
    """The whole page, of at most 3 MB. As plain HTML where no front end was built."""
    built = bundle.load()
    context = _context(run, report, source)
    found = _documents(context, report)
    if built is None:
        return plain(report, found, f"This is the plain form of the report: {bundle.missing()}.")
    without_scripts = static_page.body(_name(report), _sections(found), NO_SCRIPT_BYTES, command_line(report.run))
    for rows, boxes in LEVELS:
        fitting = {key: _cut(document, context, rows, boxes) for key, document in found.items()}
        page = _page(built, _name(report), fitting, without_scripts)
        if len(page.encode("utf-8")) <= MAX_BYTES:
            return page
    return plain(report, found)


def flame_page(graph: FlameGraph, *, first: str | None = None) -> str:
    """A page of a flame graph alone, that begins with the tree `first`. Without a front end it is the picture of it."""
    from stepscope.report import flame

    built = bundle.load()
    made = flame.document(graph, first=first)
    key = made["trees"][made["first"]]["key"]
    if built is None:
        return flame.picture_page(graph, next(tree for tree in graph.trees if tree.key == key), bundle.missing())
    page, title = PAGES["flame"], made["title"]
    shown = pages.document(page.key, [blocks.flame("flame", made, key)])
    without_scripts = static_page.body(title, [static_page.Section(page.title, shown["blocks"])], NO_SCRIPT_BYTES)
    found = {**_head(title, [page]), f"runs/{ONLY}/pages/{page.key}": shown}
    return _page(built, title, found, without_scripts)


def plain(report: Report, found: Documents, note: str | None = None) -> str:
    """The pages of `documents` as one page without scripts, of at most 3 MB; `note` is a sentence at its end."""
    return static_page.render(_name(report), _sections(found), note, command_line(report.run))


def documents(run: api.Run, report: Report, *, source: bool = True) -> dict[str, dict[str, Any]]:
    """The documents of the run and of all its pages, by the path that the server would have for them."""
    return _documents(_context(run, report, source), report)


def _context(run: api.Run, report: Report, source: bool) -> PageContext:
    shown = run.showing(report)
    return PageContext(shown, shown, limit=EMBEDDED_ROWS, boxes=EMBEDDED_BOXES, embedded=True, source=source)


def _documents(context: PageContext, report: Report) -> dict[str, dict[str, Any]]:
    made = {key: _page_document(context, key) for key in PAGES}
    empty = [
        key
        for key, document in made.items()
        if all(block["kind"] == "empty" for block in document["blocks"]) or PAGES[key].empty(context)
    ]
    recorded = context.run.recorded
    head = _head(
        _name(report),
        PAGES.values(),
        empty,
        kind="run" if recorded else "trace",
        state=live.standing(context.run.folder).state if recorded else live.FINISHED,
        command=command_line(report.run) or None,
        started_ns=report.run.get("started_ns"),
    )
    chosen = {
        f"{key}?{urlencode(given)}": pages.document(key, shown)
        for key in PAGES
        for given, shown in PAGES[key].choices(context)
    }
    return {**head, **{f"runs/{ONLY}/pages/{key}": document for key, document in {**made, **chosen}.items()}}


def _page_document(context: PageContext, key: str) -> dict[str, Any]:
    """A page; where this run has nothing for it, or it cannot be made, the reason: the others are not lost with it."""
    from polars.exceptions import PolarsError

    from stepscope.report.flame import embedded

    try:
        document = pages.page(context, key)
        embedded(document)  # raises ValueError for what JSON cannot carry
    except StepscopeError as error:
        why = str(error)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, PolarsError) as error:
        why = f"{UNMADE} ({type(error).__name__}: {error})."
    else:
        return document
    return pages.document(key, [blocks.empty(PAGES[key].title, why)])


def _sections(found: Documents) -> list[static_page.Section]:
    """The pages in their order; an experiment comes first, for that is what its report is made for."""
    head, *shown = (document for path, document in found.items() if "?" not in path)
    tried = any(page["key"] == TRIED and not page["empty"] for page in head["pages"])
    opened = (*FIRST, TRIED) if tried else FIRST
    shown.sort(key=lambda page: not tried or page["page"] != TRIED)
    return [static_page.Section(page["title"], page["blocks"], page["page"] in opened) for page in shown]


def _name(report: Report) -> str:
    return str(report.run.get("name") or "run")


def _head(name: str, *given: Any, **known: Any) -> dict[str, dict[str, Any]]:
    """The run as the front end's frame shows it, by its path. Workers, spans and steps cannot be chosen in a file."""
    return {f"runs/{ONLY}": pages.head(*given, name=harmless(name, 120), **known)}


def _page(built: bundle.Bundle, name: str, found: Documents, without_scripts: str) -> str:
    scripts = [inline_script(text) for text in built.scripts]
    styles = [inline_style(text) for text in built.styles]
    policy = _POLICY.format(scripts=static_page.hashes(scripts), styles=static_page.hashes([*styles, STYLE]))
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="referrer" content="no-referrer">\n' + "".join(f"<style>{text}</style>\n" for text in styles)
    )
    body = (
        f"<noscript><style>{STYLE}</style>\n<main>\n{without_scripts}\n</main></noscript>\n"
        + _data(found)
        + "".join(f'<script type="module">{text}</script>\n' for text in scripts)
    )
    title = f"<title>{markup(name, 120)} – stepscope</title>"
    page = _TITLE.sub(lambda _: title, built.page, count=1)
    before, _, after = page.partition("</head>")
    middle, _, end = after.rpartition("</body>")
    return f"{before}{head}</head>{middle}{body}</body>{end}".rstrip() + "\n"


def _data(found: Documents) -> str:
    """The documents as the element that the front end looks for (`embeddedDocuments` in web/src/lib/source.ts)."""
    from stepscope.report.flame import embedded

    text, encoding = embedded({"schema": SCHEMA, "run": ONLY, "documents": found}), ""
    if len(text) > PLAIN_DATA:
        text = base64.b64encode(gzip.compress(text.encode("utf-8"), compresslevel=6, mtime=0)).decode("ascii")
        encoding = ' data-encoding="gzip-base64"'
    return f'<script type="application/json" id="stepscope-data"{encoding}>{text}</script>\n'


def inline_script(text: str) -> str:
    """JavaScript that means the same inside a script element: nothing in it ends the element or begins a comment."""
    return _END_OF_SCRIPT.sub(r"<\\/", _as_parsed(text)).replace("<!--", "\\x3C!--").replace("\0", "\\x00")


def inline_style(text: str) -> str:
    """CSS that means the same inside a style element."""
    return _END_OF_STYLE.sub(r"<\\/", _as_parsed(text)).replace("\0", "")


def _as_parsed(text: str) -> str:
    """With the line ends that a parser of HTML makes of others, for hashes are of what it has read."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _cut(document: dict[str, Any], context: PageContext, rows: int, boxes: int) -> dict[str, Any]:
    """A page with fewer rows and boxes; the document of the run as it is."""
    if "blocks" not in document:
        return document
    trees = [tree for b in document["blocks"] if b["kind"] == "flame" for tree in b["document"]["trees"]]
    if boxes and sum(len(tree["parent"]) for tree in trees) > boxes:
        document = _page_document(replace(context, boxes=boxes), document["page"])
    made = []
    for block in document["blocks"]:
        if block["kind"] == "table":
            made.append({**block, "rows": block["rows"][:rows]})
        elif not boxes and block["kind"] in _DRAWN:
            title, command = _DRAWN[block["kind"]]
            made.append(blocks.empty(title, _TOO_LARGE, "Open the run itself.", command))
        else:
            made.append(block)
    return {**document, "blocks": made}


SHOWN = 8  # findings, with what they explain; the rest is counted
LEVEL = static_page.Level(rows=20, cards=SHOWN, text=600, cell=LONGEST)
COLUMNS = 100  # of the plain text twin
_CELL = re.compile(r"/notebook/cell_(\d+)\.py$")  # where the magic keeps the source of cell N
_ROOT = "stepscope-findings"
_CELL_STYLE = "\n" + Path(__file__).with_name("notebook.css").read_text(encoding="utf-8")


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
    return f"<section class='{_ROOT}' aria-label='stepscope findings'><style>{_CELL_STYLE}</style>{shown}</section>"


def text(report: Report) -> str:
    """The same for where no HTML is shown: the terminal's report, without colour."""
    from rich.console import Console

    from stepscope.dashboard import terminal

    stream = StringIO()
    # whatever a notebook's environment says of colours and of itself
    console = Console(file=stream, width=COLUMNS, color_system=None, force_terminal=False, force_jupyter=False)
    terminal.render(report, console)
    return stream.getvalue()
