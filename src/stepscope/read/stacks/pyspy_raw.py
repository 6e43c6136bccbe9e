"""py-spy's raw format, `process PID:"CMDLINE";thread (TID): NAME;frame (file:line);… COUNT`, which escapes nothing.

Semicolons and newlines may stand in command lines, thread names, functions and files, so prefixes are read by grammar,
frames from the right, and records that a newline broke are joined again. What was read once is known by its text
from then on: a record of known pieces costs a look-up for each. What fits nothing is counted, never raised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from stepscope.read.raw import FrameNames, Losses, Progress, RawStack, StackSource
from stepscope.read.stacks import source
from stepscope.read.streams import read_lines
from stepscope.read.text import clean

MAX_RECORD_CHARS = 4 * 2**20  # py-spy stops at 4096 frames; the longest seen stack of 3000 took 180 KB
MAX_RECORD_LINES = 1000
MAX_PREFIX_PIECES = 200_000
MAX_PREFIX_LENGTHS = 64
MAX_PREFIX_CHARS = 32 * 2**20
_LOOKED_AT = 1000  # lines that tell whether records carry prefixes


class PySpyRaw(StackSource):
    format = "py-spy raw"

    def __init__(self, path: Path, label: str | None = None) -> None:
        super().__init__(path, label, tool="py-spy")

    def read(self, names: FrameNames, losses: Losses, progress: Progress | None = None) -> Iterator[RawStack]:
        """The stacks. Samples of stacks and `skipped_samples` are the file's own sum where counts are legible."""
        return self.parse(read_lines(self.path, self.label, losses, source.LINES, progress), names, losses)

    def parse(self, blocks: Iterable[list[str]], names: FrameNames, losses: Losses) -> Iterator[RawStack]:
        records = _Records(blocks)
        reader = _Reader(names, self.hints, prefixed=records.prefixed)
        for number, record in enumerate(records):
            stack = reader.stack(record, number)
            if stack is not None:
                yield stack
                continue
            losses.add("skipped_records", self.label)
            counts = (source.count_of(line[line.rfind(" ") + 1 :]) for line in record.split("\n"))
            losses.add("skipped_samples", self.label, sum(count or 0 for count in counts))


class _Reader:
    def __init__(self, names: FrameNames, hints: dict[int, str], *, prefixed: bool) -> None:
        self._frames = source.FrameTexts(names, source.pyspy_frame)
        self._hints = hints
        self._prefixed = prefixed
        self._known = _KnownPrefixes()
        if not prefixed:
            self._known.learn([], source.NO_PREFIXES)

    def stack(self, record: str, number: int) -> RawStack | None:
        cut = record.rfind(" ")
        samples = source.count_of(record[cut + 1 :])
        if samples is None or cut < 0 or len(record) > MAX_RECORD_CHARS:
            return None
        pieces = record[:cut].split(";")
        prefixes, used = self._known.find(pieces)
        if prefixes is not None:
            try:
                frames = tuple(map(self._frames.known.__getitem__, pieces[used:]))
            except KeyError:
                pass  # something new, or a semicolon inside a name
            else:
                return RawStack(*prefixes, frames, samples, number)
        return self._new(record[:cut], pieces, samples, number)

    def _new(self, text: str, pieces: list[str], samples: int, number: int) -> RawStack | None:
        """A stack with something that was not met before, by the grammar."""
        found = source.split_prefixes(text, self._hints)
        if found is None:
            return None
        prefixes, position = found
        if self._prefixed and not prefixes.pids and prefixes.thread is None:
            return None
        rest = text[position:].split(";") if position < len(text) else []
        if prefixes.name is not None:
            name = prefixes.name
            # A thread's name may hold semicolons: what comes before the first frame is still the name.
            while rest and not rest[0].endswith(")"):
                name += ";" + rest.pop(0)
            prefixes = prefixes._replace(name=clean(name))
        if len(rest) > source.MAX_FRAMES:
            return None
        self._known.learn(pieces[: len(pieces) - len(rest)] if text else [], prefixes)
        return RawStack(*prefixes, self._frames.frames(rest), samples, number)


class _KnownPrefixes:
    """What records begin with, by the pieces between semicolons; beyond the bounds grammar reads what is new."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], source.Prefixes] = {}
        self._lengths: list[int] = []  # numbers of pieces, the largest first
        self._pieces = 0
        self._chars = 0

    def find(self, pieces: Sequence[str]) -> tuple[source.Prefixes | None, int]:
        """The longest known beginning of `pieces`, and how many of them it takes."""
        for length in self._lengths:
            found = self._known.get(tuple(pieces[:length]))
            if found is not None:
                return found, length
        return None, 0

    def learn(self, pieces: Sequence[str], prefixes: source.Prefixes) -> None:
        lengths = {*self._lengths, len(pieces)}
        self._pieces += len(pieces)
        self._chars += sum(map(len, pieces))
        bounded = self._pieces <= MAX_PREFIX_PIECES and self._chars <= MAX_PREFIX_CHARS
        if bounded and len(lengths) <= MAX_PREFIX_LENGTHS:
            self._known[tuple(pieces)] = prefixes
            self._lengths = sorted(lengths, reverse=True)


class _Records:
    """The records of blocks of lines, which a newline in a command line, a name or a path breaks in two.

    Where records carry a prefix (`prefixed`), one reaches to the next prefix, or to the line that ends in a count
    outside a command line. Without prefixes a line that ends in a count ends its record.
    """

    def __init__(self, blocks: Iterable[list[str]]) -> None:
        self._start: re.Pattern[str] | None = None
        iterator = iter(blocks)
        first = next((lines for lines in iterator if any(lines)), [])
        counted = sum(1 for line in first[:_LOOKED_AT] if _ends_in_count(line.rstrip("\r")))
        for start in (source.START_PROCESS, source.START_THREAD):
            met = sum(1 for line in first[:_LOOKED_AT] if start.match(line))
            if met and 2 * met >= counted:
                self._start = start
                break
        self._lines = (
            line[:-1] if line.endswith("\r") else line for lines in chain((first,), iterator) for line in lines
        )

    @property
    def prefixed(self) -> bool:
        return self._start is not None

    def __iter__(self) -> Iterator[str]:
        start = self._start
        parts: list[str] = []
        size = 0
        for line in self._lines:
            if parts and ((start is not None and start.match(line)) or size > MAX_RECORD_CHARS or not _goes_on(parts)):
                yield "\n".join(parts).rstrip("\n")  # trailing blank lines are of none
                parts = []
                size = 0
            if parts or line:
                parts.append(line)
                size += len(line)
        if parts:
            yield "\n".join(parts).rstrip("\n")


def _goes_on(parts: list[str]) -> bool:
    """Whether a line without a prefix belongs to the record before it."""
    if len(parts) >= MAX_RECORD_LINES:
        return False
    if not _ends_in_count(parts[-1]):
        return True
    # A count ends a record, unless it stands in a command line that is still open.
    if source.START_PROCESS.match(parts[0]) is None or parts[-1].rpartition(" ")[0].endswith('"'):
        return False
    return not any('";' in part for part in parts)


def _ends_in_count(line: str) -> bool:
    digits = line[line.rfind(" ") + 1 :]
    return digits.isdigit() and digits.isascii() and len(digits) < len(line)
