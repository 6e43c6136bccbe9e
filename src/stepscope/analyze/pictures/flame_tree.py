"""Weighted paths as arrays, and what every flame graph does with them: number frames, merge siblings, cut, total.

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
from stepscope.tables.arrays import NONE, Bools, Floats, Int32, Rows

ROOT = FlameFrame("all", "", None, "root")
MIN_SHARE = 0.0005  # of a tree's root: thinner paths would be less than a pixel wide
MAX_NODES = 20_000  # of one tree
MAX_DEPTH = 1_000  # levels below the root; more can neither be drawn nor read


class FrameIndex:
    """Numbers for the frames that all trees of one graph share."""

    def __init__(self) -> None:
        self._numbers: dict[FlameFrame, int] = {}

    def number(self, frame: FlameFrame) -> int:
        """The number of `frame`, a new one where it is met for the first time."""
        return self._numbers.setdefault(frame, len(self._numbers))

    @property
    def frames(self) -> tuple[FlameFrame, ...]:
        """All frames by number."""
        return tuple(self._numbers)


class Limits(Struct, frozen=True):
    """What is left out of a tree: paths below `min_share` of the root, then the thinnest, then the deepest."""

    min_share: float = MIN_SHARE
    max_nodes: int = MAX_NODES
    max_depth: int = MAX_DEPTH


BOUNDS = Limits()


class Paths(Struct, frozen=True):
    """Weighted paths below one root that is not among the nodes.

    `parent` (-1 below the root), `frame` (a number; what it counts is the maker's choice) and `own`, the value of a
    path that ends in the node, by node; parents before children. `base` is the other side of a difference.
    """

    parent: Int32
    frame: Int32
    own: Floats
    base: Floats | None = None

    def __len__(self) -> int:
        return len(self.parent)


def flame_tree(
    paths: Paths,
    frames: FrameIndex,
    *,
    key: str,
    label: str,
    unit: str,
    source: str,
    limits: Limits = BOUNDS,
    root: FlameFrame = ROOT,
) -> FlameTree:
    """`paths`, whose frames are numbers of `frames`, as a tree with totals below one root, thin paths cut away."""
    tree = nested(paths.parent)
    value = tree.totals(paths.own)
    base = tree.totals(paths.base) if paths.base is not None else None
    whole = float(paths.own.sum())
    whole_base = float(paths.base.sum()) if paths.base is not None else 0.0
    size = value if base is None else np.maximum(value, base)
    kept = _kept(size, tree.depth, max(whole, whole_base), limits)
    tops = ~kept & ((paths.parent < 0) | kept[paths.parent])  # index -1 is any node: masked by the first term
    number = np.cumsum(kept)  # 1 for the first kept node: 0 is the root
    above = paths.parent[kept]
    parent = np.where(above < 0, 0, number[above])
    return FlameTree(
        key=key,
        label=label,
        unit=unit,
        parent=(NONE, *parent.tolist()),
        frame=(frames.number(root), *paths.frame[kept].tolist()),
        value=(whole, *value[kept].tolist()),
        base=(whole_base, *base[kept].tolist()) if base is not None else None,
        source=source,
        hidden=float(value[tops].sum()),
    )


def _kept(size: Floats, depth: Int32, whole: float, limits: Limits) -> Bools:
    """Which nodes stay. With a node its parent stays, which is at least as large and comes before it.

    (Adding figures that are not negative one after the other never rounds below one of them.)
    """
    kept: Bools = (size > 0) & (size >= limits.min_share * whole) & (depth < limits.max_depth)
    if int(kept.sum()) > limits.max_nodes:
        chosen = np.flatnonzero(kept)
        largest = chosen[np.argsort(-size[chosen], kind="stable")[: limits.max_nodes]]
        kept = np.zeros(len(size), dtype=np.bool_)
        kept[largest] = True
    return kept


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


BY = ("function", "line")
NO_FRAME = FlameFrame("(no Python frame)", "", None, "native")

_LIBRARY = re.compile(r"\.(so(\.\d+)*|dylib|dll|pyd)$|^\?$|^\[")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+$")


class Names:
    """Numbers of boxes (`keys`) and of frames as drawn (`frames`), shared by all trees of a graph and by both sides."""

    def __init__(self, frames: FrameIndex | None = None, by: str = "function") -> None:
        self.frames = frames or FrameIndex()
        self.by = by
        self._keys: dict[tuple[str, str, int | None], int] = {}

    def key(self, frame: FlameFrame) -> int:
        """The number of the box that `frame` belongs to."""
        line = frame.line if self.by == "line" else None
        return self._keys.setdefault((frame.name, frame.file, line), len(self._keys))

    def keys(self, frames: Iterable[FlameFrame]) -> Int32:
        """`key` of each."""
        return np.asarray([self.key(frame) for frame in frames], dtype=np.int32)


def drawn(frames: Sequence[Frame], code: UserCode, roots: Iterable[str]) -> list[FlameFrame]:
    """Each sampled frame as it is drawn. `roots` are folders of the user's code; without, that of the files."""
    resolved = {
        file: None if _LIBRARY.search(file) else code.resolve(file) for file in {frame.file for frame in frames}
    }
    mine = sorted({path for path in resolved.values() if path})
    folders = _folders(mine, roots)
    shown = {
        file: _below(path, folders) if path else INSTALLED.sub("", file, count=1) for file, path in resolved.items()
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


def _folders(files: Sequence[str], roots: Iterable[str]) -> list[str]:
    """Beginnings to leave out of the user's files, the longest first."""
    known = {root.rstrip("/") + "/" for root in roots if root.strip("/")}
    others = [file for file in files if file.startswith("/") and not file.startswith(tuple(known))]
    if others:
        known.add(os.path.commonpath([posixpath.dirname(file) for file in others]).rstrip("/") + "/")
    return sorted(known, key=len, reverse=True)


def _below(path: str, folders: Sequence[str]) -> str:
    return next((path[len(folder) :] for folder in folders if path.startswith(folder)), path)
