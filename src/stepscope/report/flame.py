"""Flame graphs as files: the data of a page, a picture, and two formats that other viewers read.

Names come from files of others: control and directional characters are shown as escapes. The data of a page holds
names, files and frames once, trees as arrays of numbers; what could end a script element is escaped in the JSON text,
so that nothing in it can be read as HTML. speedscope's JSON and collapsed stacks hold what is drawn: paths too thin to
be drawn count for the box that leads to them, so totals stay true. A picture is one tree as one SVG file: an icicle
that stands without a script, and zooms and searches with the one it holds.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

import numpy as np

from stepscope.model.sampled import FlameFrame, FlameGraph, FlameTree
from stepscope.report.escape import markup, plain

# kind of frame -> (what the legend calls it, fill)
KINDS = {
    "user": ("your code", "#f6ad55"),
    "library": ("library", "#a9c7e8"),
    "wait": ("waiting", "#e79aa8"),
    "operator": ("operator", "#8fd0ad"),
    "kernel": ("on the device", "#ecd06f"),
    "import": ("import", "#cdb8e6"),
    "native": ("native", "#c3c8cf"),
    "root": ("", "#dfe4ea"),
}
SAME, NEW, GONE = 0, 1, 2
# (word, fill) of a change; from 3 on grown, then shrunk, by band
_BANDS = (0.15, 0.3, 0.5, 1.0)  # of the larger side: a box is in the first band that its change does not exceed
_GROWN = ("#f7d3cb", "#f0ab9d", "#e77f6d", "#dd5f4d")
_SHRUNK = ("#d0def5", "#a9c5f0", "#7faae8", "#5c8fe0")
CHANGES = (
    ("about the same", "#d9dde3"),
    ("new", "#ff9d3b"),
    ("gone", "#8f8fe6"),
    *(("grown", fill) for fill in _GROWN),
    *(("shrunk", fill) for fill in _SHRUNK),
)
LEGEND = (6, 10, NEW, GONE, SAME)  # the changes that a legend shows
_SMALL = 0.05  # of the larger side
_SMALL_OF_TREE = 0.001


def change(value: float, base: float, whole: float) -> int:
    """The position in `CHANGES` of a box that was worth `base` and is worth `value`, in a tree worth `whole`."""
    larger = max(value, base)
    difference = abs(value - base)
    if larger <= 0 or difference < _SMALL_OF_TREE * whole:
        return SAME
    if base == 0 or value == 0:
        return NEW if base == 0 else GONE
    if difference < _SMALL * larger:
        return SAME
    band = next(at for at, limit in enumerate(_BANDS) if difference <= limit * larger or limit == _BANDS[-1])
    return 3 + band + (0 if value > base else len(_BANDS))


SCHEMA = "stepscope.flame/1"
LONGEST_NAME = 300
_HTML = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def document(graph: FlameGraph, *, first: str | None = None) -> dict[str, Any]:
    """The graph as a JSON object; only frames that a tree uses are in it. `first`: key of the tree to begin with."""
    used = sorted({frame for tree in graph.trees for frame in tree.frame})
    number = {frame: at for at, frame in enumerate(used)}
    names, files, kinds = _Texts(), _Texts(), _Texts()
    frames = [
        [names.number(frame.name), files.number(frame.file), frame.line, kinds.number(frame.kind)]
        for frame in (graph.frames[each] for each in used)
    ]
    keys = [tree.key for tree in graph.trees]
    return {
        "schema": SCHEMA,
        "title": plain(graph.title),
        "notes": [plain(note) for note in graph.notes],
        "sides": [plain(side) for side in graph.sides] if graph.sides else None,
        "first": keys.index(first) if first in keys else 0,
        "names": names.texts,
        "files": files.texts,
        "kinds": [[kind, *KINDS.get(kind, KINDS["native"])] for kind in kinds.texts],
        "changes": CHANGES,
        "legend": LEGEND,
        "frames": frames,
        "source": {str(number[frame]): plain(text) for frame, text in graph.source.items() if frame in number},
        "trees": [_tree(tree, number) for tree in graph.trees],
    }


def embedded(value: object) -> str:
    """`value` as JSON that stands safely in a script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character, escape in _HTML.items():
        text = text.replace(character, escape)
    return text


class _Texts:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._known.setdefault(plain(text, LONGEST_NAME), len(self._known))

    @property
    def texts(self) -> list[str]:
        return list(self._known)


def _tree(tree: FlameTree, number: dict[int, int]) -> dict[str, Any]:
    return {
        "key": tree.key,
        "label": plain(tree.label),
        "unit": tree.unit,
        "source": plain(tree.source),
        "hidden": rounded(tree.hidden),
        "parent": list(tree.parent),
        "frame": [number[frame] for frame in tree.frame],
        "value": [rounded(value) for value in tree.value],
        "base": [rounded(value) for value in tree.base] if tree.base is not None else None,
        "change": changes(tree),
    }


def changes(tree: FlameTree) -> list[int] | None:
    """How each box of a difference changed, as positions in `CHANGES`; None outside differences."""
    if tree.base is None:
        return None
    whole = max(tree.value[0], tree.base[0])
    return [change(value, base, whole) for value, base in zip(tree.value, tree.base, strict=True)]


def rounded(value: float) -> float | int:
    """Six digits: more than a picture shows, and half the bytes."""
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() else short


_UNITS = {"ms per step": "milliseconds", "us": "microseconds", "bytes": "bytes"}
_SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"
_TINY = 1e-9  # of the root: what is left of a box after its children, when nothing is


def speedscope(graph: FlameGraph, version: str) -> str:
    """Every tree as a profile of its own. A difference's other side is left out: the format has no place for it."""
    document = {
        "$schema": _SPEEDSCOPE,
        "name": plain(graph.title),
        "exporter": f"stepscope@{version}",
        "activeProfileIndex": 0,
        "shared": {"frames": [_described(frame) for frame in graph.frames]},
        "profiles": [_profile(tree) for tree in graph.trees],
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def collapsed(graph: FlameGraph, tree: FlameTree) -> str:
    """One tree, a line per path: frames root first with ";" between them, a space, a whole number.

    Milliseconds per step are written as microseconds, as the format holds whole numbers only; a difference has two
    numbers, the other side's first.
    """
    factor = 1000.0 if tree.unit == "ms per step" else 1.0
    names = {frame: _collapsed_name(graph.frames[frame]) for frame in set(tree.frame)}
    other = own_values(tree, tree.base) if tree.base is not None else None
    lines = []
    for node, value in enumerate(own_values(tree, tree.value)):
        numbers = [round(value * factor)] if other is None else [round(other[node] * factor), round(value * factor)]
        if any(numbers):
            path = ";".join(names[frame] for frame in _path(tree, node)) or "(not drawn)"
            lines.append(f"{path} {' '.join(map(str, numbers))}")
    return "".join(f"{line}\n" for line in lines)


def own_values(tree: FlameTree, values: tuple[float, ...]) -> list[float]:
    own = list(values)
    for node, parent in enumerate(tree.parent):
        if parent >= 0:
            own[parent] -= values[node]
    least = _TINY * values[0]
    return [value if value > least else 0.0 for value in own]


def _profile(tree: FlameTree) -> dict[str, Any]:
    samples, weights = [], []
    for node, value in enumerate(own_values(tree, tree.value)):
        if value > 0:
            samples.append(list(_path(tree, node)))
            weights.append(rounded(value))
    return {
        "type": "sampled",
        "name": f"{plain(tree.label)} ({tree.unit})",
        "unit": _UNITS.get(tree.unit, "none"),
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }


def _path(tree: FlameTree, node: int) -> Iterator[int]:
    found = []
    while node > 0:
        found.append(tree.frame[node])
        node = tree.parent[node]
    return reversed(found)


def _described(frame: FlameFrame) -> dict[str, Any]:
    described: dict[str, Any] = {"name": plain(frame.name, LONGEST_NAME)}
    if frame.file:
        described["file"] = plain(frame.file, LONGEST_NAME)
    if frame.line is not None:
        described["line"] = frame.line
    return described


def _collapsed_name(frame: FlameFrame) -> str:
    """A frame as py-spy writes it. A ";" would split it in two."""
    place = f" ({frame.file}{f':{frame.line}' if frame.line is not None else ''})" if frame.file else ""
    return plain(f"{frame.name}{place}", LONGEST_NAME).replace(";", ",")


WIDTH = 1200.0
CELL = 17
TOP = 64  # for the title, what the widths mean, and the buttons
LETTER = 6.6  # of the text's average width
NARROWEST = 0.3  # a narrower box cannot be seen
_STYLE = (
    "text{font:12px system-ui,'Segoe UI',Roboto,sans-serif;fill:#14181f}.soft{fill:#566072}.box,.button{cursor:pointer}"
    ".button{fill:#1d4ed8}.box:hover rect{stroke:#14181f}.box text{pointer-events:none}"
    ".title{font-size:15px;font-weight:600}"
)
_SCRIPT = "\n" + (resources.files(__package__) / "flame_picture.js").read_text(encoding="utf-8")


def picture(graph: FlameGraph, tree: FlameTree) -> str:
    left, width, depth = layout(tree)
    rows = int(depth[width >= NARROWEST].max(initial=0)) + 1
    height = TOP + rows * CELL + 12
    boxes = "\n".join(_boxes(graph, tree, left, width, depth))
    note = markup(f"{tree.label} · {tree.unit}: {tree.source}", 220)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height}" width="{WIDTH:g}" height="{height}" '
        f'data-width="{WIDTH:g}">\n<title>{markup(graph.title, 160)}</title>\n<style>{_STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text x="4" y="18" class="title">{markup(graph.title, 140)}</text>\n'
        f'<text x="4" y="36" class="soft">{note}</text>\n'
        '<text x="4" y="54" class="button" id="reset">reset</text>'
        '<text x="50" y="54" class="button" id="search">search</text>'
        '<text x="110" y="54" class="soft" id="status"></text>\n'
        f"{boxes}\n<script><![CDATA[{_SCRIPT}]]></script>\n</svg>\n"
    )


def picture_page(graph: FlameGraph, tree: FlameTree, why: str) -> str:
    """The picture as a web page that runs nothing but its own script; `why` says why there is no more to it."""
    script, style = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (_SCRIPT, _STYLE))
    policy = f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; base-uri 'none'"
    notes = "".join(f"<li>{markup(note)}</li>" for note in graph.notes)
    others = ", ".join(f"<code>{markup(each.key)}</code>" for each in graph.trees)
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">\n'
        "<meta name='referrer' content='no-referrer'>\n"
        f"<title>{markup(graph.title, 160)} – stepscope flame graph</title>\n</head>\n<body>\n<ul>{notes}</ul>\n"
        f"{picture(graph, tree)}<p>This is the plain form of the page, with one tree: {markup(why, 600)}. "
        f"<code>--tree</code> chooses another of {others}.</p>\n</body>\n</html>\n"
    )


def layout(tree: FlameTree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(left, width, depth) of every node; of a difference, what is gone has no width."""
    value = np.asarray(tree.value, dtype=np.float64)
    parent = np.asarray(tree.parent, dtype=np.int64)
    scale = WIDTH / value[0] if value[0] > 0 else 0.0
    width = value * scale
    left = np.zeros(len(value))
    depth = np.zeros(len(value), dtype=np.int64)
    filled = np.zeros(len(value))  # of each node, by children drawn so far
    # the largest of a node's children stands first; parents come before children in the outer order
    for node in np.lexsort((-value, parent)).tolist():
        above = parent[node]
        if above >= 0:
            left[node] = filled[above]  # of the parent's own left edge; made absolute below
            filled[above] += width[node]
    for node in range(1, len(value)):
        left[node] += left[parent[node]]
        depth[node] = depth[parent[node]] + 1
    return left, width, depth


def _boxes(graph: FlameGraph, tree: FlameTree, left: np.ndarray, width: np.ndarray, depth: np.ndarray) -> Iterator[str]:
    how = changes(tree)
    for node, frame in enumerate(tree.frame):
        if width[node] < NARROWEST and node:
            continue
        drawn = graph.frames[frame]
        fill = CHANGES[how[node]][1] if how is not None else KINDS.get(drawn.kind, KINDS["native"])[1]
        name = plain(drawn.name, LONGEST_NAME)
        x, y, wide = left[node], TOP + int(depth[node]) * CELL, width[node]
        yield (
            f'<g class="box" data-x="{x:.3f}" data-w="{wide:.3f}" data-d="{depth[node]}" data-n="{markup(name)}">'
            f"<title>{_title(graph, tree, node, drawn)}</title>"
            f'<rect x="{x:.2f}" y="{y}" width="{max(0.0, wide - 0.5):.2f}" height="{CELL - 1}" rx="1.5" fill="{fill}" '
            f'data-fill="{fill}"/><text x="{x + 3:.2f}" y="{y + 12}">{markup(_fit(name, wide))}</text></g>'
        )


def _title(graph: FlameGraph, tree: FlameTree, node: int, frame: FlameFrame) -> str:
    place = frame.file + (f":{frame.line}" if frame.line is not None else "") if frame.file else ""
    share = tree.value[node] / tree.value[0] if tree.value[0] else 0.0
    lines = [plain(frame.name, LONGEST_NAME), plain(place), f"{rounded(tree.value[node]):,} {tree.unit}, {share:.2%}"]
    if tree.base is not None and graph.sides is not None:
        lines[-1] += f" in {plain(graph.sides[0])}; {rounded(tree.base[node]):,} in {plain(graph.sides[1])}"
    return "\n".join(markup(line, 900) for line in lines)


def _fit(name: str, width: float) -> str:
    letters = int((width - 6) / LETTER)
    if letters < 3:
        return ""
    return name if len(name) <= letters else name[: letters - 1] + "…"
