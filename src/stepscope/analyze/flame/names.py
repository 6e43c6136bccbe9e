"""How frames are named, told apart and coloured in a flame graph.

Frames are the same box when function and file are (and the line, where asked for). A file is named from the root of the
user's code, or of its package, on: that is shorter, tells no machine's paths, and lets runs in different folders match.
"""

from __future__ import annotations

import os.path
import posixpath
import re
from collections.abc import Iterable, Sequence

import numpy as np

from stepscope.analyze.flame.builder import FrameIndex
from stepscope.engine.call_tree import CallFrame
from stepscope.engine.user_code import UserCode
from stepscope.model.sampled import FlameFrame
from stepscope.tables.arrays import Int32

BY = ("function", "line")
NO_FRAME = FlameFrame("(no Python frame)", "", None, "native")
_INSTALLED = re.compile(r"^.*/(?:site-packages|dist-packages)/|^.*/lib(?:64)?/python\d+(?:\.\d+)?t?/")
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


def drawn(frames: Sequence[CallFrame], code: UserCode, roots: Iterable[str]) -> list[FlameFrame]:
    """Each sampled frame as it is drawn. `roots` are folders of the user's code; without, that of the files."""
    resolved = {
        file: None if _LIBRARY.search(file) else code.resolve(file) for file in {frame.file for frame in frames}
    }
    mine = sorted({path for path in resolved.values() if path})
    folders = _folders(mine, roots)
    shown = {
        file: _below(path, folders) if path else _INSTALLED.sub("", file, count=1) for file, path in resolved.items()
    }
    return [
        FlameFrame(frame.function, shown[frame.file], frame.line, _kind(frame, resolved[frame.file] is not None))
        for frame in frames
    ]


def _kind(frame: CallFrame, own: bool) -> str:
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
