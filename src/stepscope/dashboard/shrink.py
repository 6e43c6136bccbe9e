"""Makes the documents of pages smaller so that they fit into one file: fewer rows, boxes and slices, and a word of it.

What is left out is what takes least time: rows from a table's end, the narrowest boxes of flame graphs, the shortest
slices of a timeline. Totals stay those of the whole. Nothing here changes the documents that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from stepscope.dashboard.blocks import Block, empty

LEAST_BOXES = 150  # of a tree, where there are many
_COLUMNS = ("start", "duration", "depth", "name", "kind", "id", "count")  # of a track in a window


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
    return {**document, "blocks": [_block(block, level) for block in document["blocks"]]}


def _block(block: Block, level: Level) -> Block:
    if block["kind"] == "table":
        return block if len(block["rows"]) <= level.rows else {**block, "rows": block["rows"][: level.rows]}
    if block["kind"] == "flame":
        return _flame(block, level) if level.boxes else _left_out("Flame graph", "stepscope flamegraph RUN")
    if block["kind"] == "timeline":
        return _timeline(block, level) if level.slices else _left_out("Timeline", "stepscope view RUN")
    return block


def _left_out(title: str, command: str) -> Block:
    return empty(
        title, "It is left out of this file, which would have become too large.", "Open the run itself.", command
    )


# ---- flame graphs ----------------------------------------------------------------------------------------------------


def _flame(block: Block, level: Level) -> Block:
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


def _timeline(block: Block, level: Level) -> Block:
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
        picked = {column: [row[column][at] for at in chosen] for column in _COLUMNS}
        picked["name"] = [names.setdefault(name, len(names)) for name in picked["name"]]
        tracks.append({**row, **picked})
    note = f"The {most:,} longest slices are drawn; the others are left out to keep this file small."
    return {
        **window,
        "tracks": tracks,
        "names": [window["names"][name] for name in names],
        "notes": [*window["notes"], note],
    }
