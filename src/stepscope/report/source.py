"""Quotes lines of the user's own source files, within limits.

A run folder may come from elsewhere and name any path, and whoever sends a report on sends what it quotes. So a file is
opened only if it looks like Python source, is a regular file of at most 1 MB, and either still has the content that the
recorder saw (a run cannot name the hash of a file it has not read) or lies, after links are resolved, in a folder of
the reader's: the working directory, its git root, or one given by `--source-root`, which may be a copy of the folder
that the code lay in, or of the one around it. Anything else, and anything that cannot be read, gives None: a report
without a quotation is still a report.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from stepscope.files import open_regular
from stepscope.model import SourceFiles

MAX_FILE_BYTES = 1_000_000
MAX_FILES = 128  # of one run
MAX_LINE_CHARACTERS = 200
SOURCE_SUFFIXES = (".py", ".pyw", ".pyi", ".pyx")


class SourceReader:
    """Reads and keeps source files of a run.

    `recorded_ns` is when the run started, on the epoch clock. A file that changed since is quoted, but marked: by its
    hash, and without one by the time of its last change.
    """

    def __init__(self, files: SourceFiles, *, recorded_ns: int | None = None) -> None:
        resolved = (os.path.realpath(root) for root in (*own_folders(), *files.roots) if os.path.isabs(root))
        # "/" as a root would hand every file of this machine to whoever wrote the manifest
        self._roots = tuple(root for root in resolved if root != os.sep)
        self._named = tuple(os.path.realpath(root) + os.sep for root in files.roots if os.path.isabs(root))
        self._hashes = files.hashes
        self._folders = tuple(os.path.normpath(folder) for folder in files.folders if os.path.isabs(folder))
        self._recorded_ns = recorded_ns
        self._files: dict[str, tuple[list[str], bool] | None] = {}

    def lines(self, file: str) -> list[str] | None:
        """All lines of `file` without their ends, or None where it may not or cannot be read."""
        found = self._load(file)
        return found[0] if found else None

    def text(self, file: str) -> str | None:
        """The whole text of `file` as it ran, with line feeds as line ends.

        None where it may not or cannot be read, and where it changed since: by its time alone only in folders that
        nobody named for it, for a checkout elsewhere is always younger.
        """
        found = self._load(file)
        if found is None or (found[1] and (self._hash(file) or not self._path(file).startswith(self._named))):
            return None
        return "\n".join(found[0])

    def line(self, file: str, number: int | None) -> str | None:
        """The text of one line (1-based) as it ran, stripped, or None."""
        text = self.text(file)
        lines = text.split("\n") if text is not None else None
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

    def _path(self, file: str) -> str:
        """Where a file lies, links resolved: there, or where the same folder lies among those named."""
        path = os.path.realpath(file)
        if os.path.exists(path):
            return path
        for folder in self._folders:
            if file.startswith(folder + os.sep):
                tail = file[len(folder) + 1 :]
                for root in self._named:
                    for copy in (os.path.join(root, os.path.basename(folder), tail), os.path.join(root, tail)):
                        if os.path.isfile(copy):
                            return os.path.realpath(copy)
        return path

    def _hash(self, file: str) -> str | None:
        return self._hashes.get(os.path.normpath(file))  # a script may have been started as "../train.py"

    def _load(self, file: str) -> tuple[list[str], bool] | None:
        if file not in self._files:
            if len(self._files) >= MAX_FILES:
                return None
            self._files[file] = self._read(file)
        return self._files[file]

    def _read(self, file: str) -> tuple[list[str], bool] | None:
        if not os.path.isabs(file) or "\0" in file or not file.endswith(SOURCE_SUFFIXES):
            return None
        path = self._path(file)
        is_own = any(path.startswith(root + os.sep) for root in self._roots)
        if not path.endswith(SOURCE_SUFFIXES) or not (is_own or self._hash(file)):
            return None
        try:
            with open_regular(path) as handle:
                changed_ns = os.fstat(handle.fileno()).st_mtime_ns
                data = handle.read(MAX_FILE_BYTES + 1)
        except OSError:
            return None
        if len(data) > MAX_FILE_BYTES or b"\0" in data:
            return None
        changed = self._recorded_ns is not None and changed_ns > self._recorded_ns
        if self._hash(file):
            changed = hashlib.sha256(data).hexdigest() != self._hash(file)
        if changed and not is_own:
            return None
        # split as Python counts lines; str.splitlines would also split at form feeds and separators
        text = data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
        return text.split("\n"), changed


def own_folders() -> list[str]:
    try:
        folder = Path.cwd()
    except OSError:  # it was removed
        return []
    roots = [place for place in (folder, *folder.parents) if (place / ".git").exists()]
    return [str(folder), *(str(root) for root in roots[:1])]
