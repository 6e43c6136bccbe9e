"""The memory of one device in one recording: levels over time, which blocks stand when, the peak, and a thinned curve.

`levels` has one entry more than there are events: the first is what stood before the first event, entry i + 1 what
stands after event i. A position p in it means "the first p events have happened".
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct

from stepscope.model.memory import MemoryCurve
from stepscope.tables.arrays import Bools, Int64

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
        stands: Bools = (self.allocation < position) & (self.release >= position)
        return stands

    @property
    def unreleased(self) -> Bools:
        open_ended: Bools = self.release == self.never
        return open_ended


def pair(address: Int64, is_allocation: Bools) -> Pairs:
    """Pair events of a device, in order of time, by address; what is no allocation is a release."""
    count = len(address)
    order = np.argsort(address, kind="stable")
    sorted_address, opens = address[order], is_allocation[order]
    same = np.append(sorted_address[1:] == sorted_address[:-1], False) if count else np.zeros(0, bool)
    following = np.append(order[1:], count) if count else np.zeros(0, np.int64)
    release = np.where(same, following, count)[opens]
    after_allocation = np.append(False, same[:-1] & opens[:-1]) if count else np.zeros(0, bool)
    lone = order[~opens & ~after_allocation]
    allocation = order[opens]
    by_time = np.argsort(allocation)
    next_opens = np.append(opens[1:], False) if count else np.zeros(0, bool)
    return Pairs(
        allocation=allocation[by_time],
        release=release[by_time],
        lone=np.sort(lone),
        never=count,
        unseen=int(np.count_nonzero(same & opens & next_opens)),
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
    def at_peak(self) -> Bools | None:
        """Which of the pairs' allocations stand at the peak."""
        return self.pairs.standing(self.peak) if self.pairs is not None else None

    @property
    def recorded_bytes(self) -> int | None:
        """Of what stands at the peak, what was allocated while recording."""
        if self.pairs is None or self.at_peak is None:
            return None
        return int(self.sizes[self.pairs.allocation[self.at_peak]].sum())

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
