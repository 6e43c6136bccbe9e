"""What one recording tells of a device's memory: levels over time, which blocks stand when, the peak, the user's lines.

Traces and snapshots alike, and the view of files that are no traces: allocator snapshots with their history, and memory
timelines. `levels` has one entry more than there are events: the first is what stood before the first event, entry
i + 1 what stands after event i. A position p in it means "the first p events have happened".
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from stepscope.engine.attribution import place, trace_back
from stepscope.engine.spans import Base, Span
from stepscope.engine.user_code import UserCode
from stepscope.model.findings import Place
from stepscope.model.memory import (
    ALLOCATED,
    FREE,
    IN_USE,
    OUT_OF_MEMORY,
    PENDING,
    RELEASED,
    SEGMENT_ADDED,
    SEGMENT_REMOVED,
    MemoryBlock,
    MemoryCurve,
    MemoryLine,
    MemoryOperator,
    MemoryRecording,
    MemoryState,
    OutOfMemory,
)
from stepscope.tables.arrays import NONE, Bools, Int64

_SOURCES = (".py", ".ipynb")  # other frames are C++


class Seen(Struct, frozen=True):
    """What one recording tells of a device. `counts`: as of `Pairs`."""

    curve: MemoryCurve | None
    operators: tuple[MemoryOperator, ...] = ()
    lines: tuple[MemoryLine, ...] = ()
    blocks: tuple[MemoryBlock, ...] = ()
    counts: tuple[int, int, int] = (0, 0, 0)
    state: MemoryState | None = None
    out_of_memory: tuple[OutOfMemory, ...] = ()
    notes: tuple[str, ...] = ()


def seen(recording: MemoryRecording, code: UserCode) -> Seen:
    """Everything that a recording tells. `code` tells the user's frames from others."""
    found = _timeline(recording) if recording.source == "timeline" else _snapshot(recording, code)
    label = f"{recording.worker}, {recording.device}"
    notes = tuple(f"{label}: {note}" for note in (*recording.problems, *found.notes))
    return msgspec.structs.replace(found, notes=notes)


def _snapshot(recording: MemoryRecording, code: UserCode) -> Seen:
    known: dict[tuple[Place, bool], int] = {}
    lines_of_stacks = [_user_line(stack, code) for stack in recording.stacks]
    numbers = [known.setdefault((line, True), len(known)) if line else NONE for line in lines_of_stacks]
    of_stack = np.array([*numbers, NONE], np.int64)  # the last for no stack
    kind = _numbers(recording.kind)
    picked = np.flatnonzero((kind == ALLOCATED) | (kind == RELEASED))
    address = _numbers(recording.address)[picked]
    pairs = pair(address, kind[picked] == ALLOCATED)
    notes = []
    standing, rows = None, recording.blocks
    if rows is not None:
        used = np.flatnonzero(_numbers(rows.state) == IN_USE)
        allocated = np.isin(_numbers(rows.address)[used], address[pairs.allocation[pairs.unreleased]])
        standing = Standing(_numbers(rows.requested)[used], of_stack[_numbers(rows.stack)[used]], ~allocated)
        lost = int(np.count_nonzero(pairs.unreleased)) - int(np.count_nonzero(allocated))
        if lost > 0:
            notes = [f"{lost} allocations of the history have neither a release nor a block at the end"]
    if len(picked) and recording.clock == "order":
        notes.insert(0, "the events carry no times; the curve is in their order")
    if not len(picked):
        notes = [
            "no history in the snapshot, only what stood when it was taken; "
            "call torch.cuda.memory._record_memory_history() before training"
        ]
    device = _device(recording, picked, pairs, standing)
    stacks = _numbers(recording.stack)
    found = Spots(of_stack[stacks[picked]], tuple(known))
    return Seen(
        curve=device.curve() if len(picked) else None,
        lines=tuple(lines(device, found, standing)),
        blocks=tuple(blocks(device, found, None, standing)),
        counts=pairs.counts,
        state=_state(recording),
        out_of_memory=tuple(
            OutOfMemory(
                worker=recording.worker,
                device=recording.device,
                time_ns=recording.time_ns[event] if recording.clock != "order" else None,
                requested_bytes=int(recording.bytes[event]),
                device_free_bytes=recording.out_of_memory_free.get(event),
                allocated_bytes=None if device.relative else int(device.levels[position]),
                reserved_bytes=int(device.reserved[position]) if device.reserved is not None else None,
                place=found.at(int(of_stack[stacks[event]])),
                frames=recording.stacks[stacks[event]] if stacks[event] >= 0 else (),
            )
            for event in np.flatnonzero(kind == OUT_OF_MEMORY).tolist()
            for position in [int(np.searchsorted(picked, event))]
        ),
        notes=tuple(notes),
    )


def _device(recording: MemoryRecording, picked: Int64, pairs: Pairs, standing: Standing | None) -> DeviceMemory:
    """What stood at the beginning follows from what stands at the end: the same, without what came, with what went."""
    sizes = _numbers(recording.bytes)[picked]
    sizes[_numbers(recording.kind)[picked] == RELEASED] *= -1
    closed = pairs.release < pairs.never
    given = sizes[pairs.allocation[closed]]
    paired = sizes[pairs.release[closed]] < 0
    sizes[pairs.release[closed][paired]] = -given[paired]
    change = sizes.copy()
    change[pairs.release[closed][~paired]] -= given[~paired]  # released unseen, when its address came up again
    start = -int(sizes[pairs.lone].sum())
    if standing is not None:
        start += int(standing.sizes[standing.before].sum())
    return DeviceMemory(
        source=recording.source,
        worker=recording.worker,
        span=1,
        device=recording.device,
        clock=recording.clock,
        times_ns=_numbers(recording.time_ns)[picked],
        sizes=sizes,
        levels=start + np.append(0, np.cumsum(change)),
        reserved=_reserved(recording, picked),
        pairs=pairs if len(picked) else None,
        relative=standing is None,
        capacity_bytes=recording.capacity_bytes,
    )


def _reserved(recording: MemoryRecording, picked: Int64) -> Int64 | None:
    """Bytes of segments after each of the picked events, and before the first; None where they do not add up."""
    if recording.blocks is None:
        return None
    kind, size = _numbers(recording.kind), _numbers(recording.bytes)
    change = np.where(kind == SEGMENT_ADDED, size, 0) - np.where(kind == SEGMENT_REMOVED, size, 0)
    after = np.cumsum(change)
    after += sum(recording.segments) - (int(after[-1]) if len(after) else 0)
    if not len(picked):
        return np.full(1, sum(recording.segments), np.int64)
    # a segment is added before the block in it: what holds just before the next picked event is what to show
    last = np.append(picked[1:], len(kind)) - 1
    levels = np.append(after[picked[0] - 1] if picked[0] else after[0] - change[0], after[last])
    return levels if (levels >= 0).all() else None


def _state(recording: MemoryRecording) -> MemoryState | None:
    rows = recording.blocks
    if rows is None:
        return None
    state, size, asked, segment = (
        _numbers(column) for column in (rows.state, rows.bytes, rows.requested, rows.segment)
    )
    used, pending, free = state == IN_USE, state == PENDING, state == FREE
    busy = np.zeros(len(recording.segments), bool)
    busy[segment[~free]] = True
    idle = free & ~busy[segment]
    held, in_use = sum(recording.segments), int(size[used].sum())
    waiting, releasable = int(size[pending].sum()), int(size[idle].sum())
    return MemoryState(
        worker=recording.worker,
        device=recording.device,
        reserved_bytes=held,
        in_use_bytes=int(asked[used].sum()),
        rounding_bytes=in_use - int(asked[used].sum()),
        pending_bytes=waiting,
        # what no block of the file accounts for is free as well: some versions leave it out
        free_bytes=held - in_use - waiting,
        releasable_bytes=releasable,
        fragmented_bytes=held - in_use - waiting - releasable,
        largest_free_block_bytes=int(size[free].max(initial=0)),
        segments=len(recording.segments),
        blocks_in_use=int(np.count_nonzero(used)),
    )


def _timeline(recording: MemoryRecording) -> Seen:
    """Bytes by category; events of one moment count together, as they are one change of several categories."""
    times = np.maximum.accumulate(_numbers(recording.time_ns))
    category, change = _numbers(recording.category), _numbers(recording.bytes)
    last = np.flatnonzero(np.append(np.diff(times) > 0, True))
    by_category = {
        name: np.cumsum(np.where(category == number, change, 0))[last]
        for number, name in enumerate(recording.categories)
        if (category == number).any()
    }
    levels = np.cumsum(change)[last]
    kept, peak = thinned(times[last], levels), int(levels.argmax())
    curve = MemoryCurve(
        source=recording.source,
        worker=recording.worker,
        span=1,
        device=recording.device,
        times_ns=tuple(times[last][kept].tolist()),
        allocated_bytes=tuple(levels[kept].tolist()),
        reserved_bytes=(None,) * len(kept),
        peak_allocated_bytes=int(levels[peak]),
        peak_reserved_bytes=None,
        peak_time_ns=int(times[last][peak]),
        capacity_bytes=None,
        by_category={name: tuple(values[kept].tolist()) for name, values in by_category.items()},
        clock=recording.clock,
        events=len(change),
        start_allocated_bytes=int(levels[0]),
        end_allocated_bytes=int(levels[-1]),
        peak_by_category={name: int(values[peak]) for name, values in by_category.items()},
    )
    return Seen(curve)


def _user_line(stack: tuple[Place, ...], code: UserCode) -> Place | None:
    """The innermost frame of the user's in a stack, else of a library outside torch."""
    library: Place | None = None
    for frame in stack:
        if not frame.file.endswith(_SOURCES):
            continue
        file = code.resolve(frame.file)
        if file is not None:
            return Place(file, frame.line, frame.function)
        short = code.library(frame.file) if library is None else None
        if short is not None:
            library = Place(short, frame.line, frame.function)
    return library


def _numbers(column: array[int]) -> Int64:
    """A column of a recording as 64-bit numbers of its own."""
    return np.frombuffer(column, np.dtype(column.typecode)).astype(np.int64) if len(column) else np.zeros(0, np.int64)


POINTS = 1_000  # of a curve at most
_PER_BUCKET = 4


class Pairs(Struct, frozen=True):
    """Allocations with their releases. Numbers are those of events; `never` stands for no release.

    `release` goes with `allocation`. An address that is allocated again without a release in between was released
    unseen: at that event. `unseen` counts those, `lone` are releases of what was allocated before the recording.
    """

    allocation: Int64
    release: Int64
    lone: Int64
    never: int
    unseen: int

    def standing(self, position: int) -> Bools:
        """Which allocations stand after the first `position` events."""
        return np.logical_and(self.allocation < position, self.release >= position)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Pairs, allocations without a release, and releases without an allocation."""
        unpaired = int(np.count_nonzero(self.unreleased)) + self.unseen
        return len(self.allocation) - unpaired, unpaired, len(self.lone)

    @property
    def unreleased(self) -> Bools:
        return np.equal(self.release, self.never)


def pair(address: Int64, is_allocation: Bools) -> Pairs:
    """Pair events of a device, in order of time, by address; what is no allocation is a release."""
    count = len(address)
    order = np.argsort(address, kind="stable")
    opens = np.append(is_allocation[order], False)  # one entry more: what follows the last
    following = np.append(order, count)[1:]
    same = np.append(np.diff(address[order]) == 0, np.zeros(min(count, 1), bool))
    opened = opens[:-1]
    after_allocation = np.append(False, same & opened)[:-1]
    by_time = np.argsort(order[opened])
    return Pairs(
        allocation=order[opened][by_time],
        release=np.where(same, following, count)[opened][by_time],
        lone=np.sort(order[~opened & ~after_allocation]),
        never=count,
        unseen=int(np.count_nonzero(same & opened & opens[1:])),
    )


class DeviceMemory(Struct, frozen=True, dict=True):
    """One device of one recording. `levels` and `reserved` are as said above, `reserved` None where it is not known.

    `relative`: `levels` begin at 0 because what stood before is not known. `sizes` are bytes of events, above 0 for
    allocations. `pairs` is None where blocks have no addresses.
    """

    source: str
    worker: str
    span: int
    device: str
    clock: str
    times_ns: Int64
    sizes: Int64
    levels: Int64
    reserved: Int64 | None
    pairs: Pairs | None
    relative: bool
    capacity_bytes: int | None = None

    @cached_property
    def peak(self) -> int:
        """The first position with the highest level."""
        return int(self.levels.argmax())

    @cached_property
    def at_peak(self) -> Bools:
        """Which of the pairs' allocations stand at the peak; none where there are no pairs."""
        return self.pairs.standing(self.peak) if self.pairs is not None else np.zeros(0, bool)

    @property
    def recorded_bytes(self) -> int | None:
        """Of what stands at the peak, what was allocated while recording."""
        return int(self.sizes[self.pairs.allocation[self.at_peak]].sum()) if self.pairs is not None else None

    @cached_property
    def point_times(self) -> Int64:
        """The time of each position; of the first, the first event's."""
        times = np.maximum.accumulate(self.times_ns)
        return np.concatenate([times[:1], times])

    def curve(self) -> MemoryCurve:
        """Needs one event at least."""
        kept = thinned(self.point_times, self.levels, self.reserved)
        recorded = self.recorded_bytes
        peak = None if self.relative else int(self.levels[self.peak])
        return MemoryCurve(
            source=self.source,
            worker=self.worker,
            span=self.span,
            device=self.device,
            times_ns=tuple(self.point_times[kept].tolist()),
            allocated_bytes=tuple(self.levels[kept].tolist()),
            reserved_bytes=tuple(self.reserved[kept].tolist() if self.reserved is not None else [None] * len(kept)),
            peak_allocated_bytes=peak,
            peak_reserved_bytes=int(self.reserved.max()) if self.reserved is not None else None,
            peak_time_ns=int(self.point_times[self.peak]),
            capacity_bytes=self.capacity_bytes,
            by_category={},
            relative=self.relative,
            clock=self.clock,
            events=len(self.times_ns),
            peak_recorded_bytes=recorded,
            peak_before_bytes=peak - recorded if peak is not None and recorded is not None else None,
            start_allocated_bytes=None if self.relative else int(self.levels[0]),
            end_allocated_bytes=None if self.relative else int(self.levels[-1]),
        )


def thinned(times: Int64, levels: Int64, reserved: Int64 | None = None, points: int = POINTS) -> Int64:
    """At most `points` positions: the first, and in each of equal stretches of time the last and every extreme."""
    count = len(times)
    if count <= points:
        return np.arange(count)
    buckets = (points - 1) // _PER_BUCKET
    length = max(int(times[-1] - times[0]), 1)
    bucket = ((times - times[0]) / (length + 1) * buckets).astype(np.int64)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    kept = [
        np.zeros(1, np.int64),
        np.append(starts[1:], count) - 1,
        _highest(levels, starts),
        _highest(-levels, starts),
    ]
    if reserved is not None:
        kept.append(_highest(reserved, starts))
    return np.unique(np.concatenate(kept))


def _highest(values: Int64, starts: Int64) -> Int64:
    """The first position of the highest value in each stretch."""
    highest = np.maximum.reduceat(values, starts)
    stretch = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(values))))
    hits = np.flatnonzero(values == highest[stretch])
    _, first = np.unique(stretch[hits], return_index=True)
    return hits[first]


def sums(keys: Int64, values: Int64, count: int) -> Int64:
    """The sum of the values of each key, 0 to `count` - 1, in whole numbers."""
    result = np.zeros(count, np.int64)
    np.add.at(result, keys, values)
    return result


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
    if pairs is not None:
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
) -> list[MemoryBlock]:
    """The largest blocks of a device: of those that stand at the peak, and of the others.

    `operator` names the operator around an event of the device.
    """
    pairs, at_peak = device.pairs, device.at_peak
    timed = device.clock != "order"
    made = []
    if pairs is not None:
        sizes = device.sizes[pairs.allocation]
        for stood, among in ((True, at_peak), (False, ~at_peak)):
            for index in _largest(sizes, among):
                event, release = int(pairs.allocation[index]), int(pairs.release[index])
                made.append(
                    _block(
                        device,
                        int(sizes[index]),
                        found.at(int(found.numbers[event])),
                        at_peak=stood,
                        allocated_ns=int(device.times_ns[event]) if timed else None,
                        released_ns=int(device.times_ns[release]) if timed and release != pairs.never else None,
                        operator=operator(event) if operator is not None else None,
                    )
                )
    if standing is not None:  # blocks that were there before the history begins, and still are
        for index in _largest(standing.sizes, standing.before):
            place = found.at(int(standing.spots[index]))
            made.append(_block(device, int(standing.sizes[index]), place, at_peak=None if pairs is None else True))
    return sorted(made, key=lambda block: (not block.at_peak, -block.bytes, block.allocated_ns or 0))


def _block(device: DeviceMemory, size: int, place: Place | None, **known: Any) -> MemoryBlock:
    of = {"device": device.device, "source": device.source, "worker": device.worker, "span": device.span}
    unknown = {"allocated_ns": None, "released_ns": None, "operator": None}
    return MemoryBlock(bytes=size, place=place, category=None, **{**unknown, **of, **known})


def _largest(sizes: Int64, among: Bools) -> list[int]:
    picked = np.flatnonzero(among)
    found: list[int] = picked[np.argsort(-sizes[picked], kind="stable")[:LARGEST]].tolist()
    return found
