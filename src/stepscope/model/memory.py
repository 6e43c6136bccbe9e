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
    `by_category` splits allocated bytes where a timeline file does.
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
    peak_time_ns: int | None  # of the first moment with the most allocated
    capacity_bytes: int | None
    by_category: dict[str, tuple[int, ...]]
    relative: bool = False
    clock: str = "epoch"
    events: int = 0  # the curve was made from
    peak_recorded_bytes: int | None = None  # at the peak, allocated while recording
    peak_before_bytes: int | None = None  # at the peak, allocated before the recording
    start_allocated_bytes: int | None = None
    end_allocated_bytes: int | None = None
    peak_by_category: dict[str, int] = field(default_factory=dict)


class MemoryBlock(Struct, frozen=True):
    """An allocation with its release; None where the recording does not hold one of the two."""

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

    `name` None: outside any operator. `calls` are all calls of the operator in the trace, those that allocate nothing
    included. A call inside a call of the same operator counts once in the totals. `at_peak_bytes`: of what it allocated
    itself, what stood in memory at the device's peak; None where blocks have no addresses.
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

    `standing_bytes`: of a snapshot, what stands in memory when it was taken, allocated at whatever time. `exact`: the
    line is that of the call, not of its function's definition.
    """

    place: Place | None
    device: str
    allocations: int
    allocated_bytes: int
    at_peak_bytes: int | None
    unreleased_bytes: int | None  # not released in the recording; None where blocks have no addresses
    standing_bytes: int | None = None
    exact: bool = True
    source: str = "trace"
    worker: str = ""
    span: int = 1


class MemoryState(Struct, frozen=True):
    """What the allocator holds of a device when a snapshot was taken. The first figure is the sum of the next four:

    `in_use_bytes` asked for by tensors; `rounding_bytes` given beyond that; `pending_bytes` released, but another
    stream may still use them; `free_bytes` held back for later. Of `free_bytes`, `releasable_bytes` are whole segments,
    which empty_cache() gives back, and `fragmented_bytes` lie beside blocks in use, which it cannot.
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
    """An allocation that failed. `frames`: where, innermost first; `place`: the user's line among them."""

    worker: str
    device: str
    time_ns: int | None
    requested_bytes: int
    device_free_bytes: int | None
    allocated_bytes: int | None  # before it
    reserved_bytes: int | None
    place: Place | None
    frames: tuple[Place, ...]


class MemoryView(Struct, frozen=True):
    """All of it. `blocks` are the largest; `pairs` and `unpaired` say how many there were altogether."""

    curves: tuple[MemoryCurve, ...]
    operators: tuple[MemoryOperator, ...]
    lines: tuple[MemoryLine, ...]
    blocks: tuple[MemoryBlock, ...]
    pairs: int
    unpaired_allocations: int
    unpaired_releases: int
    notes: tuple[str, ...]
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
    "fraction" (set by the script) or "others". `others_bytes`: in use on the device, and not by this process's
    allocator: other processes, and what the driver itself takes.
    """

    bytes: int
    reason: str
    total_bytes: int | None = None
    others_bytes: int | None = None
    fraction: float | None = None
    place: Place | None = None  # the line that set the fraction


class MemoryPeak(Struct, frozen=True):
    """The most that a process held of a device. `retries` and `out_of_memory` are None where only a trace tells it."""

    rank: int | None
    device: str
    allocated_bytes: int
    reserved_bytes: int | None
    limit: MemoryLimit | None
    retries: int | None
    out_of_memory: int | None
    source: str


class GrowthLine(Struct, frozen=True):
    """A line that allocates in every recorded step what still stands after the step that follows."""

    place: Place
    operator: str | None
    bytes_per_step: float
    blocks_per_step: float


class MemoryGrowth(Struct, frozen=True):
    """Memory that grows steadily. Levels are on the straight line through all readings (Theil and Sen), or in a trace
    those at the ends of its first and last step. `room_bytes`: what was left below the limit at the end.

    `traced`: seen in a trace alone, because the run has too few readings.
    """

    rank: int | None
    device: str
    points: int  # readings, or steps of a trace
    steps: int  # spanned by them
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
    them count as struck. `lost_ms_per_step` is by how much these are longer at their mean than the others at their
    median, spread over all; None where all or almost none are struck, so that there is nothing to compare with.
    """

    rank: int | None
    device: str
    retries: int  # between the first and the last steady step
    steps: int
    steps_struck: int
    stretches: int  # between two readings, with a retry
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
