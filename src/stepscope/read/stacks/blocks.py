"""The lines of a text file of any size, a block at a time, so that memory holds one block whatever the file.

Bytes that are no UTF-8 become lone surrogates, as `os.fsdecode` makes them; only a newline ends a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from stepscope.read.inflate import ByteStream, Limits
from stepscope.read.raw import Losses

# Stacks repeat themselves and pack far better than traces; a bomb costs time here, but no memory.
LIMITS = Limits(unpacked_bytes=256 * 2**30, ratio=2000.0)
MAX_LINE_BYTES = 16 * 2**20

Progress = Callable[[int], None]


def read_lines(path: Path, label: str, losses: Losses, progress: Progress | None = None) -> Iterator[list[str]]:
    """Blocks of lines without their newlines; an absent file has none.

    Counts `unreadable_files`, `cut_off_files` (packed, and damaged) and, for lines that are too long,
    `skipped_records`.
    """
    told = None if progress is None else (lambda consumed, _size: progress(consumed))
    rest: list[bytes] = []
    held = 0
    dropping = False
    try:
        stream = ByteStream(path, LIMITS, told)
        for piece in stream:
            cut = piece.rfind(b"\n")
            if cut < 0:
                held += len(piece)
                if dropping or held > MAX_LINE_BYTES:
                    dropping, rest = True, []
                else:
                    rest.append(piece)
                continue
            rest.append(piece[:cut])
            lines = _decoded(rest)
            if dropping:
                losses.add("skipped_records", label)
                del lines[0]
            dropping = False
            rest = [piece[cut + 1 :]]
            held = len(rest[0])
            yield lines
        if dropping:
            losses.add("skipped_records", label)
        elif held:
            yield _decoded(rest)
        if stream.problem is not None:
            losses.add("cut_off_files", label)
    except FileNotFoundError:
        return
    except OSError:
        losses.add("unreadable_files", label)


def _decoded(parts: list[bytes]) -> list[str]:
    return b"".join(parts).decode("utf-8", "surrogateescape").split("\n")
