"""A trace that a process of its own reads while another imports what analyses it, chunk by chunk."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.beside import Beside, Ended, Send
from stepscope.errors import UnreadableInputError
from stepscope.read.kineto import KinetoTrace
from stepscope.read.trace import TraceChunk, TraceSummary

Tell = Callable[[int, int], None]


def read_ahead(path: Path, send: Send) -> None:
    """Read a trace and send its chunks, then its summary, or why it cannot be read; each with the bytes read so far."""
    done = [0, 0]

    def told(read: int, size: int) -> None:
        done[:] = read, size

    try:
        trace = KinetoTrace(path, progress=told)
        for chunk in trace.chunks():
            send(_packed((chunk, *done)))
        send(_packed((trace.summary(), *done)))
    except (UnreadableInputError, OSError) as error:
        send(_packed((error, *done)))


class TraceAhead:
    """As `KinetoTrace`: take all of `chunks()`, then ask for `summary()`."""

    def __init__(self, child: Beside, progress: Tell | None) -> None:
        self._child, self._progress = child, progress
        self._summary: TraceSummary | None = None

    def chunks(self) -> Iterator[TraceChunk]:
        """The trace in order; raises what reading it does, and `Ended` where the other process did not finish."""
        try:
            for value, done, size in self._child.values():
                if self._progress is not None and size:
                    self._progress(done, size)
                if isinstance(value, Exception):
                    raise value
                if isinstance(value, TraceChunk):
                    yield value
                else:
                    self._summary = value
        finally:
            self._child.wait()
        if self._summary is None:
            raise Ended

    def summary(self) -> TraceSummary:
        """Known only after the last chunk."""
        assert self._summary is not None
        return self._summary


class _Packer(pickle.Pickler):
    """A column of one value for all rows stays one, in the file and in memory."""

    def reducer_override(self, given: Any) -> Any:
        if isinstance(given, np.ndarray) and given.strides == (0,) and len(given):
            return np.broadcast_to, (given[0], given.shape)
        return NotImplemented


def _packed(value: tuple[Any, ...]) -> bytes:
    file = BytesIO()
    _Packer(file, 5).dump(value)
    return file.getvalue()
