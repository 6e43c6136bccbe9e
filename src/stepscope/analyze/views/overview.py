"""The steps of each trace and where their time goes: the TensorBoard plugin's breakdown, and ours.

Every moment of a step counts once in either, for the first part that covers it, so both sum to the step exactly. In the
plugin's, over all threads and devices, runtime calls, loaders and collectives count under every name that writers of
traces have given them. In ours, of a trace without device work the same is asked of the host alone, by other names:
time of a host without a device is no idle time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stepscope.analyze.views.communication import computation, on_host
from stepscope.engine import intervals
from stepscope.engine.collective_names import is_backend_range, is_collective_call
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL, Work, work
from stepscope.engine.host_activity import LOADER_RANGE, HostActivity, host_activity
from stepscope.engine.intervals import Intervals
from stepscope.engine.scene import trace_steps
from stepscope.engine.spans import Base, Span
from stepscope.model.views import (
    DEVICE,
    DEVICE_PARTS,
    HOST,
    HOST_PARTS,
    IDLE_PARTS,
    PLUGIN_PARTS,
    Overview,
    StepBreakdown,
    Summary,
)
from stepscope.tables import categories
from stepscope.tables.arrays import Int64


def overviews(base: Base) -> tuple[Overview, ...]:
    """One per trace; none of a trace in which nothing takes time."""
    found = (_overview(span) for span in base.spans)
    return tuple(one for one in found if one is not None)


def _overview(span: Span) -> Overview | None:
    found = work(span)
    windows = trace_steps(span, found)
    wall = windows.end_ns - windows.start_ns
    if not wall.sum():
        return None
    plugin = intervals.partition_lengths(windows.start_ns, windows.end_ns, _plugin_sets(span, found))
    host = host_activity(span, found)
    sets = _device_sets(found, host) if len(found) else _host_sets(span, found, host)
    parts = (*DEVICE_PARTS, *IDLE_PARTS) if len(found) else tuple(HOST_PARTS)
    own = intervals.partition_lengths(windows.start_ns, windows.end_ns, list(sets.values()))
    order = list(sets)  # the one part without a set is what none covers
    own = own[:, [order.index(part) if part in sets else len(order) for part in parts]]
    steps = tuple(
        StepBreakdown(
            step=name,
            start_ns=int(windows.start_ns[i]),
            wall_ns=int(wall[i]),
            plugin_ns=dict(zip(PLUGIN_PARTS, plugin[i].tolist(), strict=True)),
            parts_ns=dict(zip(parts, own[i].tolist(), strict=True)),
        )
        for i, name in enumerate(windows.names)
    )
    return Overview(
        span=span.ref,
        steps=steps,
        wall=_summary(wall, wall),
        plugin={part: _summary(plugin[:, i], wall) for i, part in enumerate(PLUGIN_PARTS)},
        parts={part: _summary(own[:, i], wall) for i, part in enumerate(parts)},
        dropped_steps=windows.dropped,
        has_steps=windows.has_steps,
        basis=DEVICE if len(found) else HOST,
    )


def _summary(lengths: Int64, wall: Int64) -> Summary:
    """Over the steps. `wall` sums to more than 0."""
    median, p95 = np.percentile(lengths, [50, 95])
    total = int(lengths.sum())
    return Summary(total / len(lengths), float(median), float(p95), total / int(wall.sum()))


NS_PER_US = 1000
# Shown only where the trace has something of the kind.
_DEVICE_ONLY = ("Kernel", "Memcpy", "Memset", "Runtime")


def _plugin_sets(span: Span, found: Work) -> list[Intervals]:
    names = span.names
    host = ~span.on_device
    operators = host & span.categories.where(categories.OPERATORS)
    ranges = operators | (host & span.categories.where([categories.ANNOTATION]))
    loader = ranges & names.like(LOADER_RANGE)
    collective = ranges & names.pick([is_backend_range(name) for name in names.values])
    return [
        found.covered(KERNEL),
        found.covered(COPY),
        found.covered(FILL),
        intervals.merge(found.covered(COMMUNICATION), span.times(collective)),
        span.times(span.is_runtime & host),
        span.times(loader),
        span.times(operators & ~loader & ~collective & ~names.like("^ProfilerStep#")),
    ]


def plugin_rows(overview: Overview) -> dict[str, Any]:
    """The overview as the plugin's page held it, in whole µs (and percent of the step with two digits).

    Keys: `average_step_us`, `partition_us` and `partition_pct` by part, `steps` with `step` and the parts of each.
    Parts of devices and of communication are left out where the trace has none.
    """
    seen = {part for part in PLUGIN_PARTS if any(step.plugin_ns[part] for step in overview.steps)}
    absent = {"Communication"} - seen | (set() if seen.intersection(_DEVICE_ONLY) else set(_DEVICE_ONLY))
    parts = [part for part in PLUGIN_PARTS if part not in absent]
    mean = overview.wall.mean_ns
    return {
        "average_step_us": round(mean / NS_PER_US),
        "partition_us": {part: round(overview.plugin[part].mean_ns / NS_PER_US) for part in parts},
        "partition_pct": {
            part: round(100 * overview.plugin[part].mean_ns / mean, 2) if mean else 0.0 for part in parts
        },
        "steps": [
            {"step": step.step, **{part: round(step.plugin_ns[part] / NS_PER_US) for part in parts}}
            for step in overview.steps
        ],
    }


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
    # collectives of all threads: gloo runs them beside the training thread
    alone = intervals.subtract(span.times(on_host(span, is_collective_call)), computation(span, found))
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
