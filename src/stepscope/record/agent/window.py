"""Opens torch.profiler for a few steps and keeps what it recorded.

The manager is a step listener: prepare, start, stop and export all happen between two steps, on the thread that trains;
what they take is in no step and is written with the window. `window_plan` decides when, `window_session` talks to torch,
the `user_profiler` probe says when the script's own profiler needs the room. Ends of a window: its steps are done, the
script's profiler opens, compilation or evaluation begins, workers are forked, the process ends.
"""

from __future__ import annotations

import atexit
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, Optional, cast

from stepscope.record.agent.window_plan import HIGH, LOW, AutoPlan, Boundary, Opening, Plan, SchedulePlan
from stepscope.record.agent.window_session import Session, anything_enabled, device_in_use, trace_path

if TYPE_CHECKING:
    from stepscope.record.agent.core import Agent
    from stepscope.record.agent.probes.user_profiler import UserProfilerProbe
    from stepscope.record.agent.steps import StepRow

NAME = "window"
COMPILE_DISTANCE = 2  # a recompile often follows the step after a compile (dynamic shapes)
# Another thread's profiler waits so long for the training thread to close our window; longer would look like a hang.
WAIT_FOR_CLOSE_S = 5.0
# Measured: a recorded event takes about a third of the memory it takes as JSON.
JSON_BYTES_PER_BYTE = 3
MEMORY_NOISE_BYTES = 64_000_000  # what a training process gains or frees between steps anyway


def attach(agent: Agent) -> Optional[WindowManager]:
    """Add windows to `agent` as its configuration asks; None when they are off or the user's profiler cannot be seen."""
    config = agent.config.window
    if config.mode not in ("auto", "schedule"):
        return None
    probe = cast("Optional[UserProfilerProbe]", agent.probes.get("user_profiler"))
    if probe is None:
        agent.events.write("window_skipped", reason="the script's own profilers cannot be seen", step=None)
        return None
    manager = WindowManager(agent, probe)
    agent.add_step_listener(manager)
    probe.make_room = manager.make_room
    atexit.register(agent.guard.wrap(NAME, manager.finish, inject=False))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=agent.guard.wrap(NAME, manager.before_fork, inject=False))
    return manager


@dataclass
class _Window:
    """A window that is open. Times are nanoseconds; `steps` counts the whole steps recorded so far."""

    session: Session
    opening: Opening
    at: Boundary
    compile_step: Optional[int]
    foreign_calls: int
    warmup_left: int
    first_step: int
    start_ns: int
    start_duration_ns: int = 0
    resident_bytes: int = 0
    steps: int = 0
    wall_ns: int = 0


class WindowManager:
    """All windows of a process, within a share of its time and a number of bytes."""

    probe_name = NAME

    def __init__(self, agent: Agent, probe: UserProfilerProbe) -> None:
        self._agent = agent
        self._probe = probe
        self._config = agent.config.window
        self.plan = _plan(agent)
        self._began_ns = agent.clock.now()
        self._first_step_ns: Optional[int] = None
        self._window: Optional[_Window] = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._asked: Optional[str] = None  # another thread asks for the window to be closed, and why
        self._spent_ns = 0
        self._last_cost_ns = 0
        self._bytes = 0
        self._opened = 0
        self._best: Optional[str] = None  # confidence of the best window kept
        self._why_not = "no step was fit for a window"
        self._said: Optional[str] = None
        self._usual_wall_ns = 0

    @property
    def is_open(self) -> bool:
        """Whether a window is open now."""
        return self._window is not None

    # ---------------------------------------------------------------------------------------------- step boundaries

    def __call__(self, agent: Agent, row: Optional[StepRow], now_ns: int) -> None:
        """The step listener. A boundary on another thread than the window's is not ours to act on."""
        window = self._window
        if window is not None and window.session.thread != threading.get_ident():
            return
        completed = False
        try:
            if window is not None:
                self._advance(window, row)
            elif row is not None:
                self._consider(row, now_ns)
            completed = True
        finally:
            if not completed:
                self._let_go()

    def _consider(self, row: StepRow, now_ns: int) -> None:
        at = self._boundary(row, now_ns)
        self.plan.observe(at)
        if not at.in_window:
            self._usual_wall_ns = at.wall_ns
        if self._best == HIGH and self._config.mode == "auto":
            return
        if not self._affordable(now_ns) and self._config.mode == "auto":
            self._why_not = self._over_time()
            return
        opening = self.plan.decide(at)
        if opening is None:
            return
        why = self._refusal(now_ns)
        if why is not None:
            self._skip(why)
            if self._config.mode == "schedule":
                self.plan.opened(at)
            return
        self.plan.opened(at)
        self._open(opening, at)

    def _boundary(self, row: StepRow, now_ns: int) -> Boundary:
        agent = self._agent
        if self._first_step_ns is None:
            self._first_step_ns = now_ns
        if isinstance(self.plan, AutoPlan):
            self.plan.set_device(device_in_use() is not None)
        compiled = agent.last_compile_step
        saved = getattr(agent, "last_save_step", None)
        return Boundary(
            completed=row.step + 1,
            kind=row.kind,
            wall_ns=row.wall_ns,
            first_batch=bool(row.first_batch),
            compiled=compiled is not None and row.step - compiled < COMPILE_DISTANCE,
            saved=saved is not None and row.step - saved < 1,
            in_window=bool(row.in_window),
            remaining=_remaining(agent, row),
            elapsed_ns=now_ns - self._first_step_ns,
        )

    def _refusal(self, now_ns: int) -> Optional[str]:
        """Why no window may be opened here although the plan asks for one."""
        if self._agent.guard.is_off("user_profiler"):
            return "the script's own profilers cannot be seen"
        busy = self._probe.busy()
        if busy is not None:
            return busy
        if anything_enabled():
            return "another profiler session is enabled"
        if not self._affordable(now_ns):
            return self._over_time()
        if self.plan.max_active == 0 or self._bytes >= self._config.byte_budget:
            return "the windows' byte budget is used up"
        return None

    def _affordable(self, now_ns: int) -> bool:
        if not self._opened:  # the first window is always worth its time
            return True
        return self._spent_ns + self._last_cost_ns <= self._config.time_share * (now_ns - self._began_ns)

    def _over_time(self) -> str:
        return "another window would exceed %.3g %% of the run's time" % (100 * self._config.time_share)

    def _skip(self, reason: str) -> None:
        self._why_not = reason
        if reason != self._said:
            self._said = reason
            self._agent.events.write("window_skipped", reason=reason)

    # ------------------------------------------------------------------------------------------------ open, advance

    def _open(self, opening: Opening, at: Boundary) -> None:
        agent = self._agent
        with self._lock:
            started_ns = agent.clock.now()
            agent.own_profiler_active = True
            self._asked = None
            self._closed.clear()
            self._opened += 1
            session = Session(memory=self._config.memory, device=device_in_use())
            window = _Window(
                session=session,
                opening=opening,
                at=at,
                compile_step=agent.last_compile_step,
                foreign_calls=self._probe.foreign_calls,
                warmup_left=opening.warmup,
                first_step=at.completed,
                start_ns=started_ns,
            )
            self._window = window
            if window.warmup_left:
                session.prepare()
            else:
                session.start()
            window.start_duration_ns = agent.clock.now() - started_ns
            window.resident_bytes = _resident_bytes()
            agent.steps.window(True)

    def _advance(self, window: _Window, row: Optional[StepRow]) -> None:
        agent = self._agent
        with self._lock:
            if self._window is not window:
                return
            if self._is_lost(window):
                self._drop_lost(window)
            elif agent.last_compile_step != window.compile_step:
                self._end(window, discard="compilation began inside the window")
            elif row is None:
                return
            elif window.session.state == "prepared":
                self._warm_up(window, row)
            else:
                self._count(window, row)

    def _warm_up(self, window: _Window, row: StepRow) -> None:
        if self._asked is not None:
            self._end(window, early=self._asked)
            return
        window.warmup_left -= 1
        if window.warmup_left <= 0:
            started_ns = self._agent.clock.now()
            window.session.start()
            window.first_step = row.step + 1
            window.start_ns = started_ns
            window.start_duration_ns += self._agent.clock.now() - started_ns

    def _count(self, window: _Window, row: StepRow) -> None:
        if row.kind != "train" and not self._config.everywhere:
            self._end(window, early="evaluation began")
            return
        window.steps += 1
        window.wall_ns += row.wall_ns
        if window.steps >= window.opening.active:
            self._end(window)
        elif self._asked is not None:
            self._end(window, early=self._asked)
        elif self._grows_too_fast(window):
            self._end(window, early="the trace grew towards its byte budget")

    def _grows_too_fast(self, window: _Window) -> bool:
        grown = _resident_bytes() - window.resident_bytes - MEMORY_NOISE_BYTES
        return grown * JSON_BYTES_PER_BYTE > self._config.byte_budget - self._bytes

    def _is_lost(self, window: _Window) -> bool:
        return window.foreign_calls != self._probe.foreign_calls or not window.session.alive()

    # --------------------------------------------------------------------------------------------------------- end

    def _end(self, window: _Window, early: Optional[str] = None, discard: Optional[str] = None) -> None:
        """Stop, export and record a window of this thread. `early` lowers its confidence, `discard` drops it."""
        clock = self._agent.clock
        confidence = LOW if early is not None else window.opening.confidence
        reason = window.opening.reason
        if early is not None:
            reason = "%s; ended after %d of %d steps: %s" % (reason, window.steps, window.opening.active, early)
        trace: Optional[str] = None
        size: Optional[int] = None
        stopped_ns = before_ns = clock.now()
        try:
            window.session.stop()
            stopped_ns = clock.now()
            if discard is None and window.steps == 0:
                discard = early or "no whole step was recorded"
            if discard is None:
                trace, size, discard = self._export(window)
        finally:
            self._forget(window)
        exported_ns = clock.now()
        self._charge(window, exported_ns - before_ns, size)
        kept = discard is None
        if kept:
            self._best = HIGH if HIGH in (self._best, confidence) else LOW
        self.plan.closed(kept=kept, confidence=confidence)
        self._record(
            window,
            trace=trace,
            stop_duration_ns=stopped_ns - before_ns,
            export_duration_ns=None if size is None else exported_ns - stopped_ns,
            bytes=size,
            confidence=confidence,
            reason=reason if discard is None else discard,
            status="kept" if kept else "dropped",
        )

    def _export(self, window: _Window) -> Any:
        """(file name or None, bytes, why it was dropped or None)."""
        folder = self._agent.journal.folder
        if folder is None:
            return None, None, "there is no rank folder"
        path = trace_path(folder)
        size = window.session.export(path)
        if self._bytes + size > self._config.byte_budget:
            os.unlink(path)
            left = self._config.byte_budget - self._bytes
            return None, size, "the trace takes %d bytes, the byte budget left is %d" % (size, left)
        self._bytes += size
        return os.path.basename(path), size, None

    def _charge(self, window: _Window, closing_ns: int, size: Optional[int]) -> None:
        """Account for what the window cost: its calls, and how much longer its steps took than usual."""
        slower_ns = max(0, window.wall_ns - window.steps * self._usual_wall_ns)
        self._last_cost_ns = window.start_duration_ns + closing_ns + slower_ns
        self._spent_ns += self._last_cost_ns
        if size is not None and window.steps:
            self.plan.max_active = (self._config.byte_budget - self._bytes) * window.steps // max(1, size)

    def _forget(self, window: _Window) -> None:
        if self._window is window:
            self._window = None
        self._asked = None
        self._agent.own_profiler_active = False
        self._agent.steps.window(self._probe.recording)
        self._closed.set()

    def _drop_lost(self, window: _Window) -> None:
        """Another session took ours over: touching it would crash the process."""
        window.session.abandon()
        self._forget(window)
        self.plan.closed(kept=False, confidence=LOW)
        self._record(window, confidence=LOW, reason="another profiler took the session over", status="dropped")

    def _let_go(self) -> None:
        """A call of ours failed: end the session if that is still possible, and never come back to it."""
        window = self._window
        if window is None:
            return
        self._forget(window)
        if window.session.state in ("prepared", "recording") and not self._is_lost(window):
            window.session.stop()

    def _record(self, window: _Window, **fields: Any) -> None:
        record: Dict[str, Any] = dict.fromkeys(("trace", "stop_duration_ns", "export_duration_ns", "bytes"))
        record.update(
            first_step=window.first_step,
            steps=window.steps,
            start_ns=window.start_ns,
            start_duration_ns=window.start_duration_ns,
            overhead_ns=self._last_cost_ns,
        )
        record.update(fields)
        now_ns = self._agent.clock.now()
        self._agent.events.write(
            "window", time_ns=window.start_ns, duration_ns=now_ns - window.start_ns, step=window.first_step, **record
        )

    # ------------------------------------------------------------------------------------- asked to end from outside

    def make_room(self, why: str, wait: bool) -> None:
        """The script's own profiler needs the room: close and keep the window before it opens.

        Another thread cannot close it and asks; with `wait` it gives the training thread a bounded time, and then the
        window is given up, untouched: torch replaces its session when the other one starts.
        """
        window = self._window
        if window is None:
            return
        if window.session.thread == threading.get_ident():
            with self._lock:
                if self._window is window and not self._is_lost(window):
                    self._end(window, early=why)
            return
        self._asked = why
        if wait and not self._closed.wait(WAIT_FOR_CLOSE_S):
            with self._lock:
                if self._window is window:
                    self._drop_lost(window)

    def before_fork(self) -> None:
        """A forked loader worker would inherit the session and record, unseen, for as long as it lives."""
        window = self._window
        if window is not None and window.session.thread == threading.get_ident():
            self.make_room("processes were forked", wait=False)

    def finish(self, reason: str = "the process ended") -> None:
        """Close and keep an open window, and say why there is none or no better one. Called at the process's end."""
        window = self._window
        if window is not None and window.session.thread == threading.get_ident():
            with self._lock:
                if self._is_lost(window):
                    self._drop_lost(window)
                else:
                    self._end(window, early=reason)
        if self._best != HIGH and self._first_step_ns is not None and self._said is None:
            self._skip(self._why_not)


def _plan(agent: Agent) -> Plan:
    config = agent.config.window
    if config.mode == "auto":
        return AutoPlan(everywhere=config.everywhere)
    return SchedulePlan(
        skip_first=config.skip_first,
        wait=config.wait,
        warmup=config.warmup,
        active=config.active,
        repeat=config.repeat,
        everywhere=config.everywhere,
    )


def _remaining(agent: Agent, row: StepRow) -> Optional[int]:
    """Whole steps the loader of this loop still feeds in this epoch; None without a loader or a known length."""
    batches = getattr(agent, "remaining_batches", None)
    if batches is None:
        return None
    return int(batches) // max(1, row.fetches)


def _resident_bytes() -> int:
    """Resident memory of this process; 0 where /proc does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
