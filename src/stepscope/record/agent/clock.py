"""One clock for all processes of a host: monotonic nanoseconds plus the offset the launcher chose.

CLOCK_MONOTONIC is the same in every process of a Linux machine, so files of ranks, workers and the sampler line up
without any exchange, and a correction of the wall clock during the run cannot bend a step.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import Callable


class Clock:
    """Integer nanoseconds on the epoch clock; `source` is replaceable so that tests need not wait.

    `now()` gives nanoseconds since the epoch; the hooks of every step add `source()` and `epoch_offset_ns` themselves,
    which saves a call among cold caches.
    """

    now: Callable[[], int]

    def __init__(self, epoch_offset_ns: int, source: Callable[[], int] = monotonic_ns) -> None:
        self.epoch_offset_ns = epoch_offset_ns
        self.source = source

        def now() -> int:
            return source() + epoch_offset_ns

        self.now = now
