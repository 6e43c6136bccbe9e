"""Which operator, and which slice at all, was running on the thread when memory was allocated or released."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.views.memory_device import DeviceMemory, sums
from stepscope.engine.spans import Span
from stepscope.engine.tree import climb, upward
from stepscope.model.memory import MemoryOperator
from stepscope.tables.arrays import NONE, Int64


class Around(Struct, frozen=True):
    """For each row of `span.memory` the row of the innermost operator or function around it, and of the innermost
    operator; `NONE` where there is none.
    """

    slice: Int64
    operator: Int64


def around(span: Span) -> Around:
    """What runs on the thread of each row of `span.memory` at its time; a slice's end is no longer inside."""
    memory = span.memory
    innermost = np.full(memory.height, NONE, np.int64)
    codes = {track: code for code, track in enumerate(span.tracks.values)}
    tracks = memory["track"].replace_strict(codes, default=NONE, return_dtype=pl.Int64).fill_null(NONE).to_numpy()
    times = memory["time_ns"].to_numpy()
    relevant = (span.is_operator | span.is_function) & ~span.on_device
    for code in np.unique(tracks[tracks >= 0]).tolist():
        rows = np.flatnonzero((span.tracks.codes == code) & relevant)
        own = np.flatnonzero(tracks == code)
        innermost[own] = _innermost(span, rows, times[own])
    operator = climb(span.parent, innermost, span.is_operator)
    return Around(innermost, operator)


def _innermost(span: Span, rows: Int64, times: Int64) -> Int64:
    """The innermost of `rows`, all of one track, around each time."""
    if not len(rows):
        return np.full(len(times), NONE, np.int64)
    starts = span.start_ns[rows]
    if not (np.diff(starts) > 0).all():
        depths = span.series("depth").gather(rows).fill_null(0).to_numpy()
        order = np.lexsort((depths, starts))
        rows, starts = rows[order], starts[order]
    place = np.searchsorted(starts, times, side="right") - 1
    # the last to begin is innermost, unless it has ended: then one around it is
    node = np.where(place >= 0, rows[np.maximum(place, 0)], NONE)
    relevant = np.zeros(len(span), bool)
    relevant[rows] = True
    return climb(span.parent, node, lambda at, which: relevant[at] & (span.ends(at) > times[which]))


def by_operator(span: Span, device: DeviceMemory, operator: Int64) -> Iterator[MemoryOperator]:
    """What each operator did to the memory of a device, the most allocated first.

    Args:
        operator: the row of the innermost operator around each event of the device, `NONE` outside all.
    """
    positive = np.maximum(device.sizes, 0)
    counts = (device.sizes > 0).astype(np.int64)
    peak = np.zeros(len(operator), np.int64)
    if device.pairs is not None and device.at_peak is not None:
        standing = device.pairs.allocation[device.at_peak]
        peak[standing] = device.sizes[standing]
    rows, group = np.unique(operator, return_inverse=True)
    columns = [sums(group, values, len(rows)) for values in (positive, device.sizes, counts, peak)]
    codes = np.where(rows >= 0, span.names.codes[rows], NONE)
    own = _by_name(codes, columns)
    of, names = _ancestors(span, rows)
    total = _by_name(names, [column[of] for column in columns])
    calls = np.bincount(span.names.codes[span.is_operator] + 1, minlength=len(span.names.values) + 1)
    zero = (0, 0, 0, 0)
    found = []
    for code, whole in total.items():
        allocated, increase, allocations, at_peak = own.get(code, zero)
        if not any((*whole, allocated, increase)):
            continue
        found.append(
            MemoryOperator(
                name=span.names.values[code] if code >= 0 else None,
                device=device.device,
                calls=int(calls[code + 1]) if code >= 0 else 0,
                allocations=allocations,
                self_allocated_bytes=allocated,
                total_allocated_bytes=whole[0],
                self_increase_bytes=increase,
                total_increase_bytes=whole[1],
                total_allocations=whole[2],
                at_peak_bytes=at_peak if device.pairs is not None else None,
                source=device.source,
                worker=device.worker,
                span=device.span,
            )
        )
    yield from sorted(found, key=lambda row: (-row.self_allocated_bytes, -row.total_allocated_bytes, row.name or ""))


def _by_name(codes: Int64, columns: list[Int64]) -> dict[int, tuple[int, int, int, int]]:
    """The sums of four columns by code of a name."""
    names, group = np.unique(codes, return_inverse=True)
    added = [sums(group, column, len(names)).tolist() for column in columns]
    return {
        int(code): (allocated, increase, allocations, at_peak)
        for code, allocated, increase, allocations, at_peak in zip(names.tolist(), *added, strict=True)
    }


def _ancestors(span: Span, rows: Int64) -> tuple[Int64, Int64]:
    """(index in `rows`, code of a name) once for every name among each row and the operators around it."""
    width = len(span.names.values) + 1
    keys = [np.flatnonzero(rows < 0) * width]  # outside all operators: a name of its own, code NONE
    for which, at in upward(span.parent, rows):
        operators = span.is_operator[at]
        keys.append(which[operators] * width + span.names.codes[at[operators]] + 1)
    distinct = np.unique(np.concatenate(keys))
    return distinct // width, distinct % width - 1
