"""Memory over time, by operator and by user line, and what stood in it at the peak.

From the allocations and releases that traces recorded with profile_memory=True hold, and from recordings beside them.
Nothing is taken for 0 that is not known: without addresses there are no blocks, without totals the curve is relative.

`levels` has one entry more than there are events: the first is what stood before the first event, entry i + 1 what
stands after event i. A position p in it means "the first p events have happened".
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.engine.attribution import calls, place, trace_back
from stepscope.engine.spans import Base, Span
from stepscope.engine.user_code import NO_OPTIONS, UserCode, user_code
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
    MemoryView,
    OutOfMemory,
)
from stepscope.tables.arrays import NONE, Bools, Int64, climb, self_and_ancestors

NO_ADDRESSES = "allocations carry no addresses (PyTorch before 1.10), so that no block can be followed"
NO_TOTALS = "the trace does not say what was allocated when it began: its curve shows the change since then"
LOST = "releases are missing: at the peak more of the recorded blocks seem to stand than were allocated"


def view(base: Base, recordings: Sequence[MemoryRecording] = (), code: UserCode | None = None) -> MemoryView | None:
    """The memory of all traces and recordings; None where nothing tells of memory.

    Args:
        recordings: snapshots and timelines.
        code: whose code is in the stacks of recordings; by default what the tables tell.
    """
    traced = [span for span in base.spans if span.memory.height]
    if not traced and not recordings:
        return None
    code = code or user_code(base.tables, {}, NO_OPTIONS)
    devices = [(span, device) for span in traced for device in allocations(base, span)]
    notes: list[str] = []
    for span, device in devices:
        recorded = device.recorded_bytes
        lost = not device.relative and recorded is not None and recorded > device.levels[device.peak]
        why = {NO_ADDRESSES: device.pairs is None, NO_TOTALS: device.relative, LOST: lost}
        notes += [f"{span.ref.label}, {device.device}: {note}" for note, holds in why.items() if holds]
    recorded_views = []
    for recording in recordings:
        one = _timeline(recording) if recording.source == "timeline" else _snapshot(recording, code)
        notes += [f"{recording.worker}, {recording.device}: {note}" for note in (*recording.problems, *one.notes)]
        recorded_views.append(one)
    counts = Counter[str]()
    for _, device in devices:
        counts.update(device.pair_counts)
    for one in recorded_views:
        counts.update(
            pairs=one.pairs,
            unpaired_allocations=one.unpaired_allocations,
            unpaired_releases=one.unpaired_releases,
        )
    return _View(
        devices,
        recorded_views,
        curves=(*(device.curve() for _, device in devices), *_joined(recorded_views, "curves")),
        states=_joined(recorded_views, "states"),
        out_of_memory=_joined(recorded_views, "out_of_memory"),
        notes=tuple(dict.fromkeys(notes)),
        pairs=counts["pairs"],
        unpaired_allocations=counts["unpaired_allocations"],
        unpaired_releases=counts["unpaired_releases"],
    )


def _joined(views: Sequence[MemoryView], name: str) -> tuple[Any, ...]:
    return tuple(row for one in views for row in getattr(one, name))


class _View(MemoryView):
    """Rows are made when something asks for them, which a report on the terminal mostly does not; then all of them, so
    that what they are made of can go.
    """

    def __init__(
        self, devices: Sequence[tuple[Span, DeviceMemory]], recorded: Sequence[MemoryView], **known: Any
    ) -> None:
        self.__dict__.update(known, _devices=devices, _recorded=recorded)  # what it inherits from is frozen

    @cached_property
    def _rows(self) -> dict[str, tuple[Any, ...]]:
        devices, recorded = self.__dict__.pop("_devices"), self.__dict__.pop("_recorded")
        made: dict[str, list[Any]] = {
            "operators": [row for span, device in devices for row in by_operator(span, device)],
            "lines": [row for _, device in devices for row in lines(device)],
            "blocks": [row for span, device in devices for row in blocks(device, span)],
        }
        return {name: (*rows, *_joined(recorded, name)) for name, rows in made.items()}

    operators = cached_property[Any](lambda view: view._rows["operators"])
    lines = cached_property[Any](lambda view: view._rows["lines"])
    blocks = cached_property[Any](lambda view: view._rows["blocks"])


def allocations(base: Base, span: Span) -> list[DeviceMemory]:
    """One for each device. Kept for the second who asks, of two who do, and then let go."""
    kept: list[DeviceMemory] | None = span.kept.pop("allocations", None)
    if kept is not None:
        return kept
    made: list[DeviceMemory] = []

    @cache
    def causes() -> Causes:
        near = around(span)
        return Causes(*spots(base, span, near), climb(span.parent, near, span.is_operator))

    memory = span.memory.with_row_index("row").filter(
        pl.col("device").is_not_null() & pl.col("bytes").is_not_null() & (pl.col("bytes") != 0)
    )
    for (name,), events in sorted(memory.group_by("device", maintain_order=True), key=lambda group: str(group[0][0])):
        sizes, device = events["bytes"].to_numpy(), str(name)
        known = events["allocated_bytes"].null_count() == 0
        levels = np.append(0, np.cumsum(sizes))
        if known:
            totals = events["allocated_bytes"].to_numpy()
            levels = np.append(totals[0] - sizes[0], totals)
        reserved = None  # also where it is always 0: the allocator of the host reserves nothing
        if not events["reserved_bytes"].null_count() and (events["reserved_bytes"] != 0).any():
            reserved = events["reserved_bytes"].to_numpy()
            reserved = np.append(reserved[:1], reserved)
        followed = events["address"].null_count() == 0
        gpu = span.gpus.get(number(device)) if device != "cpu" else None
        rows = events["row"].to_numpy()
        one = DeviceMemory(
            source="trace",
            worker=span.ref.worker,
            span=span.ref.span,
            device=device,
            clock="epoch",
            times_ns=events["time_ns"].to_numpy(),
            sizes=sizes,
            levels=levels,
            reserved=reserved,
            pairs=pair(events["address"].to_numpy(), sizes > 0) if followed else None,
            relative=not known,
            capacity_bytes=gpu.memory_bytes if gpu is not None else None,
            caused=partial(_of_rows, causes, rows),
        )
        made.append(one)
    span.kept["allocations"] = made
    return made


def _of_rows(causes: Callable[[], Causes], rows: Int64) -> Causes:
    found = causes()
    return Causes(found.line[rows], found.places, found.operator[rows])


def number(device: str) -> int:
    number = device.rpartition(":")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


def around(span: Span, *, until_end: bool = False) -> Int64:
    """For each row of `span.memory` the row of the innermost operator or function around it on its thread.

    Its end is inside of a slice if `until_end`; `NONE` where there is none.
    """
    memory = span.memory
    node = np.full(memory.height, NONE, np.int64)
    codes = {track: code for code, track in enumerate(span.tracks.values)}
    tracks = memory["track"].replace_strict(codes, default=NONE, return_dtype=pl.Int64).fill_null(NONE).to_numpy()
    times = memory["time_ns"].to_numpy()
    relevant = (span.is_operator | span.is_function) & ~span.on_device
    for code in np.unique(tracks[tracks >= 0]).tolist():
        rows, own = np.flatnonzero((span.tracks.codes == code) & relevant), tracks == code
        depths = span.series("depth").gather(rows).fill_null(0).to_numpy()
        rows = rows[np.lexsort((depths, span.start_ns[rows]))]
        place = np.searchsorted(span.start_ns[rows], times[own], side="right") - 1
        node[own] = np.append(rows, NONE)[place]
    # the last to begin is innermost, unless it has ended: then one around it is
    last = times - until_end
    return climb(span.parent, node, lambda at, which: relevant[at] & (span.ends(at) > last[which]))


def _summed(group: Int64, values: Int64, count: int) -> Int64:
    found = np.zeros(count, np.int64)
    np.add.at(found, group, values)
    return found


def by_operator(span: Span, device: DeviceMemory) -> Iterator[MemoryOperator]:
    """What each operator did to the memory of a device, the most allocated first."""
    sizes, operator = device.sizes, device.causes.operator
    stands = np.zeros(len(operator), bool)
    if device.pairs is not None:
        stands[device.pairs.allocation[device.at_peak]] = True
    rows, group = np.unique(operator, return_inverse=True)
    figures = {
        "allocated": _summed(group, np.maximum(sizes, 0), len(rows)),
        "increase": _summed(group, sizes, len(rows)),
        "allocations": np.bincount(group, sizes > 0).astype(np.int64),
        "at_peak": _summed(group[stands], sizes[stands], len(rows)),
    }
    del group, stands
    names = span.names
    code_of = np.append(names.codes, NONE)[rows].astype(np.int64)  # the outermost operator's number is NONE
    # once for every name among an operator and those around it; what lies outside of all has a name of its own
    around = [np.flatnonzero(rows < 0)]
    for which, at in self_and_ancestors(span.parent, rows):
        operators = span.is_operator[at]
        around.append((names.codes[at[operators]] + np.int64(1)) * len(rows) + which[operators])
    code, place = np.divmod(np.unique(np.concatenate(around)), len(rows))
    count = len(names.values) + 1
    own = {name: _summed(code_of + 1, values, count).tolist() for name, values in figures.items()}
    total = {name: _summed(code, values[place], count).tolist() for name, values in figures.items()}
    calls = np.bincount(names.codes[span.is_operator] + 1, minlength=count).tolist()
    found = [
        MemoryOperator(
            name=names.values[code - 1] if code else None,
            **device.labels,
            calls=calls[code] if code else 0,
            allocations=own["allocations"][code],
            self_allocated_bytes=own["allocated"][code],
            total_allocated_bytes=total["allocated"][code],
            self_increase_bytes=own["increase"][code],
            total_increase_bytes=total["increase"][code],
            total_allocations=total["allocations"][code],
            at_peak_bytes=own["at_peak"][code] if device.pairs is not None else None,
        )
        for code in np.unique(code).tolist()
        if any(values[code] for values in (*total.values(), own["allocated"], own["increase"]))
    ]
    yield from sorted(found, key=lambda row: (-row.self_allocated_bytes, -row.total_allocated_bytes, row.name or ""))


_SOURCES = (".py", ".ipynb")  # other frames are C++


def _snapshot(recording: MemoryRecording, code: UserCode) -> MemoryView:
    known: dict[_Line, int] = {}
    lines_of_stacks = [_user_line(stack, code) for stack in recording.stacks]
    numbers = [known.setdefault((line, True), len(known)) if line else NONE for line in lines_of_stacks]
    of_stack = np.array([*numbers, NONE], np.int64)  # the last for no stack
    line = of_stack[_numbers(recording.stack)]
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
    device = _device(recording, picked, pairs, standing, line[picked], tuple(known))
    stacks, state = _numbers(recording.stack), _state(recording)
    return MemoryView(
        curves=(device.curve(),) if len(picked) else (),
        operators=(),
        lines=tuple(lines(device)),
        blocks=tuple(blocks(device, None)),
        **device.pair_counts,
        states=(state,) if state is not None else (),
        out_of_memory=tuple(
            OutOfMemory(
                worker=recording.worker,
                device=recording.device,
                time_ns=recording.time_ns[event] if recording.clock != "order" else None,
                requested_bytes=int(recording.bytes[event]),
                device_free_bytes=recording.out_of_memory_free.get(event),
                allocated_bytes=None if device.relative else int(device.levels[position]),
                reserved_bytes=int(device.reserved[position]) if device.reserved is not None else None,
                place=device.place(line[event]),
                frames=recording.stacks[stacks[event]] if stacks[event] >= 0 else (),
            )
            for event in np.flatnonzero(kind == OUT_OF_MEMORY).tolist()
            for position in [int(np.searchsorted(picked, event))]
        ),
        notes=tuple(notes),
    )


def _device(
    recording: MemoryRecording,
    picked: Int64,
    pairs: Pairs,
    standing: Standing | None,
    line: Int64,
    places: tuple[_Line, ...],
) -> DeviceMemory:
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
    reserved = None  # bytes of segments after each of the picked events, and before the first, where they add up
    if recording.blocks is not None:
        kind, size = _numbers(recording.kind), _numbers(recording.bytes)
        added = np.where(kind == SEGMENT_ADDED, size, 0) - np.where(kind == SEGMENT_REMOVED, size, 0)
        after = np.cumsum(np.append(0, added))  # after[i]: before event i
        after += sum(recording.segments) - int(after[-1])
        # a segment is added before the block in it: what holds just before the next picked event is what to show
        reserved = after[np.append(picked, len(kind))]
        reserved = reserved if (reserved >= 0).all() else None
    return DeviceMemory(
        source=recording.source,
        worker=recording.worker,
        span=1,
        device=recording.device,
        clock=recording.clock,
        times_ns=_numbers(recording.time_ns)[picked],
        sizes=sizes,
        levels=start + np.append(0, np.cumsum(change)),
        reserved=reserved,
        pairs=pairs if len(picked) else None,
        relative=standing is None,
        capacity_bytes=recording.capacity_bytes,
        caused=lambda: Causes(line, places, np.full(len(picked), NONE)),
        standing=standing,
    )


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


def _timeline(recording: MemoryRecording) -> MemoryView:
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
    return MemoryView((curve,), (), (), ())


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
    return np.frombuffer(column, np.dtype(column.typecode)).astype(np.int64) if len(column) else np.zeros(0, np.int64)


POINTS = 1_000  # of a curve at most
_Line = tuple[Place, bool]  # with whether it is the call's own
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


class Standing(Struct, frozen=True):
    """Blocks of a snapshot's end: bytes asked for, and the line of each. `before`: not allocated in the history."""

    sizes: Int64
    line: Int64
    before: Bools


class Causes(Struct, frozen=True):
    """Of events: `line` says which of `places` each is from, `operator` is the row of the innermost operator around it,
    both `NONE` for none.
    """

    line: Int64
    places: tuple[_Line, ...]
    operator: Int64


class DeviceMemory(Struct, frozen=True, dict=True):
    """One device of one recording. `levels` and `reserved` are by position, `reserved` None where it is not known.

    `relative`: `levels` begin at 0 because what stood before is not known. `sizes` are bytes of events, above 0 for
    allocations; `caused` finds what each is from. `pairs` is None where blocks have no addresses; `standing` is a
    snapshot's.
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
    capacity_bytes: int | None
    caused: Callable[[], Causes]
    standing: Standing | None = None

    @cached_property
    def causes(self) -> Causes:
        return self.caused()

    def place(self, line: int) -> Place | None:
        """Of a number in `causes.line`."""
        return self.causes.places[line][0] if line >= 0 else None

    @property
    def labels(self) -> dict[str, Any]:
        """Which device of which recording it is, as all rows say it."""
        return {"source": self.source, "worker": self.worker, "span": self.span, "device": self.device}

    @property
    def pair_counts(self) -> dict[str, Any]:
        """What a view says of `pairs`."""
        pairs = self.pairs
        if pairs is None:
            return {}
        unpaired = int(np.count_nonzero(pairs.unreleased)) + pairs.unseen
        paired = len(pairs.allocation) - unpaired
        return {"pairs": paired, "unpaired_allocations": unpaired, "unpaired_releases": len(pairs.lone)}

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
            **self.labels,
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


LARGEST = 50  # blocks kept of those that stood at the peak, and as many of the others


def spots(base: Base, span: Span, rows: Int64) -> tuple[Int64, tuple[_Line, ...]]:
    """Which line of the user's is around each row of a span, `NONE` for none, and the distinct lines."""
    found = trace_back(base, span, rows)
    call = calls(base, span, found.called)
    width = len(base.calls) + 1
    keys, back = np.unique(np.where(found.place >= 0, found.place * width + call + 1, NONE), return_inverse=True)
    known: dict[_Line, int] = {}
    numbers = []
    for key in keys.tolist():
        where = place(base, key // width, key % width - 1) if key >= 0 else None
        numbers.append(known.setdefault(where, len(known)) if where is not None else NONE)
    return np.array(numbers, np.int64)[back], tuple(known)


def lines(device: DeviceMemory) -> Iterator[MemoryLine]:
    """What each line allocated of a device, most at the peak first; last, of equals, what no line is known of."""
    pairs, standing = device.pairs, device.standing
    stands, kept = (np.zeros(len(device.sizes), bool) for _ in range(2))
    if pairs is not None:
        stands[pairs.allocation[device.at_peak]] = True
        kept[pairs.allocation[pairs.unreleased]] = True
    rows = np.flatnonzero(device.sizes > 0)
    size = device.sizes[rows]
    columns = {"calls": np.ones_like(rows), "bytes": size, "at_peak": size * stands[rows], "kept": size * kept[rows]}
    parts = [pl.DataFrame({"line": device.causes.line[rows], **columns})]
    if standing is not None:
        parts.append(pl.DataFrame({"line": standing.line, "now": standing.sizes}))
    sums = pl.concat(parts, how="diagonal").group_by("line").sum()
    if "now" not in sums.columns:
        sums = sums.with_columns(now=0)
    order = pl.when(pl.col("line") < 0).then(len(device.causes.places)).otherwise("line")
    sums = sums.filter((pl.col("calls") > 0) | (pl.col("now") > 0))
    for row in sums.sort(-pl.col("at_peak"), -pl.col("now"), -pl.col("bytes"), order).iter_rows(named=True):
        where, exact = device.causes.places[row["line"]] if row["line"] >= 0 else (None, False)
        yield MemoryLine(
            place=where,
            allocations=row["calls"],
            allocated_bytes=row["bytes"],
            at_peak_bytes=row["at_peak"] if pairs is not None else None,
            unreleased_bytes=row["kept"] if pairs is not None else None,
            standing_bytes=row["now"] if standing is not None else None,
            exact=exact,
            **device.labels,
        )


def blocks(device: DeviceMemory, span: Span | None) -> list[MemoryBlock]:
    """The largest blocks of a device: of those that stand at the peak, and of the others.

    `span` is what the rows of operators are of; None where there are none.
    """
    pairs, standing = device.pairs, device.standing
    times = device.times_ns[: 0 if device.clock == "order" else None]
    made = []

    def add(size: int, line: int, at_peak: bool | None, event: int = NONE, release: int = NONE) -> None:
        row = device.causes.operator[event] if event >= 0 else NONE
        made.append(
            MemoryBlock(
                **device.labels,
                bytes=int(size),
                allocated_ns=int(times[event]) if 0 <= event < len(times) else None,
                released_ns=int(times[release]) if 0 <= release < len(times) else None,
                operator=span.names.values[span.names.codes[row]] if span is not None and row >= 0 else None,
                place=device.place(line),
                category=None,
                at_peak=at_peak,
            )
        )

    if pairs is not None:
        sizes = device.sizes[pairs.allocation]
        for stood, among in ((True, device.at_peak), (False, ~device.at_peak)):
            for index in _largest(sizes, among):
                event = pairs.allocation[index]
                add(sizes[index], device.causes.line[event], stood, event, pairs.release[index])
    if standing is not None:  # blocks that were there before the history begins, and still are
        for index in _largest(standing.sizes, standing.before):
            add(standing.sizes[index], standing.line[index], None if pairs is None else True)
    return sorted(made, key=lambda block: (not block.at_peak, -block.bytes, block.allocated_ns or 0))


def _largest(sizes: Int64, among: Bools) -> list[int]:
    picked = np.flatnonzero(among)
    found: list[int] = picked[np.argsort(-sizes[picked], kind="stable")[:LARGEST]].tolist()
    return found
