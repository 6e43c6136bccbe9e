"""py-spy's raw format, `process PID:"CMDLINE";thread (TID): NAME;frame (file:line);… COUNT`, which escapes nothing.

Semicolons and newlines may stand in command lines, thread names, functions and files, so prefixes are read by grammar,
frames from the right, and records that a newline broke are joined again. What was read once is known by its text
from then on: a record of known pieces costs a look-up for each. What fits nothing is counted, never raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from stepscope.read.raw import FrameNames, Losses, RawStack
from stepscope.read.stacks.blocks import read_lines
from stepscope.read.stacks.heads import Heads
from stepscope.read.stacks.pieces import Pieces, pyspy_frame
from stepscope.read.stacks.prefixes import Head, split_head
from stepscope.read.stacks.records import MAX_RECORD_CHARS, Records
from stepscope.read.stacks.source import MAX_FRAMES, FileSource, Progress, count_of
from stepscope.read.text import clean


class PySpyRaw(FileSource):
    """A raw file as a `StackSource`."""

    format = "py-spy raw"

    def __init__(self, path: Path, label: str | None = None) -> None:
        super().__init__(path, label, tool="py-spy")

    def read(self, names: FrameNames, losses: Losses, progress: Progress | None = None) -> Iterator[RawStack]:
        """The stacks. Samples of stacks and `skipped_samples` are the file's own sum where counts are legible."""
        return self.parse(read_lines(self.path, self.label, losses, progress), names, losses)

    def parse(self, blocks: Iterable[list[str]], names: FrameNames, losses: Losses) -> Iterator[RawStack]:
        """The stacks of blocks of lines."""
        records = Records(blocks)
        reader = _Reader(names, self.hints, prefixed=records.prefixed)
        for number, record in enumerate(records):
            stack = reader.stack(record, number)
            if stack is not None:
                yield stack
                continue
            losses.add("skipped_records", self.label)
            counts = (count_of(line[line.rfind(" ") + 1 :]) for line in record.split("\n"))
            losses.add("skipped_samples", self.label, sum(count or 0 for count in counts))


class _Reader:
    def __init__(self, names: FrameNames, hints: dict[int, str], *, prefixed: bool) -> None:
        self._pieces = Pieces(names, pyspy_frame)
        self._hints = hints
        self._prefixed = prefixed
        self._heads = Heads()
        if not prefixed:
            self._heads.learn([], Head((), None, None))

    def stack(self, record: str, number: int) -> RawStack | None:
        """The stack of a record; None where it cannot be read."""
        cut = record.rfind(" ")
        samples = count_of(record[cut + 1 :])
        if samples is None or cut < 0 or len(record) > MAX_RECORD_CHARS:
            return None
        pieces = record[:cut].split(";")
        head, used = self._heads.find(pieces)
        if head is not None:
            try:
                frames = tuple(map(self._pieces.known.__getitem__, pieces[used:]))
            except KeyError:
                pass  # something new, or a semicolon inside a name
            else:
                return RawStack(head.pids, head.thread, head.name, frames, samples, number)
        return self._new(record[:cut], pieces, samples, number)

    def _new(self, text: str, pieces: list[str], samples: int, number: int) -> RawStack | None:
        """A stack with something that was not met before, by the grammar."""
        found = split_head(text, self._hints)
        if found is None:
            return None
        head, position = found
        if self._prefixed and not head.pids and head.thread is None:
            return None
        rest = text[position:].split(";") if position < len(text) else []
        if head.name is not None:
            name = head.name
            # A thread's name may hold semicolons: what comes before the first frame is still the name.
            while rest and not rest[0].endswith(")"):
                name += ";" + rest.pop(0)
            head = head._replace(name=clean(name))
        if len(rest) > MAX_FRAMES:
            return None
        self._heads.learn(pieces[: len(pieces) - len(rest)] if text else [], head)
        return RawStack(head.pids, head.thread, head.name, self._pieces.frames(rest), samples, number)
