"""Ends a command that has made the steps it was allowed: SIGINT as from a terminal, and again while it trains on.

Python drops a KeyboardInterrupt that strikes where nothing may raise (a hook at fork, a destructor), and then the
training goes on as if it had never been told to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

MAX_STEPS_MARKER = "max-steps"
AGAIN_SECONDS = 5.0  # twice this at least between two signals: who answers by ending an epoch gets the time for it
MOST = 6


class StepLimit:
    """Asked now and then; calls `interrupt` when the limit is reached, and again while journals grow."""

    def __init__(
        self,
        host_dir: Path,
        ranks: Callable[[], Iterable[Path]],
        interrupt: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._marker = host_dir / MAX_STEPS_MARKER
        self._ranks, self._interrupt, self._clock = ranks, interrupt, clock
        self._sent = 0
        self._due = 0.0
        self._seen: int | None = None  # bytes of the journals right after the latest signal

    @property
    def pending(self) -> bool:
        """Whether it wants to be asked again soon."""
        return self._sent == 0

    def look(self) -> None:
        """Interrupt where it is time to."""
        now = self._clock()
        if self._sent >= MOST or now < self._due or (not self._sent and not self._marker.exists()):
            return
        size = self._size()
        if self._sent and (self._seen is None or size <= self._seen):
            # the first look after a signal: what was on its way has been written by now
            self._seen, self._due = size, now + AGAIN_SECONDS
            return
        self._interrupt()
        self._sent += 1
        self._seen, self._due = None, now + AGAIN_SECONDS

    def _size(self) -> int:
        total = 0
        for folder in self._ranks():
            try:
                total += (folder / "steps.jsonl").stat().st_size
            except OSError:
                continue
        return total
