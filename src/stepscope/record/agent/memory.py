"""How much memory this process has resident: now, and at most so far."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections import deque
from typing import Any, Sequence

from stepscope.record.agent.agent import Agent
from stepscope.record.agent.segments import StepRow


def resident_bytes() -> int:
    """Resident memory of this process; 0 where /proc does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def peak_resident_bytes() -> int:
    """The most memory this process ever had resident (ru_maxrss is in KiB on Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
