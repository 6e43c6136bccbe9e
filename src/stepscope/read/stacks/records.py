"""Lines to records of py-spy's raw format, which a newline in a command line, a name or a path breaks in two.

Where the file's records carry a process or thread prefix, a record reaches to the next prefix, but for one that is
complete and ends in a count: what follows it without a prefix is damage. Without prefixes a line that ends in a count
ends its record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

MAX_RECORD_CHARS = 4 * 2**20  # py-spy stops at 4096 frames; the longest seen stack of 3000 took 180 KB
MAX_RECORD_LINES = 1000

START_PROCESS = re.compile(r'process \d{1,18}:"')
START_THREAD = re.compile(r"thread \((?:\d{1,20}|0x[0-9A-Fa-f]{1,16})\)")
_FRAME_AND_COUNT = re.compile(r"\) [0-9]+\Z")


class Records:
    """The records of blocks of lines. `prefixed` says whether every record must begin with a prefix."""

    def __init__(self, blocks: Iterable[list[str]]) -> None:
        self.prefixed = False
        self._lines = (line[:-1] if line.endswith("\r") else line for lines in blocks for line in lines)

    def __iter__(self) -> Iterator[str]:
        first = next((line for line in self._lines if line.strip()), None)
        if first is None:
            return iter(())
        for start in (START_PROCESS, START_THREAD):
            if start.match(first):
                self.prefixed = True
                return self._by_prefix(first, start)
        return self._by_count(first)

    def _by_prefix(self, first: str, start: re.Pattern[str]) -> Iterator[str]:
        beginning = first[: first.index(" ") + 1]
        parts = [first]
        for line in self._lines:
            if line.startswith(beginning) and start.match(line):
                if parts:
                    yield _joined(parts)
                parts = [line]
            elif parts and not _goes_on(parts):
                yield _joined(parts)
                parts = [line] if line else []
            elif parts or line:
                parts.append(line)
        if parts:
            yield _joined(parts)

    def _by_count(self, first: str) -> Iterator[str]:
        parts = [first]
        for line in self._lines:
            if parts and (len(parts) == MAX_RECORD_LINES or _ends_in_count(parts[-1])):
                yield _joined(parts)
                parts = []
            if parts or line:
                parts.append(line)
        if parts:
            yield _joined(parts)


def _goes_on(parts: list[str]) -> bool:
    """Whether a line without a prefix belongs to the record before it."""
    if len(parts) >= MAX_RECORD_LINES:
        return False
    if not _FRAME_AND_COUNT.search(parts[-1]):
        return True
    # A count behind a frame ends a record, unless it stands in a command line that is still open.
    return parts[0].startswith("process ") and not any('";' in part for part in parts)


def _ends_in_count(line: str) -> bool:
    digits = line[line.rfind(" ") + 1 :]
    return digits.isdigit() and digits.isascii() and len(digits) < len(line)


def _joined(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    # Trailing blank lines belong to nothing.
    return "\n".join(parts).rstrip("\n")
