"""The entries of a trace's event list as bytes, one by one, for who copies entries instead of counting them.

Every entry is valid JSON text; a damaged one is repaired and encoded anew where that is possible, else left out and
counted. What lies around the list comes out as the allow-listed metadata alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.read.formats import read_head
from stepscope.read.frames import Frames
from stepscope.read.inflate import ByteStream, Limits, Progress
from stepscope.read.kineto import detect
from stepscope.read.metadata import read_metadata
from stepscope.read.trace import TraceQuality


def raw_events(path: Path, limits: Limits | None = None, progress: Progress | None = None) -> RawEvents:
    """Open `path` for one pass over its entries; raises UnreadableInputError where that is no Chrome trace."""
    try:
        if not detect(path, read_head(path)):
            raise UnreadableInputError(f"{path}: no Chrome trace; give a .json or .json.gz file of a profiler")
        return RawEvents(path, limits or Limits(), progress)
    except OSError as error:
        raise UnreadableInputError(f"{path}: {error.strerror or error}; check the path and its permissions") from error


class RawEvents:
    """Iterate once; `metadata()` and `quality()` are known afterwards."""

    def __init__(self, path: Path, limits: Limits, progress: Progress | None) -> None:
        self._path = path
        self._bytes = ByteStream(path, limits, progress)
        self._frames = Frames(self._bytes, _decode, limits)
        self._count = 0

    def __iter__(self) -> Iterator[bytes]:
        """Entries in file order; raises UnreadableInputError when there is none or the file cannot be read."""
        try:
            for batch in self._frames.batches():
                self._count += len(batch)
                yield from map(bytes, batch)
        except OSError as error:
            raise UnreadableInputError(f"{self._path}: {error.strerror or error}; check the file") from error
        if not self._count:
            raise UnreadableInputError(f"{self._path}: no trace event in it; give a file of a profiler")

    def metadata(self) -> dict[str, Any]:
        """Allow-listed top-level metadata."""
        return read_metadata(self._frames.head, self._frames.tail)

    def quality(self) -> TraceQuality:
        """What the pass cost; `unsupported` is 0, because no entry is judged here."""
        frames = self._frames
        problems = [self._bytes.problem] if self._bytes.problem else []
        return TraceQuality(self._count + frames.lost, frames.repaired, frames.lost, 0, (*problems, *frames.problems))


_DECODER: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])


def _decode(text: bytes) -> list[Any]:
    entries = _DECODER.decode(text)
    text.decode()  # the decoder does not look inside texts that it skips
    return entries
