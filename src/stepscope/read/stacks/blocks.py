"""The lines of a text file of any size, a block at a time, so that memory holds one block whatever the file.

Bytes that are no UTF-8 become lone surrogates, as `os.fsdecode` makes them; only a newline ends a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stepscope.read.inflate import ByteStream, Limits
from stepscope.read.raw import Losses
from stepscope.read.stacks.source import Progress

# Stacks repeat themselves, deep ones pack to a hundredth, and files may be long. What packs better than any of ours is
# read as far as costs some seconds.
LIMITS = Limits(unpacked_bytes=256 * 2**30, ratio_from_bytes=2**27)
MAX_LINE_BYTES = 16 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path, label: str, losses: Losses, progress: Progress | None = None) -> Iterator[list[str]]:
    """Blocks of lines without their newlines; an absent file has none.

    Counts `unreadable_files`, `cut_off_files` (packed, and damaged) and, for lines that are too long,
    `skipped_records`.
    """

    def told(consumed: int, _size: int) -> None:
        if progress is not None:
            progress(consumed)

    try:
        stream = ByteStream(path, LIMITS, told)
        splitter = _Splitter()
        for number, piece in enumerate(stream):
            yield splitter.add(piece if number else piece.removeprefix(BYTE_ORDER_MARK))
        yield splitter.last()
        losses.add("skipped_records", label, splitter.too_long)
        if stream.problem is not None:
            losses.add("cut_off_files", label)
    except FileNotFoundError:
        return
    except OSError:
        losses.add("unreadable_files", label)


class _Splitter:
    """Pieces of bytes to lines; what comes after a piece's last newline waits for the next piece."""

    def __init__(self) -> None:
        self.too_long = 0
        self._rest: list[bytes] = []
        self._held = 0

    def add(self, piece: bytes) -> list[str]:
        """The lines that `piece` ends."""
        cut = piece.rfind(b"\n")
        if cut < 0:
            self._held += len(piece)
            if self._held > MAX_LINE_BYTES:
                self._rest.clear()
            else:
                self._rest.append(piece)
            return []
        lines = self._lines(piece[:cut])
        self._rest = [piece[cut + 1 :]]
        self._held = len(self._rest[0])
        return lines

    def last(self) -> list[str]:
        """The line that no newline ends."""
        return self._lines(b"") if self._held else []

    def _lines(self, piece: bytes) -> list[str]:
        too_long = self._held > MAX_LINE_BYTES
        lines = b"".join((*self._rest, piece)).decode("utf-8", "surrogateescape").split("\n")
        if too_long:
            self.too_long += 1
            del lines[0]
        return lines
