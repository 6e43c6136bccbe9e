"""Frames by the text they stand as in a file: each is taken apart once, and has its number from then on."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stepscope.read.raw import Frame, FrameNames
from stepscope.read.text import clean

MAX_PIECES = 500_000  # the largest projects have some ten thousand lines that call
MAX_PIECE_CHARS = 64 * 2**20
# Stands for every frame beyond these bounds: a file of nothing but different frames must not fill the memory.
MORE_FRAMES = Frame("(more different frames than are kept)", "", None)

_LINE = re.compile(r":(-?[0-9]{1,9})\Z")


class Pieces:
    """Numbers of frames `NAME (FILE:LINE)` by their text."""

    def __init__(self, names: FrameNames) -> None:
        self.known: dict[str, int] = {}
        self._names = names
        self._chars = 0

    def frames(self, pieces: Sequence[str]) -> tuple[int, ...]:
        """Frames of the pieces between semicolons; a piece that does not end in a parenthesis goes on in the next."""
        frames: list[int] = []
        pending: list[str] = []
        last = len(pieces) - 1
        for index, piece in enumerate(pieces):
            if pending or not piece.endswith(")"):
                pending.append(piece)
                if not piece.endswith(")") and index < last:
                    continue  # a semicolon inside a name or a file
                piece = ";".join(pending)
                pending.clear()
            frames.append(self.number(piece))
        return tuple(frames)

    def number(self, text: str) -> int:
        """The number of the frame that stands as `text`."""
        known = self.known.get(text)
        if known is None:
            self._chars += len(text)
            if len(self.known) >= MAX_PIECES or self._chars > MAX_PIECE_CHARS:
                return self._names.number(MORE_FRAMES)
            known = self.known[text] = self._names.number(frame_of(text))
        return known


def frame_of(text: str) -> Frame:
    """Split `NAME (FILE:LINE)`; names and files may both hold parentheses, colons and spaces."""
    opening = _opening(text) if text.endswith(")") else -1
    if opening < 0:
        return Frame(clean(text), "", None)
    inside = text[opening + 2 : -1]
    match = _LINE.search(inside)
    file, line = (inside[: match.start()], int(match[1])) if match else (inside, None)
    return Frame(clean(text[:opening]), clean(file), line)


def _opening(text: str) -> int:
    """Where the ` (` stands that the last character closes; the last one when parentheses do not pair up."""
    last = text.rfind(" (")
    if text.find(" (") == last:
        return last
    depth = 0
    for index in range(len(text) - 1, 0, -1):
        if text[index] == ")":
            depth += 1
        elif text[index] == "(":
            depth -= 1
            if depth == 0:
                return index - 1 if text[index - 1] == " " else last
    return last
