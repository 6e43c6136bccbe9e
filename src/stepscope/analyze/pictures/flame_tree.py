"""Weighted paths as arrays, and what every flame graph does with them: merge siblings, cut, total.

Nothing walks a tree by recursion: sampled stacks reach 4096 frames. Nodes are numbered parents before children, and
work goes level by level over arrays. What is too thin to be drawn is cut away, and its value is kept in `hidden`.
"""

from __future__ import annotations

import os.path
import posixpath
import re
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from stepscope.engine.call_tree import CallTree
from stepscope.engine.user_code import INSTALLED, UserCode
from stepscope.model.sampled import FlameFrame, FlameTree
from stepscope.read.raw import Frame
from stepscope.tables.arrays import NONE, Floats, Int32, Numbers, Rows

MIN_SHARE = 0.0005  # of a tree's root: thinner paths would be less than a pixel wide
MAX_NODES = 20_000  # of one tree
MAX_DEPTH = 1_000  # levels below the root; more can neither be drawn nor read


class Limits(Struct, frozen=True):
    """What is left out of a tree: paths below `min_share` of the root, then the thinnest, then the deepest."""

    min_share: float = MIN_SHARE
    max_nodes: int = MAX_NODES
    max_depth: int = MAX_DEPTH


class Paths(Struct, frozen=True):
    """Weighted paths of boxes below one root that is not among them, by node; parents before children.

    `parent` is -1 below the root, siblings of one `key` are one box, `frame` is the number of the frame that is drawn,
    `own` the value of a path that ends in the node. `base` is the other side of a difference.
    """

    parent: Int32
    key: Int32
    frame: Int32
    own: Floats
    base: Floats | None = None

    def __len__(self) -> int:
        return len(self.parent)


class PlannedTree(Struct, frozen=True):
    key: str
    label: str
    paths: Paths
    unit: str
    source: str


def flame_tree(planned: PlannedTree, frames: Numbers[FlameFrame], limits: Limits) -> FlameTree:
    """The tree with totals below one root of its name, thin paths cut away."""
    paths = planned.paths
    tree = nested(paths.parent)
    value = tree.totals(paths.own)
    base = tree.totals(paths.base) if paths.base is not None else None
    whole = float(paths.own.sum())
    whole_base = float(paths.base.sum()) if paths.base is not None else 0.0
    size = value if base is None else np.maximum(value, base)
    # With a node its parent stays, which is at least as large and comes before it. (Adding figures that are not
    # negative one after the other never rounds below one of them.)
    kept = (size > 0) & (size >= limits.min_share * max(whole, whole_base)) & (tree.depth < limits.max_depth)
    if int(kept.sum()) > limits.max_nodes:
        chosen = np.flatnonzero(kept)
        largest = chosen[np.argsort(-size[chosen], kind="stable")[: limits.max_nodes]]
        kept = np.zeros(len(size), dtype=np.bool_)
        kept[largest] = True
    tops = ~kept & ((paths.parent < 0) | kept[paths.parent])  # index -1 is any node: masked by the first term
    number = np.cumsum(kept)  # 1 for the first kept node: 0 is the root
    above = paths.parent[kept]
    return FlameTree(
        key=planned.key,
        label=planned.label,
        unit=planned.unit,
        parent=(NONE, *np.where(above < 0, 0, number[above]).tolist()),
        frame=(frames[FlameFrame(planned.label, "", None, "root")], *paths.frame[kept].tolist()),
        value=(whole, *value[kept].tolist()),
        base=(whole_base, *base[kept].tolist()) if base is not None else None,
        source=planned.source,
        hidden=float(value[tops].sum()),
    )


def nested(parent: Int32) -> CallTree:
    """The tree of these nodes without their frames, its depths found in as many rounds as they have binary digits."""
    depth = (parent >= 0).astype(np.int32)
    above = parent.copy()
    while len(above) and (above >= 0).any():
        inside = above >= 0
        target = above[inside]
        # both sides are read before either is written: each node has added up the way to `above` so far
        depth[inside] += depth[target]
        above[inside] = above[target]
    return CallTree(parent, depth, above, ())


def merged(parent: Int32, frame: Int32, *, fold: int | None = None) -> tuple[Int32, Int32, Int32]:
    """Siblings of one frame as one node: (parent, frame) of the merged nodes, and the merged node of each given one.

    With `fold`, a function that calls itself directly more than `fold` deep stays in the node of its last call drawn.
    """
    if not len(parent):
        return parent, frame, parent
    group = np.zeros(len(parent), dtype=np.int32)
    run = np.ones(len(parent), dtype=np.int32)  # how often the frame stands on the path right up to here
    parents: list[Int32] = []
    frames: list[Int32] = []
    count = 0
    span = int(frame.max(initial=0)) + 1
    for number, level in enumerate(nested(parent).levels):
        above = group[parent[level]] if number else np.full(len(level), NONE, dtype=np.int32)
        own = frame[level]
        folded = np.zeros(len(level), dtype=np.bool_)
        if fold is not None and number:
            again = frame[parent[level]] == own
            run[level] = np.where(again, run[parent[level]] + 1, 1)
            folded = run[level] > fold
        key = (above.astype(np.int64) + 1) * span + own
        distinct, which = np.unique(key[~folded], return_inverse=True)
        group[level[folded]] = above[folded]
        group[level[~folded]] = which.astype(np.int32) + count
        parents.append((distinct // span - 1).astype(np.int32))
        frames.append((distinct % span).astype(np.int32))
        count += len(distinct)
    up, what = np.concatenate(parents), np.concatenate(frames)
    if fold is not None:  # it moves nodes up, so that equal siblings may have come from different levels
        settled, frames_left, again = merged(up, what)
        if len(settled) < len(up):
            return settled, frames_left, again[group]
    return up, what, group


def summed(group: Rows, own: Floats, count: int) -> Floats:
    """The sum of `own` by number in `group`, for numbers below `count`."""
    sums: Floats = np.bincount(group, own, minlength=count).astype(np.float64)
    return sums


def together(parts: Sequence[Paths]) -> Paths:
    """Several parts below one root, equal boxes as one, drawn as in the first part that has it."""
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    parent = [np.where(part.parent < 0, NONE, part.parent + at) for part, at in zip(parts, starts, strict=True)]
    key, frame, own = (np.concatenate([getattr(part, name) for part in parts]) for name in ("key", "frame", "own"))
    up, keys, group = merged(np.concatenate(parent).astype(np.int32), key)
    shown = np.zeros(len(up), dtype=np.int32)
    shown[group[::-1]] = frame[::-1]
    base = [part.base for part in parts if part.base is not None]
    both = summed(group, np.concatenate(base), len(up)) if base else None
    return Paths(up, keys, shown, summed(group, own, len(up)), both)


BY = ("function", "line")
NO_FRAME = FlameFrame("(no Python frame)", "", None, "native")

_LIBRARY = re.compile(r"\.(so(\.\d+)*|dylib|dll|pyd)$|^\?$|^\[")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+$")


def drawn(frames: Sequence[Frame], code: UserCode, roots: Iterable[str]) -> list[FlameFrame]:
    """Each sampled frame as it is drawn. `roots` are folders of the user's code; without, that of the files."""
    resolved = {
        file: None if _LIBRARY.search(file) else code.resolve(file) for file in {frame.file for frame in frames}
    }
    # beginnings to leave out of the user's files, the longest first
    folders = {root.rstrip("/") + "/" for root in roots if root.strip("/")}
    others = [
        path for path in resolved.values() if path and path.startswith("/") and not path.startswith(tuple(folders))
    ]
    if others:
        folders.add(os.path.commonpath([posixpath.dirname(path) for path in others]).rstrip("/") + "/")
    ordered = sorted(folders, key=len, reverse=True)
    shown = {
        file: path.removeprefix(next(filter(path.startswith, ordered), ""))
        if path
        else INSTALLED.sub("", file, count=1)
        for file, path in resolved.items()
    }
    return [
        FlameFrame(frame.function, shown[frame.file], frame.line, _kind(frame, resolved[frame.file] is not None))
        for frame in frames
    ]


def _kind(frame: Frame, own: bool) -> str:
    if own:
        return "user"
    if frame.file.startswith(("<frozen importlib", "<frozen zipimport")):
        return "import"
    if _LIBRARY.search(frame.file) or (frame.line is None and (not frame.file or _ADDRESS.match(frame.function))):
        return "native"
    return "library"
