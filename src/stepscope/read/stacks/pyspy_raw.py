"""py-spy's raw format, `process PID:"CMDLINE";thread (TID): NAME;frame (file:line);… COUNT`, which escapes nothing.

Semicolons and newlines may stand in command lines, thread names, functions and files, so prefixes are read by grammar,
frames from the right, and records that a newline broke are joined again. What was read once is known by its text
from then on: a record of known pieces costs a look-up for each. What fits nothing is counted, never raised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from stepscope.read.raw import FrameNames, Losses, RawStack
from stepscope.read.stacks.blocks import Progress, read_lines
from stepscope.read.stacks.commands import hint_of
from stepscope.read.stacks.pieces import Pieces
from stepscope.read.text import clean

FORMAT = "py-spy raw"
MAX_RECORD_CHARS = 4 * 2**20  # py-spy stops at 4096 frames; the longest seen stack of 3000 took 180 KB
MAX_FRAMES = 20_000
MAX_HEADS = 100_000
_MAX_COUNT_DIGITS = 15

_START_PROCESS = re.compile(r'process \d{1,18}:"')
_START_THREAD = re.compile(r"thread \((?:\d{1,20}|0x[0-9A-Fa-f]{1,16})\)")
# A command line ends at the first quote that another prefix follows; it may itself hold quotes and semicolons.
_PROCESS = re.compile(r'process (\d{1,18}):"(.*?)"(?:;(?=process \d{1,18}:"|thread \()|\Z)', re.DOTALL)
# Without thread prefixes it ends at the first quote that a semicolon follows.
_PROCESS_BARE = re.compile(r'process (\d{1,18}):"(.*?)"(?:;|\Z)', re.DOTALL)
_THREAD = re.compile(r"thread \((\d{1,20}|0x[0-9A-Fa-f]{1,16})\)(?::[ ]([^;]*))?(?:;|\Z)")
_COUNT = re.compile(r" (\d+)$")


class PySpyRaw:
    """A raw file as a `StackSource`. `label` names it in the losses."""

    def __init__(self, path: Path, label: str | None = None) -> None:
        self.path = path
        self.format = FORMAT
        self.unit = "samples"
        self.rate_hz: float | None = None
        self.wall_ns: int | None = None
        self.hints: dict[int, str] = {}
        self._label = label or path.name

    def read(self, names: FrameNames, losses: Losses, progress: Progress | None = None) -> Iterator[RawStack]:
        """The stacks. Samples of stacks and `skipped_samples` are the file's own sum where counts are legible."""
        return self.parse(read_lines(self.path, self._label, losses, progress), names, losses)

    def parse(self, blocks: Iterable[list[str]], names: FrameNames, losses: Losses) -> Iterator[RawStack]:
        """The stacks of blocks of lines."""
        reader = _Reader(names, self.hints)
        for number, record in enumerate(_records(blocks)):
            stack = reader.stack(record, number)
            if stack is not None:
                yield stack
                continue
            losses.add("skipped_records", self._label)
            losses.add("skipped_samples", self._label, _count_of(record) or 0)


def _records(blocks: Iterable[list[str]]) -> Iterator[str]:
    """Join lines to records.

    Where the file's records carry a process or thread prefix, a record reaches to the next prefix. Without
    prefixes a line that ends in a count ends its record.
    """
    start: re.Pattern[str] | None = None
    known = False
    parts: list[str] = []
    for line in (line for lines in blocks for line in lines):
        if not known and line.strip():
            start = next((p for p in (_START_PROCESS, _START_THREAD) if p.match(line)), None)
            known = True
        if parts and (start.match(line) if start else _COUNT.search(parts[-1])):
            yield _joined(parts)
            parts = []
        if parts or line:
            parts.append(line)
    if parts:
        yield _joined(parts)


def _joined(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    # Trailing blank lines belong to nothing.
    return "\n".join(parts).rstrip("\n")


def _count_of(record: str) -> int | None:
    match = _COUNT.search(record)
    if match is None or len(match[1]) > _MAX_COUNT_DIGITS or not match[1].isascii():
        return None
    return int(match[1])


class _Head(NamedTuple):
    pids: tuple[int, ...]
    thread: str | None
    name: str | None


class _Node:
    """Pieces that beginnings of records are made of, as a tree: known beginnings are found without any grammar."""

    __slots__ = ("below", "head")

    def __init__(self) -> None:
        self.below: dict[str, _Node] = {}
        self.head: _Head | None = None


class _Reader:
    def __init__(self, names: FrameNames, hints: dict[int, str]) -> None:
        self._pieces = Pieces(names)
        self._hints = hints
        self._heads = _Node()
        self._head_count = 0

    def stack(self, record: str, number: int) -> RawStack | None:
        """The stack of a record; None where it cannot be read."""
        count = _count_of(record)
        if count is None or len(record) > MAX_RECORD_CHARS:
            return None
        text = record.rpartition(" ")[0]
        return self._read(text, count, number)

    def _read(self, text: str, samples: int, number: int) -> RawStack | None:
        pids, position = self._processes(text)
        if position < 0:
            return None
        thread = name = None
        match = _THREAD.match(text, position)
        if match:
            thread, name, position = match[1], match[2], match.end()
        pieces = text[position:].split(";") if position < len(text) else []
        if name is not None:
            # A thread's name may hold semicolons: what comes before the first frame is still the name.
            while pieces and not pieces[0].endswith(")"):
                name += ";" + pieces.pop(0)
        if len(pieces) > MAX_FRAMES:
            return None
        frames = self._pieces.frames(pieces)
        return RawStack(pids, thread, clean(name) if name is not None else None, frames, samples, number)

    def _processes(self, text: str) -> tuple[tuple[int, ...], int]:
        """The pids of the process prefixes and where they end; -1 when a prefix is cut off."""
        pids: list[int] = []
        position = 0
        while text.startswith("process ", position) and _START_PROCESS.match(text, position):
            match = _PROCESS.match(text, position) or _PROCESS_BARE.match(text, position)
            if match is None:
                return (), -1
            pid = int(match[1])
            pids.append(pid)
            hint = hint_of(match[2])
            if hint is not None:
                self._hints.setdefault(pid, hint)
            position = match.end()
        return tuple(pids), position
