"""Collectives of one rank: calls, sizes, bandwidth, and how much of their time nothing else hides.

What the devices compute hides communication; in a trace without work of a device, what the host's operators compute. A
moment in which several collectives run is exposed once: it belongs to the one that began first, kernels before what ran
on the host. So the exposed time of all kernels is the length of the set that `analyze.device` calls exposed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepscope.analyze.views.collective_calls import Calls, Message, calls, on_host
from stepscope.engine import collective_names as words
from stepscope.engine import intervals, tree
from stepscope.engine.device_work import FILL, KERNEL, Work, work
from stepscope.engine.intervals import Intervals
from stepscope.engine.spans import Base, Span
from stepscope.model.views import CollectiveRow
from stepscope.tables.arrays import Bools, Int64, own_starts

NO_COLLECTIVES = "no trace holds a collective: one process alone, or none ran while recording"
ONLY_CALLED = (
    "collectives were called, but no work of a device was recorded for them: a group of one rank, or record with "
    "ProfilerActivity.CUDA"
)
_NS_PER_S = 1e9


def collectives(base: Base) -> tuple[CollectiveRow, ...]:
    """A row for each kind, group, data type and size of message in each trace, by trace and falling time."""
    rows: list[CollectiveRow] = []
    for span in base.spans:
        rows += sorted(_rows(span), key=lambda row: (-row.total_ns, row.name, row.message_bytes or 0))
    return tuple(rows)


def why_absent(base: Base) -> str | None:
    """Why `collectives` gives no row; None where it gives some."""
    if any(len(calls(span, work(span))) for span in base.spans):
        return None
    called = any(on_host(span, words.is_collective_call).any() for span in base.spans)
    return ONLY_CALLED if called else NO_COLLECTIVES


def computation(span: Span, work: Work) -> Intervals:
    """When something was computed: kernels and fills of the devices, or operators of the host without a device."""
    if len(work):
        return work.covered(KERNEL, FILL)
    operators = span.is_operator & ~_of_collectives(span)
    return intervals.union(span.start_ns[operators], span.ends(operators))


def _of_collectives(span: Span) -> Bools:
    """Host slices that call a collective, lie in such a call, or hold one: none of them computes."""
    flags = on_host(span, words.is_collective_call)
    if not flags.any():
        return flags
    inside = tree.nearest(span.parent, flags) >= 0
    return inside | tree.above(span.parent, np.flatnonzero(flags))


def _rows(span: Span) -> Iterator[CollectiveRow]:
    done = work(span)
    found = calls(span, done)
    if not len(found):
        return
    compute = computation(span, done)
    lengths = found.end_ns - found.start_ns
    overlapped = intervals.covered(compute, found.start_ns, found.end_ns)
    exposed = exposures(found, compute)
    for code, message in enumerate(found.messages):
        own = found.message == code
        yield _row(span, message, lengths[own], int(overlapped[own].sum()), int(exposed[own].sum()))


def exposures(found: Calls, compute: Intervals) -> Int64:
    """Of each call the time in which neither anything was computed nor an earlier collective ran, ns."""
    result = np.zeros(len(found), np.int64)
    busy = compute
    for own in (found.on_device, ~found.on_device):
        rows = np.flatnonzero(own)
        rows = rows[np.argsort(found.start_ns[rows], kind="stable")]
        starts, ends = found.start_ns[rows], found.end_ns[rows]
        if not len(rows):
            continue
        begins = own_starts(starts, ends)
        ends = np.maximum(ends, begins)
        result[rows] = ends - begins - intervals.covered(busy, begins, ends)
        busy = intervals.merge(busy, intervals.union(starts, ends))
    return result


def _row(span: Span, message: Message, lengths: Int64, overlapped_ns: int, exposed_ns: int) -> CollectiveRow:
    count, total_ns = len(lengths), int(lengths.sum())
    group = message.group
    algorithm = bus = None
    if message.bytes and total_ns:
        algorithm = message.bytes * count * _NS_PER_S / total_ns
        factor = words.bus_factor(message.kind, group.size) if group is not None and group.size else None
        bus = algorithm * factor if factor is not None else None
    return CollectiveRow(
        span=span.ref,
        name=message.kind,
        library=message.library,
        group=group.name if group is not None else None,
        group_size=group.size if group is not None else None,
        dtype=message.dtype,
        message_bytes=message.bytes,
        calls=count,
        total_bytes=message.bytes * count if message.bytes is not None else None,
        total_ns=total_ns,
        mean_ns=total_ns / count,
        min_ns=int(lengths.min()),
        max_ns=int(lengths.max()),
        overlapped_ns=overlapped_ns,
        exposed_ns=exposed_ns,
        algorithm_bytes_per_s=algorithm,
        bus_bytes_per_s=bus,
    )
