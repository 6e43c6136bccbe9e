"""What is read at the edges of steps: page faults, device time, a framework's own number of the step, memory.

Page faults: a counter is read where an event may be an edge, and kept under the time of the event. The step cutter
knows times alone, so whatever it decides, and however late, a step has the faults between the readings at its two
edges, or null.
Counted are the faults of all threads: operators touch new memory in torch's pool. A reading takes a microsecond.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Callable, Sequence

from stepscope.record.agent.config import of_standard_library
from stepscope.record.agent.segments import StepRow

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.guard import Guard
    from stepscope.record.agent.journal import Journal

resource = of_standard_library("resource")
# Readings nobody asked for, of fetches that are no edges or wait to be judged; undecided edges are far fewer.
READINGS_LIMIT = 4096


class PageFaults:
    """The readings, by time. `counter` gives `ru_minflt` and `ru_majflt`; `fed`: a loader was asked for this step."""

    def __init__(self, clock: Callable[[], int], counter: Callable[[], Any] | None = None) -> None:
        self._clock = clock
        self._count = counter or partial(resource.getrusage, resource.RUSAGE_SELF)
        self._readings: dict[int, Any] = {}
        self.fed = False

    def note(self, now: int) -> None:
        """Read the counter at `now`, a moment that may turn out to be an edge."""
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


# Steps the device may run behind the host before edges are left out; bounds the events held.
PENDING_LIMIT = 256
# How often it is asked which edges the device has reached: a question to the driver, and a write, for many steps.
ASKED_EVERY_NS = 100_000_000
# An edge takes some 10 us of the host, and steps with one cannot be cut late: of steps below this, some are enough.
SHORT_NS = 10_000_000


class DeviceTimer:
    """Records an edge per step and writes `device_step` {steps, device_ns}, lists, once the device has reached them.

    Of short steps one is timed in `ASKED_EVERY_NS`.
    """

    def __init__(self, guard: Guard, journal: Journal, is_paused: Callable[[], bool]) -> None:
        self._journal = journal
        self._is_paused = is_paused
        self._last: tuple[int, Any] | None = None  # (end of the step before the edge, event)
        self._pending: deque[tuple[int, Any, Any]] = deque()
        self._spare: list[Any] = []
        self._asked_ns = 0
        self._due_ns = 0  # steps that end before have no edge
        build = getattr(sys.modules.get("torch"), "version", None)
        self.possible = bool(getattr(build, "cuda", None) or getattr(build, "hip", None))
        self.step_edge = guard.wrap("device", self._step_edge)
        self.drain = guard.wrap("device", self._drain)

    @property
    def in_use(self) -> bool:
        """Whether the process uses a device of which edges are recorded; never initialises one."""
        if not self.possible:
            return False
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        return cuda is not None and bool(cuda.is_initialized())

    def wants(self, now_ns: int) -> bool:
        """Whether the next step must be cut right where it ends, for an edge."""
        return now_ns >= self._due_ns and self.in_use

    def _step_edge(self, row: StepRow) -> None:
        """Record the edge at the end of `row`; its device time is known when the edge before ended the step before."""
        end = row.start_ns + row.wall_ns
        cuda: Any = sys.modules["torch"].cuda if self.in_use and not self._is_paused() else None
        if cuda is None or end < self._due_ns or cuda.is_current_stream_capturing():
            self._last = None
            return
        if end - self._asked_ns >= ASKED_EVERY_NS or len(self._pending) >= PENDING_LIMIT // 2:
            self._asked_ns = end
            self._drain()
        if len(self._pending) >= PENDING_LIMIT:
            self._last = None
            return
        event = self._spare.pop() if self._spare else cuda.Event(enable_timing=True)
        event.record()
        if self._last is not None and abs(row.start_ns - self._last[0]) < min(1_000_000, row.wall_ns // 2):
            self._pending.append((row.step, self._last[1], event))
            if row.wall_ns < SHORT_NS:
                self._due_ns = end + ASKED_EVERY_NS
        self._last = (end, event)

    def _drain(self) -> None:
        """Write what the device has finished; never waits."""
        steps, device_ns = [], []
        while self._pending and self._pending[0][2].query():
            step, first, second = self._pending.popleft()
            steps.append(step)
            device_ns.append(int(first.elapsed_time(second) * 1e6))
            self._spare.append(first)
        if steps:
            self._journal.write("device_step", step=steps[-1], steps=steps, device_ns=device_ns)


NEVER = 1 << 62
KEPT = 2_000  # readings; a row is written long before so many steps have passed


class FrameworkSteps:
    """Readings of one counter at a time; None before `begin`, after `end` and where it cannot be read."""

    def __init__(self, guard: Guard) -> None:
        # A switch of its own: where the number cannot be read, fetches and rows go on.
        self.sample = guard.wrap("framework_steps", self._sample)
        self.filled = guard.wrap("framework_steps", self._filled)
        self._read: Callable[[], int | None] | None = None
        self._begun = False
        # One entry per value: when it was read first and last, the value, and the training it is of (0: of none).
        self._firsts = [0]
        self._lasts = [NEVER]
        self._values: list[int | None] = [None]
        self._trainings = [0]
        self._training = 0
        self._trained = 0  # the latest training that a training step was written of

    def begin(self, read: Callable[[], int | None], begun: bool, now: int) -> None:
        """A training begins, whose number `read` returns; `begun`: its counter counts steps when they begin."""
        self._training += 1
        self._append(now, now, None, self._training)
        self._read, self._begun = read, begun

    def end(self, now: int) -> None:
        """The training is over."""
        self.sample(now)
        self._read = None
        self._append(now + 1, NEVER, None, 0)

    def _sample(self, now: int) -> None:
        """Read the number: at a fetch or a backward pass, before it is told to the step cutter."""
        read = self._read
        if read is None:
            return
        value = read()
        if value == self._values[-1]:
            self._lasts[-1] = now
        else:
            self._append(now, now, value, self._training)

    def _filled(self, row: StepRow, now: int) -> StepRow:
        """`row` with its number. Steps of evaluation before the first training step of a training have none."""
        end = row.start_ns + row.wall_ns
        if end > self._lasts[-1]:
            if not row.fetches:
                return row  # cut where its optimizer ended: the framework has not counted it yet
            self._sample(max(now, end))
        index = bisect_left(self._firsts, end) - 1 if self._begun else bisect_left(self._lasts, end)
        started = self._trainings[bisect_right(self._firsts, row.start_ns) - 1]
        if started:  # a training's last step may end only where the next loop begins: it is the one it began in
            while self._trainings[index] != started:
                index -= 1
        if row.kind == "train":
            self._trained = max(self._trained, self._trainings[index])
        value = self._values[index] if self._trained == self._trainings[index] else None
        return row if value is None else row._replace(framework_step=value)

    def _append(self, first: int, last: int, value: int | None, training: int) -> None:
        if self._lasts[-1] >= first:
            self._lasts[-1] = max(first - 1, self._firsts[-1])
        self._firsts.append(first)
        self._lasts.append(last)
        self._values.append(value)
        self._trainings.append(training)
        if len(self._values) > KEPT:
            for column in (self._firsts, self._lasts, self._values, self._trainings):
                del column[: KEPT // 2]


def reader(owner: Any, path: str) -> Callable[[], int | None]:
    """Reads the whole number at `path` from `owner`, which is not kept alive: None where there is none, as on a device.

    A number in a tensor on the CPU is read through the memory it shares with NumPy: no operator of torch runs.
    """
    get, living = attrgetter(path), weakref.ref(owner)
    views: dict[int, tuple[Any, Any]] = {}

    def read() -> int | None:
        try:
            value = get(living())
        except AttributeError:
            return None
        if value.__class__ is int:
            return int(value)
        tensor = getattr(value, "_value", value)  # of a Keras variable
        if id(tensor) not in views:
            if getattr(getattr(tensor, "device", None), "type", None) != "cpu" or tensor.numel() != 1:
                return None
            views.clear()
            views[id(tensor)] = tensor, tensor.detach().numpy()
        return int(views[id(tensor)][1])

    return read


def held_bytes() -> int:
    """What the process has from malloc and not given back; its resident memory where glibc does not tell.

    Resident memory hides what goes into holes of the heap. Read in 3 to 30 us, 2 ms where the heap has 100,000.
    """
    told = _mallinfo()
    if told is not None:
        info = told()
        if info.uordblks:  # 0: another allocator is in its place
            return int(info.uordblks + info.hblkhd)
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


@functools.lru_cache(maxsize=None)
def _mallinfo() -> Any | None:
    """`mallinfo2` of glibc 2.33 and later."""
    import ctypes

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    told = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if told is not None:
        told.restype = type("", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names.split()]})
    return told


NAME = "memory_log"
DEVICE_NAME = "device_memory"  # of the part that asks torch: it may be switched off alone
# As `diagnose.memory.MEMORY` has it for a rise that is told of: fewer bytes are an arena that fills, or a cache.
HOST_GROWN_BYTES, DEVICE_GROWN_BYTES = 64 << 20, 16 << 20
GROWTH_READINGS, FIFTHS = 10, 5
NEARLY_FULL = 0.8  # of what this process may have of the device, at the peak of a step
EVERY_NS = 1_000_000_000
RARER = 100  # after a time, one reading per hundredth of it: some 900 in a day


def attach(agent: Agent) -> None:
    """Add readings of memory to `agent`."""
    agent.add_step_listener(MemoryLog(agent), NAME)


class MemoryLog:
    """A step listener; a call that is not due costs a comparison."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._began_ns = agent.clock.now()
        self._due_ns = 0
        self._judge = Question()
        self._read_device = agent.guard.wrap(DEVICE_NAME, lambda: device_memory() if agent.device.in_use else None)

    def __call__(self, row: StepRow | None, now_ns: int) -> None:
        if now_ns < self._due_ns or row is None or row.kind != "train":
            return
        agent = self._agent
        if agent.own_profiler_active or agent.user_profiler_active:
            return  # what a profiler holds for its trace is not the training's
        self._due_ns = now_ns + max(EVERY_NS, (now_ns - self._began_ns) // RARER)
        fields = {**host_memory(), **(self._read_device() or {})}
        if fields:
            agent.journal.write("memory", now_ns, step=row.step, **fields)
            agent.memory_question = agent.memory_question or self._judge.asked(fields)


class Question:
    """What readings leave open: which lines allocate what memory grows by, or what fills it.

    A cheap look at what `analyze.memory_losses` judges by all readings: it decides whether a window is worth its cost.
    """

    def __init__(self) -> None:
        self._device: deque[int] = deque(maxlen=GROWTH_READINGS)
        self._host: deque[int] = deque(maxlen=GROWTH_READINGS)

    def asked(self, fields: dict[str, Any]) -> str | None:
        """Take in a reading; the question once there is one."""
        allocated, total = fields.get("allocated_bytes"), fields.get("total_bytes")
        if allocated is not None:
            self._device.append(allocated)
        if "private_bytes" in fields:
            self._host.append(fields["private_bytes"] + fields.get("shared_bytes", 0))
        if grows(self._device, DEVICE_GROWN_BYTES):
            return "memory of the device grows"
        if grows(self._host, HOST_GROWN_BYTES):
            return "memory of the process grows"
        peak = fields.get("peak_allocated_bytes")
        if peak is not None and total and peak > NEARLY_FULL * total * fields.get("fraction", 1.0):
            return "memory of the device is nearly full"
        return None


def grows(readings: Sequence[int], least: int) -> bool:
    """Whether each fifth of the readings lies above the one before, and the last by `least` above the first."""
    if len(readings) < GROWTH_READINGS:
        return False
    of_fifth, known = len(readings) // FIFTHS, list(readings)
    means = [sum(known[at * of_fifth : (at + 1) * of_fifth]) / of_fifth for at in range(FIFTHS)]
    return means[-1] - means[0] >= least and all(later > earlier for earlier, later in zip(means, means[1:]))


def host_memory() -> dict[str, int]:
    """`private_bytes` and `shared_bytes` of this process; {} where /proc does not tell them."""
    try:
        with open("/proc/self/status", "rb") as file:
            text = file.read()
    except OSError:
        return {}
    fields = {"private_bytes": rb"\nRssAnon:\s*(\d+)", "shared_bytes": rb"\nRssShmem:\s*(\d+)"}
    found = {name: re.search(pattern, text) for name, pattern in fields.items()}
    return {name: int(match.group(1)) * 1024 for name, match in found.items() if match is not None}


def device_memory() -> dict[str, Any]:
    """What `torch.cuda` says of its current device; {} while a graph is captured, without what this torch lacks."""
    cuda: Any = sys.modules["torch"].cuda
    if cuda.is_current_stream_capturing():
        return {}
    index = cuda.current_device()
    stats = cuda.memory_stats_as_nested_dict(index)
    free, total = cuda.mem_get_info(index)
    allocated, reserved = (stats.get(kind, {}).get("all", {}) for kind in ("allocated_bytes", "reserved_bytes"))
    figures = {
        "free_bytes": free,
        "total_bytes": total,
        "allocated_bytes": allocated.get("current"),
        "peak_allocated_bytes": allocated.get("peak"),
        "reserved_bytes": reserved.get("current"),
        "peak_reserved_bytes": reserved.get("peak"),
        "retries": stats.get("num_alloc_retries"),
        "out_of_memory": stats.get("num_ooms"),
    }
    fields: dict[str, Any] = {name: int(value) for name, value in figures.items() if value is not None}
    fraction = getattr(cuda, "get_per_process_memory_fraction", None)
    if fraction is not None:
        fields["fraction"] = float(fraction(index))
    name = str(cuda.get_device_properties(index).name)[:80]
    return {"device": f"cuda:{index}", "device_name": name, **fields}
