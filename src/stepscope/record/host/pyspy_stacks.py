"""py-spy's Chrome trace, its only format with real time, read back into stacks: which thread stood in which, from when.

An array of begin and end events. py-spy writes them for a thread only when its stack has changed since the sample
before, and ends all that is open when it ends itself; with `--threads` the outermost frame is `thread (TID): NAME`. A
thread that has ended looks as if it stood still from then on (`pyspy.Spy` knows better). Times are microseconds
since py-spy's own start.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.record.agent.masking import mask_text
from stepscope.record.host.jsonlines import write_text

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
            if text is None:  # as in py-spy's raw format; line 0 or None is unknown, an empty file too
                name, file, line = key
                text = name if not file else f"{name} ({file}:{line})" if line else f"{name} ({file})"
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
        text = ";".join(lane.stack)
        record = self._numbers.get(text)
        if record is None:
            self._characters += len(text)
            if self._characters > MOST_CHARACTERS:
                raise UnreadableTraceError("the stacks of a segment are too many and too deep; lower --rate")
            record = self._numbers[text] = len(self._numbers)
        if not current.records or current.records[-1] != record:
            current.records.append(record)
            current.starts_us.append(lane.time_us)


class Stretch(NamedTuple):
    """A thread stood in `record`; microseconds since py-spy's start."""

    record: int
    start_us: int
    end_us: int


@dataclass(frozen=True)
class Counted:
    """One py-spy's segment: the raw records with their counts, and when each thread stood in which.

    `prefix` names its process, `start_ns` is when it started, on the run's clock.
    """

    records: tuple[str, ...]
    counts: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    last_us: int
    prefix: str = ""
    start_ns: int = 0


def count(
    trace: Trace,
    samples: int,
    *,
    rate_hz: float,
    last_seen_us: Callable[[ThreadHistory], int | None],
    prefix: str = "",
    start_ns: int = 0,
) -> Counted:
    """Distribute the `samples` (of all threads together) that py-spy has reported: by their lives among threads, then
    by time among the stretches of each, of which none goes empty.

    `last_seen_us` tells when a thread was there last, None where it lives on. The counts sum to `samples`, or to the
    number of stretches should that be higher.
    """
    gap_us = 1e6 / rate_hz
    for thread in trace.threads:
        seen_us = last_seen_us(thread)
        if seen_us is not None:
            thread.end_us = min(thread.end_us, max(seen_us, thread.starts_us[-1] + round(gap_us)))
    lives = [max(1, thread.end_us - thread.starts_us[0]) for thread in trace.threads]
    least = [len(thread.records) for thread in trace.threads]
    shares = apportion(max(samples, sum(least)), lives, least)
    gap_us = sum(lives) / sum(shares) if trace.threads else gap_us  # as it really was between two samples of a thread
    counts = [0] * len(trace.records)
    stretches: list[Stretch] = []
    for thread, share in zip(trace.threads, shares, strict=True):
        met = thread.starts_us
        # each stretch holds the moment it was met at, and begins up to a gap before
        edges = [max(trace.first_us, met[0] - round(gap_us))]
        edges += [now - round(min(gap_us, (now - before) / 2)) for before, now in pairwise(met)]
        edges.append(max(thread.end_us, met[-1]))
        durations = [max(1, end - start) for start, end in pairwise(edges)]
        for record, number in zip(thread.records, apportion(share, durations, [1] * len(durations)), strict=True):
            counts[record] += number
        stretches += map(Stretch, thread.records, edges, edges[1:])
    stretches.sort(key=lambda stretch: stretch.start_us)
    return Counted(tuple(trace.records), tuple(counts), tuple(stretches), trace.last_us, prefix, start_ns)


def apportion(total: int, weights: Sequence[int], least: Sequence[int]) -> list[int]:
    """`total` in whole numbers by `weights`, by largest remainder, entry i at least `least[i]`; they sum to `total`.

    `total` must not be below the sum of `least`.
    """
    shares = list(least)
    free = list(range(len(weights)))
    rest, weight = total, sum(weights) or 1
    while short := {i for i in free if rest * weights[i] < least[i] * weight}:
        free = [i for i in free if i not in short]
        rest -= sum(least[i] for i in short)
        weight = sum(weights[i] for i in free) or 1
    exact = {i: divmod(rest * weights[i], weight) for i in free}
    for i in free:
        shares[i] = exact[i][0]
    missing = total - sum(shares)
    for i in sorted(free, key=lambda i: -exact[i][1])[:missing]:
        shares[i] += 1
    return shares


TIMES_SCHEMA = "stepscope.times/1"
_NEXT_RECORD, _NO_RECORD = "\nprocess ", "\n process "
MOST_STRETCHES = 20_000  # some 400 KB; a segment at the default rate has a few hundred


def write_segment(path: Path, parts: Sequence[Counted]) -> tuple[bool, str | None]:
    """Write the stacks of all parts to `path`; returns whether they are there, and the name of the file of times.

    There a stretch's `record` is the position of its record in `path`, counted from 0. There are no times (None) where
    they would be too many or cannot be written. Never raises `OSError`.
    """
    start_ns = min(part.start_ns for part in parts)
    lines: list[str] = []
    rows: list[tuple[int, int, int]] = []
    for part in parts:
        shift = round((part.start_ns - start_ns) / 1000)
        rows += [(len(lines) + record, start + shift, end + shift) for record, start, end in part.stretches]
        # A name may hold line breaks, and py-spy writes them; only what would read as the next record is moved aside.
        lines += [
            f"{part.prefix}{record.replace(_NEXT_RECORD, _NO_RECORD)} {number}\n"
            for record, number in zip(part.records, part.counts, strict=True)
        ]
    times, timed = path.with_name(path.name.removesuffix(".raw") + ".times.json"), False
    if 0 < len(rows) <= MOST_STRETCHES:
        columns = zip(*sorted(rows, key=lambda row: row[1]), strict=True)
        stretches = dict(zip(("record", "start_us", "end_us"), columns, strict=True))
        value = {"schema": TIMES_SCHEMA, "start_ns": start_ns, "stretches": stretches}
        timed = _replace(times, json.dumps(value, separators=(",", ":")) + "\n")
    if not _replace(path, "".join(lines)):
        remove(times)
        return False, None
    return True, times.name if timed else None


def _replace(path: Path, text: str) -> bool:
    try:
        write_text(path, text)
    except OSError:
        return False
    return True


def remove(path: Path) -> None:
    """Without a file, or where it cannot be, nothing is done."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
