"""The steps of each trace and where their time goes: the TensorBoard plugin's breakdown, and ours.

Every moment of a step counts once in either, for the first part that covers it, so both sum to the step exactly. In the
plugin's, over all threads and devices, runtime calls, loaders and collectives count under every name that writers of
traces have given them. In ours, of a trace without device work the same is asked of the host alone, by other names:
time of a host without a device is no idle time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze.views.communication import computation, on_host
from stepscope.analyze.views.kernels import eligible, judged, plugin_tensor_cores, uses_tensor_cores
from stepscope.engine import intervals
from stepscope.engine.collective_names import is_backend_range, is_collective_call
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL, Work, by_device, work
from stepscope.engine.intervals import Intervals
from stepscope.engine.scene import LOADER_RANGE, host_activity, trace_steps
from stepscope.engine.spans import Base, Span
from stepscope.model.trace import GpuProperties
from stepscope.model.views import (
    DEVICE,
    DEVICE_PARTS,
    HOST,
    HOST_PARTS,
    IDLE_PARTS,
    PLUGIN_PARTS,
    Counter,
    GpuSummary,
    Overview,
    StepBreakdown,
    Summary,
)
from stepscope.tables import categories
from stepscope.tables.arrays import Bools, Floats, Int64, has_ancestor


def overviews(base: Base) -> tuple[Overview, ...]:
    """One per trace; none of a trace in which nothing takes time."""
    return tuple(filter(None, map(_overview, base.spans)))


def _overview(span: Span) -> Overview | None:
    found = work(span)
    windows = trace_steps(span, found)
    wall = windows.end_ns - windows.start_ns
    if not wall.sum():
        return None
    plugin = intervals.partition_lengths(windows.start_ns, windows.end_ns, _plugin_sets(span, found))
    host = host_activity(span, found)
    if len(found):  # in the order of precedence, as below
        # a compilation that waits for its benchmark compiles; an operator that launches launches
        sets = {
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
    else:
        # an operator that holds a collective and computes nothing meanwhile communicates; collectives of all threads:
        # gloo runs them beside the training thread
        alone = intervals.subtract(span.times(on_host(span, is_collective_call)), computation(span, found))
        kinds = ("convolution", "attention", "matmul", "normalization", "copies")
        sets = {
            "host_data": host.data,
            "host_compile": host.compiling,
            "host_optimizer": host.optimizer,
            **{f"host_{kind}": host.kind(kind) for kind in kinds},
            "host_communication": alone,
            "host_operators": host.computing,
            "host_io": host.io,
            "host_python": host.python,
        }
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


def summaries(base: Base, overviews: Sequence[Overview]) -> tuple[GpuSummary, ...]:
    """One per trace and device that ran a kernel, in order of span and device; none of a trace without overview.

    They are of kernels alone, clipped to the time from the first step's start to the last one's end. Their figures come
    from what the writer noted at each launch (grid, registers, shared memory), not from counters of the device.
    """
    by_span = {overview.span: overview for overview in overviews}
    return tuple(summary for span in base.spans if span.ref in by_span for summary in _of_span(span, by_span[span.ref]))


def _sm_pct(span: Span, rows: Int64, edges_ns: Int64) -> Floats | None:
    """Percent of the multiprocessors that these kernels give a block to, between each two times; None without grids."""
    blocks = _floats(span, "blocks_per_sm", rows)
    known = blocks > 0
    if not known.any():
        return None
    rows = rows[known]
    # one kernel with a block for each is all there is, whatever runs beside it
    return 100 * mean_load(span.start_ns[rows], span.ends(rows), np.minimum(blocks[known], 1.0), edges_ns, limit=1.0)


def _percent(ns: Int64, flags: Bools, among: Bools | None = None) -> float | None:
    """The flagged kernels' part of the time of all, or of those `among`; None where these take none."""
    total = int(ns.sum() if among is None else ns[among].sum())
    return 100 * int(ns[flags].sum()) / total if total else None


def _of_span(span: Span, overview: Overview) -> Iterator[GpuSummary]:
    found = work(span)
    start = overview.steps[0].start_ns
    end = overview.steps[-1].start_ns + overview.steps[-1].wall_ns
    below_eligible = has_ancestor(
        span.parent, found.operator, span.names.pick(eligible(span.names.values)) & span.is_operator
    )
    for device, own in by_device(found).items():
        chosen = np.flatnonzero(own & found.is_kernel)
        if not len(chosen):
            continue
        rows, starts, ends = found.rows[chosen], found.start_ns[chosen], found.end_ns[chosen]
        inside = np.maximum(np.minimum(ends, end) - np.maximum(starts, start), 0)
        busy = intervals.total(intervals.clip(intervals.union(starts, ends), start, end))
        sm = _sm_pct(span, rows, np.asarray([start, end]))
        occupancy = _floats(span, "occupancy_percent", rows)
        occupied = np.where(np.isfinite(occupancy), inside, 0)  # a missing one does not count
        mean = float((np.nan_to_num(occupancy) * occupied).sum() / max(int(occupied.sum()), 1))
        yield GpuSummary(
            span=span.ref,
            gpu=span.gpus.get(device) or GpuProperties(device, None, None, None, None, None, None),
            window_ns=end - start,
            utilization_pct=100 * busy / (end - start),
            sm_efficiency_pct=None if sm is None else float(sm[0]),
            achieved_occupancy_pct=mean if occupied.any() else None,
            tensor_core_pct=_percent(inside, judged(span.names, rows, uses_tensor_cores)),
            tensor_core_plugin_pct=_percent(inside, judged(span.names, rows, plugin_tensor_cores)),
            kernels=int((inside > 0).sum()),
            tensor_core_eligible_pct=_percent(inside, below_eligible[chosen], found.operator[chosen] >= 0),
        )


def _floats(span: Span, column: str, rows: Int64) -> Floats:
    """A column's values at rows; nan where the writer gave none."""
    values: Floats = span.events[column].cast(pl.Float64).fill_null(math.nan).to_numpy()
    return values[rows]


MAX_BUCKETS = 250
MAX_BYTES_PER_NS = 1e7  # a copy that claims more is a damaged record
# metric -> unit, in the order shown
UNITS = {
    "utilization_pct": "%",
    "sm_efficiency_pct": "%",
    "queue_length": "launches",
    "copy_bytes_per_s": "bytes/s",
}
_NS_PER_S = 1e9


def counters(base: Base) -> tuple[Counter, ...]:
    """By span, device and metric; a metric that the trace has no source for is left out.

    Buckets are 1, 2 or 5 times a power of ten ns, few enough to draw. A value is the mean over its bucket; the last one
    may be shorter, and is a mean over what it holds.
    """
    made = []
    for span in base.spans:
        found = work(span)
        windows = trace_steps(span, found)
        start = int(np.concatenate([found.start_ns, windows.start_ns]).min(initial=np.iinfo(np.int64).max))
        end = int(np.concatenate([found.end_ns, windows.end_ns]).max(initial=0))
        if not len(found) or end <= start:
            continue
        sizes = (factor * int(10**power) for power in itertools.count() for factor in (1, 2, 5))
        bucket = next(size for size in sizes if -(-(end - start) // size) <= MAX_BUCKETS)
        edges = np.append(np.arange(start, end, bucket, dtype=np.int64), end)
        for device, own in by_device(found).items():
            for metric, values in _of_device(span, found, own, edges):
                about = (span.ref, device, metric, UNITS[metric], start, end, bucket)
                made.append(Counter(*about, tuple(values.tolist())))
    return tuple(made)


def _of_device(span: Span, found: Work, own: Bools, edges: Int64) -> Iterator[tuple[str, Floats]]:
    kernels = own & found.is_kernel
    if kernels.any():
        busy = intervals.covered(intervals.union(found.start_ns[kernels], found.end_ns[kernels]), edges[:-1], edges[1:])
        yield "utilization_pct", 100 * busy / np.diff(edges)
        sm = _sm_pct(span, found.rows[kernels], edges)
        if sm is not None:
            yield "sm_efficiency_pct", sm
    launched = np.flatnonzero(own & (found.launch >= 0))
    if len(launched):  # launches whose first slice on the device has not begun
        launched = launched[np.lexsort((found.start_ns[launched], found.launch[launched]))]
        launch, first = np.unique(found.launch[launched], return_index=True)  # a graph is one launch of many kernels
        begun = found.start_ns[launched[first]]
        yield "queue_length", mean_load(span.start_ns[launch], begun, np.ones(len(launch)), edges)
    size = span.column("bytes", found.rows)
    copies = np.flatnonzero(own & (found.kind == COPY) & (size > 0))
    if len(copies):  # bytes per ns, each copy's spread evenly over its time
        starts = found.start_ns[copies]
        lasting = np.maximum(found.end_ns[copies] - starts, 1)
        rates = np.minimum(size[copies] / lasting, MAX_BYTES_PER_NS)
        yield "copy_bytes_per_s", _NS_PER_S * mean_load(starts, starts + lasting, rates, edges)


_FIXED = 1_000_000_000  # amounts are summed as whole billionths: what was added goes away again exactly


def mean_load(start_ns: Int64, end_ns: Int64, amount: Floats, edges_ns: Int64, *, limit: float | None = None) -> Floats:
    """The mean load between each two times, of slices that each add `amount` (at most a billion) from start to end.

    Their sum is never above `limit`. No two of the times are the same.
    """
    lasting = end_ns > start_ns
    starts, ends = start_ns[lasting], end_ns[lasting]
    if not len(starts):
        return np.zeros(len(edges_ns) - 1)
    origin = int(starts.min())
    fixed = np.rint(amount[lasting] * _FIXED).astype(np.int64)
    times = np.concatenate([starts, ends]) - origin
    order = np.argsort(times, kind="stable")
    times = times[order]
    level = np.cumsum(np.concatenate([fixed, -fixed])[order])[:-1] / _FIXED
    if limit is not None:
        np.minimum(level, limit, out=level)
    integral = np.concatenate([[0.0], np.cumsum(level * np.diff(times))])
    until: Floats = np.interp((edges_ns - origin).astype(np.float64), times.astype(np.float64), integral)
    means: Floats = np.diff(until) / np.diff(edges_ns)
    return means
