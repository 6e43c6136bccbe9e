"""Frames by the text they stand as in a file: each is taken apart once, and has its number from then on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from stepscope.read.raw import Frame, FrameNames
from stepscope.read.text import clean

MAX_PIECES = 500_000  # the largest projects have some ten thousand lines that call
MAX_PIECE_CHARS = 64 * 2**20
# Stands for every frame beyond these bounds: a file of nothing but different frames must not fill the memory.
MORE_FRAMES = Frame("(more different frames than are kept)", "", None)

_LINE = re.compile(r":(-?[0-9]{1,9})\Z")


class Pieces:
    """Numbers of frames by their text, which `frame_of` takes apart.

    `known` holds frames that are one piece between two semicolons, and nothing else.
    """

    def __init__(self, names: FrameNames, frame_of: Callable[[str], Frame]) -> None:
        self.known: dict[str, int] = {}
        self._odd: dict[str, int] = {}  # without a closing parenthesis, or with a semicolon inside
        self._names = names
        self._frame_of = frame_of
        self._files: dict[str, str] = {}
        self._chars = 0

    def frames(self, pieces: Sequence[str]) -> tuple[int, ...]:
        """Frames of the pieces between semicolons; a piece that does not end in a parenthesis goes on in the next."""
        frames: list[int] = []
        pending: list[str] = []
        last = len(pieces) - 1
        for index, piece in enumerate(pieces):
            closed = piece.endswith(")")
            if closed and not pending:
                frames.append(self.number(piece))
                continue
            pending.append(piece)
            if closed or index == last:
                frames.append(self._number(";".join(pending), self._odd))
                pending.clear()
        return tuple(frames)

    def number(self, piece: str) -> int:
        """The number of the frame that is all of `piece`."""
        return self._number(piece, self.known)

    def _number(self, text: str, known: dict[str, int]) -> int:
        number = known.get(text)
        if number is None:
            self._chars += len(text)
            if len(self.known) + len(self._odd) >= MAX_PIECES or self._chars > MAX_PIECE_CHARS:
                return self._names.number(MORE_FRAMES)
            function, file, line = self._frame_of(text)
            number = known[text] = self._names.number(Frame(function, self._files.setdefault(file, file), line))
        return number


def pyspy_frame(text: str) -> Frame:
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
