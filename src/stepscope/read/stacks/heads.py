"""Beginnings of records (processes, thread) by the pieces between their semicolons, so that grammar reads each once."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.read.stacks.prefixes import Head

MAX_PIECES = 200_000
MAX_CHARS = 32 * 2**20


class _Node:
    __slots__ = ("below", "head")

    def __init__(self) -> None:
        self.below: dict[str, _Node] = {}
        self.head: Head | None = None


class Heads:
    """A tree of pieces. Beyond its bounds nothing more is learnt, and grammar reads what is new each time."""

    def __init__(self) -> None:
        self._root = _Node()
        self._pieces = 0
        self._chars = 0

    def find(self, pieces: Sequence[str]) -> tuple[Head | None, int]:
        """The longest known beginning of `pieces`, and how many of them it takes."""
        node = self._root
        used = 0
        for piece in pieces:
            below = node.below.get(piece)
            if below is None:
                break
            node = below
            used += 1
        return node.head, used

    def learn(self, pieces: Sequence[str], head: Head) -> None:
        """Keep `head` as what `pieces` say."""
        node = self._root
        for piece in pieces:
            below = node.below.get(piece)
            if below is None:
                self._pieces += 1
                self._chars += len(piece)
                if self._pieces > MAX_PIECES or self._chars > MAX_CHARS:
                    return
                below = node.below[piece] = _Node()
            node = below
        node.head = head
