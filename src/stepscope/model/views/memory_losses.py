"""What memory may cost a run: growth from step to step, how near the limit it came, retries of the allocator.

Bytes of the host ("cpu") are pages that cannot be dropped, between two steps; of a device, what torch's allocator had
given out. A step number or a figure that nothing tells is None.
"""

from __future__ import annotations

from msgspec import Struct

from stepscope.model.findings import Place


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
