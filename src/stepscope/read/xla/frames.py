"""Frames as torch_xla prints them, `name (file:line)`, innermost first, and which of them is the user's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stepscope.read.text import clean

_LIBRARIES = ("/site-packages/", "/dist-packages/", "\\site-packages\\")


class Place(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str


def frame_of(line: str) -> Place | None:
    """The frame that `line` is, or None."""
    text = line.strip()
    name, bracket, rest = text.partition(" (")
    if not bracket or not rest.endswith(")") or len(text) > 4096:
        return None
    file, colon, number = rest[:-1].rpartition(":")
    if not colon or not file or not number.isdecimal() or len(number) > 9:
        return None
    return Place(clean(file), int(number), clean(name))


def user_place(frames: Sequence[Place]) -> Place | None:
    """The innermost frame that belongs to no installed package, nor to Python or torch_xla itself."""
    own = [frame for frame in frames if not any(part in frame.file for part in _LIBRARIES)]
    named = [frame for frame in own if not _is_runtime(frame.file)]
    return next(iter(named or own), None)


def _is_runtime(file: str) -> bool:
    return file.startswith("<") or "/lib/python3." in file or "/torch_xla/" in file
