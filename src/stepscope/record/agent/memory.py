"""How much memory this process has resident: now, and at most so far."""

from __future__ import annotations

import os
import resource
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.record.agent.agent import Agent
    from stepscope.record.agent.steps import StepRow


def resident_bytes() -> int:
    """Resident memory of this process; 0 where /proc does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def peak_resident_bytes() -> int:
    """The most memory this process ever had resident (ru_maxrss is in KiB on Linux, in bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


NAME = "memory_log"
DEVICE_NAME = "device_memory"  # of the part that asks torch: it may be switched off alone
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
        self._read_device = agent.guard.wrap(DEVICE_NAME, self._device)

    def __call__(self, row: StepRow | None, now_ns: int) -> None:
        if now_ns < self._due_ns or row is None or row.kind != "train":
            return
        agent = self._agent
        if agent.own_profiler_active or agent.user_profiler_active:
            return  # what a profiler holds for its trace is not the training's
        self._due_ns = now_ns + max(EVERY_NS, (now_ns - self._began_ns) // RARER)
        fields = {**host_memory(), **(self._read_device() or {})}
        if fields:
            agent.events.write("memory", now_ns, step=row.step, **fields)

    def _device(self) -> dict[str, Any]:
        """Of the current device; {} where none is in use, or a graph is captured."""
        if not self._agent.device.in_use:
            return {}
        cuda: Any = sys.modules["torch"].cuda
        return {} if cuda.is_current_stream_capturing() else device_memory(cuda)


def host_memory() -> dict[str, int]:
    """`private_bytes` and `shared_bytes` of this process; {} where /proc does not tell them."""
    try:
        with open("/proc/self/status", "rb") as file:
            text = file.read()
    except OSError:
        return {}
    found = {}
    for name, field in (("private_bytes", b"\nRssAnon:"), ("shared_bytes", b"\nRssShmem:")):
        at = text.find(field)
        words = text[at + len(field) : at + len(field) + 40].split() if at >= 0 else []
        if words and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def device_memory(cuda: Any) -> dict[str, Any]:
    """What `torch.cuda` says of its current device; figures that this torch does not have are left out."""
    index = cuda.current_device()
    stats = cuda.memory_stats_as_nested_dict(index)
    free, total = cuda.mem_get_info(index)
    fields: dict[str, Any] = {
        "device": f"cuda:{index}",
        "device_name": str(cuda.get_device_properties(index).name)[:80],
        "free_bytes": int(free),
        "total_bytes": int(total),
    }
    for name, kind, when in (
        ("allocated_bytes", "allocated_bytes", "current"),
        ("peak_allocated_bytes", "allocated_bytes", "peak"),
        ("reserved_bytes", "reserved_bytes", "current"),
        ("peak_reserved_bytes", "reserved_bytes", "peak"),
    ):
        value = stats.get(kind, {}).get("all", {}).get(when)
        if value is not None:
            fields[name] = int(value)
    for name, key in (("retries", "num_alloc_retries"), ("out_of_memory", "num_ooms")):
        if stats.get(key) is not None:
            fields[name] = int(stats[key])
    fraction = getattr(cuda, "get_per_process_memory_fraction", None)
    if fraction is not None:
        fields["fraction"] = float(fraction(index))
    return fields
