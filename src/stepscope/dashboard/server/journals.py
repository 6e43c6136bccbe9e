"""The steps of a run that goes on, from the ends of its journals: each byte is read once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from stepscope.files import open_regular

NAME = "steps.jsonl"
MAX_RANKS = 64  # whose journals are followed; more tell nothing new of how far the run is
MAX_READ = 32 * 2**20  # of one journal at a time
_TRAIN = "train"


class Progress(Struct, frozen=True):
    """How far a run is. `steps` are of the rank that made most; `mean_ms` is of training steps that are neither an
    epoch's first nor in a window of a profiler, over all ranks."""

    steps: int
    last_ms: float | None
    mean_ms: float | None


class Journal:
    """One rank's steps so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self.steps = 0
        self.last_ns: int | None = None
        self.counted = 0
        self.counted_ns = 0
        self._offset = 0
        self._columns: dict[str, int] = {}

    def read(self) -> None:
        """Take in what was written since; a line that is not finished waits, one that is no step is skipped."""
        try:
            with open_regular(self._path) as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._begin()  # written anew by another attempt
                file.seek(self._offset)
                data = file.read(MAX_READ)
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            row = msgspec.json.decode(line)
        except (ValueError, RecursionError):  # a msgspec error is a ValueError, and so is text that is no UTF-8
            return
        if isinstance(row, dict):
            names = row.get("columns")
            if isinstance(names, list):
                self._columns = {name: place for place, name in enumerate(names) if isinstance(name, str)}
        elif isinstance(row, list):
            self._count({name: row[place] for name, place in self._columns.items() if place < len(row)})

    def _count(self, row: Mapping[str, Any]) -> None:
        wall = row.get("wall_ns")
        if not isinstance(wall, int) or wall < 0:
            return
        self.steps += 1
        self.last_ns = wall
        if row.get("kind") == _TRAIN and not row.get("first_batch") and not row.get("in_window"):
            self.counted += 1
            self.counted_ns += wall


class Journals:
    """The journals of all ranks of a run folder, those that appear later included."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._journals: dict[str, Journal] = {}

    def read(self) -> Progress | None:
        """How far the run is now; None before its first step."""
        for name in rank_folders(self._folder)[:MAX_RANKS]:
            self._journals.setdefault(name, Journal(self._folder / name / NAME))
        for journal in self._journals.values():
            journal.read()
        first = max(self._journals.values(), key=lambda journal: journal.steps, default=None)
        if first is None or not first.steps:
            return None
        counted = sum(journal.counted for journal in self._journals.values())
        total_ns = sum(journal.counted_ns for journal in self._journals.values())
        last_ms = None if first.last_ns is None else first.last_ns / 1e6
        return Progress(first.steps, last_ms, total_ns / counted / 1e6 if counted else None)


def rank_folders(folder: Path) -> list[str]:
    """Names of the ranks' folders, in order; none where the run folder is gone."""
    try:
        with os.scandir(folder) as entries:
            found = [entry.name for entry in entries if entry.name.startswith("rank-") and entry.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda name: (len(name), name))
