"""Page faults of the process at the moments that may become edges of steps, and of each step between two of them.

A counter is read where an event may be an edge, and kept under the time of the event. The step cutter knows times
alone, so whatever it decides, and however late, a step has the faults between the readings at its two edges, or null.
Counted are the faults of all threads: operators touch new memory in torch's pool. A reading takes a microsecond.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

from stepscope.record.agent.phases import StepRow

# Readings nobody asked for, of fetches that are no edges or wait to be judged; undecided edges are far fewer.
READINGS_LIMIT = 4096


def _counter() -> Callable[[], Any] | None:
    """What the system counts for this process, or None where it does not."""
    if sys.platform == "win32":
        return None
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:
        return None
    return lambda: getrusage(RUSAGE_SELF)


class PageFaults:
    """The readings, by time. `counter` gives `ru_minflt` and `ru_majflt`; `fed`: a loader was asked for this step."""

    def __init__(self, clock: Callable[[], int], counter: Callable[[], Any] | None = None) -> None:
        self._clock = clock
        self._count = counter or _counter()
        self._readings: dict[int, Any] = {}
        self.fed = False

    def note(self, now: int) -> None:
        """Read the counter at `now`, a moment that may turn out to be an edge."""
        if self._count is not None:
            if len(self._readings) >= READINGS_LIMIT:
                self._readings.clear()
            self._readings[now] = self._count()

    def now(self) -> int:
        """The clock, for a step that begins at the moment it tells."""
        now = self._clock()
        self.note(now)
        return now

    def optimizer_ended(self, now: int) -> None:
        """Where no loader has been asked since the last time, the end of an optimizer step is an edge."""
        if self.fed:
            self.fed = False
        else:
            self.note(now)

    def fill(self, rows: list[StepRow]) -> list[StepRow]:
        """`rows`, in order, with their faults: None unless the counter was read at both edges of a step.

        What was read before the end of the last is forgotten.
        """
        readings = self._readings
        filled = []
        end_ns = 0
        for row in rows:
            end_ns = row.start_ns + row.wall_ns
            before, after = readings.get(row.start_ns), readings.get(end_ns)
            if before is not None and after is not None:
                faults = after.ru_minflt - before.ru_minflt, after.ru_majflt - before.ru_majflt
                row = _new_row(StepRow, (*row[:-2], *faults))
            filled.append(row)
        self._readings = {time: reading for time, reading in readings.items() if time >= end_ns}
        return filled


_new_row = tuple.__new__
