"""Files of sampled stacks: which format one is by its first bytes, whatever its name; speedscope's; many as one run.

To add a format, write a file with a `StackSource`, and add a line with its detector to `FORMATS`. What people give
instead of stacks stands in `REFUSALS`, with what to do.

speedscope's JSON, from py-spy and any other tool, holds profiles of samples with weights, or of frames opened and
closed. The file is held in memory as it is (up to `MAX_BYTES`), but only a stretch of it is decoded at a time. Frames
may lack their file or line, or have null there. Equal weights of time are samples taken at a rate; other weights of
time become microseconds, those in bytes stay bytes. A profile whose weights are in another unit than the first one's is
left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from stepscope.errors import UnreadableInputError, readable
from stepscope.read import stack_lines as source
from stepscope.read.raw import (
    SAMPLES,
    Frame,
    FrameNames,
    Losses,
    Progress,
    RawHost,
    RawRun,
    RawSegment,
    RawStack,
    StackSource,
)
from stepscope.read.stack_lines import START_PROCESS, START_THREAD, Austin, Collapsed, PySpyRaw, Tachyon
from stepscope.read.streams import (
    BYTE_ORDER_MARK,
    HEAD_BYTES,
    ByteStream,
    Limits,
    common_folder,
    known_files,
    read_head,
)
from stepscope.read.text import LONGEST_NS, clean, integer

MAX_BYTES = 2**30
MAX_PROFILES = 100_000
STRETCH_BYTES = 2**20
MAX_DISTINCT_BYTES = 64 * 2**20  # of different samples that wait for equal ones
MAX_PATHS = 2_000_000
_MICROSECONDS_IN = {"seconds": 1e6, "milliseconds": 1e3, "microseconds": 1.0, "nanoseconds": 1e-3}
_BAD_JSON = (msgspec.MsgspecError, ValueError, RecursionError)
_MOST = 2**53
_PERIODS_US = (0.1, 3.6e9)  # of samplers; equal weights beyond are chance, or no times

_HEAD = re.compile(rb"\s*\{")
_SCHEMA = b"speedscope.app/file-format-schema"
_SHARED = re.compile(rb'"shared"\s*:\s*\{\s*"frames"\s*:\s*\[')
_PROFILES = re.compile(rb'"profiles"\s*:\s*\[\s*\{[^{}\[\]]{0,2000}"type"\s*:\s*"(?:sampled|evented)"')
# A pair is kept; the half of one becomes nothing.
_SURROGATE = re.compile(
    rb"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
_EXPORTER = re.compile(rb'"exporter"\s*:\s*"([^"\\@]{1,100})')
_PYSPY_PROFILE = re.compile(rb'"name"\s*:\s*"Process \d{1,18} Thread ')
_PYSPY_NAME = re.compile(r'(?:Process (\d{1,18}) )?Thread (\d{1,20}|0x[0-9A-Fa-f]{1,16})(?: "(.*)")?', re.DOTALL)


class _Shared(Struct):
    frames: list[msgspec.Raw] = []


class _File(Struct):
    profiles: list[msgspec.Raw] = []
    shared: _Shared | None = None
    exporter: Any = None


class _Frame(Struct):
    name: Any = None
    file: Any = None
    line: Any = None


def detect(head: bytes) -> bool:
    text = head.removeprefix(BYTE_ORDER_MARK)
    if not _HEAD.match(text):
        return False
    return _SCHEMA in text or bool(_SHARED.search(text)) or bool(_PROFILES.search(text))


class Speedscope(StackSource):
    format = "speedscope"

    def read(self, names: FrameNames, losses: Losses, progress: Progress | None = None) -> Iterator[RawStack]:
        data = self._bytes(losses, progress)
        file = _decoded(data)
        if file is None:
            if data:
                losses.add("unreadable_files", self.label)
            return
        del data
        if isinstance(file.exporter, str) and file.exporter:
            self.tool = clean(file.exporter).partition("@")[0] or self.tool
        profiles = [profile for raw in file.profiles[:MAX_PROFILES] if (profile := _profile(raw)) is not None]
        losses.add("skipped_records", self.label, len(file.profiles) - len(profiles))
        surveys = [_survey(profile) for profile in profiles if _holds_anything(profile)]
        self._settle(surveys)
        frames = _Frames(file.shared.frames if file.shared is not None else [], names, self.hints)
        record = 0
        for found in surveys:
            at_rate = self.rate_hz is not None  # every sample counts one
            if found.unit != (source.MICROSECONDS if at_rate else self.unit):
                losses.add("other_units", self.label)
                continue
            profile = found.profile
            thread = _thread_of(profile.name, alone=len(surveys) == 1)
            make = _evented_stacks if profile.type == "evented" else _sampled_stacks
            factor = found.factor if found.weighed and not at_rate else None
            for stack, samples in make(profile, factor, len(frames.numbers), losses, self.label):
                own, rest = frames.split(stack, thread)
                yield RawStack(*own, rest, samples, record)
                record += 1

    def _bytes(self, losses: Losses, progress: Progress | None) -> bytearray:
        data = bytearray()
        try:
            if self.path.stat().st_size > MAX_BYTES:
                losses.add("oversized_files", self.label)
                return data
            stream = ByteStream(self.path, Limits(), progress)
            for piece in stream:
                data += piece
                if len(data) > MAX_BYTES:
                    losses.add("oversized_files", self.label)
                    return bytearray()
            if stream.problem is not None:
                losses.add("cut_off_files", self.label)
        except OSError:
            losses.add("unreadable_files", self.label)
            return bytearray()
        return data

    def _settle(self, surveys: list[_Survey]) -> None:
        """Unit, rate and wall time of the file; its first profile says what is counted."""
        self.unit = next((found.unit for found in surveys if found.weighed), SAMPLES)
        if self.unit != source.MICROSECONDS:
            return
        timed = [found for found in surveys if found.unit == self.unit]
        lowest, highest = min(found.lowest for found in timed), max(found.highest for found in timed)
        sampled = all(found.profile.type == "sampled" for found in timed)
        if sampled and _PERIODS_US[0] <= lowest <= _PERIODS_US[1] and math.isclose(lowest, highest, rel_tol=1e-6):
            self.unit = SAMPLES
            self.rate_hz = 1e6 / lowest
            return
        longest = max((found.wall for found in timed if found.wall is not None), default=math.inf) * 1000
        self.wall_ns = round(longest) if longest <= LONGEST_NS else None


def _decoded(data: bytearray) -> _File | None:
    """The file's outline; the rest stays as text. None where it is no JSON of this shape."""
    text: bytes | bytearray = data.removeprefix(BYTE_ORDER_MARK) if data[:1] == b"\xef" else data
    for _ in range(2):
        try:
            return msgspec.json.decode(text, type=_File)
        except _BAD_JSON:
            # Names that are no text spoil only themselves.
            text = _SURROGATE.sub(rb"\1", text.decode("utf-8", "replace").encode())
    return None


def _profile(raw: msgspec.Raw) -> _Profile | None:
    try:
        profile = msgspec.json.decode(raw, type=_Profile)
    except _BAD_JSON:
        return None
    return profile if profile.type in ("sampled", "evented") else None


class _Frames:
    """The frames of a file. py-spy has a stack begin with frames that are no frames, but its process and thread."""

    def __init__(self, frames: list[msgspec.Raw], names: FrameNames, hints: dict[int, str]) -> None:
        self.numbers: list[int] = []
        self._bare: dict[int, str] = {}  # names of frames without a file; prefixes have none
        self._hints = hints
        decoder = msgspec.json.Decoder(_Frame)
        for number, raw in enumerate(frames):
            if number >= source.MAX_DISTINCT_FRAMES:
                self.numbers.append(names.number(source.MORE_FRAMES))
                continue
            try:
                frame = decoder.decode(raw)
            except _BAD_JSON:
                frame = _Frame()
            name = clean(frame.name) if isinstance(frame.name, str) else "?"
            file = clean(frame.file) if isinstance(frame.file, str) else ""
            if not file:
                self._bare[number] = name
                if source.START_PROCESS.match(name):
                    name = "(process)"  # where it stands inside a stack after all
                elif source.START_THREAD.match(name):
                    name = "(thread)"
            whole = isinstance(frame.line, float) and frame.line.is_integer() and abs(frame.line) < 2**31
            line = integer(int(frame.line) if whole else frame.line) or None  # py-spy writes 0 where it knows none
            self.numbers.append(names.number(Frame(name, file, line)))

    def split(self, stack: tuple[int, ...], profile: source.Prefixes) -> tuple[source.Prefixes, tuple[int, ...]]:
        """The process and thread of a stack, those of its `profile` where it is silent, and its frames."""
        first = self._bare.get(stack[0], "") if stack else ""
        if not (source.START_PROCESS.match(first) or source.START_THREAD.match(first)):
            return profile, tuple(self.numbers[frame] for frame in stack)
        bare = [self._bare[frame] for frame in takewhile(self._bare.__contains__, stack)]
        # As one text, because semicolons in a command line may have cut it into several frames.
        own, length = source.split_prefixes(";".join(bare), self._hints) or (source.NO_PREFIXES, 0)
        used = 0
        while length > 0:
            length -= len(bare[used]) + 1
            used += 1
        rest = tuple(self.numbers[frame] for frame in stack[used:])
        thread = own.thread or profile.thread
        name = (
            clean(bare[used - 1].partition(": ")[2]) if own.name else profile.name if thread == profile.thread else None
        )
        return source.Prefixes(own.pids or profile.pids, thread, name), rest


def _thread_of(name: Any, *, alone: bool) -> source.Prefixes:
    """Process, thread and thread name of a profile; the name of a file's only profile is that of the file."""
    if not isinstance(name, str):
        return source.NO_PREFIXES
    match = _PYSPY_NAME.fullmatch(name)
    if match:
        return source.Prefixes((int(match[1]),) if match[1] else (), match[2], clean(match[3] or "") or None)
    return source.Prefixes((), None, None if alone or not name else clean(name))


def open_speedscope(path: Path, label: str, head: bytes) -> Speedscope:
    """Open a speedscope file; nothing is read yet. py-spy says only at the end of a file that it wrote it."""
    match = _EXPORTER.search(head)
    if match:
        return Speedscope(path, label, tool=match[1].decode("utf-8", "replace"))
    return Speedscope(path, label, tool="py-spy" if _PYSPY_PROFILE.search(head) else "speedscope")


_Stacks = Iterator[tuple[tuple[int, ...], int]]


class _Profile(Struct):
    """A profile's outline; its lists stay text of flat items: it may be cut at any closing bracket."""

    type: str = ""
    name: Any = ""
    unit: str = "none"
    startValue: Any = None
    endValue: Any = None
    samples: msgspec.Raw = msgspec.Raw(b"[]")
    weights: msgspec.Raw = msgspec.Raw(b"[]")
    events: msgspec.Raw = msgspec.Raw(b"[]")


class _Event(Struct, gc=False):
    type: str
    at: float
    frame: int


def _holds_anything(profile: _Profile) -> bool:
    raw = profile.events if profile.type == "evented" else profile.samples
    beginning = bytes(memoryview(raw)[:4096]).translate(None, b" \t\r\n")
    return beginning[:1] == b"[" and beginning != b"[]"


class _Survey(Struct, frozen=True):
    """What a profile counts, what its weights have in common, and how long it lasted; times are in microseconds.

    `lowest` is 0 where one of the weights is no number or negative.
    """

    profile: _Profile
    unit: str
    factor: float  # that makes microseconds of times
    weighed: bool
    lowest: float
    highest: float
    wall: float | None


def _survey(profile: _Profile) -> _Survey:
    """Look at all weights of a sampled profile once."""
    weighed, lowest, highest = profile.type == "evented", math.inf, 0.0
    if not weighed:
        for weight in _items(profile.weights, b",", float, bad=0.0):
            known = weight if 0 < weight < _MOST else 0.0
            weighed, lowest, highest = True, min(lowest, known), max(highest, known)
    start, end = _number(profile.startValue), _number(profile.endValue)
    wall = end - start if start is not None and end is not None and 0 < end - start < _MOST else None
    us = _MICROSECONDS_IN.get(profile.unit) if weighed else None
    counted = source.BYTES if weighed and profile.unit == "bytes" else SAMPLES
    unit, factor = (counted, 1.0) if us is None else (source.MICROSECONDS, us)
    return _Survey(profile, unit, factor, weighed, lowest * factor, highest * factor, wall and wall * factor)


def _sampled_stacks(profile: _Profile, factor: float | None, frames: int, losses: Losses, label: str) -> _Stacks:
    """Stacks of a sampled profile, equal samples as one: the sum of weights times `factor`, of samples without one."""
    weights = _items(profile.weights, b",", float, bad=0.0)
    waiting: dict[bytes, float] = {}
    held = 0
    for raw in _items(profile.samples, b"]", msgspec.Raw):
        sample = b"" if raw is None else bytes(raw)
        weight = 1.0 if factor is None else next(weights, math.nan) * factor
        if not sample or not 0 <= weight <= source.MAX_SAMPLES:
            losses.add("skipped_records", label)
            continue
        held += 0 if sample in waiting else len(sample)
        waiting[sample] = waiting.get(sample, 0.0) + weight
        if held > MAX_DISTINCT_BYTES:
            yield from _each_once(waiting, frames, losses, label)
            waiting.clear()
            held = 0
    yield from _each_once(waiting, frames, losses, label)


def _each_once(waiting: dict[bytes, float], frames: int, losses: Losses, label: str) -> _Stacks:
    decoder = msgspec.json.Decoder(list[int])
    for text, weight in waiting.items():
        samples = min(_whole(weight), source.MAX_SAMPLES)
        try:
            stack = decoder.decode(text)
        except _BAD_JSON:
            stack = [-1]
        if len(stack) > source.MAX_FRAMES or (stack and not 0 <= min(stack) <= max(stack) < frames):
            losses.add("skipped_records", label)
            losses.add("skipped_samples", label, samples)
        else:
            yield tuple(stack), samples


class _Paths:
    """Open frames as a path in a tree of paths, and the time spent in each path itself."""

    def __init__(self) -> None:
        self.parent: list[int] = [-1]
        self.frame: list[int] = [-1]
        self.own: list[float] = [0.0]
        self.now = 0
        self.depth = 0
        self._below: dict[tuple[int, int], int] = {}

    def open(self, frame: int) -> bool:
        """Go down; False where bounds are reached."""
        node = self._below.get((self.now, frame))
        if node is None:
            if self.depth >= source.MAX_FRAMES or len(self.parent) >= MAX_PATHS:
                return False
            node = self._below[(self.now, frame)] = len(self.parent)
            self.parent.append(self.now)
            self.frame.append(frame)
            self.own.append(0.0)
        self.now = node
        self.depth += 1
        return True

    def close(self, frame: int) -> bool:
        """Go up out of `frame`, and out of all that was opened in it; False where it is not open."""
        node, up = self.now, 1
        while node and self.frame[node] != frame:
            node, up = self.parent[node], up + 1
        if not node:
            return False
        self.now = self.parent[node]
        self.depth -= up
        return True

    def path(self, node: int) -> tuple[int, ...]:
        found: list[int] = []
        while node > 0:
            found.append(self.frame[node])
            node = self.parent[node]
        return tuple(reversed(found))


def _evented_stacks(profile: _Profile, factor: float | None, frames: int, losses: Losses, label: str) -> _Stacks:
    """Stacks of an evented profile with the time (or weight) spent in them themselves, not in what they call."""
    paths = _Paths()
    last = _number(profile.startValue)
    for event in _items(profile.events, b"}", _Event):
        in_order = event is not None and abs(event.at) < _MOST and (last is None or event.at >= last)
        if not in_order or not 0 <= event.frame < frames:
            losses.add("skipped_records", label)
            continue
        if last is not None:
            paths.own[paths.now] += event.at - last
        last = event.at
        done = paths.open(event.frame) if event.type == "O" else event.type == "C" and paths.close(event.frame)
        if not done:
            losses.add("skipped_records", label)
    end = _number(profile.endValue)
    if end is not None and last is not None and last < end < _MOST:
        paths.own[paths.now] += end - last
    for node, own in enumerate(paths.own):
        samples = _whole(min(own * (factor or 1.0), source.MAX_SAMPLES))
        if node and samples:
            yield paths.path(node), samples


def _stretches(raw: msgspec.Raw, closing: bytes) -> Iterator[bytes]:
    """A list's text as lists of bounded length; they end behind `closing`, or before it where it is a comma."""
    text = memoryview(raw)
    if len(text) < 2 or text[0] != ord("["):
        return
    position, end = 1, len(text) - 1
    while position < end:
        stop = min(end, position + STRETCH_BYTES)
        stretch = bytes(text[position:stop])
        if stop < end:
            cut = stretch.rfind(closing)
            if cut >= 0:
                stretch = stretch[: cut + 1]
            stop = position + len(stretch)
        position = stop
        yield b"[" + stretch.strip(b" \t\r\n,") + b"]"


def _items(raw: msgspec.Raw, closing: bytes, kind: Any, bad: Any = None) -> Iterator[Any]:
    """The items of a list as `kind`, a stretch at a time; `bad` for each that is none, None for a broken stretch."""
    items: Any = msgspec.json.Decoder(list.__class_getitem__(kind))
    for stretch in _stretches(raw, closing):
        try:
            yield from items.decode(stretch)
        except _BAD_JSON:
            yield from _one_by_one(stretch, kind, bad)


def _one_by_one(stretch: bytes, kind: Any, bad: Any) -> Iterator[Any]:
    try:
        raws = msgspec.json.decode(stretch, type=list[msgspec.Raw])
    except _BAD_JSON:
        yield from (None,) if bad is None else ()
        return
    for raw in raws:
        try:
            yield msgspec.json.decode(raw, type=kind)
        except _BAD_JSON:
            yield bad


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST:
        return None
    return float(value)


def _whole(weight: float) -> int:
    return math.floor(weight + 0.5)


Detect = Callable[[bytes], bool]
Open = Callable[[Path, str, bytes], StackSource]

_LOOKED_AT = 200  # lines that are enough to tell formats apart
_PYSPY_FRAME = re.compile(r".+ \(.*[.:/<?\\].*\)|.+ \(\?\)", re.DOTALL)  # "name (file)", not any words in brackets
_COUNTED = re.compile(r"(.*) \d{1,15}(?:\.\d{1,20})?\Z")
_TACHYON = re.compile(r"tid:(?:\d{1,20}|0x[0-9A-Fa-f]{1,16});")
_AUSTIN = re.compile(r"# austin: |P\d{1,18};T(?:\w{1,24}:)?\w{1,24}[; ]")


def open_stacks(path: Path, label: str | None = None) -> StackSource:
    """Open a file of stacks; nothing is read yet but its beginning. `label` names it in the losses.

    Raises UnreadableInputError, with what to do, where no format knows the file or it cannot be read.
    """
    with readable(path):
        if not path.is_file():
            what = "a folder" if path.is_dir() else "no such file"
            raise UnreadableInputError(f"{path}: {what}; give a file that a sampler wrote")
        head = read_head(path)
        empty = path.stat().st_size == 0
    opener = _opener(head)
    if opener is not None:
        return opener(path, label or path.name, head)
    what = _EMPTY if empty else next((reason for detect, reason in REFUSALS if detect(head)), _TEXT)
    raise UnreadableInputError(f"{path}: {what}")


def is_stack_file(path: Path) -> bool:
    """Whether `path` is a file that begins with sampled stacks in a format we know. Raises OSError."""
    return path.is_file() and _opener(read_head(path)) is not None


def _opener(head: bytes) -> Open | None:
    return next((opener for detect, opener in FORMATS if detect(head)), None)


def _lines(head: bytes) -> list[str]:
    """The first lines that are no blanks; the last is left out where the head ends within it."""
    if b"\0" in head:
        return []
    lines = head.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "surrogateescape").split("\n")
    if len(head) >= HEAD_BYTES and len(lines) > 1:
        lines.pop()
    return [line.rstrip("\r ") for line in lines[:_LOOKED_AT] if line.strip()]


def _is_pyspy(head: bytes) -> bool:
    lines = _lines(head)
    if not lines or lines[0][0] in "{[":
        return False
    whole = [match[1] for line in lines if (match := _COUNTED.fullmatch(line))]
    for start in (START_PROCESS, START_THREAD):
        # Newlines in a command line break every record in two or more lines.
        if 5 * sum(1 for line in lines if start.match(line)) >= len(lines):
            return True
    if len(lines) == 1 and not whole and len(head) >= HEAD_BYTES:
        pieces = lines[0].split(";")[:-1]  # a line longer than what was looked at
        return len(pieces) > 1 and _written_as_pyspy(pieces)
    if 10 * len(whole) < 8 * len(lines):
        return False
    return _written_as_pyspy([piece for text in whole if text for piece in text.split(";")])


def _written_as_pyspy(pieces: list[str]) -> bool:
    """Whether most frames are `name (file)`; none at all is what remains of stacks without Python frames."""
    return 2 * sum(1 for piece in pieces if _PYSPY_FRAME.fullmatch(piece)) >= len(pieces)


def _is_tachyon(head: bytes) -> bool:
    lines = _lines(head)
    return bool(lines) and 2 * sum(1 for line in lines if _TACHYON.match(line)) >= len(lines)


def _is_collapsed(head: bytes) -> bool:
    """Strict: logs and tables hold lines that end in a number too."""
    lines = _lines(head)
    if not lines or lines[0].lstrip()[:1] in "{[<":
        return False
    whole = [match[1] for line in lines if (match := _COUNTED.fullmatch(line))]
    stacked = sum(1 for text in whole if ";" in text and "; " not in text)
    return 10 * len(whole) >= 9 * len(lines) and 2 * stacked >= len(whole)


# Tried in order; the first detector that says yes decides.
FORMATS: tuple[tuple[Detect, Open], ...] = (
    (detect, open_speedscope),
    (
        lambda head: any(_AUSTIN.match(line) for line in _lines(head)[:1]),
        lambda path, label, head: Austin(path, label, head=head[:4096].decode("utf-8", "replace")),
    ),
    (_is_tachyon, lambda path, label, _: Tachyon(path, label, tool="profiling.sampling")),
    (_is_pyspy, lambda path, label, _: PySpyRaw(path, label)),
    (_is_collapsed, lambda path, label, _: Collapsed(path, label)),
)


_EMPTY = "an empty file: what writes it was killed before, or still runs; py-spy writes when it ends (Ctrl-C)"
_NO_FILE = "no file of sampled stacks in it; give files of `py-spy record --format raw`, collapsed stacks or speedscope"
_ELSE = "give py-spy's raw format, collapsed stacks or a file of speedscope"
_TEXT = f"neither sampled stacks nor a trace; {_ELSE}"
_EVENT = re.compile(rb'"ph"\s*:\s*"|"traceEvents"')


def _looks_like_json(head: bytes) -> bool:
    return head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] in (b"{", b"[") and b"\0" not in head


# What a file begins with, and what to say of it.
REFUSALS: tuple[tuple[Detect, str], ...] = (
    (
        lambda head: b"<svg" in head[:4096].lower(),
        "an SVG flame graph holds pictures, not stacks; record with --format raw",
    ),
    (
        lambda head: head[:512].lstrip().lower().startswith((b"<!doctype html", b"<html")),
        "an HTML page holds pictures, not stacks; have its tool write collapsed stacks or speedscope's format",
    ),
    (
        lambda head: head.startswith((b"PERFILE2", b"2ELIFREP")),
        "perf's own file; fold it first: `perf script -i FILE | stackcollapse-perf.pl > stacks.txt`",
    ),
    (
        lambda head: head.startswith(b"MOJ"),
        "Austin's binary format; make text of it first: `mojo2austin FILE stacks.austin`",
    ),
    (
        lambda head: head[:1] in (b"{", b"\xfb") and head[1:2] in (b"(", b")", b"\xa8", b"\xa9"),
        "a file of cProfile holds totals of functions, not stacks; record with `py-spy record --format raw`",
    ),
    (
        lambda head: _looks_like_json(head) and bool(_EVENT.search(head)),
        "a trace, and no sampled stacks; give it to `stepscope analyze`",
    ),
    (_looks_like_json, f"JSON without stacks; {_ELSE}"),
    (
        lambda head: head.startswith((b"PK\3\4", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")),
        "packed otherwise than by gzip; unpack it and give what is in it",
    ),
    (
        lambda head: b"\0" in head,
        "a binary file; give a trace that torch.profiler exported as JSON, or stacks as text or of speedscope",
    ),
    (lambda head: not head, "a packed file that cannot be unpacked; copy it anew"),
)


def read_stack_files(paths: Sequence[Path]) -> RawRun:
    """Files of stacks that others recorded, and folders of them, as a run without steps: one segment for each file.

    Nothing says which host or rank a file is of; the tables make processes of the chains of process ids. Counts
    `foreign_files` of folders. Raises UnreadableInputError for a given file that holds none, and when not one record of
    all files can be read.
    """
    losses = Losses()
    sources = [open_stacks(file, name) for file, name in known_files(paths, is_stack_file, losses)]
    # One record at least must be readable; of a file of lines only the beginning is looked at.
    if not any(True for source in sources for _ in open_stacks(source.path).read(FrameNames(), Losses())):
        nothing = "not one stack in it can be read; record again" if sources else _NO_FILE
        raise UnreadableInputError(f"{paths[0]}: {nothing}")
    segments = tuple(
        RawSegment(number=number, file=source.label, source=source.tool, idle=source.idle, status="ok", stacks=source)
        for number, source in enumerate(sources)
    )
    return RawRun(common_folder(paths), hosts=(RawHost(name="", segments=segments),), ranks=(), losses=losses)
