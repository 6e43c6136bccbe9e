"""Figures of each device over time: utilisation, SM efficiency, queue length, copy bandwidth.

Time is cut into buckets of 1, 2 or 5 times a power of ten ns, few enough to draw. A value is the mean over its bucket;
the last bucket may be shorter than the others and is a mean over what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepscope.analyze.views.device_load import Load, load
from stepscope.analyze.views.gpus import sm_load
from stepscope.engine import intervals
from stepscope.engine.device_work import COPY, Work, by_device, work
from stepscope.engine.spans import Base, Span
from stepscope.engine.step_windows import step_windows
from stepscope.model.views import Counter
from stepscope.tables.arrays import Bools, Floats, Int64

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
    """By span, device and metric; a metric that the trace has no source for is left out."""
    return tuple(counter for span in base.spans for counter in _of_span(span))


def _of_span(span: Span) -> Iterator[Counter]:
    found = work(span)
    if not len(found):
        return
    windows = step_windows(span, found)
    start = min(int(found.start_ns.min()), *windows.start_ns.tolist())
    end = max(int(found.end_ns.max()), *windows.end_ns.tolist())
    if end <= start:
        return
    bucket = bucket_ns(end - start)
    edges = np.append(np.arange(start, end, bucket, dtype=np.int64), end)
    for device, own in by_device(found).items():
        for metric, values in _of_device(span, found, own, edges):
            yield Counter(span.ref, device, metric, UNITS[metric], start, end, bucket, tuple(values.tolist()))


def bucket_ns(length_ns: int, most: int = MAX_BUCKETS) -> int:
    """The smallest bucket of 1, 2 or 5 times a power of ten that cuts this length into at most `most`."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if -(-length_ns // (size * factor)) <= most:
                return size * factor
        size *= 10


def _of_device(span: Span, found: Work, own: Bools, edges: Int64) -> Iterator[tuple[str, Floats]]:
    kernels = own & found.is_kernel
    if kernels.any():
        busy = intervals.covered(intervals.union(found.start_ns[kernels], found.end_ns[kernels]), edges[:-1], edges[1:])
        yield "utilization_pct", 100 * busy / np.diff(edges)
        sm = sm_load(span, found.rows[kernels])
        if sm is not None:
            yield "sm_efficiency_pct", 100 * sm.mean(edges)
    queued = _queued(span, found, own)
    if queued is not None:
        yield "queue_length", queued.mean(edges)
    copied = _copied(span, found, own)
    if copied is not None:
        yield "copy_bytes_per_s", _NS_PER_S * copied.mean(edges)


def _queued(span: Span, found: Work, own: Bools) -> Load | None:
    """Launches whose first slice on the device has not begun; None where no launch is in the trace."""
    chosen = np.flatnonzero(own & (found.launch >= 0))
    if not len(chosen):
        return None
    chosen = chosen[np.lexsort((found.start_ns[chosen], found.launch[chosen]))]
    launch, first = np.unique(found.launch[chosen], return_index=True)  # a graph is one launch of many kernels
    return load(span.start_ns[launch], found.start_ns[chosen[first]], np.ones(len(launch)))


def _copied(span: Span, found: Work, own: Bools) -> Load | None:
    """Bytes per ns of copies, each spread evenly over its time; None where no copy says its size."""
    chosen = np.flatnonzero(own & (found.kind == COPY))
    size = span.column("bytes", found.rows[chosen])
    chosen, size = chosen[size > 0], size[size > 0]
    if not len(chosen):
        return None
    starts = found.start_ns[chosen]
    lasting = np.maximum(found.end_ns[chosen] - starts, 1)
    return load(starts, starts + lasting, np.minimum(size / lasting, MAX_BYTES_PER_NS))
