"""Stacks from inside, for machines where no other process may look in: a thread reads `sys._current_frames()`.

It starts only when a `sampler-fallback` file of the launcher's, or of a notebook, is there, at most 50 times a second
with jitter, sums equal stacks in memory and writes them every few seconds in py-spy's raw grammar, with a file of times
beside them. Whether a thread waits cannot be told from inside, so every sample counts as wall time.
"""

from __future__ import annotations

import _thread
import atexit
import json
import os
import random
import sys
import threading
import time
from types import CodeType
from typing import TYPE_CHECKING, Any, Callable, Tuple

from stepscope.record.agent.config import Config
from stepscope.record.agent.guard import Guard
from stepscope.record.agent.journal import append_line, masked_command, write_whole
from stepscope.record.agent.masking import mask_text
from stepscope.record.agent.segments import StepRow

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent

MARKER = "sampler-fallback"
HIGHEST_HZ = 50  # every sample holds the interpreter lock while it walks all threads
SEGMENT_SECONDS = 5.0
SUSPENDED_POLL_SECONDS = 0.5
DEEPEST_STACK = 400
MOST_STACKS = 20_000  # distinct stacks per segment; beyond it the segment ends early
MOST_STRETCHES = 20_000  # per segment; beyond it the segment's file of times is left out
TIMES_SCHEMA = "stepscope.times/1"
_FIRST_LOOK_NS = 500_000_000
_LONGEST_LOOK_NS = 30_000_000_000
_ENDING_S, _ENDING_LOOKS = 50e-6, 10_000  # how often it is looked whether the thread has ended, no clock being asked

Stack = Tuple[int, Tuple[Tuple[CodeType, int], ...]]  # thread ident; (code, line) from the root
Stretch = Tuple[int, int, int]  # position of the stack in the segment's file, start and end in ns

_sampler: FallbackSampler | None = None


def attach(agent: Agent) -> None:
    """Called once by the agent: start sampling now, or as soon as the launcher asks for it."""
    if maybe_start(agent):
        return
    pause_ns, next_ns = _FIRST_LOOK_NS, agent.clock.now()

    def look(_row: StepRow | None, now_ns: int) -> None:  # ever more rarely: refusals show in the first seconds
        nonlocal pause_ns, next_ns
        if now_ns >= next_ns:
            pause_ns = min(pause_ns * 3 // 2, _LONGEST_LOOK_NS)
            next_ns = now_ns + pause_ns
            maybe_start(agent)

    agent.add_step_listener(look, "sampler")


def maybe_start(agent: Agent) -> bool:
    """Start the sampler when the launcher's marker file is there; returns whether one runs. Cheap to call again."""
    global _sampler
    if _sampler is not None:
        return True
    if not os.path.exists(os.path.join(agent.config.host_dir, MARKER)):
        return False

    # Busy while a profiler, ours or the user's, is recording: our thread must not show up in it.
    _sampler = FallbackSampler(
        agent.config,
        agent.clock.now,
        lambda: agent.probes.suspended or agent.own_profiler_active or agent.user_profiler_active,
        agent.guard,
    )
    _sampler.start()
    agent.probes.add(_sampler)
    agent.add_finish_hook(_end, "sampler")
    return True


def _end() -> None:
    """Recording ends, the process may go on: what is pending is written, and the next recording has its own sampler."""
    global _sampler
    sampler, _sampler = _sampler, None
    if sampler is not None:
        sampler.stop()


class Stretches:
    """When each thread stood in which stack, from samples. A change is put half-way between the two that show it."""

    def __init__(self, started_ns: int) -> None:
        self._open: dict[int, tuple[int, int]] = {}  # thread ident -> position of its stack, start
        self._closed: list[Stretch] = []
        self._last_ns = started_ns  # of the last sample
        self.full = False

    def add(self, positions: dict[int, int], now_ns: int) -> None:
        """A sample of all threads: the position of each one's stack in the file."""
        edge_ns = (self._last_ns + now_ns) // 2
        for ident, (position, start_ns) in list(self._open.items()):
            if positions.get(ident) != position:
                self._close(ident, position, start_ns, edge_ns)
        for ident, position in positions.items():
            if ident not in self._open:
                self._open[ident] = (position, edge_ns)
        self._last_ns = now_ns

    def interrupt(self, end_ns: int) -> None:
        """No samples for a while: what threads stood in is not known beyond `end_ns`."""
        for ident, (position, start_ns) in list(self._open.items()):
            self._close(ident, position, start_ns, max(start_ns, end_ns))
        self._last_ns = end_ns

    def resume(self, now_ns: int) -> None:
        """Samples follow from `now_ns` on."""
        if not self._open:
            self._last_ns = now_ns

    def text(self, started_ns: int, ended_ns: int) -> str | None:
        """The file of times, None where there is none."""
        self.interrupt(ended_ns)
        if self.full or not self._closed:
            return None
        record, starts_ns, ends_ns = zip(*self._closed)
        columns = {
            "record": record,
            "start_us": [(start_ns - started_ns) // 1000 for start_ns in starts_ns],
            "end_us": [(end_ns - started_ns) // 1000 for end_ns in ends_ns],
        }
        value = {"schema": TIMES_SCHEMA, "start_ns": started_ns, "stretches": columns}
        return json.dumps(value, separators=(",", ":")) + "\n"

    def _close(self, ident: int, position: int, start_ns: int, end_ns: int) -> None:
        del self._open[ident]
        self.full = self.full or len(self._closed) >= MOST_STRETCHES
        if not self.full:
            self._closed.append((position, start_ns, end_ns))


class FallbackSampler:
    """Samples all Python threads of this process. `busy()` tells when to hold still; `now()` is the run's clock.

    In children made by `multiprocessing` it starts anew, with files of its own. It stands among the probes: while the
    user's profiler records stacks its thread is gone, for the stack of a thread at rest would be recorded too.
    """

    name = "sampler"

    def __init__(
        self, config: Config, now: Callable[[], int], busy: Callable[[], bool], guard: Guard | None = None
    ) -> None:
        self._config, self._now, self._busy = config, now, busy
        self._guard = guard or Guard(lambda _probe, _error: None, config.faults)
        self._rate_hz = max(1, min(config.sampler_hz, HIGHEST_HZ))
        self._lock = threading.Lock()  # around the segment under way: the thread samples, the exit flushes
        self._thread: int | None = None
        self._is_running = False
        self._stopping = False
        self._end = threading.Event()  # ends the thread, not the sampler
        self._number = 0
        self._reset()

    def start(self) -> None:
        """Begin, in this process and in those that `multiprocessing` forks from it."""
        from multiprocessing.util import register_after_fork  # torch has imported it already

        self.install()
        atexit.register(self._guard.wrap("sampler", self.stop, inject=False))
        register_after_fork(self, FallbackSampler._restart)

    def stop(self) -> None:
        """Write what is pending and sample no more."""
        self._stopping = True
        self._flush()

    def install(self) -> None:
        """Start the thread, which ends with the process, or go on after `uninstall`."""
        if self._stopping or self._is_running:
            return
        self._pid = os.getpid()
        self._end.clear()
        # None of `threading`'s: a script may join all that this lists, or wait until it is alone.
        self._thread = _thread.start_new_thread(self._guard.wrap("sampler", self._run), ())
        self._is_running = True

    def uninstall(self) -> None:
        """End the thread; it is gone when this returns, unless it hangs in a write."""
        self._end.set()
        for _ in range(_ENDING_LOOKS):
            if not self._is_running or self._thread == threading.get_ident():
                break
            time.sleep(_ENDING_S)
            self._is_running = self._thread in sys._current_frames()

    def _restart(self) -> None:
        """In a multiprocessing child, before its target: the thread is gone, and what it summed is the parent's."""
        from multiprocessing.util import Finalize

        if self._stopping:  # recording had ended before the fork
            return
        # There is no journal to report to in a child; its sampler just ends.
        self._guard = Guard(lambda _probe, _error: None, self._config.faults)
        self._lock, self._end, self._is_running = threading.Lock(), threading.Event(), False
        self._number, self._busy = 0, lambda: False
        self._reset()
        self._guard.wrap("sampler", self.install, inject=False)()
        Finalize(None, self._guard.wrap("sampler", self.stop, inject=False), exitpriority=100)

    def _reset(self) -> None:
        self._counts: dict[Stack, int] = {}
        self._positions: dict[Stack, int] = {}
        self._names: dict[int, str] = {}
        self._started_ns = self._now()
        self._stretches = Stretches(self._started_ns)

    def _run(self) -> None:
        interval = 1.0 / self._rate_hz
        segment_ns = int(SEGMENT_SECONDS * 1e9)
        while not self._stopping and not self._end.is_set():
            if self._busy():
                with self._lock:
                    self._stretches.interrupt(self._now())
                self._end.wait(SUSPENDED_POLL_SECONDS)
                continue
            self._stretches.resume(self._now())
            # Jitter, so that a loop of the same period is not always met at the same place.
            self._end.wait(interval * _random.uniform(0.5, 1.5))
            with self._lock:
                if not self._stopping and not self._end.is_set() and not self._busy():
                    self._sample()
            if self._now() - self._started_ns >= segment_ns or len(self._counts) >= MOST_STACKS:
                self._flush()

    def _sample(self) -> None:
        frames = sys._current_frames()
        now_ns = self._now()
        frames.pop(threading.get_ident(), None)
        positions: dict[int, int] = {}
        for ident, frame in frames.items():
            stack: list[tuple[CodeType, int]] = []
            current: Any = frame
            while current is not None and len(stack) < DEEPEST_STACK:
                stack.append((current.f_code, current.f_lineno or 0))
                current = current.f_back
            key = (ident, tuple(reversed(stack)))
            self._counts[key] = self._counts.get(key, 0) + 1
            positions[ident] = self._positions.setdefault(key, len(self._positions))
        self._stretches.add(positions, now_ns)
        for thread in threading.enumerate():
            if thread.ident is not None and thread.ident not in self._names:
                name = mask_text(thread.name[:200]).replace("\n", " ")
                self._names[thread.ident] = f"thread ({thread.native_id or thread.ident}): {name}"

    def _flush(self) -> None:
        """Write the segment and begin the next."""
        with self._lock:
            counts, names = self._counts, self._names
            started_ns, ended_ns, number = self._started_ns, self._now(), self._number
            stretches = self._stretches
            self._reset()
            if not counts:
                return
            self._number += 1
        stem = f"stacks-{self._pid}-{number}"
        path = os.path.join(self._config.host_dir, stem)
        times = stretches.text(started_ns, ended_ns)
        has_times = times is not None and write_whole(path + ".times.json", times)
        process = 'process {}:"{}"'.format(self._pid, " ".join(masked_command()).replace("\n", " "))
        lines = []
        for (ident, stack), count in counts.items():
            frames = [
                f"{getattr(code, 'co_qualname', code.co_name)} ({code.co_filename}{f':{line}' if line else ''})"
                for code, line in stack
            ]
            lines.append(";".join([process, names.get(ident) or f"thread ({ident:#x})", *frames]) + f" {count}\n")
        if not write_whole(path + ".raw", "".join(lines)):
            return
        row: dict[str, Any] = {
            "segment": number, "file": stem + ".raw", "source": "agent", "pid": self._pid, "start_ns": started_ns,
            "end_ns": ended_ns, "rate_hz": float(self._rate_hz), "idle": True, "blocking": True,
            "samples": sum(counts.values()), "errors": 0, "status": "ok", "message": None,
        }  # fmt: skip
        if has_times:
            row["times"] = stem + ".times.json"
        append_line(os.path.join(self._config.host_dir, "stacks.jsonl"), row)


_random = random.Random(os.urandom(8))  # the user's generator is not ours to advance
