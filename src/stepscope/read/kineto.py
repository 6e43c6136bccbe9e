"""Chrome traces as torch.profiler (Kineto) writes them, of all ages, from any vendor, whole or damaged.

The file is read once, in pieces; a stretch of events is decoded, turned into columns and forgotten. Nothing branches
on a version: `schemaVersion` is 1 for everything since 2021, so types and units are told by the values themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.read.chunks import ChunkBuilder
from stepscope.read.frames import Frames
from stepscope.read.inflate import ByteStream, Limits, Progress
from stepscope.read.metadata import rank_and_size, read_metadata, whole
from stepscope.read.records import Event, ExactEvent, LooseEvent
from stepscope.read.text import moment_ns
from stepscope.read.times import EXACT_MICROSECONDS, loses_nanoseconds
from stepscope.read.trace import TraceChunk, TraceQuality, TraceSummary

_SAMPLES = 8
_FREED_BYTES = 2**24
_SURE_BYTES = 4 * 2**20  # of far times without decimals, after which a writer is taken to write none
_FAR_DECIMAL = re.compile(rb'"ts"\s*:\s*-?\d{13,}\.\d*[1-9]')
# Times later than this after their base (September 2001 from 1970) are times since 1970, whatever the base says.
_SINCE_1970_NS = 10**18


def detect(path: Path, head: bytes) -> bool:
    """Whether a file begins like JSON; whether there are events in it shows only later."""
    del path
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[", b'"')


def open_kineto(path: Path, limits: Limits, progress: Progress | None = None) -> KinetoSource:
    """Open a trace; nothing but its size is read yet. Raises OSError."""
    return KinetoSource(path, limits, progress)


class KinetoSource:
    """A Kineto trace being read; see `TraceSource`."""

    def __init__(self, path: Path, limits: Limits, progress: Progress | None) -> None:
        self._path = path
        self._bytes = ByteStream(path, limits, progress)
        self._decoders = EventDecoder()
        self._frames = Frames(self._watched(limits.barren_bytes), self._decoders.decode, limits)
        self._builder = ChunkBuilder()
        self._earliest: int | None = None

    def chunks(self) -> Iterator[TraceChunk]:
        """The trace in order; raises UnreadableInputError when not a single event can be read."""
        builder = self._builder
        _keep_freed_memory()
        try:
            for events in self._frames.batches():
                builder.add(events)
                if builder.full():
                    yield self._seen(builder.take())
        except OSError as error:
            raise UnreadableInputError(f"{self._path}: {error.strerror or error}; check the file") from error
        if self._useful() <= 0:
            raise UnreadableInputError(f"{self._path}: {self._nothing()}")
        yield self._seen(builder.take())

    def _watched(self, barren_bytes: int) -> Iterator[bytes]:
        """The file's bytes, up to the point where it has shown that it holds nothing."""
        size = 0
        for piece in self._bytes:
            yield piece
            size += len(piece)
            if size > barren_bytes and not self._useful():
                return

    def _useful(self) -> int:
        return self._builder.events - self._builder.lost - self._builder.unsupported

    def _nothing(self) -> str:
        why = f"no trace event in it ({self._bytes.problem})" if self._bytes.problem else "no trace event in it"
        return f"{why}; give a file that torch.profiler's export_chrome_trace wrote"

    def _seen(self, chunk: TraceChunk) -> TraceChunk:
        if self._earliest is None and len(chunk.slices):
            self._earliest = int(chunk.slices.start_ns.min())
        return chunk

    def summary(self) -> TraceSummary:
        """Known only after the last chunk."""
        metadata = read_metadata(self._frames.head, self._frames.tail)
        rank, size = rank_and_size(metadata)
        base = moment_ns(whole(metadata.get("baseTimeNanoseconds"))) or 0
        problems = [*self._frames.problems]
        if self._bytes.problem:
            problems.insert(0, self._bytes.problem)
        if base and self._earliest is not None and self._earliest > _SINCE_1970_NS:
            problems.append("its times are since 1970 although it names another base; the base was left out")
            base = 0
        builder = self._builder
        return TraceSummary(
            base_ns=base,
            rank=rank,
            world_size=size,
            threads=builder.names.threads,
            processes=builder.names.named_processes(),
            metadata=metadata,
            quality=TraceQuality(
                events=builder.events + self._frames.lost,
                salvaged=self._frames.repaired,
                lost=builder.lost + self._frames.lost,
                unsupported=builder.unsupported,
                problems=tuple(problems),
            ),
        )


def _keep_freed_memory() -> None:
    """Let the C library use freed blocks again, of the size of a stretch, instead of asking for new pages each time.

    glibc returns large blocks to the system at once; what it takes for large grows with the largest block that was
    freed. So one is freed whose pages were never touched. Elsewhere it does nothing.
    """
    bytes(_FREED_BYTES)


class EventDecoder:
    """Decodes stretches of an event list with the fastest types that fit, and remembers which did."""

    def __init__(self) -> None:
        self._usual: Any = msgspec.json.Decoder(list[Event])
        self._exact: Any = msgspec.json.Decoder(list[ExactEvent])
        self._loose: Any = msgspec.json.Decoder(list[LooseEvent])
        self._fastest = self._usual
        self._misfits = 0
        self._whole_bytes = 0

    def decode(self, text: bytes) -> list[Any]:
        """A JSON array of entries; raises what msgspec raises where it is not one."""
        try:
            events: list[Any] = self._fastest.decode(text)
        except msgspec.ValidationError:
            events = self._decode_loosely(text)
            self._misfits += 1
            if self._misfits > _SAMPLES:  # no single odd entry: the file is like that
                self._fastest = self._loose
            return events
        if self._fastest is self._loose:
            return [_usual(event) for event in events]
        if self._fastest is self._usual and self._loses(events, text):
            self._fastest = self._exact
            return self.decode(text)
        return events

    def _loses(self, events: list[Any], text: bytes) -> bool:
        """Whether times of these events lost nanoseconds by becoming floats."""
        step = len(events) // _SAMPLES + 1
        samples = [event.ts for event in events[::step] if abs(event.ts) >= EXACT_MICROSECONDS]
        if not samples or loses_nanoseconds(samples):
            return bool(samples)
        # A float may have lost its decimals altogether. Writers do not change, so the first stretches tell.
        self._whole_bytes += len(text)
        return self._whole_bytes - len(text) <= _SURE_BYTES and _FAR_DECIMAL.search(text) is not None

    def _decode_loosely(self, text: bytes) -> list[Any]:
        return [_usual(event) for event in self._loose.decode(text)]


def _usual(event: Any) -> Any:
    """Replace what has no usable type by what stands for missing."""
    event.ph = event.ph if isinstance(event.ph, str) else ""
    event.cat = event.cat if isinstance(event.cat, str) else None
    event.name = event.name if isinstance(event.name, str) else None
    event.pid = event.pid if type(event.pid) in (int, str) else "?"
    event.tid = event.tid if type(event.tid) in (int, str) else "?"
    event.id = event.id if event.id is None or type(event.id) in (int, str) else whole(event.id)
    return event
