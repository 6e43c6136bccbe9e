"""The bytes of a plain or gzip file in pieces of bounded size, so that a file of any size needs the memory of one.

What can be unpacked of a cut-off or damaged file is handed out and the damage is said. A file that unpacks to more
than the limits allow stops there: a few megabytes of gzip can hold terabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib
from msgspec import Struct

from stepscope.files import open_regular

Progress = Callable[[int, int], None]

PIECE_BYTES = 2**19  # what it decodes to fits the processor's cache; with less, what is done once a piece shows
_PACKED_BYTES = 2**16
_UNPACKED_BYTES = 2**17
_GZIP = b"\x1f\x8b"
_WINDOW_BITS = 31  # zlib's way to say: a gzip header is expected


class Limits(Struct, frozen=True):
    """Bounds for one file. Real traces pack to a twentieth or thirtieth; gzip can pack to a thousandth."""

    unpacked_bytes: int = 20 * 2**30
    ratio: float = 200.0  # unpacked over packed, once `ratio_from_bytes` are unpacked
    ratio_from_bytes: int = 32 * 2**20
    barren_bytes: int = 64 * 2**20  # a file without an event in its first bytes is none of ours
    event_bytes: int = 16 * 2**20  # a longer one is lost
    metadata_bytes: int = 16 * 2**20  # of what stands before, and of what stands after the events
    piece_bytes: int = PIECE_BYTES


class ByteStream:
    """The unpacked bytes of `path`. `problem` says why they are not all of the file's, else None.

    `progress` gets the bytes of the file consumed and its size. Opening and iterating may raise OSError.
    """

    def __init__(self, path: Path, limits: Limits, progress: Progress | None = None) -> None:
        self.problem: str | None = None
        self.packed = False
        self._path = path
        self._limits = limits
        self._progress = progress
        self._consumed = 0
        self._size = path.stat().st_size

    def __iter__(self) -> Iterator[bytes]:
        with open_regular(self._path, follow=True) as file:
            self.packed = file.read(2) == _GZIP
            file.seek(0)
            unpacked = 0
            for piece in self._inflate(file) if self.packed else self._plain(file):
                unpacked += len(piece)
                if unpacked > self._limits.unpacked_bytes:
                    keep = len(piece) - (unpacked - self._limits.unpacked_bytes)
                    self.problem = f"it holds more than {_size(self._limits.unpacked_bytes)}; the rest was left unread"
                    yield piece[:keep]
                    return
                if unpacked > self._limits.ratio_from_bytes and unpacked > self._limits.ratio * self._consumed:
                    self.problem = (
                        f"it unpacks to more than {self._limits.ratio:.0f} times its size; what lies behind the first "
                        f"{_size(unpacked)} was left unread"
                    )
                    return
                yield piece

    def _read(self, file: BinaryIO, size: int) -> bytes:
        data = file.read(size)
        self._consumed += len(data)
        if self._progress is not None:
            self._progress(self._consumed, self._size)
        return data

    def _plain(self, file: BinaryIO) -> Iterator[bytes]:
        while data := self._read(file, self._limits.piece_bytes):
            yield data

    def _inflate(self, file: BinaryIO) -> Iterator[bytes]:
        """Small pieces, as damage costs all of the call that meets it."""
        unpacked_bytes = min(_UNPACKED_BYTES, self._limits.piece_bytes)
        stream = isal_zlib.decompressobj(wbits=_WINDOW_BITS)
        packed = b""
        while True:
            packed = packed or self._read(file, _PACKED_BYTES)
            if not packed:
                if not stream.eof:
                    self.problem = "the compressed file ends too early"
                return
            try:
                part = stream.decompress(packed, unpacked_bytes)
            except isal_zlib.error:  # type: ignore[misc]  # its stub calls the class an instance
                self.problem = "the compressed data is damaged"
                return
            if part:
                yield part
            packed = stream.unconsumed_tail
            if stream.eof:  # another gzip member may follow
                packed = stream.unused_data or self._read(file, _PACKED_BYTES)
                if not packed.startswith(_GZIP):
                    return
                stream = isal_zlib.decompressobj(wbits=_WINDOW_BITS)


def _size(count: int) -> str:
    return f"{count / 2**30:.0f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
