"""Copies that nothing hides: from the host, by how they were made, and within or between devices."""

from __future__ import annotations

import numpy as np

from stepscope.analyze.device_losses.idle import IN, Idle
from stepscope.analyze.device_losses.pieces import Piece, piece
from stepscope.engine import intervals
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL
from stepscope.engine.intervals import Intervals
from stepscope.tables.arrays import Bools, Int64

WITHIN, BETWEEN = ("DtoD", "DeviceToDevice"), ("PtoP", "PeerToPeer")


def from_host(idle: Idle) -> Piece:
    """Copies from the host that nothing hides, what the device idles because the host waits for them, and pinning.

    PyTorch waits behind a copy unless it was told `non_blocking=True`, so the wait, or its absence, tells the argument.
    Some writers (AMD's) do not tell the kind of memory.
    """
    scene = idle.scene
    found, span = scene.found, scene.span
    slices = idle.copies(IN)
    slices = slices[(scene.step_of(found.start_ns[slices]) >= 0) & ~idle.operations.work[slices]]
    others = intervals.merge(found.covered(KERNEL, FILL, COMMUNICATION), _copies_but(idle, slices))
    starts, ends = found.start_ns[slices], found.end_ns[slices]
    exposed = intervals.subtract(intervals.union(starts, ends), others)
    shown = intervals.covered(exposed, starts, ends)
    rows = found.launch[slices]
    waited = np.zeros(len(slices), np.int64)
    at, hit = _awaited(idle, rows)
    first = np.flatnonzero(hit)[np.unique(at[hit], return_index=True)[1]]
    waited[first] = idle.waits_in.idle_ns[at[first]]
    pageable, pinned = (
        span.names.pick([kind in name for name in span.names.values])[found.rows[slices]]
        for kind in ("Pageable", "Pinned")
    )
    size = np.maximum(span.column("bytes", found.rows[slices]), 0)
    weights = shown + waited
    synced = _synced(idle, rows)
    pinning = intervals.intersect(idle.pinning, scene.inside)
    pinned_ns = intervals.covered(pinning, span.start_ns[idle.pin_rows], span.ends(idle.pin_rows))
    details = {
        "copied_ns": float((ends - starts).sum()),
        "copied_bytes": float(size.sum()),
        "pageable_copies": float(pageable.sum()),
        "blocking_copies": float(hit.sum()),
        "exposed_ns": float(shown.sum()),
        "idle_ns": float(waited.sum()),
        "pageable_ns": float(weights[pageable & synced].sum()),
        "unpinned_async_ns": float(weights[pageable & ~synced].sum()),
        "pinned_blocking_ns": float(weights[pinned & synced].sum()),
        "pinned_async_ns": float(weights[pinned & ~synced].sum()),
        "untold_ns": float(weights[~pageable & ~pinned].sum()),
        "pinning_ns": float(intervals.total(pinning)),
    }
    times = intervals.merge(exposed, intervals.intersect(idle.waits_in.idle, scene.inside), pinning)
    rows, weights = np.concatenate([rows, idle.pin_rows]), np.concatenate([weights, pinned_ns])
    named = np.concatenate([found.rows[slices], idle.pin_rows])
    kept = np.concatenate([np.ones(len(slices), bool), pinned_ns > 0])
    return piece(scene, times, rows[kept], weights[kept], named[kept], details)


def _awaited(idle: Idle, launches: Int64) -> tuple[Int64, Bools]:
    """For each launch of a copy the first wait behind its start, and whether the same operator waits there."""
    span, waits = idle.scene.span, idle.waits_in.times
    rows = np.maximum(launches, 0)
    around = span.parent[rows]
    inside = (around >= 0) & span.is_operator[np.maximum(around, 0)]
    ends = np.where(inside, span.ends(np.maximum(around, 0)), span.ends(rows))
    at = np.searchsorted(waits.ends, span.start_ns[rows], side="right")
    hit = (launches >= 0) & (at < len(waits.starts))
    hit[hit] = waits.starts[at[hit]] < ends[hit]
    return at, hit


def _synced(idle: Idle, launches: Int64) -> Bools:
    """Whether the operator around a copy's launch waits with a call of its own, or the call itself is no async one."""
    span = idle.scene.span
    names = span.names
    waits = names.pick(["Synchronize" in name for name in names.values])[idle.calls]
    marked = np.zeros(len(span) + 1, bool)  # the last for rows without a parent
    around = span.parent[idle.calls[waits]]
    marked[around[around >= 0]] = True
    rows = np.maximum(launches, 0)
    at_once = names.pick(["async" in name.lower() for name in names.values])[rows]
    synced: Bools = (launches >= 0) & (marked[span.parent[rows]] | ~at_once)
    return synced


def _copies_but(idle: Idle, slices: Int64) -> Intervals:
    """Copies of other kinds."""
    found = idle.scene.found
    other = found.kind == COPY
    other[slices] = False
    return intervals.union(found.start_ns[other], found.end_ns[other])


def on_devices(idle: Idle) -> Piece:
    """Copies within a device or between devices in which nothing else runs."""
    scene, found, span = idle.scene, idle.scene.found, idle.scene.span
    slices = idle.copies((*WITHIN, *BETWEEN))
    slices = slices[(scene.step_of(found.start_ns[slices]) >= 0) & ~idle.operations.work[slices]]
    mine = np.zeros(len(found), bool)
    mine[slices] = True
    times = scene.exclusive(mine)
    weights = intervals.covered(times, found.start_ns[slices], found.end_ns[slices])
    between = span.names.pick([any(mark in name for mark in BETWEEN) for name in span.names.values])
    peer = between[found.rows[slices]]
    details = {
        "copied_ns": float((found.end_ns - found.start_ns)[slices].sum()),
        "copied_bytes": float(np.maximum(span.column("bytes", found.rows[slices]), 0).sum()),
        "between_ns": float(weights[peer].sum()),
        "between_copies": float(peer.sum()),
    }
    rows = found.launch[slices]
    operators = idle.operators(rows)
    return piece(scene, times, rows, weights, np.where(operators >= 0, operators, found.rows[slices]), details)
