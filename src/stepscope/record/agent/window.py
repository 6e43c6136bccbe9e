"""Opens torch.profiler for a few steps and keeps what it recorded.

The manager is a step listener: prepare, start, stop and export happen between two steps, on the thread that trains;
what they take is in no step and is written with the window. `window_plan` decides when and what it may cost,
`window_session` talks to torch, the `user_profiler` probe says when the script's own profiler needs the room.
Ends of a window: its steps are done, the script's profiler opens, compilation or evaluation begins, workers are
forked, the process ends.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, replace
from typing import Any

from stepscope.record.agent.agent import Agent
from stepscope.record.agent.guard import Guard
from stepscope.record.agent.memory import peak_resident_bytes, resident_bytes
from stepscope.record.agent.probes.loader import LoaderProbe
from stepscope.record.agent.probes.user_profiler import UserProfilerProbe
from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.window_plan import DEVICE_WARMUP, HIGH, LOW, Boundary, Budget, Opening, Plan, SchedulePlan
from stepscope.record.agent.window_session import (
    Session,
    anything_enabled,
    begin_here,
    device_in_use,
    in_forked_child,
    quiet_allocator,
    trace_path,
)

NAME = "window"
PROFILE_FUNCTION = "the script has a profile function of its own (sys.setprofile), which recording them would take out"
COMPILE_DISTANCE = 2  # a recompile often follows the step after a compile (dynamic shapes)
# Another thread's profiler waits so long for the training thread to close our window; longer would look like a hang.
WAIT_FOR_CLOSE_S = 5.0


def attach(agent: Agent) -> None:
    """Add windows to `agent` as its configuration asks, but not where they could meet the user's profiler."""
    probe = agent.probes.get("user_profiler")
    if not isinstance(probe, UserProfilerProbe):
        agent.journal.write("window_skipped", reason="the script's own profilers cannot be seen", step=None)
        return
    manager = WindowManager(agent, probe)
    build = sys.modules["torch"].version
    if all(getattr(build, name, None) is None for name in ("cuda", "hip", "xpu")):  # for no device at all
        manager.begin_here()
    agent.add_step_listener(manager, NAME, manager.is_waiting)
    probe.make_room = manager.make_room
    agent.add_finish_hook(manager.finish, NAME)
    # The child's handler is guarded by itself: a forked child's agent has been switched off before it runs.
    child = Guard(lambda _probe, _error: None).wrap(NAME, in_forked_child, inject=False)
    os.register_at_fork(before=agent.guard.wrap(NAME, manager.before_fork, inject=False), after_in_child=child)


@dataclass
class _Window:
    """A window that is open. Times are nanoseconds; `steps` counts the whole steps recorded so far."""

    session: Session
    opening: Opening
    compile_step: int | None
    foreign_calls: int
    warmup_left: int
    first_step: int
    start_ns: int
    start_duration_ns: int = 0
    peak_bytes: int = 0  # resident at most before it opened: what training itself takes and gives back
    steps: int = 0
    wall_ns: int = 0


class WindowManager:
    """All windows of a process, within a share of its time and a number of bytes."""

    def __init__(self, agent: Agent, probe: UserProfilerProbe) -> None:
        self._agent = agent
        self._probe = probe
        self._config = config = agent.config.window
        self.plan = (SchedulePlan if config.mode == "schedule" else Plan)(config)
        self.budget = Budget(began_ns=agent.clock.now(), time_share=config.time_share, byte_budget=config.byte_budget)
        self._first_step_ns: int | None = None
        self._window: _Window | None = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._asked: str | None = None  # another thread asks for the window to be closed, and why
        self._best: str | None = None  # confidence of the best window kept
        self._why_not: str | None = None
        self._said: str | None = None
        self._usual_wall_ns = 0
        self._imported_torch = threading.get_ident()  # the thread: an import hook starts the agent
        self._memory_asked = False  # the window for what readings of memory leave open was planned
        self._is_apart: bool | None = None  # whether sessions end on threads of their own; None before the first loop

    @property
    def is_open(self) -> bool:
        """Whether a window is open now."""
        return self._window is not None

    def is_waiting(self) -> bool:
        """Whether something may have to happen right where the next step ends."""
        return self.is_open or not self.plan.over or self._asks_for_memory()

    def _asks_for_memory(self) -> bool:
        """Whether readings of memory ask for a window with allocations, which no window before them had."""
        wanted = self._config.memory == "auto" and self._config.mode == "auto" and not self._memory_asked
        return wanted and self._agent.memory_question is not None and quiet_allocator() is not None

    def begin_here(self) -> None:
        """Decide whether sessions end apart: no device is in use, and torch's first one is had on the right thread.

        As early as can be: what it leaves behind then lies below the script's tensors. Where torch knows of devices
        that is the first loop, for to ask for one would initialise its driver before processes are forked.
        """
        here = self._imported_torch == threading.get_ident() and self._config.memory != "on" and device_in_use() is None
        self._is_apart = here and self._probe.busy() is None and not anything_enabled()
        if self._is_apart:
            begin_here()

    # ---------------------------------------------------------------------------------------------- step boundaries

    def __call__(self, row: StepRow | None, now_ns: int) -> None:
        """The step listener. A boundary on another thread than the window's is not ours to act on."""
        window = self._window
        if window is not None and window.session.thread != threading.get_ident():
            return
        try:
            if self._is_apart is None:
                self.begin_here()
            if window is not None:
                self._advance(window, row)
            elif row is not None:
                if self.plan.over and self._asks_for_memory():
                    self.plan, self._memory_asked = Plan(self._config, once=True), True
                    self._first_step_ns = None  # it waits for steady steps anew
                if not self.plan.over:
                    self._consider(row, now_ns)
        except BaseException:
            self._let_go()
            raise

    def _consider(self, row: StepRow, now_ns: int) -> None:
        at = self._boundary(row, now_ns)
        self.plan.observe(at)
        if not at.in_window:
            self._usual_wall_ns = at.wall_ns
        if self._config.mode == "auto" and not self.budget.affords_time(now_ns):
            self._why_not = self.budget.over_time()
            return
        opening = self.plan.decide(at)
        if opening is not None:
            why = self._refusal(now_ns)
            if why is None or self._config.mode == "schedule":
                self.plan.opened(at)
            if why is None:
                self._open(opening, at)
            else:
                self._skip(why)

    def _boundary(self, row: StepRow, now_ns: int) -> Boundary:
        agent = self._agent
        self._first_step_ns = self._first_step_ns or now_ns
        if self._config.mode == "auto":
            self.plan.warmup = 0 if device_in_use() is None else DEVICE_WARMUP
        compiled = agent.last_compile_step
        loader = agent.probes.get("loader")
        batches = loader.remaining() if isinstance(loader, LoaderProbe) else None
        return Boundary(
            completed=row.step + 1,
            kind=row.kind,
            wall_ns=row.wall_ns,
            first_batch=bool(row.first_batch),
            compiled=compiled is not None and row.step - compiled < COMPILE_DISTANCE,
            saved=agent.last_save_step == row.step,
            in_window=bool(row.in_window),
            # whole steps that the loader of this loop still feeds in this epoch
            remaining=None if batches is None else batches // max(1, row.fetches),
            elapsed_ns=now_ns - self._first_step_ns,
        )

    def _refusal(self, now_ns: int) -> str | None:
        """Why no window may be opened here although the plan asks for one."""
        if self._agent.guard.is_off("user_profiler"):
            return "the script's own profilers cannot be seen"
        busy = self._probe.busy() or ("another profiler session is enabled" if anything_enabled() else None)
        if busy is not None:
            return busy
        if not self.budget.affords_time(now_ns):
            return self.budget.over_time()
        if self.plan.max_active == 0 or not self.budget.fits(1):
            return "the windows' byte budget is used up"
        return None

    def _skip(self, reason: str) -> None:
        self._why_not = reason
        if reason != self._said:
            self._said = reason
            self._agent.journal.write("window_skipped", reason=reason, asked=self._config.mode == "schedule")

    # ------------------------------------------------------------------------------------------------ open, advance

    def _open(self, opening: Opening, at: Boundary) -> None:
        agent = self._agent
        with self._lock:
            started_ns = agent.clock.now()
            agent.own_profiler_active = True
            self._asked = None
            self._closed.clear()
            self.budget.opened = True
            device = device_in_use()
            apart = self._is_apart is True and device is None
            stacks = sys.getprofile() is None
            if not stacks:
                opening = replace(opening, reason=f"{opening.reason}; without Python functions: {PROFILE_FUNCTION}")
            memory = self._config.memory == "on" or self._memory_asked
            if self._memory_asked:
                opening = replace(opening, reason=f"{opening.reason}; with allocations: {agent.memory_question}")
            session = Session(memory=memory, device=device, stacks=stacks, is_apart=apart)
            compiled, calls = agent.last_compile_step, self._probe.foreign_calls
            window = _Window(session, opening, compiled, calls, opening.warmup, at.completed, started_ns)
            self._window = window
            (session.prepare if window.warmup_left else session.start)()
            window.start_duration_ns = agent.clock.now() - started_ns
            window.peak_bytes = peak_resident_bytes()
            agent.steps.window(True)

    def _advance(self, window: _Window, row: StepRow | None) -> None:
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
            elif window.session.state == "recording":
                self._count(window, row)
            elif self._asked is not None:
                self._end(window, early=self._asked)
            else:
                self._warm_up(window, row)

    def _warm_up(self, window: _Window, row: StepRow) -> None:
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
        elif self.budget.outgrown_by(resident_bytes() - window.peak_bytes):
            self._end(window, early="the process grew by more memory than a trace within the byte budget takes")

    def _is_lost(self, window: _Window) -> bool:
        return window.foreign_calls != self._probe.foreign_calls or not window.session.alive()

    # --------------------------------------------------------------------------------------------------------- end

    def _end(self, window: _Window, early: str | None = None, discard: str | None = None) -> None:
        """Stop, export and record a window of this thread. `early` lowers its confidence, `discard` drops it."""
        clock = self._agent.clock
        confidence = LOW if early is not None else window.opening.confidence
        reason = window.opening.reason
        if early is not None:
            reason = f"{reason}; ended after {window.steps} of {window.opening.active} steps: {early}"
        trace: str | None = None
        size: int | None = None
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
        # What it cost: its calls, and how much longer its steps took than usual.
        slower_ns = max(0, window.wall_ns - window.steps * self._usual_wall_ns)
        self.budget.charge(window.start_duration_ns + exported_ns - before_ns + slower_ns)
        if size is not None and window.steps:
            self.plan.max_active = self.budget.steps_left(size, window.steps)
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

    def _export(self, window: _Window) -> tuple[str | None, int | None, str | None]:
        """(file name or None, bytes, why it was dropped or None)."""
        folder = self._agent.journal.folder
        if folder is None:
            return None, None, "there is no rank folder"
        path = trace_path(folder)
        size = window.session.export(path)
        if not self.budget.fits(size):
            os.unlink(path)
            return None, size, f"the trace takes {size} bytes, the byte budget left is {self.budget.bytes_left}"
        self.budget.bytes_left -= size
        return os.path.basename(path), size, None

    def _forget(self, window: _Window) -> None:
        if self._window is window:
            self._window = None
        self._asked = None
        self._agent.own_profiler_active = False
        self._agent.steps.window(self._probe.recording > 0)
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
        record: dict[str, Any] = {
            **dict.fromkeys(("trace", "stop_duration_ns", "export_duration_ns", "bytes")),
            "first_step": window.first_step,
            "steps": window.steps,
            "start_ns": window.start_ns,
            "start_duration_ns": window.start_duration_ns,
            "cost_ns": self.budget.last_cost_ns,
            **fields,
        }
        lasted_ns = self._agent.clock.now() - window.start_ns
        self._agent.journal.write("window", window.start_ns, lasted_ns, step=window.first_step, **record)

    # ------------------------------------------------------------------------------------- asked to end from outside

    def _close_here(self, why: str) -> None:
        """Close and keep the window, if one is open that is this thread's."""
        window = self._window
        if window is not None and window.session.thread == threading.get_ident():
            with self._lock:
                if self._is_lost(window):
                    self._drop_lost(window)
                else:
                    self._end(window, early=why)

    def make_room(self, why: str, wait: bool) -> None:
        """The script's own profiler needs the room: close and keep the window before it opens.

        Another thread cannot close it and asks; with `wait` it gives the training thread a bounded time, and then the
        window is given up, untouched: torch replaces its session when the other one starts.
        """
        self._close_here(why)
        window = self._window
        if window is None:
            return
        self._asked = why
        if wait and not self._closed.wait(WAIT_FOR_CLOSE_S):
            with self._lock:
                if self._window is window:
                    self._drop_lost(window)

    def before_fork(self) -> None:
        """A forked loader worker would inherit the session and record, unseen, for as long as it lives."""
        self._close_here("processes were forked")

    def finish(self) -> None:
        """Close and keep an open window, and say why there is none or no better one. Called at the process's end."""
        self._close_here("the process ended")
        if self._first_step_ns is None or self._said is not None or self._best == HIGH:
            return
        if self._best is None or self._why_not is not None:
            self._skip(self._why_not or "no step was fit for a window")
