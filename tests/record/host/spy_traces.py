"""Chrome traces as py-spy writes them, built from what a sampler would have seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Frame = tuple[str, str, int]


class SpyTrace:
    """Takes samples like py-spy: events only where the stack of a thread has changed, all ended at the end."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._stacks: dict[int, list[Frame]] = {}

    def sample(self, time_us: int, stacks: dict[int, Sequence[Frame]], labels: dict[int, str] | None = None) -> None:
        """One sample; `stacks` by pthread id, outermost frame first. The label defaults to `thread (ID)`."""
        for thread, frames in stacks.items():
            label = (labels or {}).get(thread, f"thread ({thread})")
            self._change(thread, [(label, "", 0), *frames], time_us)

    def write(self, path: Path, end_us: int) -> Path:
        """End all that is open and write the file."""
        for thread in list(self._stacks):
            self._change(thread, [], end_us)
        path.write_text(json.dumps(self.events, separators=(",", ":"), ensure_ascii=False), encoding="utf-8")
        return path

    def _change(self, thread: int, new: list[Frame], time_us: int) -> None:
        old = self._stacks.get(thread, [])
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        for frame in reversed(old[same:]):
            self._event("E", thread, frame, time_us)
        for frame in new[same:]:
            self._event("B", thread, frame, time_us)
        self._stacks[thread] = new

    def _event(self, phase: str, thread: int, frame: Frame, time_us: int) -> None:
        name, file, line = frame
        self.events.append(
            {
                "args": {"filename": file, "line": line}, "cat": "py-spy", "name": name, "ph": phase, "pid": 1,
                "tid": thread, "ts": time_us,
            }
        )  # fmt: skip
