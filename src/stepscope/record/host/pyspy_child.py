"""One py-spy that reads one process for one segment: how it ended, when its clock started, and what it has sampled."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stepscope.record.host.pyspy_counts import Counted, count
from stepscope.record.host.pyspy_tasks import TaskWatch
from stepscope.record.host.pyspy_trace import ThreadHistory, read_trace

_RESULT = re.compile(r"Samples: (\d+) Errors: (\d+)")
# From the call that starts py-spy until its clock starts: measured 0.3 to 2 ms; and what it takes to write its file.
_LOADING_NS = 1_500_000
_WRITING_NS_PER_BYTE = 5


@dataclass
class Spy:
    """The child process; `output` is what it says, `path` what it writes. Moments are on the run's clock."""

    pid: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    path: Path
    spawned_ns: int
    tasks: TaskWatch
    text: str | None = None  # what it said, once it has ended
    ended_ns: int = 0

    def collect(self, now_ns: Callable[[], int]) -> bool:
        """Whether it has ended; fetches its words the first time."""
        if self.text is None and self.process.poll() is not None:
            self.ended_ns = now_ns()
            self.output.seek(0)
            self.text = self.output.read(65536).decode("utf-8", "replace")
            self.output.close()
        return self.text is not None

    @property
    def counts(self) -> tuple[int, int] | None:
        """(samples, errors) as it reported them, None when it failed."""
        result = _RESULT.search(self.text or "")
        return (int(result[1]), int(result[2])) if result and self.path.exists() else None

    def start_ns(self, last_us: int, wall_minus_run_ns: int) -> int:
        """When its clock started, on the run's clock, by that clock's last reading: 2 ms off at most on a free core.

        A busy machine may have held it up while it loaded; then its file, written right after that last reading, is
        late as well. The file system's own clock is believed only between the two moments we have seen ourselves.
        """
        with contextlib.suppress(OSError):
            file = self.path.stat()
            written_ns = file.st_mtime_ns - wall_minus_run_ns - file.st_size * _WRITING_NS_PER_BYTE
            latest = self.ended_ns - last_us * 1000
            return min(max(self.spawned_ns + _LOADING_NS, written_ns - last_us * 1000), max(latest, self.spawned_ns))
        return self.spawned_ns + _LOADING_NS

    def convert(self, rate_hz: float, wall_minus_run_ns: int) -> tuple[Counted, int]:
        """What it has sampled, and its start on the run's clock. Raises `UnreadableTraceError`."""
        trace = read_trace(self.path)
        start_ns = self.start_ns(trace.last_us, wall_minus_run_ns)
        known = self.tasks.knows(thread.tid for thread in trace.threads)

        def last_seen_us(thread: ThreadHistory) -> int | None:
            if thread.tid is None or not known:
                return None
            seen_ns = self.tasks.last_seen_ns(thread.tid, start_ns + thread.starts_us[0] * 1000)
            return None if seen_ns is None else (seen_ns - start_ns) // 1000

        samples = self.counts[0] if self.counts else 0
        return count(trace, samples, rate_hz=rate_hz, last_seen_us=last_seen_us), start_ns
