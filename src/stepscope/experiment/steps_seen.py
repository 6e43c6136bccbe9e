"""How far a run in progress is, from the step journals it writes; what has been read is not read again."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from stepscope.schema import STEP_COLUMNS

_KIND, _WALL = STEP_COLUMNS.index("kind"), STEP_COLUMNS.index("wall_ns")
_MOST_KEPT = 50


class StepsSeen:
    """Training steps of the rank that is furthest (evaluation steps, where there are no others), as the recorder counts
    towards its own limit."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._read: dict[Path, int] = {}
        self._counts: dict[tuple[Path, str], int] = {}
        self._walls: list[int] = []

    @property
    def count(self) -> int:
        """Steps so far."""
        train = [count for (_, kind), count in self._counts.items() if kind == "train"]
        return max(train or self._counts.values(), default=0)

    @property
    def step_s(self) -> float | None:
        """Median wall time of the latest steps, in seconds; None before there are any."""
        if not self._walls:
            return None
        return sorted(self._walls)[len(self._walls) // 2] / 1e9

    def look(self) -> bool:
        """Read what was added; whether there was any."""
        added = False
        with contextlib.suppress(OSError):
            for path in self._run.glob("rank-*/steps.jsonl"):
                added = self._read_from(path) or added
        return added

    def _read_from(self, path: Path) -> bool:
        start = self._read.get(path, 0)
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._read[path] = start + end
        rows = 0
        for line in data[:end].splitlines():
            with contextlib.suppress(ValueError, TypeError, IndexError):
                row = json.loads(line)
                if isinstance(row, list):
                    self._add(path, str(row[_KIND]), row[_WALL])
                    rows += 1
        return rows > 0

    def _add(self, path: Path, kind: str, wall_ns: object) -> None:
        self._counts[path, kind] = self._counts.get((path, kind), 0) + 1
        if isinstance(wall_ns, int):
            self._walls = [*self._walls, wall_ns][-_MOST_KEPT:]
