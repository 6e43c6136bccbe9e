"""Opens torch.profiler for a few steps and keeps what it recorded.

The manager is a step listener: prepare, start, stop and export happen between two steps, on the thread that trains;
what they take is in no step and is written with the window. A plan decides when to open and how long to stay, without
clock, file or profiler; `window_session` talks to torch, the `user_profiler` probe says when the script's own profiler
needs the room. Ends of a window: its steps are done, the script's profiler opens, compilation or evaluation begins,
workers are forked, the process ends.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from dataclasses import dataclass, replace
from sys import getprofile
from threading import get_ident
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any, Sequence

from stepscope.record.agent.agent import Agent
from stepscope.record.agent.guard import Guard
from stepscope.record.agent.probes.loader import LoaderProbe
from stepscope.record.agent.probes.user_profiler import UserProfilerProbe
from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.step_readings import held_bytes
from stepscope.record.agent.window_session import (
    Session,
    anything_enabled,
    begin_here,
    device_in_use,
    in_forked_child,
    quiet_allocator,
    trace_path,
    without_room,
)

if TYPE_CHECKING:
    from stepscope.record.agent.config import WindowConfig

NAME = "window"
FUNCTIONS_TOO_LARGE = "with them the trace took too many bytes"
EXCUSED = "one step, whatever share of the run's time it takes, for there is no window yet"
PROFILE_FUNCTION = "the script has a profile function of its own (sys.setprofile), which recording them would take out"
CALLS_REPLACED = "the script has replaced nn.Module.__call__ by what would end the process in torch's recorder"
COMPILE_DISTANCE = 2  # a recompile often follows the step after a compile (dynamic shapes)
# Another thread's profiler waits so long for the training thread to close our window; longer would look like a hang.
WAIT_FOR_CLOSE_S = 5.0
TOO_LARGE = "more of them would take the trace beyond the byte budget"
# What recording holds says how large the trace becomes. Measured (torch 2.13, Python 3.11): a call of a Python function
# or a generator's resumption holds 24 bytes and takes 270 to 360 as JSON, by its path; operators 0.7 to 0.8 of what
# they hold, with launches and kernels 1.7 to 2.2 times it, reckoned from the events of two traces (torch 2.11).
CALL_BYTES = 24
CALL_JSON_BYTES = 330
OPERATOR_JSON_PER_BYTE, DEVICE_JSON_PER_BYTE = 1, 2
MEMORY_NOISE_BYTES = 64_000_000  # what a training process gains or frees between steps anyway
# A first window beyond the budget is kept up to so many times it: the training has paid for it, and without it there is
# nothing to tell. One of 445 MB was analysed in 5 s of processor time and 761 MiB: 1 GB may take 1.2 GB of memory.
KEPT_TIMES = 3
CALLS, ROUNDS = 20, 5  # that time a recorded call: some 30 KB of trace

HIGH = "high"
LOW = "low"

MIN_ACTIVE = 3  # per-step figures need repeats to tell a habit from an accident
MAX_ACTIVE = 10  # more steps of the same kind add bytes, not knowledge
# About this much training per window: stopping and exporting took 13 times what was traced in a Python-heavy loop.
AIM_NS = 100_000_000
DEVICE_WARMUP = 1  # device tracing starts lazily and drops its first records; CPU tracing has nothing to warm up
LAST_CHANCE_MARGIN = 1  # steps kept free between a last-chance window and the end of the epoch
GIVE_UP_STEPS = 40  # after so many steps a loop will not become steady soon
GIVE_UP_NS = 60_000_000_000
MAX_ATTEMPTS = 4  # windows tried in automatic mode, dropped ones included
MAX_LOW = 1  # low-confidence windows in automatic mode: the next one must be better

# Five steps are the fewest in which one odd step cannot hide a trend: a median of five has two neighbours on each side.
STEADY_STEPS = 5
# Two-thread hosts show 5 to 15 % between equal steps; warm-up (allocator, autotuning, page cache) shows 50 % and more.
STEADY_SPREAD = 0.20
# A loop with stalls never has five quiet steps in a row. Over twelve, the middle half must agree and the newer half
# must not differ from the older one.
NOISY_STEPS = 12
NOISY_QUARTILE_SPREAD = 0.20
NOISY_DRIFT = 0.10
# Few steps that agree this well are worth a look when there may be no more of them.
AGREEING_STEPS = 3
AGREEING_SPREAD = 0.25
# Logging and checkpoint steps take visibly longer than their neighbours.
OUTLIER_RATIO = 1.5


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
    # A forked loader worker would inherit the session and record, unseen, for as long as it lives. The child's handler
    # is guarded by itself: a forked child's agent has been switched off before it runs.
    before = agent.guard.wrap(NAME, lambda: manager.close_here("processes were forked"), inject=False)
    child = Guard(lambda _probe, _error: None).wrap(NAME, in_forked_child, inject=False)
    os.register_at_fork(before=before, after_in_child=child)


# -------------------------------------------------------------------------------------------- when, and how long


@dataclass(frozen=True)
class Boundary:
    """What is known between two steps. `remaining` counts steps left in the loader's epoch; None where unknown."""

    completed: int
    kind: str
    wall_ns: int
    first_batch: bool = False
    compiled: bool = False
    saved: bool = False
    in_window: bool = False
    remaining: int | None = None
    elapsed_ns: int = 0  # since the first step was cut


@dataclass(frozen=True)
class Opening:
    """Open now: `warmup` steps prepared, then `active` steps recorded."""

    warmup: int
    active: int
    confidence: str
    reason: str


class Plan:
    """One window over steady steps; before that at most one of low confidence, for runs that may end first.

    `decide` is told of every step boundary at which a window may open.
    """

    def __init__(self, config: WindowConfig, *, once: bool = False) -> None:
        self._enough = (HIGH, LOW) if once else (HIGH,)  # confidence of a window after which none is wanted
        self.everywhere = config.everywhere
        self.warmup = 0  # DEVICE_WARMUP where a device will be traced as well, unless a schedule gives it
        self.max_active: int | None = None  # set from the bytes an earlier window took
        self._walls: deque[int] = deque(maxlen=NOISY_STEPS)
        self._outlier = False
        self._seen = 0
        self._attempts = 0
        self._low = 0
        self._done = False

    @property
    def over(self) -> bool:
        """Whether no window will be asked for any more."""
        return self._done or self._attempts >= MAX_ATTEMPTS

    def observe(self, at: Boundary) -> None:
        """A step was cut."""
        self._outlier = is_outlier(at.wall_ns, self._walls)
        if at.kind == "train":
            self._seen += 1
            if not (at.first_batch or at.compiled or at.saved or at.in_window):
                self._walls.append(at.wall_ns)

    def decide(self, at: Boundary) -> Opening | None:
        """An `Opening`, or None to go on without a window. `at` is the boundary observed last."""
        # Stacks recorded during compilation are gigabytes.
        if at.compiled or (not self.everywhere and (at.kind != "train" or at.saved)):
            return None
        opening = self._opening(at)
        if opening is None or self.max_active is None or opening.active <= self.max_active:
            return opening
        return replace(opening, active=max(1, self.max_active))

    def opened(self, _at: Boundary) -> None:
        """The window decided on was opened, or given up for a reason outside this plan."""
        self._attempts += 1

    def closed(self, *, kept: bool, confidence: str) -> None:
        """A window that was opened has ended."""
        if kept:
            self._done = self._done or confidence in self._enough
            self._low += 1

    def _opening(self, at: Boundary) -> Opening | None:
        if self.over or (self._outlier and not self.everywhere):
            return None
        walls, remaining = list(self._walls), at.remaining
        aim = AIM_NS // max(1, median(walls)) if walls else MIN_ACTIVE
        usual = active = min(MAX_ACTIVE, max(MIN_ACTIVE, aim))
        if remaining is not None:
            active = max(MIN_ACTIVE, min(active, remaining - self.warmup))
        if (remaining is None or remaining >= self.warmup + active) and is_steady(walls):
            return Opening(self.warmup, active, HIGH, "step time is steady")
        if self._low >= MAX_LOW:
            return None
        if remaining is not None and 1 <= remaining <= self.warmup + MIN_ACTIVE + LAST_CHANCE_MARGIN:
            warmup = self.warmup if remaining > self.warmup + 1 else 0
            active = max(1, min(MIN_ACTIVE, remaining - warmup))
            return Opening(warmup, active, LOW, "the epoch ends before step time was steady")
        if remaining is None and len(walls) >= AGREEING_STEPS and spread(walls[-AGREEING_STEPS:]) <= AGREEING_SPREAD:
            reason = f"{AGREEING_STEPS} steps agree, too few to call step time steady"
        elif walls and (self._seen >= GIVE_UP_STEPS or at.elapsed_ns >= GIVE_UP_NS):
            reason = f"step time was not steady after {self._seen} steps in {at.elapsed_ns / 1e9:.0f} s"
        else:
            return None
        return Opening(self.warmup, usual, LOW, reason)


class SchedulePlan(Plan):
    """As `torch.profiler.schedule`: skip_first, then cycles of wait, warmup and active steps.

    `repeat` cycles, 0 for as long as the run lasts. Whether steps are steady does not matter, nor whether a device is
    in use.
    """

    def __init__(self, config: WindowConfig) -> None:
        super().__init__(config)
        self.warmup = config.warmup
        self._config = config
        self._last_cycle = -1  # the cycle a window was last opened in

    @property
    def over(self) -> bool:
        return 0 < self._config.repeat <= self._last_cycle + 1

    def opened(self, _at: Boundary) -> None:
        self._last_cycle = self._position(_at)[0]

    def _opening(self, at: Boundary) -> Opening | None:
        cycle, position = self._position(at)
        # Later than planned where the planned step compiled or evaluated; a cycle without a fit step is left out.
        if cycle <= self._last_cycle or 0 < self._config.repeat <= cycle or position < self._config.wait:
            return None
        return Opening(self.warmup, max(1, self._config.active), HIGH, "as scheduled")

    def _position(self, at: Boundary) -> tuple[int, int]:
        """(cycle, step in it) of the step that begins; cycle -1 while the first steps are skipped."""
        config = self._config
        return divmod(at.completed - config.skip_first, config.wait + self.warmup + max(1, config.active))


def median(values: Sequence[int]) -> int:
    """The middle value (the lower one of two), without floating point. `values` must not be empty."""
    return sorted(values)[(len(values) - 1) // 2]


def spread(walls: Sequence[int]) -> float:
    """(largest - smallest) / median; infinite for nothing or for a median of zero."""
    middle = median(walls) if walls else 0
    return (max(walls) - min(walls)) / middle if middle > 0 else float("inf")


def is_steady(walls: Sequence[int]) -> bool:
    """True when the newest steps agree, or when many noisy ones show no drift. `walls` is oldest first."""
    if len(walls) >= STEADY_STEPS and spread(walls[-STEADY_STEPS:]) <= STEADY_SPREAD:
        return True
    walls = walls[-NOISY_STEPS:]
    if len(walls) < NOISY_STEPS:
        return False
    ordered, middle = sorted(walls), median(walls)
    quarter, half = len(ordered) // 4, len(walls) // 2
    if middle <= 0 or (ordered[-1 - quarter] - ordered[quarter]) / middle > NOISY_QUARTILE_SPREAD:
        return False
    return abs(median(walls[half:]) - median(walls[:half])) / middle <= NOISY_DRIFT


def call_ns() -> int:
    """What a call of a Python function takes on this thread now, the least of some rounds."""

    def call() -> None:
        pass

    def timed() -> int:
        began = perf_counter_ns()
        for _ in range(CALLS):
            call()
        return perf_counter_ns() - began

    return max(1, min(timed() for _ in range(ROUNDS)) // CALLS)


def is_outlier(wall_ns: int, walls: Sequence[int]) -> bool:
    """True when a step took much longer than the others in `walls` (at least three are needed to say so)."""
    return len(walls) >= AGREEING_STEPS and wall_ns > OUTLIER_RATIO * median(walls)


# ------------------------------------------------------------------------------------------------------- windows


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
    held_bytes: int = 0  # by the process when recording began
    call_ns: int = 0  # what a recorded call of a Python function takes; 0: none are recorded
    most_ns: int | None = None  # of processor time that one of the last steps before it took on this thread
    steps: int = 0
    wall_ns: int = 0
    least_ns: int = 0  # of processor time, of the steps recorded

    def trace_bytes(self, held_bytes: int) -> tuple[int, int]:
        """(operators', Python functions') bytes of the trace as it is, from what the process holds now.

        What was gained would hold `most` calls, and recording them would take processor time: of that, steps took 0.6
        to 1 more where all of it was calls, at most 0.3 where all was operators, on quick and slow machines alike. The
        step with the least counts, and beyond the one with the most before: what makes one step slow is no event.
        """
        gained = max(0, held_bytes - self.held_bytes)
        per_byte = DEVICE_JSON_PER_BYTE if self.session.device else OPERATOR_JSON_PER_BYTE
        operators = per_byte * max(0, gained - MEMORY_NOISE_BYTES)
        if not self.call_ns or self.most_ns is None:
            return operators, 0
        most = gained // CALL_BYTES
        timed = self.steps * max(0, self.least_ns - self.most_ns) // self.call_ns
        return operators, CALL_JSON_BYTES * min(most, max(0, 3 * timed - most))


def _functions_obstacle() -> str | None:
    """Why a session must not record Python functions."""
    if getprofile() is not None:
        return PROFILE_FUNCTION
    code = getattr(sys.modules["torch"].nn.Module.__call__, "__code__", None)
    return None if code is not None and "self" in code.co_varnames[: code.co_argcount] else CALLS_REPLACED


class WindowManager:
    """All windows of a process, within a share of its time and a number of bytes; the first may always be opened."""

    def __init__(self, agent: Agent, probe: UserProfilerProbe) -> None:
        self._agent = agent
        self._probe = probe
        self._config = config = agent.config.window
        self.plan = (SchedulePlan if config.mode == "schedule" else Plan)(config)
        self._began_ns = agent.clock.now()
        self._spent_ns: int | None = None  # what all windows cost so far; None before the first
        self._last_cost_ns = 0
        self._bytes_left = config.byte_budget  # that further traces may take
        self._first_step_ns: int | None = None
        self._window: _Window | None = None
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._asked: str | None = None  # another thread asks for the window to be closed, and why
        self._best: str | None = None  # confidence of the best window kept
        self._why_not: str | None = None
        self._said: str | None = None
        self._usual_wall_ns = 0
        self._imported_torch = get_ident()  # the thread: an import hook starts the agent
        self._memory_asked = False  # the window for what readings of memory leave open was planned
        self._functions = True  # of Python are recorded: until a window with them took too many bytes
        self._processor_ns: deque[int] = deque(maxlen=AGREEING_STEPS)  # of the last steps
        self._processor_at_ns = thread_time_ns()
        self._is_excused = False  # the next window is held to no share of the time
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
        here = self._imported_torch == get_ident() and self._config.memory != "on" and device_in_use() is None
        self._is_apart = here and self._refusal() is None
        if self._is_apart:
            begin_here()

    # ---------------------------------------------------------------------------------------------- step boundaries

    def __call__(self, row: StepRow | None, now_ns: int) -> None:
        """The step listener. A boundary on another thread than the window's is not ours to act on."""
        window = self._window
        if window is not None and window.session.thread != get_ident():
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
            # A call of ours failed: end the session if that is still possible, and never come back to it.
            window = self._window
            if window is not None:
                self._forget(window)
                if window.session.state in ("prepared", "recording") and not self._is_lost(window):
                    window.session.stop()
            raise

    def _processor_time(self) -> int:
        """What this thread took since the last call; a stall of the machine is not in it."""
        before, self._processor_at_ns = self._processor_at_ns, thread_time_ns()
        return self._processor_at_ns - before

    def _consider(self, row: StepRow, now_ns: int) -> None:
        agent, is_auto = self._agent, self._config.mode == "auto"
        self._first_step_ns = self._first_step_ns or now_ns
        if is_auto:
            self.plan.warmup = 0 if device_in_use() is None else DEVICE_WARMUP
        compiled, loader = agent.last_compile_step, agent.probes.get("loader")
        batches = loader.remaining() if isinstance(loader, LoaderProbe) else None
        at = Boundary(
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
        self.plan.observe(at)
        processor_ns = self._processor_time()
        if not at.in_window:
            self._usual_wall_ns = at.wall_ns
            self._processor_ns.append(processor_ns)
        # Whether another window like the last one would stay within the share of the time run so far.
        allowed_ns = self._config.time_share * (now_ns - self._began_ns)
        too_long: str | None = None
        spent_ns = None if self._is_excused else self._spent_ns
        if spent_ns is not None and spent_ns + self._last_cost_ns > allowed_ns:
            too_long = f"another window would exceed {100 * self._config.time_share:.3g} % of the run's time"
            if is_auto:
                self._why_not = too_long
                return
        opening = self.plan.decide(at)
        if opening is not None:
            why = self._refusal() or too_long
            if why is None and (self.plan.max_active == 0 or self._bytes_left < 1):
                why = "the windows' byte budget is used up"
            if why is None or not is_auto:
                self.plan.opened(at)
            if why is None:
                self._open(opening, at)
            else:
                self._skip(why)

    def _refusal(self) -> str | None:
        """Why no profiler of ours may be opened here."""
        if self._agent.guard.is_off("user_profiler"):
            return "the script's own profilers cannot be seen"
        enabled = "another profiler session is enabled" if anything_enabled() else None
        return self._probe.busy() or enabled or without_room()

    def _skip(self, reason: str) -> None:
        self._why_not = reason
        if reason != self._said:
            self._said = reason
            self._agent.journal.write("window_skipped", reason=reason, asked=self._config.mode == "schedule")

    def _open(self, opening: Opening, at: Boundary) -> None:
        agent = self._agent
        with self._lock:
            started_ns = agent.clock.now()
            agent.own_profiler_active = True
            self._asked = None
            self._closed.clear()
            self._spent_ns = self._spent_ns or 0
            device = device_in_use()
            why_none = _functions_obstacle() if self._functions else FUNCTIONS_TOO_LARGE
            stacks = why_none is None
            reason = opening.reason if stacks else f"{opening.reason}; without Python functions: {why_none}"
            if self._is_excused:
                reason, opening, self._is_excused = f"{reason}; {EXCUSED}", replace(opening, confidence=LOW), False
            if self._memory_asked:
                reason = f"{reason}; with allocations: {agent.memory_question}"
            memory = self._config.memory == "on" or self._memory_asked
            apart = self._is_apart is True and device is None
            session = Session(memory=memory, device=device, stacks=stacks, is_apart=apart)
            opening, compiled = replace(opening, reason=reason), agent.last_compile_step
            calls, warmup = self._probe.foreign_calls, opening.warmup
            window = self._window = _Window(session, opening, compiled, calls, warmup, at.completed, started_ns)
            if warmup:
                session.prepare()
            else:
                self._start(window)
            window.start_duration_ns = agent.clock.now() - started_ns
            agent.steps.window(True)

    def _start(self, window: _Window) -> None:
        held_bytes()  # what it imports is not recorded
        window.session.start()
        window.most_ns = max(self._processor_ns, default=None)
        window.call_ns = call_ns() if window.session.stacks else 0
        window.held_bytes = held_bytes()
        self._processor_at_ns = thread_time_ns()

    def _advance(self, window: _Window, row: StepRow | None) -> None:
        with self._lock:
            if self._window is not window:
                return
            if self._is_lost(window):
                self._drop_lost(window)
            elif self._agent.last_compile_step != window.compile_step:
                self._end(window, discard="compilation began inside the window")
            elif row is None:
                return
            elif window.session.state == "recording":
                self._count(window, row)
            elif self._asked is not None:
                self._end(window, early=self._asked)
            else:
                window.warmup_left -= 1
                if window.warmup_left <= 0:
                    window.start_ns = self._agent.clock.now()
                    self._start(window)
                    window.first_step = row.step + 1
                    window.start_duration_ns += self._agent.clock.now() - window.start_ns

    def _count(self, window: _Window, row: StepRow) -> None:
        if row.kind != "train" and not self._config.everywhere:
            self._end(window, early="evaluation began")
            return
        window.steps += 1
        window.wall_ns += row.wall_ns
        processor_ns = self._processor_time()
        window.least_ns = min(window.least_ns or processor_ns, processor_ns)
        if window.steps >= window.opening.active:
            self._end(window)
        elif self._asked is not None:
            self._end(window, early=self._asked)
        elif self._is_full(window):
            self._end(window, early=TOO_LARGE)

    def _is_full(self, window: _Window) -> bool:
        """Whether one more step would not fit. One step may take longer for a reason of its own: its time alone ends no
        window that would still be kept.
        """
        operators, functions = window.trace_bytes(held_bytes())
        if window.steps == 1:
            functions //= KEPT_TIMES
        return (operators + functions) * (window.steps + 1) > self._bytes_left * window.steps

    def _is_lost(self, window: _Window) -> bool:
        return window.foreign_calls != self._probe.foreign_calls or not window.session.alive()

    # --------------------------------------------------------------------------------------------------------- end

    def _end(self, window: _Window, early: str | None = None, discard: str | None = None) -> None:
        """Stop, export and record a window of this thread. `early` lowers its confidence, but not where its steps are
        enough and more would be too large; `discard` drops it.
        """
        clock = self._agent.clock
        confidence, reason = window.opening.confidence, window.opening.reason
        if early is not None:
            if early != TOO_LARGE or window.steps < MIN_ACTIVE:
                confidence = LOW
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
        self._last_cost_ns = window.start_duration_ns + exported_ns - before_ns + slower_ns
        self._spent_ns = (self._spent_ns or 0) + self._last_cost_ns
        if size is not None and window.steps:  # how many steps the bytes left will hold, going by this trace
            self.plan.max_active = max(0, self._bytes_left) * window.steps // max(1, size)
            if discard is not None and self._best is None and window.session.stacks:
                # No window at all is the worst there is to tell: one step, which takes less than what was dropped.
                self._functions, self._is_excused, self.plan.max_active = False, True, 1
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
            reason=discard or reason,
            status="kept" if kept else "dropped",
        )

    def _export(self, window: _Window) -> tuple[str | None, int | None, str | None]:
        """(file name or None, bytes, why it was dropped or None)."""
        folder = self._agent.journal.folder
        if folder is None:
            return None, None, "there is no rank folder"
        path = trace_path(folder)
        size = window.session.export(path)
        if size > self._bytes_left * (KEPT_TIMES if self._best is None else 1):
            os.unlink(path)
            return None, size, f"the trace takes {size} bytes, the byte budget left is {self._bytes_left}"
        self._bytes_left -= size
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

    def _record(self, window: _Window, **fields: Any) -> None:
        record: dict[str, Any] = {
            **dict.fromkeys(("trace", "stop_duration_ns", "export_duration_ns", "bytes")),
            "first_step": window.first_step,
            "steps": window.steps,
            "start_ns": window.start_ns,
            "start_duration_ns": window.start_duration_ns,
            "cost_ns": self._last_cost_ns,
            **fields,
        }
        lasted_ns = self._agent.clock.now() - window.start_ns
        self._agent.journal.write("window", window.start_ns, lasted_ns, step=window.first_step, **record)

    def close_here(self, why: str) -> None:
        """Close and keep the window, if one is open that is this thread's."""
        window = self._window
        if window is not None and window.session.thread == get_ident():
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
        self.close_here(why)
        window = self._window
        if window is None:
            return
        self._asked = why
        if wait and not self._closed.wait(WAIT_FOR_CLOSE_S):
            with self._lock:
                if self._window is window:
                    self._drop_lost(window)

    def finish(self) -> None:
        """Close and keep an open window, and say why there is none or no better one. Called at the process's end."""
        self.close_here("the process ended")
        if self._first_step_ns is None or self._said is not None or self._best == HIGH:
            return
        if self._best is None or self._why_not is not None:
            self._skip(self._why_not or "no step was fit for a window")
