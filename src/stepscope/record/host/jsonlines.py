"""Append-only JSON lines and atomic JSON files, written so that a kill loses at most the line under way."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.files import read_small

MAX_JSON_BYTES = 1 << 24  # of a file that is read whole: a run folder may come from anybody


class JsonLines:
    """A file that only grows; each `append` is one write of one whole line.

    A write that fails (disk full, folder removed) is dropped: recording must never stop what it records.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.dropped = int(self._descriptor is None)

    def append(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"
        if self._descriptor is None:
            self.dropped += 1
            return
        try:
            written = os.write(self._descriptor, line)
        except OSError:
            written = 0
        self.dropped += written < len(line)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class JsonLinesTail:
    """Reads what was appended to a JSON-lines file since the last call; a torn last line waits for its end."""

    _CHUNK = 1 << 20

    def __init__(self, path: Path, kind: type = dict) -> None:
        """Rows that are not of this `kind` are left out."""
        self._path, self._kind = path, kind
        self._offset = 0

    def read(self) -> list[Any]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(self._CHUNK)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        rows = []
        for line in data[:end].splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, self._kind):
                rows.append(row)
        return rows


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None when there is no such file, empty when it cannot be understood."""
    try:
        found = json.loads(read_small(path, MAX_JSON_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by `value` in one step, as `write_text` does."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: a reader sees the old file or the new one. Raises `OSError`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
