"""The step breakdown of the TensorBoard plugin, and its rows as that plugin printed them.

A moment of a step counts for the first part that covers it, in the order of PLUGIN_PARTS, over all threads and devices;
what nothing covers is Other. Unlike the plugin's, parts always sum to the step; runtime calls, loaders and collectives
count under every name that writers of traces have given them.
"""

from __future__ import annotations

from typing import Any

from stepscope.engine import intervals
from stepscope.engine.collective_names import is_backend_range
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL, Work
from stepscope.engine.host_activity import LOADER_RANGE, matches
from stepscope.engine.intervals import Intervals
from stepscope.engine.spans import Span
from stepscope.engine.step_windows import StepWindows
from stepscope.model.views import PLUGIN_PARTS, Overview
from stepscope.tables import categories
from stepscope.tables.arrays import Int64

NS_PER_US = 1000
# Shown only where the trace has something of the kind.
_DEVICE_ONLY = ("Kernel", "Memcpy", "Memset", "Runtime")


def plugin_lengths(span: Span, found: Work, windows: StepWindows) -> Int64:
    """ns by step and part, shape (steps, len(PLUGIN_PARTS)); rows sum to the step."""
    return intervals.partition_lengths(windows.start_ns, windows.end_ns, _sets(span, found))


def _sets(span: Span, found: Work) -> list[Intervals]:
    """In the order of PLUGIN_PARTS, without Other."""
    names = span.names
    host = ~span.on_device
    operators = host & span.categories.where(categories.OPERATORS)
    ranges = operators | (host & span.categories.where([categories.ANNOTATION]))
    loader = ranges & names.pick(matches(LOADER_RANGE, names.values).tolist())
    collective = ranges & names.pick([is_backend_range(name) for name in names.values])
    steps = names.pick(matches("^ProfilerStep#", names.values).tolist())

    def times(rows: Any) -> Intervals:
        return intervals.union(span.start_ns[rows], span.ends(rows))

    return [
        found.covered(KERNEL),
        found.covered(COPY),
        found.covered(FILL),
        intervals.merge(found.covered(COMMUNICATION), times(collective)),
        times(span.is_runtime & host),
        times(loader),
        times(operators & ~loader & ~collective & ~steps),
    ]


def plugin_rows(overview: Overview) -> dict[str, Any]:
    """The overview as the plugin's page held it, in whole µs (and percent of the step with two digits).

    Keys: `average_step_us`, `partition_us` and `partition_pct` by part, `steps` with `step` and the parts of each.
    Parts of devices and of communication are left out where the trace has none.
    """
    seen = {part for part in PLUGIN_PARTS if any(step.plugin_ns[part] for step in overview.steps)}
    device = bool(seen.intersection(_DEVICE_ONLY))
    absent = set() if device else set(_DEVICE_ONLY)
    if "Communication" not in seen:
        absent.add("Communication")
    parts = [part for part in PLUGIN_PARTS if part not in absent]
    mean = overview.wall.mean_ns
    return {
        "average_step_us": _us(mean),
        "partition_us": {part: _us(overview.plugin[part].mean_ns) for part in parts},
        "partition_pct": {
            part: round(100 * overview.plugin[part].mean_ns / mean, 2) if mean else 0.0 for part in parts
        },
        "steps": [
            {"step": step.step, **{part: _us(step.plugin_ns[part]) for part in parts}} for step in overview.steps
        ],
    }


def _us(time_ns: float) -> int:
    return round(time_ns / NS_PER_US)
