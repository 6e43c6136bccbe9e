"""py-spy's Chrome trace, its only format with real time, read back into stacks: which thread stood in which, from when.

An array of begin and end events. py-spy writes them for a thread only when its stack has changed since the sample
before, and ends all that is open when it ends itself; with `--threads` the outermost frame is `thread (TID): NAME`. A
thread that has ended looks as if it stood still from then on (`pyspy_tasks` knows better). Times are microseconds
since py-spy's own start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stepscope.record.agent.masking import mask_text

MOST_BYTES = 64 * 2**20  # of one file: 50 times what a deep training loop writes in a segment at the default rate
MOST_CHARACTERS = 64 * 2**20  # of all distinct stacks; a recursion a thousand deep makes each of them 60 KB
_CHUNK_BYTES = 4 * 2**20
_SEPARATOR = b'},{"args":'  # cannot lie inside a string: a quote in there is escaped
_THREAD = re.compile(r"thread \((\d{1,19}|0x[0-9a-fA-F]{1,16})\)")


class UnreadableTraceError(ValueError):
    """The file is no Chrome trace of py-spy, or too large to be converted beside a training."""


class _Arguments(msgspec.Struct):
    filename: str = ""
    line: int | None = None


class _Event(msgspec.Struct):
    name: str
    ph: str
    tid: int
    ts: int
    args: _Arguments


@dataclass
class ThreadHistory:
    """A thread's stacks in order: `records[i]` was first met at `starts_us[i]`, the last one holds until `end_us`.

    `tid` is the kernel's number of the thread, None where py-spy could not tell it.
    """

    label: str
    tid: int | None
    records: list[int] = field(default_factory=list)
    starts_us: list[int] = field(default_factory=list)
    end_us: int = 0


@dataclass
class Trace:
    """`records` are the distinct stacks in py-spy's raw grammar, thread first, without their counts."""

    records: list[str]
    threads: list[ThreadHistory]
    first_us: int  # of the first sample
    last_us: int  # when py-spy stopped


def read_trace(path: Path) -> Trace:
    """Read the file a py-spy has written at its end. Raises `UnreadableTraceError`."""
    lanes = _Lanes()
    decoder = msgspec.json.Decoder(list[_Event])
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UnreadableTraceError(f"more than {MOST_BYTES >> 20} MiB of stacks in a segment; lower --rate")
        for piece in _pieces(path):
            for event in decoder.decode(piece):
                lanes.take(event)
    except OSError as error:
        raise UnreadableTraceError(f"py-spy's file cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnreadableTraceError(f"py-spy's file is damaged: {error}") from error
    return lanes.finish()


def _pieces(path: Path) -> Iterator[bytes]:
    """The array as shorter arrays, so that memory does not grow with the file."""
    buffer = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            buffer += chunk
            cut = buffer.rfind(_SEPARATOR) if len(buffer) >= _CHUNK_BYTES else -1
            if cut >= 0:
                yield buffer[: cut + 1] + b"]"
                buffer = b"[" + buffer[cut + 2 :]
    yield buffer


@dataclass
class _Lane:
    """The events of one pthread. Those of one moment belong to one sample; `pending` until the next moment shows up."""

    stack: list[str] = field(default_factory=list)
    time_us: int = -1
    current: ThreadHistory | None = None


class _Lanes:
    """Follows all threads through the events."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}
        self._frames: dict[tuple[str, str, int | None], str] = {}
        self._numbers: dict[str, int] = {}
        self._characters = 0
        self._threads: list[ThreadHistory] = []

    def take(self, event: _Event) -> None:
        lane = self._lanes.get(event.tid)
        if lane is None:
            lane = self._lanes[event.tid] = _Lane()
        if event.ts != lane.time_us:
            if event.ts < lane.time_us:
                raise UnreadableTraceError("py-spy's file is damaged: time runs backwards")
            self._settle(lane)
            lane.time_us = event.ts
        if event.ph == "B":
            key = (event.name, event.args.filename, event.args.line)
            text = self._frames.get(key)
            if text is None:
                text = frame_text(*key)
                text = self._frames[key] = mask_text(text) if _THREAD.match(text) else text
            lane.stack.append(text)
        elif event.ph == "E" and lane.stack:
            lane.stack.pop()
        else:
            raise UnreadableTraceError("py-spy's file is damaged: an end without a beginning")

    def finish(self) -> Trace:
        for lane in self._lanes.values():
            self._settle(lane)
        last_us = max((lane.time_us for lane in self._lanes.values()), default=0)
        for lane in self._lanes.values():
            if lane.current is not None:
                lane.current.end_us = last_us
        first_us = min((thread.starts_us[0] for thread in self._threads), default=0)
        return Trace(list(self._numbers), self._threads, first_us, last_us)

    def _settle(self, lane: _Lane) -> None:
        """All events of one moment are in: the thread now stands in `lane.stack`, or has been closed."""
        current = lane.current
        if not lane.stack:
            if current is not None:
                current.end_us, lane.current = lane.time_us, None
            return
        found = _THREAD.match(lane.stack[0])
        label = found[0] if found else ""  # without the name, which py-spy may learn later
        if current is None or current.label != label:  # the pthread of a thread that has ended is used again
            if current is not None:
                current.end_us = lane.time_us
            tid = int(found[1]) if found and found[1].isdecimal() else None
            current = lane.current = ThreadHistory(label, tid)
            self._threads.append(current)
        record = self._number(";".join(lane.stack))
        if not current.records or current.records[-1] != record:
            current.records.append(record)
            current.starts_us.append(lane.time_us)

    def _number(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            self._characters += len(text)
            if self._characters > MOST_CHARACTERS:
                raise UnreadableTraceError("the stacks of a segment are too many and too deep; lower --rate")
            number = self._numbers[text] = len(self._numbers)
        return number


def frame_text(name: str, file: str, line: int | None) -> str:
    """A frame as py-spy's raw format writes it; `line` 0 or None is unknown, an empty `file` too."""
    if not file:
        return name
    return f"{name} ({file}:{line})" if line else f"{name} ({file})"
