"""Text of stack files read through the readers, with frames spelled out, for tests that look at single records."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from stepscope.read.raw import Frame, FrameNames, Losses, StackSource
from stepscope.read.stack_lines import PySpyRaw


class Stack(NamedTuple):
    """A `RawStack` with its frames instead of their numbers."""

    pids: tuple[int, ...]
    thread: str | None
    thread_name: str | None
    frames: tuple[Frame, ...]
    samples: int
    record: int


class Parsed(NamedTuple):
    """All stacks of a file, and what was skipped."""

    stacks: list[Stack]
    skipped_records: int
    skipped_samples: int
    losses: Losses


def parse(lines: Iterable[str]) -> Parsed:
    """Parse py-spy raw lines, with or without their newlines."""
    names, losses = FrameNames(), Losses()
    whole = [line[:-1] if line.endswith("\n") else line for line in lines]
    return _parsed(PySpyRaw(Path("text")).parse([whole], names, losses), names, losses)


def read_all(source: StackSource) -> Parsed:
    """Read a source to its end."""
    names, losses = FrameNames(), Losses()
    return _parsed(source.read(names, losses), names, losses)


def _parsed(stacks: Iterable[tuple[object, ...]], names: FrameNames, losses: Losses) -> Parsed:
    found = [
        Stack(*stack[:3], tuple(names.frames[number] for number in stack[3]), *stack[4:])  # type: ignore[arg-type,attr-defined]
        for stack in stacks
    ]
    return Parsed(found, losses.counts["skipped_records"], losses.counts["skipped_samples"], losses)
