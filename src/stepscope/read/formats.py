"""The table of trace formats: who knows a file by its first bytes, and who opens it.

To add a format, write a file with a detector and an `open` that returns a `TraceSource`, and add its line here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from isal import isal_zlib

from stepscope.errors import UnreadableInputError
from stepscope.files import open_regular
from stepscope.read import kineto
from stepscope.read.inflate import Limits, Progress
from stepscope.read.trace import TraceSource

__all__ = ["FORMATS", "Limits", "open_trace"]

HEAD_BYTES = 65_536
Detect = Callable[[Path, bytes], bool]
Open = Callable[[Path, Limits, "Progress | None"], TraceSource]

# Tried in order; the first detector that says yes decides.
FORMATS: tuple[tuple[Detect, Open], ...] = ((kineto.detect, kineto.open_kineto),)


def open_trace(path: Path, *, limits: Limits | None = None, progress: Progress | None = None) -> TraceSource:
    """Open the trace `path`; `progress` gets the bytes of the file consumed and its size.

    Raises UnreadableInputError where no format knows the file or it cannot be read.
    """
    try:
        head = read_head(path)
        for detect, opener in FORMATS:
            if detect(path, head):
                return opener(path, limits or Limits(), progress)
    except OSError as error:
        raise UnreadableInputError(f"{path}: {error.strerror or error}; check the path and its permissions") from error
    raise UnreadableInputError(
        f"{path}: no trace event in it; give a file that torch.profiler's export_chrome_trace wrote"
    )


def read_head(path: Path, size: int = HEAD_BYTES) -> bytes:
    """The first bytes of a file after unpacking; raises OSError."""
    with open_regular(path, follow=True) as file:
        packed = file.read(size)
    if not packed.startswith(b"\x1f\x8b"):
        return packed
    try:
        head: bytes = isal_zlib.decompressobj(wbits=31).decompress(packed, size)
    except isal_zlib.error:  # type: ignore[misc]  # its stub calls the class an instance
        return b""
    return head
