"""The bytes of a plain or gzip file, bounded: a small file that unpacks to terabytes stops at the limit.

What can be unpacked of a cut-off or damaged file is kept and the damage is said.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, NamedTuple

from isal import isal_zlib

_CHUNK = 2**20
_GZIP = b"\x1f\x8b"
_WINDOW_BITS = 31  # zlib's way to say: a gzip header is expected


class Content(NamedTuple):
    """Bytes of a file; `problem` says in words why it is not all of them, else None."""

    data: bytes
    problem: str | None


def read_bounded(path: Path, limit: int) -> Content:
    """Read `path`, unpacking gzip by its first bytes whatever its name, up to `limit` bytes; raises OSError."""
    with path.open("rb") as file:
        head = file.read(2)
        file.seek(0)
        if head != _GZIP:
            data = file.read(limit + 1)
            return Content(data, None) if len(data) <= limit else Content(data[:limit], _too_large(limit))
        return _inflate(file, limit)


def _inflate(file: BinaryIO, limit: int) -> Content:
    parts: list[bytes] = []
    size = 0
    stream = isal_zlib.decompressobj(wbits=_WINDOW_BITS)
    packed = b""
    while True:
        packed = packed or file.read(_CHUNK)
        if not packed:
            return Content(b"".join(parts), None if stream.eof else "the compressed file ends too early")
        try:
            part = stream.decompress(packed, limit - size + 1)
        except isal_zlib.error:  # type: ignore[misc]  # its stub calls the class an instance
            return Content(b"".join(parts), "the compressed data is damaged")
        parts.append(part)
        size += len(part)
        if size > limit:
            return Content(b"".join(parts)[:limit], _too_large(limit))
        packed = stream.unconsumed_tail
        if stream.eof:  # another gzip member may follow
            packed = stream.unused_data or file.read(_CHUNK)
            if not packed.startswith(_GZIP):
                return Content(b"".join(parts), None)
            stream = isal_zlib.decompressobj(wbits=_WINDOW_BITS)


def _too_large(limit: int) -> str:
    return f"it holds more than {limit / 2**20:.0f} MiB; the rest was left unread"
