"""Allocations by the user's line, in traces and snapshots alike: each allocation has the number of a spot or -1."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from msgspec import Struct

from stepscope.analyze.views.memory_device import DeviceMemory, sums
from stepscope.engine.attribution import place, trace_back
from stepscope.engine.spans import Base, Span
from stepscope.model.findings import Place
from stepscope.model.memory import MemoryBlock, MemoryLine
from stepscope.tables.arrays import NONE, Bools, Int64

OperatorOf = Callable[[int], "str | None"]
LARGEST = 50  # blocks kept of those that stood at the peak, and as many of the others


class Spots(Struct, frozen=True):
    """Distinct lines: `numbers` says for each thing asked for which of `places` it is, `NONE` for no line."""

    numbers: Int64
    places: tuple[tuple[Place, bool], ...]  # with whether the line is the call's own

    def at(self, number: int) -> Place | None:
        return self.places[number][0] if number >= 0 else None


class Standing(Struct, frozen=True):
    """Blocks of a snapshot's end: bytes asked for, and the spot of each. `before`: not allocated in the history."""

    sizes: Int64
    spots: Int64
    before: Bools


def spots(base: Base, span: Span, rows: Int64) -> Spots:
    """The user's lines around rows of a span."""
    found = trace_back(base, span, rows)
    names, width = span.names, len(span.names.values) + 1
    callee = np.where(found.called >= 0, names.codes[found.called], NONE)
    keys, back = np.unique(np.where(found.place >= 0, found.place * width + callee + 1, NONE), return_inverse=True)
    known: dict[tuple[Place, bool], int] = {}
    numbers = []
    for key in keys.tolist():
        index, code = key // width, key % width - 1
        where = place(base, index, names.values[code] if code >= 0 else None) if key >= 0 else None
        numbers.append(known.setdefault(where, len(known)) if where is not None else NONE)
    return Spots(np.array(numbers, np.int64)[back], tuple(known))


def lines(device: DeviceMemory, found: Spots, standing: Standing | None = None) -> Iterator[MemoryLine]:
    """What each line allocated of a device, most at the peak first. `found` goes with the device's events."""
    count = len(found.places) + 1  # the last is "no line", which is what -1 picks
    allocated = np.flatnonzero(device.sizes > 0)
    totals = _sums(found.numbers[allocated], device.sizes[allocated], count)
    calls = _sums(found.numbers[allocated], np.ones(len(allocated), np.int64), count)
    at_peak, kept, now = totals * 0, totals * 0, totals * 0
    pairs = device.pairs
    if pairs is not None and device.at_peak is not None:
        for target, picked in ((at_peak, device.at_peak), (kept, pairs.unreleased)):
            events = pairs.allocation[picked]
            target += _sums(found.numbers[events], device.sizes[events], count)
    if standing is not None:
        now = _sums(standing.spots, standing.sizes, count)
    order = sorted(range(count), key=lambda number: (-at_peak[number], -now[number], -totals[number], number))
    for number in order:
        if not calls[number] and not now[number]:
            continue
        where, exact = found.places[number] if number < count - 1 else (None, False)
        yield MemoryLine(
            place=where,
            device=device.device,
            allocations=int(calls[number]),
            allocated_bytes=int(totals[number]),
            at_peak_bytes=int(at_peak[number]) if pairs is not None else None,
            unreleased_bytes=int(kept[number]) if pairs is not None else None,
            standing_bytes=int(now[number]) if standing is not None else None,
            exact=exact,
            source=device.source,
            worker=device.worker,
            span=device.span,
        )


def _sums(numbers: Int64, values: Int64, count: int) -> Int64:
    return sums(np.where(numbers >= 0, numbers, count - 1), values, count)


def blocks(
    device: DeviceMemory, found: Spots, operator: OperatorOf | None, standing: Standing | None = None
) -> Iterator[MemoryBlock]:
    """The largest blocks of a device: of those that stand at the peak, and of the others.

    `operator` names the operator around an event of the device.
    """
    pairs, at_peak = device.pairs, device.at_peak
    if pairs is None or at_peak is None:
        if standing is not None:
            yield from _earlier(device, found, standing, at_peak=None)
        return
    timed = device.clock != "order"
    sizes = device.sizes[pairs.allocation]
    rows = [(int(sizes[index]), int(index), True) for index in _largest(sizes, at_peak)]
    rows += [(int(sizes[index]), int(index), False) for index in _largest(sizes, ~at_peak)]
    made = []
    for size, index, stood in rows:
        event, release = int(pairs.allocation[index]), int(pairs.release[index])
        made.append(
            MemoryBlock(
                device=device.device,
                bytes=size,
                allocated_ns=int(device.times_ns[event]) if timed else None,
                released_ns=int(device.times_ns[release]) if timed and release != pairs.never else None,
                operator=operator(event) if operator is not None else None,
                place=found.at(int(found.numbers[event])),
                category=None,
                at_peak=stood,
                source=device.source,
                worker=device.worker,
                span=device.span,
            )
        )
    if standing is not None:
        made += _earlier(device, found, standing, at_peak=True)
    yield from sorted(made, key=lambda block: (not block.at_peak, -block.bytes, block.allocated_ns or 0))


def _earlier(device: DeviceMemory, found: Spots, standing: Standing, *, at_peak: bool | None) -> Iterator[MemoryBlock]:
    """Blocks that were there before the history begins, and still are."""
    for index in _largest(standing.sizes, standing.before):
        yield MemoryBlock(
            device=device.device,
            bytes=int(standing.sizes[index]),
            allocated_ns=None,
            released_ns=None,
            operator=None,
            place=found.at(int(standing.spots[index])),
            category=None,
            at_peak=at_peak,
            source=device.source,
            worker=device.worker,
            span=device.span,
        )


def _largest(sizes: Int64, among: Bools) -> list[int]:
    picked = np.flatnonzero(among)
    found: list[int] = picked[np.argsort(-sizes[picked], kind="stable")[:LARGEST]].tolist()
    return found
