"""Memory over time, by operator and by user line, what stood in it at the peak, and what it may cost a run.

Every row names its source: a trace ("trace", with worker and span), a snapshot of torch's allocator ("snapshot") or a
file of export_memory_timeline ("timeline"); of the last two `worker` is the file's name and `span` is 1. Bytes are
those asked for, before the allocator rounds up. Sums over the rows of one source and device are exact:

    peak_allocated_bytes = peak_recorded_bytes + peak_before_bytes
    peak_recorded_bytes = the sum of at_peak_bytes over its operators, and over its lines, and over all its blocks

Of losses (growth, peaks, retries), bytes of the host ("cpu") are pages that cannot be dropped, between two steps; of a
device, what torch's allocator had given out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from msgspec import Struct, field

from stepscope.model.findings import Place

# What an event of a recording is. Of timeline files, CHANGED: of a category's bytes; EXISTING: there from the start.
ALLOCATED, RELEASED, SEGMENT_ADDED, SEGMENT_REMOVED, OUT_OF_MEMORY, CHANGED, EXISTING = range(7)
# What a block of an allocator is
IN_USE, PENDING, FREE = range(3)


class MemoryCurve(Struct, frozen=True):
    """Allocated and reserved bytes of a device over time, thinned so that peaks stay.

    `clock` tells what `times_ns` count from: "epoch", "start" (of the recording), or "order", where they are numbers of
    events, because the recording holds no times. `relative`: the recording does not say what stood in memory when it
    began, so that allocated bytes are the change since then and may be below 0; peaks are None.

    span: Number of the worker's trace, from 1 on; of recordings of memory 1.
    times_ns: Moments of the curve: at most 1,000, extremes kept. `clock` says since when: the epoch, the start of the
        file, or only the order.
    allocated_bytes: In use after the event: in traces the allocator's total, in snapshots the bytes asked for, in
        timelines the sum of categories. With `relative` the change since the recording began. On `cpu` only what was
        allocated while memory was recorded, not the process's memory.
    reserved_bytes: Held by the caching allocator. Missing on the host, which reserves nothing. Not what other processes
        hold.
    peak_allocated_bytes: The highest level within the recording; not the process's peak.
    peak_time_ns: Its first moment.
    peak_reserved_bytes: The highest reserved level.
    peak_recorded_bytes: Of the peak, what was allocated in the recording and not yet released.
    peak_before_bytes: The rest of the peak, allocated before the recording: its line is not known. Below 0 only where
        releases were lost.
    start_allocated_bytes: The level before the first event.
    end_allocated_bytes: The level after the last event.
    capacity_bytes: Memory of the device.
    by_category (bytes): PyTorch's categories in a timeline file; they sum to allocated_bytes.
    peak_by_category (bytes): The same at the peak.
    events: Events the curve was made from.
    """

    source: str
    worker: str
    span: int
    device: str  # "cpu", "cuda:0"
    times_ns: tuple[int, ...]
    allocated_bytes: tuple[int | None, ...]
    reserved_bytes: tuple[int | None, ...]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_time_ns: int | None
    capacity_bytes: int | None
    by_category: dict[str, tuple[int, ...]]
    relative: bool = False
    clock: str = "epoch"
    events: int = 0
    peak_recorded_bytes: int | None = None
    peak_before_bytes: int | None = None
    start_allocated_bytes: int | None = None
    end_allocated_bytes: int | None = None
    peak_by_category: dict[str, int] = field(default_factory=dict)


class MemoryBlock(Struct, frozen=True):
    """An allocation with its release; None where the recording does not hold one of the two.

    span: Number of the worker's trace, from 1 on; of recordings of memory 1.
    bytes: Size. The 50 largest at the peak and the 50 largest others of each device are listed.
    allocated_ns: When it was allocated; missing: before the recording.
    released_ns: When it was released; missing: after the recording.
    """

    device: str
    bytes: int
    allocated_ns: int | None
    released_ns: int | None
    operator: str | None
    place: Place | None
    category: str | None
    at_peak: bool | None  # stood in memory at its device's peak; None where no history tells when that was
    source: str = "trace"
    worker: str = ""
    span: int = 1


class MemoryOperator(Struct, frozen=True):
    """What an operator allocated, itself and with what it called. `increase` is allocated minus released.

    `name` None: outside any operator. `calls` include those that allocate nothing.

    span: Number of the worker's trace, from 1 on; of recordings of memory 1.
    calls: Calls of the name in the trace.
    allocations: Allocations while it was the innermost operator of the thread.
    total_allocations: The same with operators it called.
    self_allocated_bytes: Sum of these allocations; not what it kept.
    total_allocated_bytes: The same with operators it called; a call in a call of its own name counts once.
    self_increase_bytes: Allocated without released while it was innermost. A release counts for the operator that runs
        then, not for the one that allocated.
    total_increase_bytes: The same with operators it called.
    at_peak_bytes: Of its own allocations, what stood at the device's peak. They sum to peak_recorded_bytes.
    """

    name: str | None
    device: str
    calls: int
    allocations: int
    self_allocated_bytes: int
    total_allocated_bytes: int
    self_increase_bytes: int
    total_increase_bytes: int
    total_allocations: int = 0
    at_peak_bytes: int | None = None
    source: str = "trace"
    worker: str = ""
    span: int = 1


class MemoryLine(Struct, frozen=True):
    """What a line of the user's allocated, and what of it stood at the peak. `place` None: no line was found.

    `exact`: the line is that of the call, not of its function's definition.

    span: Number of the worker's trace, from 1 on; of recordings of memory 1.
    allocations: Allocations whose innermost line of yours this is; those of the backward pass count for the forward
        operator's line.
    allocated_bytes: Their sum.
    at_peak_bytes: What of it stood at the peak.
    unreleased_bytes: Not released before the recording ended; by itself no leak.
    standing_bytes: In a snapshot, what stands when it was taken, whenever allocated.
    """

    place: Place | None
    device: str
    allocations: int
    allocated_bytes: int
    at_peak_bytes: int | None
    unreleased_bytes: int | None
    standing_bytes: int | None = None
    exact: bool = True
    source: str = "trace"
    worker: str = ""
    span: int = 1


class MemoryState(Struct, frozen=True):
    """What the allocator holds of a device when a snapshot was taken.

    reserved_bytes: All segments: the sum of in use, rounding, pending and free.
    in_use_bytes: Asked for by tensors.
    rounding_bytes: Given beyond that.
    pending_bytes: Released, but another stream may still use it.
    free_bytes: Held back for later: releasable and fragmented.
    releasable_bytes: Whole free segments, which empty_cache() gives back.
    fragmented_bytes: Free beside blocks in use, which it cannot give back.
    largest_free_block_bytes: The largest request that needs no new segment.
    segments: Segments.
    blocks_in_use: Blocks in use.
    """

    worker: str
    device: str
    reserved_bytes: int
    in_use_bytes: int
    rounding_bytes: int
    pending_bytes: int
    free_bytes: int
    releasable_bytes: int
    fragmented_bytes: int
    largest_free_block_bytes: int
    segments: int
    blocks_in_use: int


class OutOfMemory(Struct, frozen=True):
    """An allocation that failed. `frames`: where, innermost first; `place`: the user's line among them.

    time_ns: When.
    requested_bytes: What was asked for.
    device_free_bytes: What the device reported as free.
    allocated_bytes: In use just before.
    reserved_bytes: Held by the allocator just before.
    """

    worker: str
    device: str
    time_ns: int | None
    requested_bytes: int
    device_free_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    place: Place | None
    frames: tuple[Place, ...]


@dataclass(frozen=True)
class MemoryView:
    """All of it. `blocks` are the largest.

    pairs: Allocations whose release was recorded, matched by address. An address allocated twice was released unseen.
    unpaired_allocations: Allocations without one.
    unpaired_releases: Releases of what was allocated before the recording.
    """

    curves: tuple[MemoryCurve, ...]
    operators: tuple[MemoryOperator, ...]
    lines: tuple[MemoryLine, ...]
    blocks: tuple[MemoryBlock, ...]
    pairs: int = 0
    unpaired_allocations: int = 0
    unpaired_releases: int = 0
    notes: tuple[str, ...] = ()
    states: tuple[MemoryState, ...] = ()
    out_of_memory: tuple[OutOfMemory, ...] = ()


class BlockRows(Struct, frozen=True):
    """Blocks of an allocator as columns side by side. `stack` is a number in `MemoryRecording.stacks`, -1 for none."""

    address: array[int]
    bytes: array[int]
    requested: array[int]
    state: array[int]  # IN_USE | PENDING | FREE
    segment: array[int]
    stack: array[int]


class MemoryRecording(Struct, frozen=True):
    """What a file that is no trace says of the memory of one device: events in order of time, as columns side by side.

    `bytes` are not negative but for CHANGED. `address`, `stack` (in `stacks`) and `category` (in `categories`) are -1
    where there is none. `blocks`, and the sizes of their `segments`, are the allocator's state at the end, None of a
    timeline. `out_of_memory_free` maps the number of an OUT_OF_MEMORY event to what the device had free.
    """

    source: str  # "snapshot" | "timeline"
    worker: str
    device: str
    clock: str  # "epoch", "start" or "order", as of a curve
    kind: array[int]
    time_ns: array[int]
    bytes: array[int]
    address: array[int]
    stack: array[int]
    category: array[int]
    stacks: tuple[tuple[Place, ...], ...] = ()
    categories: tuple[str, ...] = ()
    blocks: BlockRows | None = None
    segments: tuple[int, ...] = ()
    out_of_memory_free: dict[int, int] = field(default_factory=dict)
    capacity_bytes: int | None = None
    problems: tuple[str, ...] = ()


class MemoryLimit(Struct, frozen=True):
    """The most that a process can hold, and what sets it.

    `reason`: "machine" or "cgroup" of the host; of a device "device", "slice" (of a GPU that is partitioned),
    "fraction" (set by the script) or "others".

    bytes: The most that the process can hold, or on the host all processes of the run together.
    total_bytes: Of the device that the process sees, which may be a slice of one; of the machine.
    others_bytes: In use on the device, and not held by the allocator of this process: other processes, and what the
        driver takes. The most that was read.
    fraction: What `torch.cuda.set_per_process_memory_fraction` leaves to the process.
    """

    bytes: int
    reason: str
    total_bytes: int | None = None
    others_bytes: int | None = None
    fraction: float | None = None
    place: Place | None = None  # the line that set the fraction


class MemoryPeak(Struct, frozen=True):
    """The most that a process held of a device. What only a trace tells has no `retries` and `out_of_memory`.

    rank: Number of the rank; null of traces and snapshots.
    allocated_bytes: Given out by the allocator, at its peak.
    reserved_bytes: Held by the allocator, at its own peak, which may be another moment.
    retries: Allocations that were tried again after all cached blocks were given back.
    out_of_memory: Allocations that failed.
    """

    rank: int | None
    device: str
    allocated_bytes: int
    reserved_bytes: int | None
    limit: MemoryLimit | None
    retries: int | None
    out_of_memory: int | None
    source: str


class GrowthLine(Struct, frozen=True):
    """A line that allocates in every recorded step what still stands after the step that follows.

    bytes_per_step: Median over the recorded steps but the last of what the line allocated in a step and still stood at
        the end of the next.
    blocks_per_step: The same in blocks.
    """

    place: Place
    operator: str | None
    bytes_per_step: float
    blocks_per_step: float


class MemoryGrowth(Struct, frozen=True):
    """Memory that grows steadily. `traced`: seen in a trace alone, because the run has too few readings.

    rank: Number of the rank.
    points: Readings between two steps, or steps of a trace.
    steps: From the first of them to the last.
    seconds: From the first of them to the last.
    early_bytes: At the first, on the straight line through all (Theil and Sen). Of the host pages that cannot be
        dropped; of a device what the allocator had given out. In a trace the level at the end of its first step, 0
        where it does not say what stood when it began.
    late_bytes: The same at the last.
    bytes_per_step: Their difference by the steps between; in a trace the median rise.
    room_bytes: What the limit leaves above the last reading; of the host, above those of all ranks on it.
    steps_left: Steps until there is no room, at this rate. At most: others may take of it too.
    seconds_left: The same as time, with all ranks of the host that grow.
    """

    rank: int | None
    device: str
    points: int
    steps: int
    seconds: float
    early_bytes: float
    late_bytes: float
    bytes_per_step: float
    limit: MemoryLimit | None
    room_bytes: float | None
    steps_left: float | None
    seconds_left: float | None
    lines: tuple[GrowthLine, ...]
    source: str
    lines_source: str  # the trace that tells the lines; empty without one
    traced: bool


class RetryFacts(Struct, frozen=True):
    """Steady steps with retries of the allocator near them against those without, of the rank that lost most.

    A retry gives all cached blocks back and allocates anew. It is known to lie between two readings; the steps between
    them count as struck. Where all or almost none are, there is nothing to compare with, and nothing lost is told.

    rank: Number of the rank that lost most.
    retries: Between its first and its last steady step.
    steps: Steady steps between readings.
    steps_struck: Of them between two readings with a retry in between.
    stretches: Between two neighbouring readings, with a retry.
    usual_ms: Median of the steps that are not struck.
    struck_ms: Mean of those that are.
    lost_ms_per_step: By how much `struck_ms` exceeds `usual_ms`, and what the mean of the others exceeds their median
        by, spread over all steps.
    total_ms_per_step: Mean of all these steps.
    """

    rank: int | None
    device: str
    retries: int
    steps: int
    steps_struck: int
    stretches: int
    usual_ms: float | None
    struck_ms: float | None
    lost_ms_per_step: float | None
    total_ms_per_step: float


class MemoryLosses(Struct, frozen=True):
    """All of it. `logged`: the journal has readings enough to tell growth from noise. `traced`: a trace holds
    allocations over steps enough. `device_readings`: the journal has readings of a device.
    """

    logged: bool
    traced: bool
    device_readings: bool
    growth: tuple[MemoryGrowth, ...]
    peaks: tuple[MemoryPeak, ...]
    retries: RetryFacts | None
