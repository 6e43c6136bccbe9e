"""A small file in one piece, unpacked where it is packed, and its name without endings."""

from __future__ import annotations

from pathlib import Path

from stepscope.errors import UnreadableInputError
from stepscope.read.inflate import ByteStream, Limits

MAX_BYTES = 2**30
_ENDINGS = (".gz", ".json", ".raw", ".pickle", ".pkl", ".html")


def read_whole(path: Path, limits: Limits) -> bytes:
    """The unpacked bytes of a file; raises UnreadableInputError where they cannot be had or are too many."""
    pieces: list[bytes] = []
    left = MAX_BYTES
    too_large = f"{path}: it holds more than {MAX_BYTES >> 20} MiB; record a shorter time"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UnreadableInputError(too_large)
        stream = ByteStream(path, limits)
        for piece in stream:
            left -= len(piece)
            if left < 0:
                raise UnreadableInputError(too_large)
            pieces.append(piece)
    except OSError as error:
        raise UnreadableInputError(f"{path}: {error.strerror or error}; check the path and its permissions") from error
    if stream.problem is not None:
        raise UnreadableInputError(f"{path}: {stream.problem}; record it again or copy it anew")
    return b"".join(pieces)


def stem(path: Path) -> str:
    """The name of a file without the endings of its format."""
    name = path.name
    while name.endswith(_ENDINGS) and not name.startswith("."):
        name = name.rsplit(".", 1)[0]
    return name or path.name
