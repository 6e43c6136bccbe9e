"""py-spy's raw format, `process PID:"CMDLINE";thread (TID): NAME;frame (file:line);… COUNT`, which escapes nothing.

Semicolons and newlines may stand in command lines, thread names, functions and files, so prefixes are read by grammar,
frames from the right, and records that a newline broke are joined again. What fits nothing is counted, never
raised. Command lines are dropped here: they are recorded unmasked and may carry secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from stepscope.read.raw import Frame, Losses, RawStack
from stepscope.read.text import clean

MAX_RECORD_CHARS = 4 * 2**20  # py-spy stops at 4096 frames; the longest seen stack of 3000 took 180 KB
MAX_FILE_BYTES = 512 * 2**20
MAX_FRAMES = 20_000
_MAX_COUNT_DIGITS = 15

_START_PROCESS = re.compile(r'process \d{1,18}:"')
_START_THREAD = re.compile(r"thread \((?:\d{1,20}|0x[0-9A-Fa-f]{1,16})\)")
# A command line ends at the first quote that another prefix follows; it may itself hold quotes and semicolons.
_PROCESS = re.compile(r'process (\d{1,18}):"(.*?)"(?:;(?=process \d{1,18}:"|thread \()|\Z)', re.DOTALL)
# Without thread prefixes it ends at the first quote that a semicolon follows.
_PROCESS_BARE = re.compile(r'process (\d{1,18}):"(.*?)"(?:;|\Z)', re.DOTALL)
_THREAD = re.compile(r"thread \((\d{1,20}|0x[0-9A-Fa-f]{1,16})\)(?::[ ]([^;]*))?(?:;|\Z)")
_COUNT = re.compile(r" (\d+)$")
_LINE = re.compile(r":(-?[0-9]{1,9})\Z")


class Parsed(NamedTuple):
    """Stacks of a file; `skipped_records` could not be read, with `skipped_samples` where their count was legible."""

    stacks: list[RawStack]
    skipped_records: int
    skipped_samples: int


def read_stacks(path: Path, losses: Losses, label: str) -> list[RawStack]:
    """The stacks of a raw file; an absent one has none."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            losses.add("oversized_files", label)
            return []
        with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            parsed = parse(file)
    except FileNotFoundError:
        return []
    except OSError:
        losses.add("unreadable_files", label)
        return []
    losses.add("skipped_records", label, parsed.skipped_records)
    losses.add("skipped_samples", label, parsed.skipped_samples)
    return parsed.stacks


def parse(lines: Iterable[str]) -> Parsed:
    """Parse raw lines (with or without their newline). Samples kept + `skipped_samples` is the file's own sum."""
    stacks: list[RawStack] = []
    frames: dict[str, Frame] = {}  # the same few thousand frames make up all stacks
    skipped_records = skipped_samples = 0
    for record in _records(lines):
        count = _count_of(record)
        stack = None if count is None else _stack(record.rpartition(" ")[0], count, frames)
        if stack is None:
            skipped_records += 1
            skipped_samples += count or 0
        else:
            stacks.append(stack)
    return Parsed(stacks, skipped_records, skipped_samples)


def _records(lines: Iterable[str]) -> Iterator[str]:
    """Join lines to records.

    Where the file's records carry a process or thread prefix, a record reaches to the next prefix. Without
    prefixes a line that ends in a count ends its record.
    """
    start: re.Pattern[str] | None = None
    known = False
    parts: list[str] = []
    for raw in lines:
        line = raw[:-1] if raw.endswith("\n") else raw
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


def _stack(text: str, samples: int, known: dict[str, Frame]) -> RawStack | None:
    if len(text) > MAX_RECORD_CHARS:
        return None
    pids, position = _processes(text)
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
    frames = _frames(pieces, known)
    if frames is None:
        return None
    return RawStack(pids, thread, clean(name) if name is not None else None, frames, samples)


def _processes(text: str) -> tuple[tuple[int, ...], int]:
    """The pids of the process prefixes and where they end; -1 when a prefix is cut off."""
    pids: list[int] = []
    position = 0
    while text.startswith("process ", position) and _START_PROCESS.match(text, position):
        match = _PROCESS.match(text, position) or _PROCESS_BARE.match(text, position)
        if match is None:
            return (), -1
        pids.append(int(match[1]))
        position = match.end()
    return tuple(pids), position


def _frames(pieces: list[str], known: dict[str, Frame]) -> tuple[Frame, ...] | None:
    if len(pieces) > MAX_FRAMES:
        return None
    frames: list[Frame] = []
    pending: list[str] = []
    for index, piece in enumerate(pieces):
        pending.append(piece)
        if not piece.endswith(")") and index < len(pieces) - 1:
            continue  # a semicolon inside a name or a file
        text = ";".join(pending)
        pending.clear()
        frame = known.get(text)
        if frame is None:
            frame = known[text] = _frame(text)
        frames.append(frame)
    return tuple(frames)


def _frame(text: str) -> Frame:
    """Split `NAME (FILE:LINE)`; names and files may both hold parentheses, colons and spaces."""
    opening = _opening(text) if text.endswith(")") else -1
    if opening < 0:
        return Frame(clean(text), "", None)
    inside = text[opening + 2 : -1]
    match = _LINE.search(inside)
    file, line = (inside[: match.start()], int(match[1])) if match else (inside, None)
    return Frame(clean(text[:opening]), clean(file), line)


def _opening(text: str) -> int:
    """Where the ` (` stands that the last character closes; the last one when parentheses do not pair up."""
    last = text.rfind(" (")
    if text.find(" (") == last:
        return last
    depth = 0
    for index in range(len(text) - 1, 0, -1):
        if text[index] == ")":
            depth += 1
        elif text[index] == "(":
            depth -= 1
            if depth == 0:
                return index - 1 if text[index - 1] == " " else last
    return last
