"""The memory view of files that are no traces: allocator snapshots with their history, and memory timelines."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
from msgspec import Struct

from stepscope.analyze.views.memory_device import DeviceMemory, Pairs, pair, thinned
from stepscope.analyze.views.memory_lines import Spots, Standing, blocks, lines
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
    MemoryRecording,
    MemoryState,
    OutOfMemory,
)
from stepscope.tables.arrays import NONE, Int64

_SOURCES = (".py", ".ipynb")  # other frames are C++


class Seen(Struct, frozen=True):
    """What one recording tells."""

    curve: MemoryCurve | None
    lines: tuple[MemoryLine, ...] = ()
    blocks: tuple[MemoryBlock, ...] = ()
    pairs: Pairs | None = None
    state: MemoryState | None = None
    out_of_memory: tuple[OutOfMemory, ...] = ()
    notes: tuple[str, ...] = ()


def seen(recording: MemoryRecording, code: UserCode) -> Seen:
    """Everything that a recording tells. `code` tells the user's frames from others."""
    found = _timeline(recording) if recording.source == "timeline" else _snapshot(recording, code)
    label = f"{recording.worker}, {recording.device}"
    notes = (*(f"{label}: {problem}" for problem in recording.problems), *found.notes)
    return msgspec.structs.replace(found, notes=notes)


def _snapshot(recording: MemoryRecording, code: UserCode) -> Seen:
    places = _spots(recording.stacks, code)
    kind, stack = _numbers(recording.kind), _numbers(recording.stack)
    picked = np.flatnonzero((kind == ALLOCATED) | (kind == RELEASED))
    address = _numbers(recording.address)[picked]
    pairs = pair(address, kind[picked] == ALLOCATED)
    standing = _standing(recording, pairs, address, places)
    device = _device(recording, picked, pairs, standing)
    spots = Spots(_spot_of(places, stack[picked]), places.places)
    notes = list(_notes(recording, pairs, standing, len(picked)))
    return Seen(
        curve=device.curve() if len(picked) else None,
        lines=tuple(lines(device, spots, standing)),
        blocks=tuple(blocks(device, spots, None, standing)),
        pairs=pairs,
        state=_state(recording),
        out_of_memory=_out_of_memory(recording, device, picked, places),
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


def _standing(recording: MemoryRecording, pairs: Pairs, address: Int64, places: Spots) -> Standing | None:
    rows = recording.blocks
    if rows is None:
        return None
    used = np.flatnonzero(_numbers(rows.state) == IN_USE)
    open_addresses = address[pairs.allocation[pairs.unreleased]]
    return Standing(
        sizes=_numbers(rows.requested)[used],
        spots=_spot_of(places, _numbers(rows.stack)[used]),
        before=~np.isin(_numbers(rows.address)[used], open_addresses),
    )


def _notes(recording: MemoryRecording, pairs: Pairs, standing: Standing | None, events: int) -> list[str]:
    label = f"{recording.worker}, {recording.device}"
    notes = []
    if not events:
        notes.append(
            f"{label}: no history in the snapshot, only what stood when it was taken; "
            "call torch.cuda.memory._record_memory_history() before training"
        )
    if events and recording.clock == "order":
        notes.append(f"{label}: the events carry no times; the curve is in their order")
    if events and standing is not None:
        lost = int(np.count_nonzero(pairs.unreleased)) - int(np.count_nonzero(~standing.before))
        if lost > 0:
            notes.append(f"{label}: {lost} allocations of the history have neither a release nor a block at the end")
    return notes


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
    held, in_use, waiting, unused = sum(recording.segments), size[used].sum(), size[pending].sum(), size[free].sum()
    idle = free & ~busy[segment]
    return MemoryState(
        worker=recording.worker,
        device=recording.device,
        reserved_bytes=held,
        in_use_bytes=int(asked[used].sum()),
        rounding_bytes=int(in_use - asked[used].sum()),
        pending_bytes=int(waiting),
        # what no block of the file accounts for is free as well: some versions leave it out
        free_bytes=int(held - in_use - waiting),
        releasable_bytes=int(size[idle].sum()),
        fragmented_bytes=int(held - in_use - waiting - size[idle].sum()),
        largest_free_block_bytes=int(size[free].max()) if unused else 0,
        segments=len(recording.segments),
        blocks_in_use=int(np.count_nonzero(used)),
    )


def _out_of_memory(
    recording: MemoryRecording, device: DeviceMemory, picked: Int64, places: Spots
) -> tuple[OutOfMemory, ...]:
    kind, stack, size = (_numbers(column) for column in (recording.kind, recording.stack, recording.bytes))
    found = []
    for event in np.flatnonzero(kind == OUT_OF_MEMORY).tolist():
        position = int(np.searchsorted(picked, event))
        frames = recording.stacks[stack[event]] if stack[event] >= 0 else ()
        found.append(
            OutOfMemory(
                worker=recording.worker,
                device=recording.device,
                time_ns=recording.time_ns[event] if recording.clock != "order" else None,
                requested_bytes=int(size[event]),
                device_free_bytes=recording.out_of_memory_free.get(event),
                allocated_bytes=None if device.relative else int(device.levels[position]),
                reserved_bytes=int(device.reserved[position]) if device.reserved is not None else None,
                place=places.at(int(_spot_of(places, stack[event : event + 1])[0])),
                frames=frames,
            )
        )
    return tuple(found)


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


def _spots(stacks: tuple[tuple[Place, ...], ...], code: UserCode) -> Spots:
    """The user's line of each stack: its innermost frame of theirs, else of a library outside torch."""
    known: dict[tuple[Place, bool], int] = {}
    numbers = []
    for stack in stacks:
        where = _user_line(stack, code)
        numbers.append(known.setdefault((where, True), len(known)) if where is not None else NONE)
    return Spots(np.array(numbers, np.int64), tuple(known))


def _user_line(stack: tuple[Place, ...], code: UserCode) -> Place | None:
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


def _spot_of(places: Spots, stack: Int64) -> Int64:
    return np.append(places.numbers, NONE)[stack]  # -1, no stack, picks the last


def _numbers(column: array[int]) -> Int64:
    """A column of a recording as 64-bit numbers of its own."""
    return np.frombuffer(column, np.dtype(column.typecode)).astype(np.int64) if len(column) else np.zeros(0, np.int64)
