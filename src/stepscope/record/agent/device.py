"""Device time of a step, from timing events recorded at its edges and read later: nothing here ever synchronises.

An event is recorded at each step boundary on the current stream; once the device has passed it (`query()`), the time
between two neighbours is written as a `device_step` event. CUDA (and ROCm, which torch calls CUDA) only, and only once
the process has initialised it by itself. Nothing is recorded while a graph is captured or the user's profiler is on.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.phases import StepRow

# Steps the device may run behind the host before edges are left out; bounds the events held.
PENDING_LIMIT = 256


class DeviceTimer:
    """Records an edge per step and writes `device_step` {step, device_ns} once the device has reached it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._last: tuple[int, Any] | None = None  # (end of the step before the edge, event)
        self._pending: deque[tuple[int, Any, Any]] = deque()
        self._spare: list[Any] = []
        build = getattr(sys.modules.get("torch"), "version", None)
        self.possible = bool(getattr(build, "cuda", None) or getattr(build, "hip", None))
        self.step_edge = agent.guard.wrap("device", self._step_edge)
        self.drain = agent.guard.wrap("device", self._drain)

    @property
    def in_use(self) -> bool:
        """Whether the process uses a device of which edges are recorded; never initialises one."""
        if not self.possible:
            return False
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        return cuda is not None and bool(cuda.is_initialized())

    def _step_edge(self, row: StepRow) -> None:
        """Record the edge at the end of `row`; its device time is known when the edge before ended the step before."""
        cuda = self._cuda()
        if cuda is None:
            self._last = None
            return
        self._drain()
        if len(self._pending) >= PENDING_LIMIT:
            self._last = None
            return
        event = self._spare.pop() if self._spare else cuda.Event(enable_timing=True)
        event.record()
        end = row.start_ns + row.wall_ns
        if self._last is not None and abs(row.start_ns - self._last[0]) < 1_000_000:
            self._pending.append((row.step, self._last[1], event))
        self._last = (end, event)

    def _drain(self) -> None:
        """Write what the device has finished; never waits."""
        while self._pending and self._pending[0][2].query():
            step, first, second = self._pending.popleft()
            elapsed_ms = first.elapsed_time(second)
            self._agent.events.write("device_step", step=step, device_ns=int(elapsed_ms * 1e6))
            self._spare.append(first)

    def _cuda(self) -> Any | None:
        """torch.cuda when events may be recorded now."""
        if not self.in_use or self._agent.user_profiler_active:
            return None
        cuda: Any = sys.modules["torch"].cuda
        return None if cuda.is_current_stream_capturing() else cuda
