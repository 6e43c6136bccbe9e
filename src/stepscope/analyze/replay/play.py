"""Plays a graph again: every slice and every wait as early as what it depends on allows.

One pass in the order of the recording: what anything depends on comes before it. `Change` is a what-if; a smaller one
never makes anything come earlier than a larger one does, because every time is a maximum of sums of other times.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from stepscope.analyze.replay.graph import LEAST_CHAIN, Graph, Steps
from stepscope.engine import intervals
from stepscope.engine.intervals import EMPTY, Intervals
from stepscope.tables.arrays import Bools, Int64

# begin, waits over before, beside one, the slice ahead and the wait for it, the same of another stream, length
_Row: TypeAlias = tuple[int, int, bool, int, int, int, int, int]

MOSTLY = 0.5  # a wait with more than this part of it cut is gone


class Change(Struct, frozen=True):
    """A what-if: host time that takes none, durations of slices, and slices that start at once when launched.

    `duration_ns` is None for all as recorded. `at_once` is None for none.
    """

    cut: Intervals = EMPTY
    duration_ns: Int64 | None = None
    at_once: Bools | None = None


class Played(Struct, frozen=True):
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


def play(graph: Graph, change: Change) -> Played:
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
    return Played(starts, ends, begin, finish, _array(run.begun), _array(run.finished), gone)


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


def step_lengths(graph: Graph, played: Played) -> Int64:
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
