"""Profiled steps played again without one of their losses: what could be gained at most, and not by subtraction.

A `Graph` says what in a trace waits for what: slices for their launch and their stream, the host for itself and for
the device. All threads that launch share one clock of the host, in the order of the recording: while one thread waits
for the device all do, as the training thread does during the backward pass. A slice starts when it is launched, what is
ahead of it on its stream has ended, and what held it back (below) is over. Of these the last one decided: from there on
a slice takes as long to start as it was recorded to. The others are taken to cost nothing more, so that no replay
starts anything later than it could. A slice of another stream is a dependency only where something must have held the
slice back, and that slice ended right before it started. Everything there is an array over slices in order of their
start; `Replayed` plays it.

`_Trace` knows the changes that leave losses out, `Played` what a run's traces gain by each.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.device.device_losses import TraceLosses, by_run
from stepscope.analyze.device.idle_time import IN, LAUNCH_NS, OUT, RETURN_NS, SHORT_NS
from stepscope.engine import intervals
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL
from stepscope.engine.intervals import EMPTY, Intervals
from stepscope.engine.scene import Scene, host_steps, launched_in
from stepscope.model import device_losses as kinds
from stepscope.model.device_losses import Replay, WhatIf
from stepscope.tables.arrays import NONE, Bools, Int64, unique

# From launch to start an idle device takes 5 to 10 us. A slice that starts later although its stream is free was held
# back by something; it starts as soon after that.
HELD_NS = 20_000
CLOSE_NS = 10_000
LEAST_CHAIN = 64  # slices; fewer are quicker one by one than as columns
ROWS_MADE = 256  # at once of slices that come one by one: between two waits are few

LONG_NS = 100_000  # of a call: ten times what a launch takes
QUEUED = 500  # launched but not begun; CUDA's queue takes 1,024, and a launch into a full one lasts as long as a kernel
FULL_NS = 20_000  # of a launch: twice what it takes
LOOKED_AT = 1_000  # slices, to find the one a call waited for; more are launched meanwhile only by other threads
MOSTLY = 0.5  # a wait with more than this part of it cut is gone
_WHOLE = np.iinfo(np.int64).max  # a wait for all of a slice, whatever it lasts
_ON_DEVICE, _ON_STREAM, _ON_EVENT, _ON_COPY, _OTHER = range(5)
_CALLS = (
    (re.compile(r"^(cuda|cu|hip)(Device|Ctx)Synchronize"), _ON_DEVICE),
    (re.compile(r"^(cuda|cu|hip)StreamSynchronize"), _ON_STREAM),
    (re.compile(r"^(cuda|cu|hip)EventSynchronize"), _ON_EVENT),
    (re.compile(r"^(cuda|cu|hip)Memcpy(?!.*async)", re.IGNORECASE), _ON_COPY),
)
Awaited = list[tuple[int, int]]  # slices, and how long each has to have run at least
# number, begin, waits over before, beside one, the slice ahead and the wait for it, the same of another stream, length
_Row: TypeAlias = tuple[int, int, int, bool, int, int, int, int, int]


class Graph:
    """One trace, or its first `count` steps: device work in order of start, the host's waits for it, and the steps.

    `row` is that of the span, `stream` a number for each stream of each device. `launch_ns` is the host's time of the
    launch; of a slice without one, when it was noticed that it must have been launched. `before` is the slice that it
    follows on its stream, NONE for none; -2 - n for slice n that still ran when it began, which then had run for
    `reach_ns`. `awaited` is the slice of another stream that held it back, NONE for none. `held`: when slices did not
    start although nothing recorded held them back.

    Waits are in order of time and disjoint. Wait i is over `wait_own_ns[i]` after the host has come to it and
    `wait_for[i]` are over. A soft wait may be for something else: it never becomes longer than `wait_stall_ns[i]`.

    Steps have the host's times. `step` is the one each slice belongs to, NONE for none.

    Args:
        calls: rows of the runtime on the training thread and those that work for it.
    """

    def __init__(self, scene: Scene, calls: Int64, count: int) -> None:
        found, span = scene.found, scene.span
        order = np.argsort(found.start_ns, kind="stable")
        if count < len(scene):
            order = order[found.start_ns[order] < scene.ends[count - 1]]
        self.row, self.launch, self.device = found.rows[order], found.launch[order], found.device[order]
        self.kind = found.kind[order]
        start = self.start_ns = found.start_ns[order]
        end = self.end_ns = np.maximum(found.end_ns[order], start)
        self.duration_ns = end - start
        names, number = np.unique(span.column("stream", self.row), return_inverse=True)
        of_device = np.unique(self.device, return_inverse=True)[1] * len(names) + number
        self.stream = np.unique(of_device, return_inverse=True)[1].astype(np.int64)
        ahead = np.full(
            len(order), NONE, np.int64
        )  # of its stream the one that, of all that began before it, ends last
        for one in range(int(self.stream.max(initial=NONE)) + 1):
            own = np.flatnonzero(self.stream == one)
            latest = np.where(end[own] >= np.maximum.accumulate(end[own]), np.arange(len(own)), 0)
            ahead[own[1:]] = own[np.maximum.accumulate(latest)[:-1]]
        # A slice without a launch counts as launched when it began, unless it began right behind the one ahead of it:
        # then it came with that one. Clocks of host and device may disagree.
        begin = span.start_ns[np.maximum(self.launch, 0)]
        self.launch_ns = np.where(self.launch >= 0, np.minimum(begin, start), start)
        follows = (self.launch < 0) & (ahead >= 0) & (start - end[np.maximum(ahead, 0)] <= CLOSE_NS)
        for number in np.flatnonzero(follows).tolist():
            self.launch_ns[number] = min(self.launch_ns[ahead[number]], self.launch_ns[number])
        safe = np.maximum(ahead, 0)
        free = np.where(ahead >= 0, np.minimum(end[safe], start), np.iinfo(np.int64).min)
        ready = np.maximum(free, self.launch_ns)
        self.awaited = self._held_by(ready)
        by_own = self.awaited < 0
        by_launch = by_own & (self.launch_ns > free)
        running = (ahead >= 0) & (end[safe] > start)
        self.launch_delay_ns = np.where(by_launch, start - self.launch_ns, 0)
        self.before = np.where(running, -2 - ahead, ahead)
        self.before_delay_ns = np.where(by_own & ~by_launch & (ahead >= 0), start - free, 0)
        self.reach_ns = np.where(running, start - start[safe], 0)
        self.awaited_delay_ns = np.where(by_own, 0, start - end[np.maximum(self.awaited, 0)])
        late = by_own & (start - ready > HELD_NS)
        self.held = intervals.union(ready[late], start[late])

        _, starts, ends = host_steps(span, found)
        self.step_start_ns, self.step_end_ns = starts[:count], ends[:count]
        step = launched_in(span, found, starts, ends)[order]
        self.step = np.where(step < count, step, NONE)
        self._find_waits(scene, calls)

    def __len__(self) -> int:
        return len(self.row)

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

    def _held_by(self, ready: Int64) -> Int64:
        """For each slice that was ready but did not start the slice of another stream it started right behind."""
        stream, start, end = self.stream, self.start_ns, self.end_ns
        held = np.full(len(stream), NONE, np.int64)
        late = np.flatnonzero(start - ready > HELD_NS)
        order = np.argsort(end, kind="stable")
        firsts = np.searchsorted(end[order], start[late] - CLOSE_NS)
        lasts = np.searchsorted(end[order], start[late], side="right")
        for number, first, last in zip(late.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
            near = order[first:last]
            near = near[(stream[near] != stream[number]) & (end[near] > ready[number]) & (near < number)]
            if len(near):
                held[number] = int(near[-1])
        return held

    def _find_waits(self, scene: Scene, calls: Int64) -> None:
        """The waits among `calls`; those that overlap are one."""
        found, span = _Calls(scene, self), scene.span
        begins: list[int] = []
        finishes: list[int] = []
        soft: list[bool] = []
        self.wait_for: list[Awaited] = []
        for row, kind in found.chosen(calls):
            begin, finish = int(span.start_ns[row]), int(span.start_ns[row] + span.duration_ns[row])
            awaited, unsure = found.awaited(row, kind, begin, finish)
            if not awaited or finish <= begin:
                continue
            if not begins or begin >= finishes[-1]:
                begins.append(begin)
                finishes.append(finish)
                soft.append(True)
                self.wait_for.append([])
            finishes[-1] = max(finishes[-1], finish)
            soft[-1] &= unsure
            self.wait_for[-1] += awaited
        over = []
        for own, finish in zip(self.wait_for, finishes, strict=True):
            # Where clocks disagree a slice may be recorded to end after the call that waited for it did: then the wait
            # is for as much of it as had run, or a replay of the recording would be later than the recording.
            run = [(number, reach, finish - int(self.start_ns[number])) for number, reach in own]
            own[:] = [(number, ns if ns < self.duration_ns[number] else reach) for number, reach, ns in run if ns > 0]
            ends = (int(self.start_ns[n] + min(self.duration_ns[n], reach)) for n, reach in own)
            over.append(max(ends, default=NONE))
        self.wait_begin_ns, self.wait_finish_ns, self.wait_soft = _array(begins), _array(finishes), soft
        ready = np.maximum(self.wait_begin_ns, _array(over))
        self.wait_own_ns, self.wait_stall_ns = self.wait_finish_ns - ready, ready - self.wait_begin_ns


class _Calls:
    """Looks up what calls wait for."""

    def __init__(self, scene: Scene, slices: Graph) -> None:
        self.span, self.slices = scene.span, slices
        self.by_end = np.argsort(slices.end_ns, kind="stable")
        self.ends = slices.end_ns[self.by_end]
        self.streams: list[tuple[int, Int64, Int64]] = []  # device; slices in order of launch; their launches
        for one in range(int(slices.stream.max(initial=NONE)) + 1):
            own = np.flatnonzero(slices.stream == one)
            own = own[np.argsort(slices.launch_ns[own], kind="stable")]
            self.streams.append((int(slices.device[own[0]]), own, slices.launch_ns[own]))
        known = slices.launch >= 0
        self.last_of = dict(zip(slices.launch[known].tolist(), np.flatnonzero(known).tolist(), strict=True))

    @cached_property
    def below(self) -> dict[int, list[int]]:
        """Operator -> slices launched right below it, in order of launch."""
        found: dict[int, list[int]] = {}
        for row, number in sorted(self.last_of.items(), key=lambda one: int(self.slices.launch_ns[one[1]])):
            found.setdefault(int(self.span.parent[row]), []).append(number)
        return found

    def chosen(self, calls: Int64) -> Iterator[tuple[int, int]]:
        """Calls that may wait, in order of time, with their kind."""
        span, slices = self.span, self.slices
        calls = calls[np.argsort(span.start_ns[calls], kind="stable")]
        codes = span.names.codes[calls]
        kinds = np.full(len(span.names.values) + 1, _OTHER)
        for code in unique(codes[codes >= 0]).tolist():
            name = span.names.values[code]
            kinds[code] = next((kind for pattern, kind in _CALLS if pattern.search(name)), _OTHER)
        kind = kinds[codes]
        # calls that launched a copy of which one side is pageable memory
        pageable = (slices.kind == COPY) & (slices.launch >= 0) & span.names.containing("Pageable")[slices.row]
        kind[(kind == _OTHER) & np.isin(calls, slices.launch[pageable])] = _ON_COPY
        lasting = span.duration_ns[calls]
        launched = np.searchsorted(np.sort(slices.launch_ns), span.start_ns[calls], side="right")
        begun = np.searchsorted(slices.start_ns, span.start_ns[calls], side="right")
        launches = np.isin(calls, slices.launch)
        full = launches & (lasting >= FULL_NS) & (launched - begun >= QUEUED)
        wanted = (kind != _OTHER) | full | (~launches & (lasting >= LONG_NS))
        yield from zip(calls[wanted].tolist(), kind[wanted].tolist(), strict=True)

    def awaited(self, row: int, kind: int, begin: int, finish: int) -> tuple[Awaited, bool]:
        """What a call waits for, and whether it is not certain."""
        if kind == _ON_COPY:
            number = self.last_of.get(row, NONE)
            if number >= 0 and self.slices.start_ns[number] < finish:
                return [(number, finish - int(self.slices.start_ns[number]))], False
        # of the slices launched before the call that end while it lasts the last one
        first, behind = np.searchsorted(self.ends, [begin, finish], side="right").tolist()
        near = self.by_end[max(first, behind - LOOKED_AT) : behind]
        near = near[self.slices.launch_ns[near] <= begin]
        last = int(near[-1]) if len(near) else NONE
        if kind == _ON_DEVICE:
            return self._on_device(last, begin, finish), False
        if kind == _ON_STREAM and last < 0:
            last = self._same_operator(row, begin, finish)
        return ([(last, _WHOLE)] if last >= 0 else []), kind not in (_ON_STREAM, _ON_COPY)

    def _on_device(self, last: int, begin: int, finish: int) -> Awaited:
        if last < 0 and len(unique(self.slices.device)) > 1:
            return []  # nobody tells which device
        found = []
        for device, own, launched in self.streams:
            at = int(np.searchsorted(launched, begin, side="right")) - 1
            same = last < 0 or device == self.slices.device[last]
            if at >= 0 and same and self.slices.end_ns[own[at]] <= finish + RETURN_NS:
                found.append((int(own[at]), _WHOLE))
        return found

    def _same_operator(self, row: int, begin: int, finish: int) -> int:
        """The last slice that the operator around a call launched before it, as `.item()` copies and then waits."""
        around = int(self.span.parent[row])
        if around < 0 or not self.span.is_operator[around]:
            return NONE
        launched = self.below.get(around, [])
        last = bisect_right(launched, begin, key=lambda one: int(self.slices.launch_ns[one]))
        near = reversed(launched[max(0, last - LOOKED_AT) : last])
        return next((number for number in near if self.slices.end_ns[number] <= finish + RETURN_NS), NONE)


class Change(Struct, frozen=True):
    """A what-if: host time that takes none, durations of slices, and slices that start at once when launched.

    `duration_ns` is None for all as recorded. `at_once` is None for none. `work`: device work becomes shorter; then a
    host that is late hides a part of what it gives.
    """

    cut: Intervals = EMPTY
    duration_ns: Int64 | None = None
    at_once: Bools | None = None
    work: bool = False


class Replayed:
    """A graph played under a change. `start_ns`, `end_ns` go with the slices."""

    def __init__(self, graph: Graph, change: Change) -> None:
        self._graph = graph
        begin, finish, launched = graph.wait_begin_ns, graph.wait_finish_ns, graph.launch_ns
        # host time that the base leaves out: what was cut, and all waits
        self._gone = intervals.merge(change.cut, intervals.union(begin, finish))
        kept = np.flatnonzero(intervals.covered(change.cut, begin, finish) <= MOSTLY * (finish - begin))
        self._begin_ns, self._finish_ns = begin, finish = begin[kept], finish[kept]
        self._base_ns = begin - intervals.covered_before(self._gone, begin)
        durations = self._durations = graph.duration_ns if change.duration_ns is None else change.duration_ns
        # a slice that is gone does not take any time to start behind the one ahead of it
        self._before_delay_ns = np.where((durations == 0) & (graph.duration_ns > 0), 0, graph.before_delay_ns)
        self._delays = graph.launch_delay_ns
        if change.at_once is not None:
            self._delays = np.where(change.at_once, 0, self._delays)
        position = np.searchsorted(graph.start_ns, finish)  # slices ahead of each wait
        self._over = np.minimum(  # waits over before each launch
            np.searchsorted(finish, launched, side="right"),
            np.searchsorted(position, np.arange(len(launched)), side="right"),
        )
        inner = np.zeros(len(launched), np.int64)
        if len(begin):
            at = np.minimum(self._over, len(begin) - 1)
            within = (self._over < len(begin)) & (begin[at] < launched) & (launched < finish[at])
            inner[within] = (launched - begin[at])[within]
        self._launches = launched - intervals.covered_before(self._gone, launched) + inner + self._delays
        self._beside = inner > 0  # launched beside a wait: once it is over, they start at its end at the latest
        self.start_ns, self.end_ns = np.empty((2, len(launched)), np.int64)
        self._begun, self._finished = np.empty((2, len(kept)), np.int64)
        self._shifts = np.zeros(len(kept) + 1, np.int64)  # how far the host is behind its base once so many are over
        self._waits = 0  # that are over
        # single items of a view are read and written in a third of the time that those of an array take
        self._views = self.start_ns.data, self.end_ns.data, self._shifts.data
        self._columns = (
            *(self._launches, self._over, self._beside, graph.before, self._before_delay_ns),
            *(graph.awaited, graph.awaited_delay_ns, self._durations),
        )
        self._items: Iterator[_Row] = iter(())
        self._passed = self._made = 0  # slices that items were taken of, and made for
        self._run(kept.tolist(), position.tolist())

    def _run(self, kept: list[int], position: list[int]) -> None:
        """Every slice, and every wait where its turn comes."""
        at, count = 0, len(self._graph)
        chains = iter((*self._graph.chains, (count, count)))
        first, last = next(chains)
        for wait, turn in zip((*kept, NONE), (*position, count), strict=True):
            while at < turn:
                while last <= at:
                    first, last = next(chains)
                stop = min(last, turn)
                if stop - max(at, first) <= LEAST_CHAIN:  # also where the next one begins later
                    self._one_by_one(at, stop)
                else:
                    if at < first:
                        self._one_by_one(at, first)
                    self._chained(max(at, first), stop)
                at = stop
            if wait != NONE:
                self._wait(wait)

    def _rows(self, at: int, stop: int) -> Iterator[_Row]:
        """Slices from `at` on to go through one by one, as items made of some of each column at once."""
        if at != self._passed or stop > self._made:
            self._made = max(stop, at + ROWS_MADE)
            self._items = zip(
                range(at, min(self._made, len(self._graph))),
                *(column[at : self._made].tolist() for column in self._columns),
                strict=True,
            )
        self._passed = stop
        return islice(self._items, stop - at)

    def _one_by_one(self, at: int, stop: int) -> None:
        waits = self._waits
        starts, ends, shifts = self._views
        for number, begin, behind, beside, first, wait, other, wait_other, length in self._rows(at, stop):
            begin += shifts[behind]
            if beside and behind < waits:
                begin = min(begin, int(self._finished[behind] + self._delays[number]))
            if first >= 0:
                if ends[first] + wait > begin:
                    begin = ends[first] + wait
            elif first < -1:
                begin = max(begin, self._reached(-2 - first, int(self._graph.reach_ns[number])) + wait)
            if other >= 0 and ends[other] + wait_other > begin:
                begin = ends[other] + wait_other
            starts[number] = begin
            ends[number] = begin + length

    def _chained(self, at: int, stop: int) -> None:
        """Slices of one of the graph's chains: the latest of all sums along a stream is a running maximum."""
        graph, over = self._graph, self._over[at:stop]
        begins = self._launches[at:stop] + self._shifts[over]
        beside = np.flatnonzero(self._beside[at:stop] & (over < self._waits))
        begins[beside] = np.minimum(begins[beside], self._finished[over[beside]] + self._delays[at:stop][beside])
        lengths, ends = self._durations[at:stop], self.end_ns[at:stop]
        streams = graph.stream[at:stop]
        for stream in np.flatnonzero(np.bincount(streams)):
            of_it = np.flatnonzero(streams == stream)
            begin, waits = begins[of_it], self._before_delay_ns[at:stop][of_it]
            before = int(graph.before[at + of_it[0]])
            if before >= 0:
                begin[0] = max(begin[0], self.end_ns[before] + waits[0])
            sums = np.cumsum(waits + lengths[of_it])
            ends[of_it] = sums + np.maximum.accumulate(begin + lengths[of_it] - sums)
        self.start_ns[at:stop] = ends - lengths

    def _reached(self, number: int, reach: int) -> int:
        """When a slice is over, or has run for as long as `reach`."""
        return int(self.start_ns[number] + min(self._durations[number], reach))

    def _wait(self, wait: int) -> None:
        graph, number, shifts = self._graph, self._waits, self._views[2]
        base = int(self._base_ns[number])
        begin = base + shifts[number]
        done = max((self._reached(*one) for one in graph.wait_for[wait]), default=begin)
        stall = max(0, done - begin)
        if graph.wait_soft[wait]:
            stall = min(stall, int(graph.wait_stall_ns[wait]))
        finish = begin + stall + int(graph.wait_own_ns[wait])
        self._begun[number], self._finished[number] = begin, finish
        self._waits = number + 1
        shifts[self._waits] = finish - base

    def host_ns(self, times: Int64) -> Int64:
        """When the host comes to what it did at `times`."""
        base = times - intervals.covered_before(self._gone, times)
        if not self._waits:
            return base
        behind = np.searchsorted(self._finish_ns, times, side="right")
        at = np.minimum(behind, self._waits - 1)
        inside = (behind < self._waits) & (self._begin_ns[at] < times)
        within = np.minimum(self._begun[at] + times - self._begin_ns[at], self._finished[at])
        reached: Int64 = np.where(inside, within, base + self._shifts[behind])
        return reached

    def step_lengths(self) -> Int64:
        """The steps' lengths, cut from a replay as the overview cuts them from the recording. ns."""
        graph = self._graph
        starts, ends = self.host_ns(graph.step_start_ns), self.host_ns(graph.step_end_ns)
        last = np.full(len(starts), np.iinfo(np.int64).min)
        inside = graph.step >= 0
        np.maximum.at(last, graph.step[inside], self.end_ns[inside])
        # what no step launched and is over before the first one's work
        first = graph.start_ns[graph.step == 0]
        earlier = self.end_ns[~inside & (graph.end_ns < first.min(initial=_WHOLE)) & (len(first) > 0)]
        previous = int(earlier.max(initial=starts[0]))
        lengths = np.empty(len(starts), np.int64)
        for number in range(len(starts)):
            start = max(previous, int(starts[number]))
            previous = max(int(ends[number]), int(last[number]), start)
            lengths[number] = previous - start
        return lengths


def _array(values: list[int]) -> Int64:
    return np.asarray(values, np.int64)


MAX_RESIDUAL = 0.05  # of the recorded steps: a replay that is further off does not know the trace
# Of a trace: more take two seconds and more, and then its first steps stand for it. Of all traces: what is beyond that
# is left out, as of many ranks that do the same.
MAX_SLICES = 100_000
MAX_SLICES_OF_ALL = 400_000
# Tensor cores by ordinary cores in 32 bits: data sheets of V100 and T4, of A100 and H100.
TENSOR_CORE_RATES = (8, 16)
HALVED = 2  # kernels that move data, in 16 bits in place of 32


class _Trace:
    """One trace that can be replayed. Lengths are ns of its interior steps; a replay is made when it is asked for."""

    def __init__(self, lost: TraceLosses, graph: Graph) -> None:
        self.lost, self.scene, self.slices = lost, lost.scene, graph
        span, host, count = self.scene.span, self.scene.host, len(graph.step_start_ns)
        self._interior = slice(1, -1) if count >= 3 else slice(None)
        self._starts, self._ends = (edges[:count][self._interior] for edges in (self.scene.starts, self.scene.ends))
        self.recorded: Int64 = self._ends - self._starts
        # when launches began, in order, and when the last of those up to each was over
        launch = graph.launch[graph.launch >= 0]
        launch = launch[np.argsort(span.start_ns[launch], kind="stable")]
        self._launches = span.start_ns[launch], np.maximum.accumulate(span.ends(launch))
        # host time that is not the preparation of a launch
        waiting = intervals.union(graph.wait_begin_ns, graph.wait_finish_ns)
        self._otherwise = intervals.merge(
            host.synchronizing, waiting, host.data, host.compiling, host.allocating, host.io
        )
        # each what-if of which the trace holds something, by its kind
        self.changes: dict[str, Change] = dict((*self._of_host(), *self._of_work()))
        self.unchanged = self._played(Change())

    def _played(self, change: Change) -> Int64:
        return Replayed(self.slices, change).step_lengths()[self._interior]

    def unexplained_ns(self) -> int:
        """While no device does anything although slices had all they need."""
        held = intervals.intersect(self.scene.idle, self.slices.held)
        return int(intervals.covered(held, self._starts, self._ends).sum())

    def without(self, kind: str) -> Int64:
        return self._played(self.changes[kind]) if kind in self.changes else self.unchanged

    @cached_property
    def never_late(self) -> Int64:
        return self._played(self._prepared_at_once)

    def never_late_without(self, kind: str) -> Int64:
        """The same with a host that is never late, of a loss that is work."""
        change, late = self.changes.get(kind), self._prepared_at_once
        if change is None or not change.work:
            return self.never_late
        return self._played(replace(change, cut=intervals.merge(change.cut, late.cut), at_once=late.at_once))

    @cached_property
    def _prepared_at_once(self) -> Change:
        """A host that prepares launches in no time. It still waits, loads, compiles and gets memory."""
        slices = self.slices
        if not len(slices):
            return Change()
        first = int(min(slices.launch_ns.min(), slices.start_ns.min()))
        cut = intervals.complement(self._otherwise, first, int(slices.end_ns.max()))
        return Change(cut, at_once=np.ones(len(slices), bool))

    def _of_host(self) -> Iterator[tuple[str, Change]]:
        host, idle, losses = self.scene.host, self.lost.idle, self.lost.by_kind
        slices, found, span = self.slices, self.scene.found, self.scene.span
        causes = ((kinds.LOADER, host.data), (kinds.COMPILE, host.compiling), (kinds.ALLOCATOR, host.allocating))
        for kind, times in causes:
            if len(times.starts):
                yield kind, Change(times)
        waits = idle.waits.times
        if len(waits.starts):  # the host waits for nothing at these calls, and what it copies to itself takes no time
            copied = self._chosen(found.rows[idle.copies(OUT)])
            copied &= intervals.inside(intervals.union(waits.starts, waits.ends + RETURN_NS), slices.end_ns)
            cut = intervals.merge(waits, self._reading())
            yield kinds.SYNC, Change(cut, np.where(copied, 0, slices.duration_ns))
        making = losses[kinds.MADE].rows
        of_made = idle.copies_in.slices[idle.made.copies]
        if len(making):  # the operators take no time, nor do the copies of what they make
            yield (
                kinds.MADE,
                replace(self._shortened(self._chosen(found.rows[of_made]), span.times(making)), work=False),
            )
        copies = unique(idle.copies(IN))
        copies = copies[~np.isin(copies, of_made)]
        if len(copies):  # nor do the calls take any that ask for them and wait for them, nor pinning
            calls = np.concatenate([found.launch[copies], idle.pin_rows])
            cut = intervals.merge(span.times(calls[calls >= 0]), idle.waits_in.times)
            yield kinds.COPY_IN, self._shortened(self._chosen(found.rows[copies]), cut)
        for kind in (kinds.OPTIMIZER, kinds.ZERO_GRAD):
            times = losses[kind].times
            if len(times.starts):  # nor do kernels that an optimizer could do without
                yield kind, replace(self._exposed(times), cut=self._prepared(times))
        yield from self._of_gaps()
        for kind in (kinds.LINALG, kinds.DATA_PARALLEL):
            loss = losses[kind]
            if len(loss.rows):  # operations of the host take no time, nor does what they launch
                calls_of_it = span.times(loss.rows)
                mine = intervals.inside(calls_of_it, slices.launch_ns) & (slices.launch >= 0)
                cut = intervals.merge(calls_of_it, self._prepared(loss.times))
                yield kind, replace(self._shortened(mine, cut), work=False)

    def _of_gaps(self) -> Iterator[tuple[str, Change]]:
        slices, span = self.slices, self.scene.span
        for kind in (kinds.COMPILED, kinds.LAUNCH, kinds.HOST, kinds.OPERATORS):
            times = self.lost.by_kind[kind].times
            if len(times.starts) and kind in (kinds.HOST, kinds.OPERATORS):
                yield kind, Change(self._prepared(times))
            elif len(times.starts):  # nor do small kernels, whose work larger ones do, and their launches
                first = np.isin(slices.start_ns, times.ends)
                blocks = span.series("blocks_per_sm").gather(slices.row).fill_null(1.0).to_numpy()
                short = (slices.duration_ns <= SHORT_NS) | (blocks < 1)
                short &= first & (slices.duration_ns < (times.ends - times.starts).mean())
                cut = intervals.merge(self._prepared(times), self._launching(short))
                yield kind, Change(cut, np.where(short, 0, slices.duration_ns), first, work=True)

    def _reading(self) -> Intervals:
        """Operators of the host that wait for the device and launch nothing but copies to the host, which go with the
        wait, and what lies between two of them without a launch: a loop that reads values one by one.
        """
        idle, span, found = self.lost.idle, self.scene.span, self.scene.found
        waiting = idle.calls[intervals.covered(idle.waits.times, span.start_ns[idle.calls], span.ends(idle.calls)) > 0]
        others = np.delete(found.launch, idle.copies(OUT))
        rows = unique(idle.operators(waiting))
        rows = rows[~np.isin(rows, idle.operators(others[others >= 0]))]
        own = span.times(rows[span.is_operator[rows]])
        before, behind = own.ends[:-1], own.starts[1:]
        launches = np.searchsorted(self._launches[0], before) != np.searchsorted(self._launches[0], behind)
        near = ~launches & (behind - before <= LAUNCH_NS)
        return intervals.merge(own, Intervals(before[near], behind[near]))

    def _launching(self, chosen: Bools) -> Intervals:
        """The host's time for the launches of slices, each from the launch before it on where that is near."""
        span, (starts, ends) = self.scene.span, self._launches
        rows = self.slices.launch[chosen & (self.slices.launch >= 0)]
        begin, at = span.start_ns[rows], np.searchsorted(starts, span.start_ns[rows]) - 1
        before = np.where(at >= 0, np.minimum(ends[np.maximum(at, 0)], begin), begin)
        begin = np.where(begin - before <= LAUNCH_NS, before, begin)
        return intervals.subtract(intervals.union(begin, span.ends(rows)), self._otherwise)

    def _prepared(self, gaps: Intervals) -> Intervals:
        """Gaps, and the host's time before them from its last launch on."""
        starts, ends = self._launches
        begin = gaps.starts
        if len(starts):
            at = np.searchsorted(starts, begin) - 1
            begin = np.where(at >= 0, np.minimum(ends[np.maximum(at, 0)], begin), begin)
        return intervals.subtract(intervals.union(begin, gaps.ends), self._otherwise)

    def _of_work(self) -> Iterator[tuple[str, Change]]:
        losses, kind, duration = self.lost.by_kind, self.slices.kind, self.slices.duration_ns
        for name in (kinds.ATTENTION, kinds.LAYOUT, kinds.POINTWISE):
            chosen = self._chosen(losses[name].named)
            if chosen.any():  # nor does the host take any to launch them
                yield name, self._shortened(chosen, self._launching(chosen))
        if (kind == COMMUNICATION).any():
            yield kinds.COLLECTIVES, self._shortened(kind == COMMUNICATION)
        copied = losses[kinds.DEVICE_COPY].times
        if len(copied.starts):
            yield kinds.DEVICE_COPY, replace(self._exposed(copied), work=True)
        products = self._chosen(losses[kinds.MATRIX].named)
        if products.any():
            others = np.where((kind == KERNEL) | (kind == FILL), duration // HALVED, duration)
            for rate in TENSOR_CORE_RATES:
                lengths = np.where(products, duration // rate, others)
                yield kinds.matrix(rate), Change(duration_ns=lengths, work=True)

    def _shortened(self, chosen: Bools, cut: Intervals = EMPTY) -> Change:
        return Change(cut, np.where(chosen, 0, self.slices.duration_ns), work=True)

    def _exposed(self, times: Intervals) -> Change:
        """Slices without what of them lies in these times."""
        slices = self.slices
        lengths = slices.duration_ns - intervals.covered(times, slices.start_ns, slices.end_ns)
        return Change(duration_ns=lengths, at_once=np.isin(slices.start_ns, times.ends))

    def _chosen(self, rows: Int64) -> Bools:
        """Slices by their rows in the span."""
        return np.isin(self.slices.row, rows)


_LENGTHS = ("recorded", "unchanged")


class Played(Replay):
    """The replay of a run's traces: each what-if is played when it is first asked for."""

    def __init__(self, found: Sequence[_Trace] = (), **known: Any) -> None:
        self.__dict__.update(known, _found=found, _of={})  # what it inherits from is frozen

    _found: Sequence[_Trace]
    _of: dict[str, WhatIf]

    @cached_property
    def _never_late(self) -> tuple[float, float]:
        return _mean_and_median(one.never_late for one in self._found)

    @cached_property
    def never_late_mean_ns(self) -> float:
        return self._never_late[0]

    @cached_property
    def never_late_median_ns(self) -> float:
        return self._never_late[1]

    @cached_property
    def what_ifs(self) -> tuple[WhatIf, ...]:
        known = dict.fromkeys(kind for one in self._found for kind in one.changes)
        return tuple(found for kind in known if (found := self.of(kind)) is not None)

    def of(self, kind: str) -> WhatIf | None:
        if not self._found:  # all that there is was given
            return super().of(kind)
        own = [one.changes[kind] for one in self._found if kind in one.changes]
        if kind not in self._of and own:
            lengths = _mean_and_median(one.without(kind) for one in self._found)
            late: tuple[float | None, float | None] = (None, None)
            if any(change.work for change in own):
                late = _mean_and_median(one.never_late_without(kind) for one in self._found)
            self._of[kind] = WhatIf(kind, *lengths, *late)
        return self._of.get(kind)


def _mean_and_median(lengths: Iterable[Int64]) -> tuple[float, float]:
    every = np.concatenate(list(lengths))
    return float(every.mean()), float(np.median(every))


def replays(traces: Sequence[TraceLosses]) -> tuple[Replay, ...]:
    """One for each run of which a trace can be replayed, by the runs' names."""
    sizes = np.cumsum([min(len(one.scene.found), MAX_SLICES) for one in traces])
    fitting = {one.scene.span for one, size in zip(traces, sizes, strict=True) if size <= MAX_SLICES_OF_ALL}
    made = []
    for run, own in by_run(traces):
        found, left_out = [], []
        for one in own:
            graph = graph_of(one) if one.scene.span in fitting else None
            trace = None if graph is None else _Trace(one, graph)
            if trace is None or trace.recorded.sum() <= 0 or _residual([trace]) > MAX_RESIDUAL:
                left_out.append(one.scene.span.ref.label)
            else:
                found.append(trace)
        if found:
            recorded, unchanged = (_mean_and_median(getattr(one, name) for one in found) for name in _LENGTHS)
            steps = sum(len(one.recorded) for one in found)
            known = Played(
                found,
                run=run,
                traces=tuple(one.scene.span.ref.label for one in found),
                left_out=tuple(left_out),
                steps=steps,
                recorded_mean_ns=recorded[0],
                recorded_median_ns=recorded[1],
                unchanged_mean_ns=unchanged[0],
                unchanged_median_ns=unchanged[1],
                residual=_residual(found),
                unexplained_ns=sum(one.unexplained_ns() for one in found) / steps,
            )
            made.append(known)
    return tuple(made)


def graph_of(lost: TraceLosses) -> Graph | None:
    """The graph of a trace, or of as many of its first steps as `MAX_SLICES` allows; None where one is too many."""
    ahead = np.searchsorted(np.sort(lost.scene.found.start_ns), lost.scene.ends)
    count = int((ahead <= MAX_SLICES).sum())
    return Graph(lost.scene, lost.idle.calls, count) if count else None


def _residual(found: Sequence[_Trace]) -> float:
    apart = sum(int(np.abs(one.unchanged - one.recorded).sum()) for one in found)
    return apart / sum(int(one.recorded.sum()) for one in found)
