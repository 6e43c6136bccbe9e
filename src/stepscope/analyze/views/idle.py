"""Our own partition of steps: what the devices did, and what the host did while they were idle.

Every moment of a step counts once, for the first set that covers it. Of a trace without device work the same is asked
of the host alone, by other names: time of a host without a device is no idle time.
"""

from __future__ import annotations

from stepscope.analyze.views.communication import computation
from stepscope.engine import intervals
from stepscope.engine.collective_names import is_collective_call
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL, Work
from stepscope.engine.host_activity import HostActivity, host_activity
from stepscope.engine.intervals import Intervals
from stepscope.engine.spans import Span
from stepscope.engine.step_windows import StepWindows
from stepscope.model.views import DEVICE, DEVICE_PARTS, HOST, HOST_PARTS, IDLE_PARTS
from stepscope.tables import categories
from stepscope.tables.arrays import Int64


def own_lengths(span: Span, found: Work, windows: StepWindows) -> tuple[str, tuple[str, ...], Int64]:
    """(basis, parts, ns by step and part); rows sum to the step."""
    host = host_activity(span, found)
    if len(found):
        return DEVICE, *_lengths(windows, _device_sets(found, host), (*DEVICE_PARTS, *IDLE_PARTS))
    return HOST, *_lengths(windows, _host_sets(span, found, host), tuple(HOST_PARTS))


def _lengths(windows: StepWindows, sets: dict[str, Intervals], parts: tuple[str, ...]) -> tuple[tuple[str, ...], Int64]:
    """(parts, ns by step and part): the one part without a set is what none covers."""
    lengths = intervals.partition_lengths(windows.start_ns, windows.end_ns, list(sets.values()))
    order = list(sets)
    return parts, lengths[:, [order.index(part) if part in sets else len(order) for part in parts]]


def _device_sets(found: Work, host: HostActivity) -> dict[str, Intervals]:
    """In the order of precedence: a compilation that waits for its benchmark compiles; an operator that launches
    launches."""
    return {
        "compute": found.covered(KERNEL, FILL),
        "exposed_communication": found.covered(COMMUNICATION),
        "exposed_copies": found.covered(COPY),
        "idle_data": host.data,
        "idle_compile": host.compiling,
        "idle_sync": host.synchronizing,
        "idle_allocator": host.allocating,
        "idle_launch": host.launching,
        "idle_io": host.io,
        "idle_operators": host.operators,
        "idle_python": host.python,
    }


def _host_sets(span: Span, found: Work, host: HostActivity) -> dict[str, Intervals]:
    """In the order of precedence: an operator that holds a collective and computes nothing meanwhile communicates."""
    alone = intervals.subtract(_collectives(span), computation(span, found))
    return {
        "host_data": host.data,
        "host_compile": host.compiling,
        "host_optimizer": host.optimizer,
        "host_convolution": host.kind("convolution"),
        "host_attention": host.kind("attention"),
        "host_matmul": host.kind("matmul"),
        "host_normalization": host.kind("normalization"),
        "host_copies": host.kind("copies"),
        "host_communication": alone,
        "host_operators": host.computing,
        "host_io": host.io,
        "host_python": host.python,
    }


def _collectives(span: Span) -> Intervals:
    """Collectives of all threads: gloo runs them beside the training thread."""
    ranges = span.categories.where([categories.ANNOTATION, *categories.OPERATORS]) & ~span.on_device
    rows = ranges & span.names.pick([is_collective_call(name) for name in span.names.values])
    return intervals.union(span.start_ns[rows], span.ends(rows))
