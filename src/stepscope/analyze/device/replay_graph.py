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

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import TypeAlias

import numpy as np
from msgspec import Struct, field

from stepscope.engine import intervals
from stepscope.engine.device_work import COPY
from stepscope.engine.intervals import EMPTY, Intervals
from stepscope.engine.scene import Scene
from stepscope.engine.trace_steps import host_steps, launched_in
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


RETURN_NS = 10_000  # a call returns about as long after the device is done; also by how much clocks may disagree
LONG_NS = 100_000  # of a call: ten times what a launch takes
QUEUED = 500  # launched but not begun; CUDA's queue takes 1,024, and a launch into a full one lasts as long as a kernel
FULL_NS = 20_000  # of a launch: twice what it takes
LOOKED_AT = 1_000  # slices, to find the one a call waited for; more are launched meanwhile only by other threads
_DEVICE = re.compile(r"^(cuda|cu|hip)(Device|Ctx)Synchronize")
_STREAM = re.compile(r"^(cuda|cu|hip)StreamSynchronize")
_EVENT = re.compile(r"^(cuda|cu|hip)EventSynchronize")
_COPY = re.compile(r"^(cuda|cu|hip)Memcpy(?!.*async)", re.IGNORECASE)
_ON_DEVICE, _ON_STREAM, _ON_EVENT, _ON_COPY, _OTHER = range(5)
Awaited = list[tuple[int, int]]


class _Group(Struct):
    """Calls that overlap: one wait."""

    begin: int
    finish: int
    awaited: Awaited = field(default_factory=list)
    soft: bool = True


def waits_of(scene: Scene, slices: Slices, calls: Int64) -> Waits:
    """Waits among `calls`, rows of the runtime on the training thread and those that work for it."""
    found = _Calls(scene, slices)
    groups: list[_Group] = []
    for row, kind in found.chosen(calls):
        begin, finish = int(scene.span.start_ns[row]), int(scene.span.start_ns[row] + scene.span.duration_ns[row])
        awaited, soft = found.awaited(row, kind, begin, finish)
        if not awaited or finish <= begin:
            continue
        if not groups or begin >= groups[-1].finish:
            groups.append(_Group(begin, finish))
        group = groups[-1]
        group.finish = max(group.finish, finish)
        group.awaited += awaited
        group.soft &= soft
    begins, finishes = (np.asarray([getattr(one, name) for one in groups], np.int64) for name in ("begin", "finish"))
    awaited_by = [_begun_before(slices, group) for group in groups]
    over = [[int(slices.start_ns[n] + min(slices.duration_ns[n], reach)) for n, reach in own] for own in awaited_by]
    ready = np.maximum(begins, np.asarray([max(own, default=NONE) for own in over], np.int64))
    soft_ones = np.asarray([group.soft for group in groups], bool)
    return Waits(begins, finishes, finishes - ready, ready - begins, soft_ones, awaited_by)


def _begun_before(slices: Slices, group: _Group) -> Awaited:
    """What a group waits for. Where clocks disagree a slice may be recorded to end after the call that waited for it
    did: then the wait is for as much of it as had run, or a replay of the recording would be later than the recording.
    """
    run = [(number, reach, group.finish - int(slices.start_ns[number])) for number, reach in group.awaited]
    return [(number, ns if ns < slices.duration_ns[number] else reach) for number, reach, ns in run if ns > 0]


class _Calls:
    """Looks up what calls wait for."""

    def __init__(self, scene: Scene, slices: Slices) -> None:
        self.scene, self.slices = scene, slices
        self.end_ns = slices.end_ns
        self.by_end = np.argsort(self.end_ns, kind="stable")
        self.ends = self.end_ns[self.by_end]
        self.streams: list[tuple[int, Int64, Int64]] = []  # device; slices in order of launch; their launches
        for one in range(int(slices.stream.max(initial=NONE)) + 1):
            own = np.flatnonzero(slices.stream == one)
            own = own[np.argsort(slices.launch_ns[own], kind="stable")]
            self.streams.append((int(slices.device[own[0]]), own, slices.launch_ns[own]))
        known = slices.launch >= 0
        self.last_of = dict(zip(slices.launch[known].tolist(), np.flatnonzero(known).tolist(), strict=True))
        self.devices = len(np.unique(slices.device))

    @cached_property
    def below(self) -> dict[int, list[int]]:
        """Operator -> slices launched right below it, in order of launch."""
        rows, numbers = (np.fromiter(values, np.int64) for values in (self.last_of.keys(), self.last_of.values()))
        order = np.argsort(self.slices.launch_ns[numbers], kind="stable")
        found: dict[int, list[int]] = {}
        for parent, number in zip(self.scene.span.parent[rows[order]].tolist(), numbers[order].tolist(), strict=True):
            found.setdefault(parent, []).append(number)
        return found

    def chosen(self, calls: Int64) -> Iterator[tuple[int, int]]:
        """Calls that may wait, in order of time, with their kind."""
        span, slices = self.scene.span, self.slices
        calls = calls[np.argsort(span.start_ns[calls], kind="stable")]
        codes = span.names.codes[calls]
        kinds = np.full(len(span.names.values) + 1, _OTHER)
        for code in np.unique(codes[codes >= 0]).tolist():
            name = span.names.values[code]
            patterns = ((_DEVICE, _ON_DEVICE), (_STREAM, _ON_STREAM), (_EVENT, _ON_EVENT), (_COPY, _ON_COPY))
            kinds[code] = next((kind for pattern, kind in patterns if pattern.search(name)), _OTHER)
        kind = kinds[codes]
        kind[(kind == _OTHER) & self._pageable()[calls]] = _ON_COPY
        lasting = span.duration_ns[calls]
        launched = np.searchsorted(np.sort(slices.launch_ns), span.start_ns[calls], side="right")
        begun = np.searchsorted(slices.start_ns, span.start_ns[calls], side="right")
        launches: Bools = np.zeros(len(span), bool)
        launches[slices.launch[slices.launch >= 0]] = True
        full = launches[calls] & (lasting >= FULL_NS) & (launched - begun >= QUEUED)
        other = (~launches[calls] & (lasting >= LONG_NS)) | full
        wanted = (kind != _OTHER) | other
        yield from zip(calls[wanted].tolist(), kind[wanted].tolist(), strict=True)

    def _pageable(self) -> Bools:
        """Rows of calls that launched a copy of which one side is pageable memory."""
        names, slices = self.scene.span.names, self.slices
        flags = names.containing("Pageable")
        copies = (slices.kind == COPY) & (slices.launch >= 0) & flags[slices.row]
        rows: Bools = np.zeros(len(self.scene.span), bool)
        rows[slices.launch[copies]] = True
        return rows

    def awaited(self, row: int, kind: int, begin: int, finish: int) -> tuple[Awaited, bool]:
        """What a call waits for, and whether it is not certain."""
        if kind == _ON_COPY:
            number = self.last_of.get(row, NONE)
            if number >= 0 and self.slices.start_ns[number] < finish:
                return [(number, finish - int(self.slices.start_ns[number]))], False
        if kind == _ON_DEVICE:
            return self._on_device(begin, finish), False
        last = self._ended_last(begin, finish)
        if kind == _ON_STREAM and last < 0:
            last = self._same_operator(row, begin, finish)
        return ([self._whole(last)] if last >= 0 else []), kind not in (_ON_STREAM, _ON_COPY)

    def _whole(self, number: int) -> tuple[int, int]:
        """A wait for all of a slice, whatever it lasts."""
        return number, np.iinfo(np.int64).max

    def _on_device(self, begin: int, finish: int) -> Awaited:
        last = self._ended_last(begin, finish)
        if self.devices > 1 and last < 0:
            return []  # nobody tells which device
        wanted = int(self.slices.device[last]) if last >= 0 else None
        found = []
        for device, own, launched in self.streams:
            at = int(np.searchsorted(launched, begin, side="right")) - 1
            if at >= 0 and wanted in (None, device) and self.end_ns[own[at]] <= finish + RETURN_NS:
                found.append(self._whole(int(own[at])))
        return found

    def _ended_last(self, begin: int, finish: int) -> int:
        """Of the slices launched before a call that end while it lasts the last one, NONE for none."""
        first = int(np.searchsorted(self.ends, begin, side="right"))
        last = int(np.searchsorted(self.ends, finish, side="right"))
        for at in range(last - 1, max(first, last - LOOKED_AT) - 1, -1):
            number = int(self.by_end[at])
            if self.slices.launch_ns[number] <= begin:
                return number
        return NONE

    def _same_operator(self, row: int, begin: int, finish: int) -> int:
        """The last slice that the operator around a call launched before it, as `.item()` copies and then waits."""
        around = int(self.scene.span.parent[row])
        if around < 0 or not self.scene.span.is_operator[around]:
            return NONE
        launched = self.below.get(around, [])
        last = bisect_right(launched, begin, key=lambda one: int(self.slices.launch_ns[one]))
        for number in reversed(launched[max(0, last - LOOKED_AT) : last]):
            if self.end_ns[number] <= finish + RETURN_NS:
                return number
        return NONE


# begin, waits over before, beside one, the slice ahead and the wait for it, the same of another stream, length
_Row: TypeAlias = tuple[int, int, bool, int, int, int, int, int]

MOSTLY = 0.5  # a wait with more than this part of it cut is gone


class Change(Struct, frozen=True):
    """A what-if: host time that takes none, durations of slices, and slices that start at once when launched.

    `duration_ns` is None for all as recorded. `at_once` is None for none. `work`: device work becomes shorter; then a
    host that is late hides a part of what it gives.
    """

    cut: Intervals = EMPTY
    duration_ns: Int64 | None = None
    at_once: Bools | None = None
    work: bool = False


class Replayed(Struct, frozen=True):
    """What a replay comes out at. `start_ns`, `end_ns` go with the slices; waits are those that were kept."""

    start_ns: Int64
    end_ns: Int64
    begin_ns: Int64  # of kept waits, as recorded
    finish_ns: Int64
    played_begin_ns: Int64
    played_finish_ns: Int64
    gone: Intervals  # host time that the base leaves out: what was cut, and all waits

    def host_ns(self, times: Int64) -> Int64:
        """When the host comes to what it did at `times`."""
        base = times - intervals.covered_before(self.gone, times)
        if not len(self.begin_ns):
            return base
        behind = np.searchsorted(self.finish_ns, times, side="right")
        begun = self.begin_ns - intervals.covered_before(self.gone, self.begin_ns)
        shifts = np.concatenate([[0], self.played_finish_ns - begun])
        at = np.minimum(behind, len(self.begin_ns) - 1)
        inside = (behind < len(self.begin_ns)) & (self.begin_ns[at] < times)
        within = np.minimum(self.played_begin_ns[at] + times - self.begin_ns[at], self.played_finish_ns[at])
        reached: Int64 = np.where(inside, within, base + shifts[behind])
        return reached


def play(graph: Graph, change: Change) -> Replayed:
    """The replay of a graph under a change."""
    waits, slices = graph.waits, graph.slices
    lengths = waits.finish_ns - waits.begin_ns
    lost = intervals.covered(change.cut, waits.begin_ns, waits.finish_ns)
    kept = np.flatnonzero(lost <= MOSTLY * lengths)
    begin, finish = waits.begin_ns[kept], waits.finish_ns[kept]
    gone = intervals.merge(change.cut, intervals.union(waits.begin_ns, waits.finish_ns))
    duration = slices.duration_ns if change.duration_ns is None else change.duration_ns
    delay = slices.launch_delay_ns
    if change.at_once is not None:
        delay = np.where(change.at_once, 0, delay)

    launched = slices.launch_ns
    position = np.searchsorted(slices.start_ns, finish)  # slices ahead of each wait
    over = np.minimum(
        np.searchsorted(finish, launched, side="right"),
        np.searchsorted(position, np.arange(len(launched)), side="right"),
    )
    inner = np.zeros(len(launched), np.int64)
    if len(begin):
        at = np.minimum(over, len(begin) - 1)
        within = (over < len(begin)) & (begin[at] < launched) & (launched < finish[at])
        inner[within] = (launched - begin[at])[within]
    base = launched - intervals.covered_before(gone, launched)
    begun = begin - intervals.covered_before(gone, begin)
    run = _Run(graph, duration.tolist(), kept.tolist(), begun.tolist(), position.tolist())
    run.all(base + inner, delay, over, inner > 0)
    starts, ends = np.asarray(run.starts, np.int64), np.asarray(run.ends, np.int64)
    return Replayed(starts, ends, begin, finish, _array(run.begun), _array(run.finished), gone)


class _Run:
    """One pass. `shifts[k]`: by how much the host is behind its base once k waits are over."""

    def __init__(
        self, graph: Graph, duration: list[int], kept: list[int], base: list[int], position: list[int]
    ) -> None:
        self.graph = graph
        self.duration = duration
        self.kept, self.base, self.position = kept, base, position
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.shifts = [0]
        self.begun: list[int] = []
        self.finished: list[int] = []

    def all(self, launches: Int64, delays: Int64, over: Int64, inside: Bools) -> None:
        """Every slice, and every wait where its turn comes.

        Slices `inside` are launched beside a wait; once it is over, they start at its end at the latest.
        """
        self.launches, self.delays, self.over, self.inside = launches + delays, delays, over, inside
        columns = (self.launches.tolist(), over.tolist(), inside.tolist(), *self.graph.slices.links, self.duration)
        rows = zip(*columns, strict=True)
        count = len(launches)
        chains = iter((*self.graph.slices.chains, (count, count)))
        first, last = next(chains)
        for turn in (*self.position, count):
            while (at := len(self.starts)) < turn:
                while last <= at:
                    first, last = next(chains)
                stop = min(last, turn)
                if stop - max(at, first) <= LEAST_CHAIN:  # also where the next one begins later
                    self._one_by_one(islice(rows, stop - at))
                    continue
                if at < first:
                    self._one_by_one(islice(rows, first - at))
                self._chained(max(at, first), stop)
                next(islice(rows, stop - max(at, first) - 1, None), None)
            if len(self.finished) < len(self.position):
                self._wait()

    def _one_by_one(self, rows: Iterable[_Row]) -> None:
        starts, ends, shifts = self.starts, self.ends, self.shifts
        for begin, behind, beside, first, wait, other, wait_other, length in rows:
            begin += shifts[behind]
            if beside and behind < len(self.finished):
                begin = min(begin, self.finished[behind] + int(self.delays[len(starts)]))
            if first >= 0:
                if ends[first] + wait > begin:
                    begin = ends[first] + wait
            elif first < -1:
                reach = int(self.graph.slices.reach_ns[len(starts)])
                begin = max(begin, self._reached(-2 - first, reach) + wait)
            if other >= 0 and ends[other] + wait_other > begin:
                begin = ends[other] + wait_other
            starts.append(begin)
            ends.append(begin + length)

    def _chained(self, at: int, stop: int) -> None:
        """Slices of one of the graph's chains: the latest of all sums along a stream is a running maximum."""
        slices = self.graph.slices
        over, finished = self.over[at:stop], _array(self.finished)
        begins = self.launches[at:stop] + _array(self.shifts)[over]
        beside = np.flatnonzero(self.inside[at:stop] & (over < len(finished)))
        begins[beside] = np.minimum(begins[beside], finished[over[beside]] + self.delays[at:stop][beside])
        lengths = _array(self.duration[at:stop])
        ends = np.empty(stop - at, np.int64)
        streams = slices.stream[at:stop]
        for stream in np.unique(streams):
            of_it = np.flatnonzero(streams == stream)
            begin, waits = begins[of_it], slices.before_delay_ns[at:stop][of_it]
            before = int(slices.before[at + of_it[0]])
            if before >= 0:
                begin[0] = max(begin[0], self.ends[before] + waits[0])
            sums = np.cumsum(waits + lengths[of_it])
            ends[of_it] = sums + np.maximum.accumulate(begin + lengths[of_it] - sums)
        self.starts += (ends - lengths).tolist()
        self.ends += ends.tolist()

    def _reached(self, number: int, reach: int) -> int:
        """When a slice is over, or has run for as long as `reach`."""
        return self.starts[number] + min(self.duration[number], reach)

    def _wait(self) -> None:
        """The next wait."""
        waits, number = self.graph.waits, len(self.finished)
        wait = self.kept[number]
        begin = self.base[number] + self.shifts[-1]
        done = max((self._reached(*one) for one in waits.awaited[wait]), default=begin)
        stall = max(0, done - begin)
        if waits.soft[wait]:
            stall = min(stall, int(waits.stall_ns[wait]))
        finish = begin + stall + int(waits.own_ns[wait])
        self.begun.append(begin)
        self.finished.append(finish)
        self.shifts.append(finish - self.base[number])


def step_lengths(graph: Graph, played: Replayed) -> Int64:
    """The steps' lengths, cut from a replay as the overview cuts them from the recording. ns."""
    steps: Steps = graph.steps
    starts, ends = played.host_ns(steps.start_ns), played.host_ns(steps.end_ns)
    count = len(starts)
    last = np.full(count, np.iinfo(np.int64).min)
    inside = steps.of_slice >= 0
    np.maximum.at(last, steps.of_slice[inside], played.end_ns[inside])
    previous = int(starts[0])
    if steps.earlier.any():
        previous = max(previous, int(played.end_ns[steps.earlier].max()))
    lengths = np.empty(count, np.int64)
    for number in range(count):
        start = max(previous, int(starts[number]))
        previous = max(int(ends[number]), int(last[number]), start)
        lengths[number] = previous - start
    return lengths


def _array(values: list[int]) -> Int64:
    return np.asarray(values, np.int64)
