"""Lines to records of py-spy's raw format, which a newline in a command line, a name or a path breaks in two.

Where the file's records carry a process or thread prefix, a record reaches to the next prefix, or to the line that ends
in a count outside a command line: what follows that without a prefix is damage. Without prefixes a line that ends in a
count ends its record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain

MAX_RECORD_CHARS = 4 * 2**20  # py-spy stops at 4096 frames; the longest seen stack of 3000 took 180 KB
MAX_RECORD_LINES = 1000

START_PROCESS = re.compile(r'process \d{1,18}:"')
START_THREAD = re.compile(r"thread \((?:\d{1,20}|0x[0-9A-Fa-f]{1,16})\)")
_LOOKED_AT = 1000  # lines that tell whether records carry prefixes


class Records:
    """The records of blocks of lines. `prefixed` says whether every record must begin with a prefix."""

    def __init__(self, blocks: Iterable[list[str]]) -> None:
        self._start: re.Pattern[str] | None = None
        iterator = iter(blocks)
        first = next((lines for lines in iterator if any(lines)), [])
        counted = sum(1 for line in first[:_LOOKED_AT] if _ends_in_count(line.rstrip("\r")))
        for start in (START_PROCESS, START_THREAD):
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
                yield _joined(parts)
                parts = []
                size = 0
            if parts or line:
                parts.append(line)
                size += len(line)
        if parts:
            yield _joined(parts)


def _goes_on(parts: list[str]) -> bool:
    """Whether a line without a prefix belongs to the record before it."""
    if len(parts) >= MAX_RECORD_LINES:
        return False
    if not _ends_in_count(parts[-1]):
        return True
    # A count ends a record, unless it stands in a command line that is still open.
    if START_PROCESS.match(parts[0]) is None or parts[-1].rpartition(" ")[0].endswith('"'):
        return False
    return not any('";' in part for part in parts)


def _ends_in_count(line: str) -> bool:
    digits = line[line.rfind(" ") + 1 :]
    return digits.isdigit() and digits.isascii() and len(digits) < len(line)


def _joined(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    # Trailing blank lines belong to nothing.
    return "\n".join(parts).rstrip("\n")
