"""The data of a flame graph as its page holds it: names, files and frames once, trees as arrays of numbers.

Names come from files of others. Control and directional characters are shown as escapes; what else could end a script
element is escaped in the JSON text, so that nothing in it can be read as HTML.
"""

from __future__ import annotations

import json
from typing import Any

from stepscope.model.sampled import FlameFrame, FlameGraph, FlameTree
from stepscope.report.escape import plain

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
    frames = [_frame(graph.frames[frame], names, files, kinds) for frame in used]
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


def _frame(frame: FlameFrame, names: _Texts, files: _Texts, kinds: _Texts) -> list[int | None]:
    return [names.number(frame.name), files.number(frame.file), frame.line, kinds.number(frame.kind)]


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
    """How each box of a difference changed, as positions in `colours.CHANGES`; None outside differences."""
    if tree.base is None:
        return None
    whole = max(tree.value[0], tree.base[0])
    return [change(value, base, whole) for value, base in zip(tree.value, tree.base, strict=True)]


def rounded(value: float) -> float | int:
    """Six digits: more than a picture shows, and half the bytes."""
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() else short
