"""Quotes lines of the user's own source files, within limits.

A run folder may come from elsewhere and name any path, so a file is opened only if it looks like Python source, lies
under one of the run's user roots after links are resolved, is a regular file and is at most 1 MB. Anything else, and
anything that cannot be read, gives None: a report without a quotation is still a report.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Any

MAX_FILE_BYTES = 1_000_000
MAX_FILES = 128  # of one run
MAX_LINE_CHARACTERS = 200
SOURCE_SUFFIXES = (".py", ".pyw", ".pyi", ".pyx")


class SourceReader:
    """Reads and keeps source files under `roots`.

    `recorded_ns` is when the run started, on the epoch clock; a file changed later is quoted, but marked.
    """

    def __init__(self, roots: Iterable[str], *, recorded_ns: int | None = None) -> None:
        resolved = (os.path.realpath(root) for root in roots if os.path.isabs(root))
        # "/" as a root would hand every file of this machine to whoever wrote the manifest
        self._roots = tuple(root for root in resolved if root != os.sep)
        self._recorded_ns = recorded_ns
        self._files: dict[str, tuple[list[str], bool] | None] = {}

    def lines(self, file: str) -> list[str] | None:
        """All lines of `file` without their ends, or None where it may not or cannot be read."""
        found = self._load(file)
        return found[0] if found else None

    def text(self, file: str) -> str | None:
        """The whole text of `file` with line feeds as line ends, or None where it may not or cannot be read."""
        lines = self.lines(file)
        return None if lines is None else "\n".join(lines)

    def line(self, file: str, number: int | None) -> str | None:
        """The text of one line (1-based), stripped, or None."""
        lines = self.lines(file)
        if lines is None or number is None or not 1 <= number <= len(lines):
            return None
        return lines[number - 1].strip()[:MAX_LINE_CHARACTERS] or None

    def context(self, file: str, number: int | None, around: int = 2) -> dict[str, Any] | None:
        """`{"first_line", "lines", "changed_since"}` around a line (1-based), or None."""
        found = self._load(file)
        if found is None or number is None or not 1 <= number <= len(found[0]):
            return None
        lines, changed = found
        first = max(1, number - around)
        quoted = [line[:MAX_LINE_CHARACTERS] for line in lines[first - 1 : number + around]]
        return {"first_line": first, "lines": quoted, "changed_since": changed}

    def _load(self, file: str) -> tuple[list[str], bool] | None:
        if file not in self._files:
            if len(self._files) >= MAX_FILES:
                return None
            self._files[file] = self._read(file)
        return self._files[file]

    def _read(self, file: str) -> tuple[list[str], bool] | None:
        if not os.path.isabs(file) or "\0" in file or not file.endswith(SOURCE_SUFFIXES):
            return None
        path = os.path.realpath(file)
        if not path.endswith(SOURCE_SUFFIXES) or not any(_inside(path, root) for root in self._roots):
            return None
        try:
            data, changed_ns = _bytes_of(path)
        except OSError:
            return None
        if b"\0" in data:
            return None
        changed = self._recorded_ns is not None and changed_ns > self._recorded_ns
        # split as Python counts lines; str.splitlines would also split at form feeds and separators
        text = data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
        return text.split("\n"), changed


def _bytes_of(path: str) -> tuple[bytes, int]:
    """Content and time of change (epoch, ns) of a small regular file; raises `OSError` for anything else."""
    # O_NONBLOCK: opening a pipe that poses as a source file must not wait for its writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise OSError("not a small regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as handle:
            return handle.read(MAX_FILE_BYTES), status.st_mtime_ns
    finally:
        os.close(descriptor)


def _inside(path: str, root: str) -> bool:
    return path.startswith(root + os.sep)
