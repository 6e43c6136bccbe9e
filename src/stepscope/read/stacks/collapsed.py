"""Collapsed stacks, `a;b;c 12`: a line per stack, root first, then its count.

Frames are bare names, `name (file:line)`, or, behind a `tid:`, the `file:function:line` of Python's own sampler. Austin
writes that too, behind a process and a thread, a line per sample, with microseconds or bytes for a count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from stepscope.read.raw import Frame, FrameNames, Losses, Progress, RawStack, StackSource
from stepscope.read.stacks import source
from stepscope.read.streams import read_lines
from stepscope.read.text import LONGEST_NS, clean

MAX_STACK_CHARS = 4 * 2**20
MAX_MERGED_STACKS = 200_000
MAX_MERGED_CHARS = 64 * 2**20

_THREAD = r"(?P<thread>\d{1,20}|0x[0-9A-Fa-f]{1,16})(?:;|\Z)"
_TACHYON = re.compile(rf"(?P<pid>)tid:{_THREAD}")
_AUSTIN = re.compile(rf"P(?P<pid>\d{{1,18}});T(?:(?:\d{{1,20}}|0x[0-9A-Fa-f]{{1,16}}):)?{_THREAD}")
_AUSTIN_FACT = re.compile(r"# (austin|interval|mode|duration|memory): (.{0,100})")
_DECIMAL = re.compile(r"\d{1,15}\.\d{1,20}")
_LINE = re.compile(r"-?[0-9]{1,9}")


def _colon_frame(text: str) -> Frame:
    """Split `file:function:line`; a Windows file holds a colon itself."""
    parts = text.rsplit(":", 2)
    if len(parts) < 3 or not parts[1] or not _LINE.fullmatch(parts[2]):
        return Frame(clean(text), "", None)
    return Frame(clean(parts[1]), clean(parts[0]), int(parts[2]) or None)


class Collapsed(StackSource):
    format = "collapsed"
    frame_of = staticmethod(source.pyspy_frame)  # `name (file:line)` or a name

    def read(self, names: FrameNames, losses: Losses, progress: Progress | None = None) -> Iterator[RawStack]:
        texts = source.FrameTexts(names, self.frame_of)
        equal: dict[str, list[int]] = {}  # text of a stack -> the sum of its counts, and its first record
        chars = record = 0
        for lines in read_lines(self.path, self.label, losses, source.LINES, progress):
            for raw in lines:
                line = raw.rstrip("\r ")
                if not line or (line.startswith("# ") and self._note(line)):
                    continue
                text, space, count = line.rpartition(" ")
                samples = self._count(count)
                if samples is None or not space or len(text) > MAX_STACK_CHARS:
                    losses.add("skipped_records", self.label)
                    losses.add("skipped_samples", self.label, samples or 0)
                elif text in equal:
                    equal[text][0] += samples
                else:
                    equal[text] = [samples, record]
                    chars += len(text)
                record += 1
                if len(equal) >= MAX_MERGED_STACKS or chars > MAX_MERGED_CHARS:
                    yield from self._stacks(equal, texts, losses)
                    equal, chars = {}, 0
        yield from self._stacks(equal, texts, losses)

    def _stacks(self, equal: dict[str, list[int]], texts: source.FrameTexts, losses: Losses) -> Iterator[RawStack]:
        for text, (count, record) in equal.items():
            samples = min(count, source.MAX_SAMPLES)
            prefixes, used = self._prefixes(text)
            parts = text[used:].split(";") if text[used:] else []
            if len(parts) > source.MAX_FRAMES:
                losses.add("skipped_records", self.label)
                losses.add("skipped_samples", self.label, samples)
            else:
                yield RawStack(*prefixes, tuple(map(texts.number, parts)), samples, record)

    def _note(self, line: str) -> bool:  # noqa: ARG002 - which formats with comments read
        """Take in a comment; False for a line that is none."""
        return False

    def _count(self, text: str) -> int | None:
        return round(float(text)) if _DECIMAL.fullmatch(text) else source.count_of(text)

    def _prefixes(self, text: str) -> tuple[source.Prefixes, int]:
        """Who a stack is of, and how much of its text says so; here only py-spy's prefixes do."""
        found = source.split_prefixes(text, self.hints) if text.startswith(("process ", "thread (")) else None
        if found is None:
            return source.NO_PREFIXES, 0
        prefixes, used = found
        return prefixes._replace(name=clean(prefixes.name) if prefixes.name else None), used


class Tachyon(Collapsed):
    """What `python -m profiling.sampling --collapsed` writes: frames as `file:function:line`, behind a thread."""

    format = "collapsed, Python's sampler"
    frame_of = staticmethod(_colon_frame)
    prefix = _TACHYON

    def _prefixes(self, text: str) -> tuple[source.Prefixes, int]:
        match = self.prefix.match(text)
        if match is None:
            return source.NO_PREFIXES, 0
        return source.Prefixes((int(match["pid"]),) if match["pid"] else (), match["thread"], None), match.end()


class Austin(Tachyon):
    """Austin's text format. Times are microseconds, memory is bytes; `interval` is the time between samples."""

    format = "austin"
    prefix = _AUSTIN

    def __init__(self, path: Path, label: str | None = None, *, tool: str = "austin", head: str = "") -> None:
        super().__init__(path, label, tool=tool)
        self.unit = source.MICROSECONDS
        for line in head.split("\n"):
            if not line.startswith("#"):
                break
            self._note(line.rstrip("\r "))

    def _note(self, line: str) -> bool:
        match = _AUSTIN_FACT.fullmatch(line)
        if match is None:
            return line.startswith("# ")
        name, value = match[1], match[2].strip()
        number = source.count_of(value)
        if name == "mode":
            self.unit = source.BYTES if value == "memory" else source.MICROSECONDS
            self.idle = {"wall": True, "full": True, "cpu": False}.get(value)
        elif name == "interval" and number:
            self.rate_hz = 1e6 / number
        elif name == "duration" and number and number * 1000 <= LONGEST_NS:
            self.wall_ns = number * 1000
        return True

    def _count(self, text: str) -> int | None:
        # All metrics at once: microseconds, whether the thread was idle, bytes.
        return source.count_of(text.partition(",")[0])
