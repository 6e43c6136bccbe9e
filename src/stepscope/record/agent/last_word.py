"""A block of the disk, taken ahead of time, for what is said when no more of it can be had.

The file exists from the start, blank; saying something overwrites it in place, which a full disk, a quota and a limit
on the size of files allow. File systems that never write in place may refuse: then nothing is said.
"""

from __future__ import annotations

import json
import os
from typing import Any, Mapping

NAME = "last-word.json"
SIZE = 4096  # bytes: a block of most file systems


class LastWord:
    """The file NAME in `folder`; neither making it nor `say` ever raises OSError."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, NAME)
        self._write(b"", os.O_CREAT | os.O_EXCL)

    def say(self, record: Mapping[str, Any]) -> None:
        """Replace what was said before; a `record` of more than `SIZE` bytes is not said."""
        self._write(json.dumps(record, separators=(",", ":")).encode(), 0)

    def _write(self, data: bytes, flags: int) -> None:
        if len(data) >= SIZE:
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o644)
            try:
                os.write(descriptor, data.ljust(SIZE - 1) + b"\n")
            finally:
                os.close(descriptor)
        except OSError:
            return
