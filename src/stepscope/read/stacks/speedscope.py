"""speedscope's JSON, from py-spy and any other tool: profiles of samples with weights, or of frames opened and closed.

The file is held in memory as it is (up to `MAX_BYTES`), but only a stretch of it is decoded at a time. Frames may lack
their file or line, or have null there. Equal weights of time are samples taken at a rate; other weights of time become
microseconds, those in bytes stay bytes. A profile whose weights are in another unit than the first one's is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stepscope.read.inflate import ByteStream, Limits
from stepscope.read.raw import Frame, FrameNames, Losses, RawStack
from stepscope.read.stacks.blocks import BYTE_ORDER_MARK
from stepscope.read.stacks.pieces import MAX_PIECES, MORE_FRAMES
from stepscope.read.stacks.prefixes import Head, PrefixFrame, head_of_frames, prefix_frame
from stepscope.read.stacks.source import BYTES, MICROSECONDS, SAMPLES, FileSource, Progress
from stepscope.read.stacks.speedscope_profiles import (
    BAD_JSON,
    MICROSECONDS_IN,
    Profile,
    Survey,
    evented_stacks,
    holds_anything,
    sampled_stacks,
    survey,
)
from stepscope.read.text import LONGEST_NS, clean, integer

MAX_BYTES = 2**30
MAX_PROFILES = 100_000
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
_PYSPY_NAME = re.compile(r'Process (\d{1,18}) Thread (\d{1,20}|0x[0-9A-Fa-f]{1,16}) "(.*)"', re.DOTALL)
_PYSPY_BARE_NAME = re.compile(r"(?:Process (\d{1,18}) )?Thread (\d{1,20}|0x[0-9A-Fa-f]{1,16})")


class _Shared(msgspec.Struct):
    frames: list[msgspec.Raw] = []


class _File(msgspec.Struct):
    profiles: list[msgspec.Raw] = []
    shared: _Shared | None = None
    exporter: Any = None


class _Frame(msgspec.Struct):
    name: Any = None
    file: Any = None
    line: Any = None


def detect(head: bytes) -> bool:
    """Whether a file begins as one of speedscope's."""
    text = head.removeprefix(BYTE_ORDER_MARK)
    if not _HEAD.match(text):
        return False
    return _SCHEMA in text or bool(_SHARED.search(text)) or bool(_PROFILES.search(text))


class Speedscope(FileSource):
    """A speedscope file as a `StackSource`."""

    format = "speedscope"

    def read(self, names: FrameNames, losses: Losses, progress: Progress | None = None) -> Iterator[RawStack]:
        """The stacks of all profiles, equal ones of a profile as one."""
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
        profiles = [profile for profile in profiles if holds_anything(profile)]
        surveys = [survey(profile) for profile in profiles]
        self._settle(profiles, surveys)
        frames = _Frames(file.shared.frames if file.shared is not None else [], names, self.hints)
        record = 0
        for profile, found in zip(profiles, surveys, strict=True):
            fits, factor = self._fits(profile, found)
            if not fits:
                losses.add("other_units", self.label)
                continue
            head = _head(profile.name, alone=len(profiles) == 1)
            make = evented_stacks if profile.type == "evented" else sampled_stacks
            for stack, samples in make(profile, factor, len(frames.numbers), losses, self.label):
                own, rest = frames.split(stack, head)
                yield RawStack(own.pids, own.thread, own.name, rest, samples, record)
                record += 1

    def _bytes(self, losses: Losses, progress: Progress | None) -> bytearray:
        data = bytearray()
        try:
            if self.path.stat().st_size > MAX_BYTES:
                losses.add("oversized_files", self.label)
                return data
            stream = ByteStream(self.path, Limits(), None if progress is None else lambda done, _: progress(done))
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

    def _settle(self, profiles: list[Profile], surveys: list[Survey]) -> None:
        """Unit, rate and wall time of the file; its first profile says what is counted."""
        both = list(zip(profiles, surveys, strict=True))
        weighed = (_unit_of(profile, found) for profile, found in both if found.count or profile.type == "evented")
        self.unit = next(weighed, SAMPLES)
        if self.unit != MICROSECONDS:
            return
        fitting = [(profile, found) for profile, found in both if _unit_of(profile, found) == self.unit]
        timed = [(found, MICROSECONDS_IN[profile.unit]) for profile, found in fitting]
        lowest = min(found.lowest * us for found, us in timed)
        highest = max(found.highest * us for found, us in timed)
        sampled = all(profile.type == "sampled" for profile, _ in fitting)
        if sampled and _PERIODS_US[0] <= lowest <= _PERIODS_US[1] and math.isclose(lowest, highest, rel_tol=1e-6):
            self.unit = SAMPLES
            self.rate_hz = 1e6 / lowest
            return
        walls = [found.wall * us for found, us in timed if found.wall is not None]
        longest = max(walls, default=math.inf) * 1000
        self.wall_ns = round(longest) if longest <= LONGEST_NS else None

    def _fits(self, profile: Profile, found: Survey) -> tuple[bool, float | None]:
        """Whether the profile counts what the file does, and the factor of its weights; None where each counts one."""
        unit = _unit_of(profile, found)
        if unit == MICROSECONDS:
            at_rate = self.unit == SAMPLES and self.rate_hz is not None
            return at_rate or self.unit == unit, None if at_rate else MICROSECONDS_IN[profile.unit]
        without = profile.type == "sampled" and not found.count
        return self.unit == unit and self.rate_hz is None, None if without else 1.0


def _unit_of(profile: Profile, found: Survey) -> str:
    if profile.type == "sampled" and not found.count:
        return SAMPLES
    if profile.unit in MICROSECONDS_IN:
        return MICROSECONDS
    return BYTES if profile.unit == "bytes" else SAMPLES


def _decoded(data: bytearray) -> _File | None:
    """The file's outline; the rest stays as text. None where it is no JSON of this shape."""
    text: bytes | bytearray = data.removeprefix(BYTE_ORDER_MARK) if data[:1] == b"\xef" else data
    for _ in range(2):
        try:
            return msgspec.json.decode(text, type=_File)
        except BAD_JSON:
            # Names that are no text spoil only themselves.
            text = _SURROGATE.sub(rb"\1", text.decode("utf-8", "replace").encode())
    return None


def _profile(raw: msgspec.Raw) -> Profile | None:
    try:
        profile = msgspec.json.decode(raw, type=Profile)
    except BAD_JSON:
        return None
    return profile if profile.type in ("sampled", "evented") else None


class _Frames:
    """The frames of a file. py-spy has a stack begin with frames that are no frames, but its process and thread."""

    def __init__(self, frames: list[msgspec.Raw], names: FrameNames, hints: dict[int, str]) -> None:
        self.numbers: list[int] = []
        self._prefixes: dict[int, PrefixFrame] = {}
        self._closing: set[int] = set()  # may be the last piece of a command line that semicolons cut into frames
        self._hints = hints
        decoder = msgspec.json.Decoder(_Frame)
        for raw in frames:
            if len(self.numbers) >= MAX_PIECES:
                self.numbers.append(names.number(MORE_FRAMES))
                continue
            try:
                frame = decoder.decode(raw)
            except BAD_JSON:
                frame = _Frame()
            self._add(frame, names)

    def _add(self, frame: _Frame, names: FrameNames) -> None:
        name = clean(frame.name) if isinstance(frame.name, str) else "?"
        file = clean(frame.file) if isinstance(frame.file, str) else ""
        prefix = prefix_frame(name) if not file else None
        if not file and name.endswith('"'):
            self._closing.add(len(self.numbers))
        if prefix is not None:
            self._prefixes[len(self.numbers)] = prefix
            name = "(process)" if prefix.pid is not None else "(thread)"  # where it stands inside a stack after all
        self.numbers.append(names.number(Frame(name, file, _line(frame.line))))

    def split(self, stack: tuple[int, ...], head: Head) -> tuple[Head, tuple[int, ...]]:
        """The process and thread of a stack, `head` where it does not say, and the numbers of its frames."""
        used = 0
        found: list[PrefixFrame] = []
        while used < len(stack) and stack[used] in self._prefixes:
            prefix = self._prefixes[stack[used]]
            if prefix.pid is not None and stack[used] not in self._closing:
                used = next((n for n in range(used, len(stack)) if stack[n] in self._closing), used)
            found.append(prefix)
            used += 1
        rest = tuple(self.numbers[frame] for frame in stack[used:])
        if not used:
            return head, rest
        own = head_of_frames(found, self._hints)
        thread = own.thread or head.thread
        name = own.name or (head.name if thread == head.thread else None)
        return Head(own.pids or head.pids, thread, name), rest


def _line(line: Any) -> int | None:
    """A line number; py-spy writes 0 where it knows none."""
    if isinstance(line, float) and line.is_integer() and abs(line) < 2**31:
        line = int(line)
    return integer(line) or None


def _head(name: Any, *, alone: bool) -> Head:
    """Process, thread and thread name of a profile; the name of a file's only profile is that of the file."""
    if not isinstance(name, str):
        return Head((), None, None)
    match = _PYSPY_NAME.fullmatch(name)
    if match:
        return Head((int(match[1]),), match[2], clean(match[3]) or None)
    match = _PYSPY_BARE_NAME.fullmatch(name)
    if match:
        return Head((int(match[1]),) if match[1] else (), match[2], None)
    return Head((), None, None if alone or not name else clean(name))


def open_speedscope(path: Path, label: str, head: bytes) -> Speedscope:
    """Open a speedscope file; nothing is read yet. py-spy says only at the end of a file that it wrote it."""
    match = _EXPORTER.search(head)
    if match:
        return Speedscope(path, label, tool=match[1].decode("utf-8", "replace"))
    return Speedscope(path, label, tool="py-spy" if _PYSPY_PROFILE.search(head) else "speedscope")
