"""The lines of a log of any size, a block at a time. A carriage return ends a line too: progress bars write these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stepscope.read.inflate import ByteStream, Limits
from stepscope.read.raw import Losses

# Logs may be long. They pack to a tenth or a thirtieth: one that packs to less than a two-hundredth is none.
LIMITS = Limits(unpacked_bytes=256 * 2**30)
MAX_LINE_BYTES = 2**20


def read_lines(path: Path, label: str, losses: Losses) -> Iterator[list[str]]:
    """Blocks of lines without their ends; bytes that are no UTF-8 become lone surrogates.

    Counts `unreadable_files`, `cut_off_files` (packed, and damaged) and `bad_lines` for lines that are too long.
    """
    rest = b""
    too_long = False
    try:
        stream = ByteStream(path, LIMITS)
        for piece in stream:
            whole, newline, tail = (rest + piece.replace(b"\r", b"\n")).rpartition(b"\n")
            if newline:
                lines = whole.decode("utf-8", "surrogateescape").split("\n")
                yield lines[1:] if too_long else lines
                too_long = False
            rest = tail
            if len(rest) > MAX_LINE_BYTES:
                losses.add("bad_lines", label, 0 if too_long else 1)
                rest, too_long = b"", True
        if rest and not too_long:
            yield [rest.decode("utf-8", "surrogateescape")]
        if stream.problem is not None:
            losses.add("cut_off_files", label)
    except OSError:
        losses.add("unreadable_files", label)
