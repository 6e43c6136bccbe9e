"""What in a trace waits for what: slices for their launch and their stream, the host for itself and for the device.

All threads that launch share one clock of the host, in the order of the recording: while one thread waits for the
device all do, as the training thread does during the backward pass. A slice starts when it is launched, what is ahead
of it on its stream has ended, and what held it back (below) is over. Of these the last one decided: from there on a
slice takes as long to start as it was recorded to. The others are taken to cost nothing more, so that no replay starts
anything later than it could.

A slice of another stream is a dependency only where something must have held the slice back, and that slice ended
right before it started. Everything here is an array over slices in order of their start.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct

from stepscope.engine import intervals
from stepscope.engine.intervals import Intervals
from stepscope.engine.scene import Scene
from stepscope.engine.step_windows import host_steps, launched_in
from stepscope.tables.arrays import Bools, Int64

NONE = -1
# From launch to start an idle device takes 5 to 10 us. A slice that starts later although its stream is free was held
# back by something; it starts as soon after that.
HELD_NS = 20_000
CLOSE_NS = 10_000
LEAST_CHAIN = 64  # slices; fewer are quicker one by one than as columns


class Slices(Struct, frozen=True, dict=True):
    """Device work in order of start.

    `row` is that of the span, `stream` a number for each stream of each device. `launch_ns` is the host's time of the
    launch; of a slice without one, when it was noticed that it must have been launched. `before` is the slice that it
    follows on its stream, NONE for none; -2 - n for slice n that still ran when it began, which then had run for
    `reach_ns`. `awaited` is the slice of another stream that held it back, NONE for none.
    """

    row: Int64
    kind: Int64
    stream: Int64
    device: Int64
    start_ns: Int64
    duration_ns: Int64
    launch: Int64
    launch_ns: Int64
    launch_delay_ns: Int64
    before: Int64
    before_delay_ns: Int64
    reach_ns: Int64
    awaited: Int64
    awaited_delay_ns: Int64
    held: Intervals  # when slices did not start although nothing recorded held them back

    def __len__(self) -> int:
        return len(self.row)

    @property
    def end_ns(self) -> Int64:
        return self.start_ns + self.duration_ns

    @cached_property
    def links(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """`before`, `before_delay_ns`, `awaited` and `awaited_delay_ns` as every replay goes through them."""
        before, awaited = self.before.tolist(), self.awaited.tolist()
        return before, self.before_delay_ns.tolist(), awaited, self.awaited_delay_ns.tolist()

    @cached_property
    def chains(self) -> list[tuple[int, int]]:
        """Stretches, from and to before a slice, in which each waits for the one before it on its stream alone."""
        order = np.argsort(self.stream, kind="stable")
        previous = np.full(len(self), NONE)
        same = self.stream[order][1:] == self.stream[order][:-1]
        previous[order[1:][same]] = order[:-1][same]
        ends = np.flatnonzero((self.before != previous) | (self.awaited != NONE))
        bounds = np.concatenate([[NONE], ends, [len(self)]])
        long = np.flatnonzero(np.diff(bounds) > LEAST_CHAIN)
        return list(zip((bounds[long] + 1).tolist(), bounds[long + 1].tolist(), strict=True))


class Waits(Struct, frozen=True):
    """Waits of the host for the device, in order of time and disjoint.

    Wait i is over `own_ns[i]` after the host has come to it and `awaited[i]` are over: pairs of a slice and how long
    it has to have run at least. A soft wait may be for something else: it never becomes longer than `stall_ns[i]`.
    """

    begin_ns: Int64
    finish_ns: Int64
    own_ns: Int64
    stall_ns: Int64
    soft: Bools
    awaited: list[list[tuple[int, int]]]


class Steps(Struct, frozen=True):
    """The host's times of the steps, and which step each slice belongs to, -1 for none; `earlier` slices are over
    before the first step's."""

    start_ns: Int64
    end_ns: Int64
    of_slice: Int64
    earlier: Bools


class Graph(Struct, frozen=True):
    """One trace, or its first steps."""

    slices: Slices
    waits: Waits
    steps: Steps


def slices_of(scene: Scene, until_ns: int) -> Slices:
    """The slices that start before a time."""
    found, span = scene.found, scene.span
    order = np.argsort(found.start_ns, kind="stable")
    order = order[found.start_ns[order] < until_ns]
    row, start = found.rows[order], found.start_ns[order]
    end = np.maximum(found.end_ns[order], start)
    launch, device = found.launch[order], found.device[order]
    names, number = np.unique(span.column("stream", row), return_inverse=True)
    of_device = np.unique(device, return_inverse=True)[1] * len(names) + number
    stream = np.unique(of_device, return_inverse=True)[1].astype(np.int64)
    ahead = _ahead(stream, end)
    launch_ns = _launch_times(span.start_ns[np.maximum(launch, 0)], launch, ahead, start, end)
    safe = np.maximum(ahead, 0)
    free = np.where(ahead >= 0, np.minimum(end[safe], start), np.iinfo(np.int64).min)
    ready = np.maximum(free, launch_ns)
    awaited = _held_by(stream, start, end, ready)
    holder = end[np.maximum(awaited, 0)]
    late = (start - ready > HELD_NS) & (awaited < 0)
    by_launch = (awaited < 0) & (launch_ns > free)
    by_stream = (awaited < 0) & ~by_launch
    running = (ahead >= 0) & (end[safe] > start)
    return Slices(
        row=row,
        kind=found.kind[order].astype(np.int64),
        stream=stream,
        device=device,
        start_ns=start,
        duration_ns=end - start,
        launch=launch,
        launch_ns=launch_ns,
        launch_delay_ns=np.where(by_launch, start - launch_ns, 0),
        before=np.where(running, -2 - ahead, ahead),
        before_delay_ns=np.where(by_stream & (ahead >= 0), start - free, 0),
        reach_ns=np.where(running, start - start[safe], 0),
        awaited=awaited,
        awaited_delay_ns=np.where(awaited >= 0, start - holder, 0),
        held=intervals.union(ready[late], start[late]),
    )


def _ahead(stream: Int64, end: Int64) -> Int64:
    """For each slice the one of its stream that, of all that began before it, ends last."""
    ahead = np.full(len(stream), NONE, np.int64)
    for one in range(int(stream.max(initial=NONE)) + 1):
        own = np.flatnonzero(stream == one)
        reached = np.maximum.accumulate(end[own])
        latest = np.maximum.accumulate(np.where(end[own] >= reached, np.arange(len(own)), 0))
        ahead[own[1:]] = own[latest[:-1]]
    return ahead


def _launch_times(begin: Int64, launch: Int64, ahead: Int64, start: Int64, end: Int64) -> Int64:
    """`begin` where there is a launch. A slice without one counts as launched when it began, unless it began right
    behind the one ahead of it: then it came with that one."""
    times = np.where(launch >= 0, np.minimum(begin, start), start)  # clocks of host and device may disagree
    follows = (launch < 0) & (ahead >= 0) & (start - end[np.maximum(ahead, 0)] <= CLOSE_NS)
    for number in np.flatnonzero(follows).tolist():
        times[number] = min(times[ahead[number]], times[number])
    return times


def _held_by(stream: Int64, start: Int64, end: Int64, ready: Int64) -> Int64:
    """For each slice that was ready but did not start the slice of another stream it started right behind."""
    held = np.full(len(stream), NONE, np.int64)
    late = np.flatnonzero(start - ready > HELD_NS)
    order = np.argsort(end, kind="stable")
    ordered = end[order]
    firsts = np.searchsorted(ordered, start[late] - CLOSE_NS)
    lasts = np.searchsorted(ordered, start[late], side="right")
    for number, first, last in zip(late.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
        near = order[first:last]
        near = near[(stream[near] != stream[number]) & (end[near] > ready[number]) & (near < number)]
        if len(near):
            held[number] = int(near[-1])
    return held


def steps_of(scene: Scene, slices: Slices, count: int) -> Steps:
    """The first `count` steps."""
    _, starts, ends = host_steps(scene.span, scene.found)
    step = np.full(len(scene.span) + 1, NONE, np.int64)
    step[scene.found.rows] = launched_in(scene.span, scene.found, starts, ends)
    of_slice = step[slices.row]
    of_slice[of_slice >= count] = NONE
    first = slices.start_ns[of_slice == 0]
    earlier = (of_slice < 0) & (slices.end_ns < first.min()) if len(first) else np.zeros(len(slices), bool)
    return Steps(starts[:count], ends[:count], of_slice, earlier)
