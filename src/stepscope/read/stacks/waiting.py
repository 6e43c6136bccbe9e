"""Equal stacks of a file that writes one line per sample become one, as far as a bounded memory holds them."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.read.stacks.source import MAX_SAMPLES

MAX_STACKS = 200_000
MAX_CHARS = 64 * 2**20


class Waiting:
    """Texts of stacks with the sum of their counts and the number of the first record of each."""

    def __init__(self) -> None:
        self._found: dict[str, list[int]] = {}
        self._chars = 0

    def add(self, text: str, samples: int, record: int) -> bool:
        """Add a record; True where it is time to take all."""
        known = self._found.get(text)
        if known is not None:
            known[0] += samples
            return False
        self._found[text] = [samples, record]
        self._chars += len(text)
        return len(self._found) >= MAX_STACKS or self._chars > MAX_CHARS

    def take(self) -> Iterator[tuple[str, int, int]]:
        """All that waits, which then waits no more."""
        found, self._found, self._chars = self._found, {}, 0
        return ((text, min(samples, MAX_SAMPLES), record) for text, (samples, record) in found.items())
