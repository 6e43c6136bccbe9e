"""The prefixes that py-spy puts before frames: `process PID:"CMDLINE"`, ancestors first, and `thread (TID): NAME`.

Command lines are recorded unmasked and may carry secrets: of each only a hint at what the process is leaves this file.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from stepscope.read.stacks.commands import hint_of
from stepscope.read.stacks.records import START_PROCESS
from stepscope.read.text import clean

MAX_PROCESSES = 100_000

# A command line ends at the first quote that another prefix follows; it may itself hold quotes and semicolons.
_PROCESS = re.compile(r'process (\d{1,18}):"(.*?)"(?:;(?=process \d{1,18}:"|thread \()|\Z)', re.DOTALL)
# Without thread prefixes it ends at the first quote that a semicolon follows.
_PROCESS_BARE = re.compile(r'process (\d{1,18}):"(.*?)"(?:;|\Z)', re.DOTALL)
_THREAD = re.compile(r"thread \((\d{1,20}|0x[0-9A-Fa-f]{1,16})\)(?::[ ]([^;]*))?(?:;|\Z)")
_PROCESS_FRAME = re.compile(r'process (\d{1,18}):"(.*)"?', re.DOTALL)
_THREAD_FRAME = re.compile(r"thread \((\d{1,20}|0x[0-9A-Fa-f]{1,16})\)(?::[ ](.*))?", re.DOTALL)


class Head(NamedTuple):
    """What stands before the frames; `pids` lists ancestors first."""

    pids: tuple[int, ...]
    thread: str | None
    name: str | None


def split_head(text: str, hints: dict[int, str]) -> tuple[Head, int] | None:
    """The prefixes of a record (none at all, perhaps) and where they end; None when one is cut off. Fills `hints`."""
    pids: list[int] = []
    position = 0
    above = ""
    while text.startswith("process ", position) and START_PROCESS.match(text, position):
        match = _PROCESS.match(text, position) or _PROCESS_BARE.match(text, position)
        if match is None:
            return None
        pids.append(int(match[1]))
        _note(pids[-1], match[2], above, hints)
        above = match[2]
        position = match.end()
    match = _THREAD.match(text, position)
    if match:
        return Head(tuple(pids), match[1], match[2]), match.end()
    return Head(tuple(pids), None, None), position


class PrefixFrame(NamedTuple):
    """A prefix that stands as a frame of its own, in formats that keep frames apart; `command` is for hints alone."""

    pid: int | None
    thread: str | None
    name: str | None
    command: str


def prefix_frame(name: str) -> PrefixFrame | None:
    """What a frame's name says that is a prefix; None for any other frame."""
    match = _PROCESS_FRAME.fullmatch(name) if name.startswith("process ") else None
    if match:
        return PrefixFrame(int(match[1]), None, None, match[2].removesuffix('"'))
    match = _THREAD_FRAME.fullmatch(name) if name.startswith("thread (") else None
    if match:
        return PrefixFrame(None, match[1], clean(match[2]) if match[2] else None, "")
    return None


def head_of_frames(prefixes: list[PrefixFrame], hints: dict[int, str]) -> Head:
    """The prefixes that begin a stack, together. Fills `hints`."""
    pids: list[int] = []
    thread = name = None
    above = ""
    for prefix in prefixes:
        if prefix.pid is not None:
            pids.append(prefix.pid)
            _note(prefix.pid, prefix.command, above, hints)
            above = prefix.command
        else:
            thread, name = prefix.thread, prefix.name
    return Head(tuple(pids), thread, name)


def _note(pid: int, command: str, above: str, hints: dict[int, str]) -> None:
    hint = hint_of(command, above)
    if hint is not None and len(hints) < MAX_PROCESSES:
        hints.setdefault(pid, hint)
