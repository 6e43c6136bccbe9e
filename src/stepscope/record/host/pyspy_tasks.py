"""Which kernel threads a sampled process had, and when: py-spy does not notice that a thread has ended.

A look lists /proc/PID/task, a few microseconds for each thread. Times are nanoseconds on the run's clock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable


class TaskWatch:
    """The looks at one process."""

    def __init__(self, pid: int) -> None:
        self._folder = f"/proc/{pid}/task"
        self._seen_ns: dict[int, int] = {}
        self._last_ns: int | None = None

    def look(self, now_ns: int) -> None:
        """Note the threads there are; nothing where the process is gone."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return
        self._last_ns = now_ns
        self._seen_ns.update((int(name), now_ns) for name in names if name.isdecimal())

    def knows(self, tids: Iterable[int | None]) -> bool:
        """Whether threads called `tids` by the process can be told here; not those of another pid namespace."""
        return any(tid in self._seen_ns for tid in tids if tid is not None)

    def last_seen_ns(self, tid: int, met_ns: int) -> int | None:
        """When a thread that the sampler met at `met_ns` was last there; None when, for all we know, it lives on."""
        if self._last_ns is None or met_ns > self._last_ns:
            return None
        seen_ns = self._seen_ns.get(tid, met_ns)
        return None if seen_ns == self._last_ns else seen_ns
