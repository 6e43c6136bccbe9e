"""report.html as one file: the front end and the documents of all pages in it, and nothing that asks a network.

The file forbids itself everything but the scripts and style sheets it was made with, which its Content-Security-Policy
names by their hashes; documents stand in it as JSON in which nothing can be read as HTML, compressed where they are
long. Browsers that run no scripts show the same documents as plain HTML (`static_page`), which is also what there is
where no front end was built. Documents are made smaller so that they fit: what is left out is what takes least time,
rows from a table's end, the narrowest boxes of flame graphs, the shortest slices of a timeline. Totals stay those of
the whole.
"""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from stepscope.dashboard import blocks, bundle, static_page
from stepscope.dashboard.blocks import Block
from stepscope.errors import StepscopeError
from stepscope.report.words import command_line

if TYPE_CHECKING:
    from stepscope import api
    from stepscope.dashboard.pages import Page, PageContext
    from stepscope.model import Report
    from stepscope.model.sampled import FlameGraph
    from stepscope.report.outputs import Render

SCHEMA = "stepscope.embedded/1"
HEAD_SCHEMA = "stepscope.run/1"
RUN = "this"  # the id of the only run
FIRST = "findings"  # the page that is open where there is no script
MAX_BYTES = 3_000_000
PLAIN_DATA = 400_000  # characters of documents that stand in the file uncompressed
UNMADE = "This page could not be made, which is a mistake in stepscope"
NO_SCRIPT_BYTES = 300_000  # of the plain pages for browsers without scripts
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; base-uri 'none'; form-action 'none'"
)
_TITLE = re.compile(r"<title>.*?</title>", re.DOTALL)
_END_OF_SCRIPT = re.compile(r"</(?=script)", re.IGNORECASE)
_END_OF_STYLE = re.compile(r"</(?=style)", re.IGNORECASE)


def renderer(run: api.Run, *, source: bool = True) -> Render:
    """What makes a page of a report of `run`, or of that report with more in it; `source` as in `Run.report`."""

    def render_report(report: Report) -> str:
        return render(run, report, source=source)

    return render_report


def render(run: api.Run, report: Report, *, source: bool = True) -> str:
    """The whole page, of at most 3 MB. As plain HTML where no front end was built."""
    built = bundle.load()
    found = documents(run, report, source=source)
    if built is None:
        return plain(report, found, f"This is the plain form of the report: {bundle.missing()}.")
    shown = list(_sections(found))
    without_scripts = static_page.body(_name(report), shown, NO_SCRIPT_BYTES, command_line(report.run))
    for level in LEVELS:
        embedded = {
            "schema": SCHEMA,
            "run": RUN,
            "documents": {key: shrunk(each, level) for key, each in found.items()},
        }
        page = _page(built, _name(report), embedded, without_scripts)
        if len(page.encode("utf-8")) <= MAX_BYTES:
            return page
    return plain(report, found)


def flame_page(graph: FlameGraph, *, first: str | None = None) -> str:
    """A page of a flame graph alone, that begins with the tree `first`. Without a front end it is the picture of it."""
    from stepscope.dashboard.pages import PAGES
    from stepscope.report import flame
    from stepscope.report.flame import document

    built = bundle.load()
    made = document(graph, first=first)
    key = made["trees"][made["first"]]["key"]
    if built is None:
        return flame.picture_page(graph, next(tree for tree in graph.trees if tree.key == key), bundle.missing())
    page = PAGES["flame"]
    shown = _page_of(page, [blocks.flame("flame", made, key)])
    head = _head_of(made["title"], [{"key": page.key, "title": page.title, "group": page.group, "empty": False}])
    embedded = {
        "schema": SCHEMA,
        "run": RUN,
        "documents": {f"runs/{RUN}": head, f"runs/{RUN}/pages/{page.key}": shown},
    }
    sections = [static_page.Section(page.title, shown["blocks"])]
    without_scripts = static_page.body(made["title"], sections, NO_SCRIPT_BYTES)
    return _page(built, made["title"], embedded, without_scripts)


def plain(report: Report, found: Mapping[str, Mapping[str, Any]], note: str | None = None) -> str:
    """The pages of `documents` as one page without scripts, of at most 3 MB; `note` is a sentence at its end."""
    return static_page.render(_name(report), list(_sections(found)), note, command_line(report.run))


def documents(run: api.Run, report: Report, *, source: bool = True) -> dict[str, dict[str, Any]]:
    """The documents of the run and of all its pages, by the path that the server would have for them."""
    from stepscope.dashboard.pages import EMBEDDED_ROWS, PAGES, PageContext

    shown = run.showing(report)
    context = PageContext(run=shown, base=shown, limit=EMBEDDED_ROWS, embedded=True, key=RUN, source=source)
    made = {key: _page_document(context, key) for key in PAGES}
    empty = {
        key: all(block["kind"] == "empty" for block in document["blocks"]) or PAGES[key].empty(context)
        for key, document in made.items()
    }
    head = _head(context, report, empty)
    return {f"runs/{RUN}": head, **{f"runs/{RUN}/pages/{key}": document for key, document in made.items()}}


def _page_document(context: PageContext, key: str) -> dict[str, Any]:
    """A page; where this run has nothing for it, or it cannot be made, the reason: the others are not lost with it."""
    from polars.exceptions import PolarsError

    from stepscope.dashboard import pages
    from stepscope.report.flame import embedded

    try:
        document = pages.page(context, key)
        embedded(document)  # raises ValueError for what JSON cannot carry
    except StepscopeError as error:
        return _without_content(key, str(error))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, PolarsError) as error:
        return _without_content(key, f"{UNMADE} ({type(error).__name__}: {error}).")
    return document


def _without_content(key: str, why: str) -> dict[str, Any]:
    from stepscope.dashboard import pages

    page = pages.PAGES[key]
    return _page_of(page, [blocks.empty(page.title, why)])


def _page_of(page: Page, shown: list[Block]) -> dict[str, Any]:
    from stepscope.dashboard.pages import PAGE_SCHEMA

    return {
        "schema": PAGE_SCHEMA,
        "page": page.key,
        "title": page.title,
        "revision": 0,
        "scope": {"worker": None, "span": None, "steps": None, "follows": list(page.follows), "note": None},
        "blocks": shown,
    }


def _sections(found: Mapping[str, Mapping[str, Any]]) -> Iterator[static_page.Section]:
    """The pages in their order; an experiment comes first, for that is what its report is made for."""
    pages = [document for key, document in found.items() if "/pages/" in key]
    filled = {page["key"] for page in found[f"runs/{RUN}"]["pages"] if not page["empty"]}
    tried = [page for page in pages if page["page"] == "compare" and page["page"] in filled]
    for page in (*tried, *(page for page in pages if page not in tried)):
        opened = page in tried or page["page"] == FIRST
        yield static_page.Section(page["title"], page["blocks"], opened)


def _name(report: Report) -> str:
    return str(report.run.get("name") or "run")


def _head(context: PageContext, report: Report, empty: Mapping[str, bool]) -> dict[str, Any]:
    """The run as the front end's frame shows it. Workers, spans and steps cannot be chosen in a file."""
    from stepscope.dashboard.pages import PAGES
    from stepscope.dashboard.server.live import FINISHED, standing

    pages = [
        {"key": page.key, "title": page.title, "group": page.group, "empty": empty[page.key]} for page in PAGES.values()
    ]
    recorded = context.run.recorded
    return {
        **_head_of(_name(report), pages),
        "kind": "run" if recorded else "trace",
        "state": standing(context.run.folder).state if recorded else FINISHED,
        "command": command_line(report.run) or None,
        "started_ns": report.run.get("started_ns"),
    }


def _head_of(name: str, pages: list[dict[str, Any]]) -> dict[str, Any]:
    """The frame around pages of files, which no run is known of."""
    from stepscope.dashboard.server.live import FINISHED
    from stepscope.report import escape

    return {
        "schema": HEAD_SCHEMA,
        "id": RUN,
        "name": escape.plain(name, 120),
        "kind": "trace",
        "state": FINISHED,
        "command": None,
        "started_ns": None,
        "revision": 0,
        "workers": [],
        "spans": [],
        "steps": None,
        "pages": pages,
        "preparing": None,
        "error": None,
    }


def _page(built: bundle.Bundle, name: str, embedded: Mapping[str, Any], without_scripts: str) -> str:
    from stepscope.dashboard.static_page import STYLE
    from stepscope.report.escape import markup

    scripts = [inline_script(text) for text in built.scripts]
    styles = [inline_style(text) for text in built.styles]
    policy = _POLICY.format(scripts=static_page.hashes(scripts), styles=static_page.hashes([*styles, STYLE]))
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="referrer" content="no-referrer">\n' + "".join(f"<style>{text}</style>\n" for text in styles)
    )
    body = (
        f"<noscript><style>{STYLE}</style>\n<main>\n{without_scripts}\n</main></noscript>\n"
        + _data(embedded)
        + "".join(f'<script type="module">{text}</script>\n' for text in scripts)
    )
    title = f"<title>{markup(name, 120)} – stepscope</title>"
    page = _TITLE.sub(lambda _: title, built.page, count=1)
    before, _, after = page.partition("</head>")
    middle, _, end = after.rpartition("</body>")
    return f"{before}{head}</head>{middle}{body}</body>{end}".rstrip() + "\n"


def _data(embedded: Mapping[str, Any]) -> str:
    """The documents as the element that the front end looks for (`embeddedDocuments` in web/src/lib/source.ts)."""
    from stepscope.report.flame import embedded as as_json

    text = as_json(embedded)
    if len(text) <= PLAIN_DATA:
        return f'<script type="application/json" id="stepscope-data">{text}</script>\n'
    packed = base64.b64encode(gzip.compress(text.encode("utf-8"), compresslevel=9, mtime=0)).decode("ascii")
    return f'<script type="application/json" id="stepscope-data" data-encoding="gzip-base64">{packed}</script>\n'


def inline_script(text: str) -> str:
    """JavaScript that means the same inside a script element: nothing in it ends the element or begins a comment."""
    return _END_OF_SCRIPT.sub(r"<\\/", _as_parsed(text)).replace("<!--", "\\x3C!--").replace("\0", "\\x00")


def inline_style(text: str) -> str:
    """CSS that means the same inside a style element."""
    return _END_OF_STYLE.sub(r"<\\/", _as_parsed(text)).replace("\0", "")


def _as_parsed(text: str) -> str:
    """With the line ends that a parser of HTML makes of others, for hashes are of what it has read."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


# ---- documents made smaller ------------------------------------------------------------------------------------------

LEAST_BOXES = 150  # of a tree, where there are many
_OF_TRACK = ("start", "duration", "depth", "name", "kind", "id", "count")  # of a track in a window


class Level(Struct, frozen=True):
    """What the documents may hold; 0 leaves a whole block out."""

    rows: int  # of a table
    boxes: int  # of all trees of a flame graph together
    slices: int  # of a timeline
    details: int  # of slices


LEVELS = (
    Level(rows=100, boxes=8_000, slices=40_000, details=3_000),
    Level(rows=60, boxes=3_000, slices=15_000, details=800),
    Level(rows=30, boxes=1_000, slices=5_000, details=200),
    Level(rows=15, boxes=0, slices=0, details=0),
)


def shrunk(document: dict[str, Any], level: Level) -> dict[str, Any]:
    """A page document with what `level` allows; other documents as they are."""
    if "blocks" not in document:
        return document
    return {**document, "blocks": [_shrunk_block(block, level) for block in document["blocks"]]}


def _shrunk_block(block: Block, level: Level) -> Block:
    if block["kind"] == "table":
        return block if len(block["rows"]) <= level.rows else {**block, "rows": block["rows"][: level.rows]}
    if block["kind"] == "flame":
        return _fewer_boxes(block, level) if level.boxes else _left_out("Flame graph", "stepscope flamegraph RUN")
    if block["kind"] == "timeline":
        return _fewer_slices(block, level) if level.slices else _left_out("Timeline", "stepscope view RUN")
    return block


def _left_out(title: str, command: str) -> Block:
    return blocks.empty(
        title, "It is left out of this file, which would have become too large.", "Open the run itself.", command
    )


# ---- flame graphs ----------------------------------------------------------------------------------------------------


def _fewer_boxes(block: Block, level: Level) -> Block:
    document = block["document"]
    trees = document["trees"]
    most = max(LEAST_BOXES, level.boxes // max(1, len(trees)))
    if all(len(tree["parent"]) <= most for tree in trees):
        return block
    return {**block, "document": _used_only({**document, "trees": [_tree(tree, most) for tree in trees]})}


def _tree(tree: dict[str, Any], most: int) -> dict[str, Any]:
    """The tree without its narrowest boxes; a box is never wider than the one it lies in, so trees stay whole."""
    parent, value, base = tree["parent"], tree["value"], tree["base"]
    if len(parent) <= most:
        return tree
    width = value if base is None else [max(pair) for pair in zip(value, base, strict=True)]
    kept = sorted(sorted(range(len(parent)), key=lambda node: -width[node])[:most])
    kept = _with_parents(kept, parent)
    number = {node: at for at, node in enumerate(kept)}
    cut = sum(value[node] for node in range(len(parent)) if node not in number and parent[node] in number)
    columns = {key: _picked(tree[key], kept) for key in ("frame", "value", "base", "change")}
    return {
        **tree,
        **columns,
        "parent": [number.get(parent[node], -1) for node in kept],
        "hidden": tree["hidden"] + cut,
    }


def _with_parents(kept: list[int], parent: Sequence[int]) -> list[int]:
    """Only the boxes whose parents are there too: rounding may have made one wider than the box it lies in."""
    known: set[int] = set()
    for node in kept:  # parents come before their children
        if parent[node] < 0 or parent[node] in known:
            known.add(node)
    return [node for node in kept if node in known]


def _picked(values: Sequence[Any] | None, kept: Sequence[int]) -> list[Any] | None:
    return None if values is None else [values[at] for at in kept]


def _used_only(document: dict[str, Any]) -> dict[str, Any]:
    """The document without frames, names and files that no tree shows any more."""
    frames = sorted({frame for tree in document["trees"] for frame in tree["frame"]})
    number = {frame: at for at, frame in enumerate(frames)}
    rows = [list(document["frames"][frame]) for frame in frames]
    texts: dict[str, list[Any]] = {}
    for column, key in ((0, "names"), (1, "files")):
        used = sorted({row[column] for row in rows})
        place = {text: at for at, text in enumerate(used)}
        texts[key] = [document[key][text] for text in used]
        for row in rows:
            row[column] = place[row[column]]
    source = {str(number[int(key)]): text for key, text in document["source"].items() if int(key) in number}
    trees = [{**tree, "frame": [number[frame] for frame in tree["frame"]]} for tree in document["trees"]]
    return {**document, **texts, "frames": rows, "source": source, "trees": trees}


# ---- timelines -------------------------------------------------------------------------------------------------------


def _fewer_slices(block: Block, level: Level) -> Block:
    window, details = block["window"], block["details"]
    many = sum(len(track["start"]) for track in window["tracks"])
    if many > level.slices:
        window = _longest(window, level.slices)
    if details is not None:
        drawn = {slice_ for track in window["tracks"] for slice_ in track["id"]}
        shown = [(key, value) for key, value in details.items() if int(key) in drawn]
        shown.sort(key=lambda item: -(item[1]["duration_ns"] or 0))
        details = dict(shown[: level.details])
    return {**block, "window": window, "details": details}


def _longest(window: dict[str, Any], most: int) -> dict[str, Any]:
    """The window with its `most` longest slices, and the names that they need."""
    order = [
        (-duration, track, at)
        for track, row in enumerate(window["tracks"])
        for at, duration in enumerate(row["duration"])
    ]
    kept: list[list[int]] = [[] for _ in window["tracks"]]
    for _, track, at in sorted(order)[:most]:
        kept[track].append(at)
    tracks = []
    names: dict[int, int] = {}
    for row, chosen in zip(window["tracks"], kept, strict=True):
        chosen.sort()
        picked = {column: [row[column][at] for at in chosen] for column in _OF_TRACK}
        picked["name"] = [names.setdefault(name, len(names)) for name in picked["name"]]
        tracks.append({**row, **picked})
    note = f"The {most:,} longest slices are drawn; the others are left out to keep this file small."
    return {
        **window,
        "tracks": tracks,
        "names": [window["names"][name] for name in names],
        "notes": [*window["notes"], note],
    }
