"""A trace that a process of its own reads, while this one imports what will look at it, and works on what came.

`reader_process` starts it, `opened` is the trace. The other process runs this module: it decodes the trace and writes
messages to its stdout, each a header (length, then msgpack) and the columns behind it as they lie in memory. Columns
without a value are not sent. It gets no say in anything but the trace: where it cannot be started or ends before its
first message, the trace is read here.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.errors import UnreadableInputError
from stepscope.read.formats import open_trace
from stepscope.read.inflate import Progress
from stepscope.read.trace import MISSING, Flows, MemoryEvents, Slices, Text, TraceChunk, TraceSource, TraceSummary

if TYPE_CHECKING:
    from subprocess import Popen

_PROGRESS_S = 0.05
_SIZE = struct.Struct("<I")
_PARTS: dict[str, Any] = {"slices": Slices, "flows": Flows, "memory": MemoryEvents}


class _Column(msgspec.Struct, array_like=True):
    """A column of a message: `size` values of type `kind`, `bytes` of them behind the header, none where all are
    missing. Of texts, their codes; `values` are the texts."""

    part: str
    name: str
    kind: str
    size: int
    bytes: int
    values: list[str] | None = None


class _Message(msgspec.Struct, array_like=True):
    """One of these is there."""

    columns: list[_Column] | None = None  # of a chunk
    done: tuple[int, int] | None = None  # bytes of the file, of how many
    summary: TraceSummary | None = None
    error: str | None = None


def opened(path: Path, progress: Progress | None = None) -> TraceSource | None:
    """The trace `path` from the process that reads it; None where none does, or somebody has it already."""
    from stepscope import reader_process  # what starts processes is not needed in the one that was started

    process = reader_process.take(path)
    return None if process is None else _Ahead(path, _Reader(process), progress)


class _Reader:
    """The other process, and what comes from it."""

    def __init__(self, process: Popen[bytes]) -> None:
        self._process = process
        assert process.stdout is not None
        self._pipe = process.stdout

    def message(self) -> tuple[_Message, list[np.ndarray[Any, Any]]] | None:
        """The next one and its columns; None where the process has ended."""
        head = self._pipe.read(_SIZE.size)
        if len(head) < _SIZE.size:
            return None
        body = self._pipe.read(_SIZE.unpack(head)[0])
        try:
            message = msgspec.msgpack.decode(body, type=_Message)
        except msgspec.DecodeError:
            return None
        arrays = []
        for column in message.columns or ():
            if not column.bytes:  # one value for all rows, as a reader has it
                arrays.append(np.broadcast_to(np.array(_missing(np.dtype(column.kind)), column.kind), column.size))
                continue
            array = np.empty(column.size, column.kind)
            if self._pipe.readinto(array.data.cast("B")) != column.bytes:  # type: ignore[attr-defined]
                return None
            arrays.append(array)
        return message, arrays

    def end(self) -> None:
        """Nothing more is asked of it."""
        from stepscope import reader_process

        reader_process.end(self._process)


class _Ahead:
    """The trace that another process reads; see `TraceSource`."""

    def __init__(self, path: Path, reader: _Reader, progress: Progress | None) -> None:
        self._path = path
        self._reader = reader
        self._progress = progress
        self._summary: TraceSummary | None = None

    def chunks(self) -> Iterator[TraceChunk]:
        """The trace in order; raises UnreadableInputError when not a single event can be read."""
        came = False
        try:
            while self._summary is None:
                got = self._reader.message()
                if got is None:
                    break
                came = True
                message, arrays = got
                if message.error is not None:
                    raise UnreadableInputError(message.error)
                if message.done is not None and self._progress is not None:
                    self._progress(*message.done)
                if message.columns is not None:
                    yield _chunk(message.columns, arrays)
                self._summary = message.summary
        finally:
            self._reader.end()
        if self._summary is not None:
            return
        if came:
            raise UnreadableInputError(f"{self._path}: the process that read it was ended; is there enough memory?")
        here = open_trace(self._path, progress=self._progress)
        yield from here.chunks()
        self._summary = here.summary()

    def summary(self) -> TraceSummary:
        """Known only after the last chunk."""
        assert self._summary is not None
        return self._summary


def _chunk(columns: list[_Column], arrays: list[np.ndarray[Any, Any]]) -> TraceChunk:
    parts: dict[str, dict[str, Any]] = {name: {} for name in _PARTS}
    for column, array in zip(columns, arrays, strict=True):
        parts[column.part][column.name] = array if column.values is None else Text(column.values, array)
    return TraceChunk(**{name: kind(**parts[name]) for name, kind in _PARTS.items()})


def _missing(kind: np.dtype[Any]) -> Any:
    """What stands for a missing value; False among booleans, which have none."""
    if kind == np.int32:  # codes of texts
        return -1
    return np.nan if kind.kind == "f" else MISSING if kind == np.int64 else False


# ------------------------------------------------------------------------------------------------ the other process


def _tell(out: IO[bytes], message: _Message, arrays: list[np.ndarray[Any, Any]]) -> None:
    body = msgspec.msgpack.encode(message)
    out.write(_SIZE.pack(len(body)))
    out.write(body)
    for array in arrays:
        out.write(array.data.cast("B"))
    out.flush()


def _tell_chunk(out: IO[bytes], chunk: TraceChunk) -> None:
    columns, arrays = [], []
    for part in _PARTS:
        of_part = getattr(chunk, part)
        for name in of_part.__struct_fields__:
            given = getattr(of_part, name)
            values = given.values if isinstance(given, Text) else None
            array = given.codes if isinstance(given, Text) else given
            if _has_values(array):
                array = np.ascontiguousarray(array)
                arrays.append(array)
                columns.append(_Column(part, name, array.dtype.str, len(array), array.nbytes, values))
            else:
                columns.append(_Column(part, name, array.dtype.str, len(array), 0, values))
    _tell(out, _Message(columns=columns), arrays)


def _has_values(array: np.ndarray[Any, Any]) -> bool:
    missing = _missing(array.dtype)
    values = array[:1] if array.strides == (0,) else array
    return not bool((np.isnan(values) if missing != missing else values == missing).all())


def _read(path: Path, out: IO[bytes]) -> None:
    told = time.monotonic()

    def progress(done: int, size: int) -> None:
        nonlocal told
        if done == size or time.monotonic() - told > _PROGRESS_S:
            told = time.monotonic()
            _tell(out, _Message(done=(done, size)), [])

    try:
        source = open_trace(path, progress=progress)
        for chunk in source.chunks():
            _tell_chunk(out, chunk)
        _tell(out, _Message(summary=source.summary()), [])
    except UnreadableInputError as error:
        _tell(out, _Message(error=str(error)), [])


if __name__ == "__main__":
    try:
        _read(Path(sys.argv[1]), sys.stdout.buffer)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(1)  # nobody listens any more
