"""Idle time of the devices by its cause, each nanosecond once.

A gap begins when the queue runs empty. Where the host stood in a wait for the device at that moment, the wait is the
cause of more than itself: had the host not waited, it would have been ahead by as long as it waited, so that much of
the gap behind the wait is the wait's, too. What no wait, loader, compilation, allocation or file explains is the host
preparing its next launch: gap by gap where the gaps are short, else host work with a place of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stepscope.analyze import intervals
from stepscope.analyze.device_losses.pieces import Piece, Scene, piece
from stepscope.analyze.intervals import EMPTY, Int64, Intervals
from stepscope.analyze.origins import NONE
from stepscope.analyze.views.base import Bools
from stepscope.analyze.views.host_activity import HostActivity, matches
from stepscope.analyze.views.work import COMMUNICATION, COPY, FILL, KERNEL
from stepscope.model.views.device_losses import ALLOCATOR, COPY_IN, HOST, LAUNCH, SYNC

# A call of the host returns a little after the device is done, and two calls of one operator lie as close together.
RETURN_NS = 10_000
# Preparing one launch takes eager PyTorch 5 to 100 us, and under a profiler with stacks a few times that. A longer gap
# is something else that runs on the host.
LAUNCH_NS = 1_000_000
LONG_GAPS = 200  # whose places are looked up, the longest first
COVERING = 0.5  # of a long gap: what a slice must cover to be named as what ran in it
MAX_LEVELS = 1_000  # operators around each other; a broken tree ends here
IN, OUT = ("HtoD", "HostToDevice"), ("DtoH", "DeviceToHost")
_OPTIMIZER, _ZERO_GRAD = r"^Optimizer\.step#", r"^Optimizer\.zero_grad#"


@dataclass(frozen=True)
class Waits:
    """Waits for the device, merged where they lie close. `rows[i]` is the longest call of wait i, -1 for none.

    `idle` is the idle time under them, and behind them as far as the wait is its cause; `idle_ns[i]` the part of i.
    """

    times: Intervals
    rows: Int64
    idle: Intervals
    idle_ns: Int64


@dataclass(frozen=True)
class Idle:
    """The idle time of one trace, taken apart."""

    scene: Scene
    host: HostActivity

    @cached_property
    def gaps(self) -> Intervals:
        """Between the slices of all devices, from the first step's start to the last one's end."""
        windows = self.scene.windows
        busy = self.scene.found.covered(KERNEL, FILL, COMMUNICATION, COPY)
        return intervals.complement(busy, int(windows.start_ns[0]), int(windows.end_ns[-1]))

    @cached_property
    def _ended_by(self) -> Int64:
        """For each gap the slice of work that ends it, -1 for none."""
        found = self.scene.found
        if not len(found):
            return np.full(len(self.gaps.ends), NONE, np.int64)
        order = np.argsort(found.start_ns, kind="stable")
        at = np.searchsorted(found.start_ns[order], self.gaps.ends)
        slices = order[np.minimum(at, len(order) - 1)]
        return np.where((at < len(order)) & (found.start_ns[slices] == self.gaps.ends), slices, NONE)

    @cached_property
    def launch(self) -> Int64:
        """For each gap the row of the call that launched the slice behind it, -1 for none."""
        found = self.scene.found
        return np.where(self._ended_by >= 0, found.launch[self._ended_by], NONE) if len(found) else self._ended_by

    @cached_property
    def starved(self) -> Bools:
        """Gaps that ended because the host launched something: the call was not over when the queue ran empty."""
        span = self.scene.span
        found: Bools = (self.launch >= 0) & (span.ends(np.maximum(self.launch, 0)) > self.gaps.starts)
        return found

    # ---------------------------------------------------------------------------------------------- waits

    def copies(self, marks: tuple[str, ...]) -> Int64:
        """Slices of work that copy in a direction."""
        found, names = self.scene.found, self.scene.span.names
        wanted = names.pick([any(mark in name for mark in marks) for name in names.values])
        return np.flatnonzero((found.kind == COPY) & wanted[found.rows])

    @cached_property
    def _calls(self) -> Int64:
        """Rows of the calls of the runtime or driver."""
        return self.host.rows[self.scene.span.is_runtime[self.host.rows]]

    @cached_property
    def _copying_in(self) -> Intervals:
        """Calls below operators that copy from the host: the copy, and the wait for it behind."""
        span = self.scene.span
        launches = self.scene.found.launch[self.copies(IN)]
        launches = np.unique(launches[launches >= 0])
        around = span.parent[launches]
        around = around[around >= 0]
        around = around[span.is_operator[around]]
        marked = np.zeros(len(span) + 1, bool)  # the last for rows without a parent
        marked[around] = True
        rows = np.union1d(self._calls[marked[span.parent[self._calls]]], launches)
        return intervals.union(span.start_ns[rows], span.ends(rows))

    @cached_property
    def _other_causes(self) -> Intervals:
        """A loader or compilation that waits for the device has the better name."""
        return intervals.merge(self.host.data, self.host.compiling)

    @cached_property
    def waits_in(self) -> Waits:
        """Waits for copies from the host."""
        return self._waits(intervals.intersect(self.host.synchronizing, self._copying_in), EMPTY)

    @cached_property
    def waits(self) -> Waits:
        """All other waits for the device."""
        return self._waits(intervals.subtract(self.host.synchronizing, self._copying_in), self.waits_in.idle)

    def _waits(self, times: Intervals, told: Intervals) -> Waits:
        """`told`: idle time of other waits."""
        times = intervals.subtract(times, self._other_causes)
        if not len(times.starts):
            return Waits(EMPTY, np.empty(0, np.int64), EMPTY, np.empty(0, np.int64))
        wide = intervals.union(times.starts, times.ends + RETURN_NS)
        waits = Intervals(wide.starts, wide.ends - RETURN_NS)
        gaps = self.gaps
        at = np.searchsorted(waits.starts, gaps.starts, side="right") - 1
        safe = np.maximum(at, 0)
        caused = (at >= 0) & (gaps.starts <= waits.ends[safe] + RETURN_NS)
        behind = np.maximum(waits.ends[safe], gaps.starts)
        reach = np.minimum(gaps.ends, behind + gaps.starts - waits.starts[safe])
        behind, reach = behind[caused], np.maximum(reach, behind)[caused]
        after = intervals.subtract(intervals.union(behind, reach), intervals.merge(self._other_causes, told))
        after = intervals.subtract(after, self.host.synchronizing)
        under = intervals.subtract(intervals.intersect(gaps, waits), intervals.merge(self._other_causes, told))
        idle = intervals.merge(under, after)
        own = intervals.covered(under, waits.starts, waits.ends)
        np.add.at(own, at[caused], intervals.covered(after, behind, reach))
        return Waits(waits, self._longest_calls(waits), idle, own)

    def _longest_calls(self, waits: Intervals) -> Int64:
        span, calls = self.scene.span, self._calls
        at = np.searchsorted(waits.starts, span.start_ns[calls], side="right") - 1
        inside = (at >= 0) & (span.ends(calls) <= waits.ends[np.maximum(at, 0)])
        calls, at = calls[inside], at[inside]
        order = np.lexsort((span.duration_ns[calls], at))
        longest = np.full(len(waits.starts), NONE, np.int64)
        longest[at[order]] = calls[order]  # of several the last, which is the longest
        return longest

    # ------------------------------------------------------------------------------------------- launching

    @cached_property
    def _allocating(self) -> Intervals:
        told = intervals.merge(self._other_causes, self.waits.idle, self.waits_in.idle)
        return intervals.subtract(intervals.intersect(self.gaps, self.host.allocating), told)

    @cached_property
    def _rest(self) -> Intervals:
        """Idle time that nothing above explains."""
        told = intervals.merge(
            self._other_causes, self.waits.idle, self.waits_in.idle, self.host.synchronizing, self._allocating
        )
        return intervals.subtract(intervals.subtract(self.gaps, told), self.host.io)

    @cached_property
    def _rest_ns(self) -> Int64:
        return intervals.covered(self._rest, self.gaps.starts, self.gaps.ends)

    def launching(self) -> Piece:
        """Short gaps in which the host prepared the launch that ended them."""
        span, gaps = self.scene.span, self.gaps
        inside = self.scene.step_of(gaps.ends - 1) >= 0
        chosen = self.starved & (self._rest_ns <= LAUNCH_NS) & (self._rest_ns > 0) & inside
        times = intervals.intersect(self._rest, Intervals(gaps.starts[chosen], gaps.ends[chosen]))
        rows, weights = self.launch[chosen], self._rest_ns[chosen]
        found = self.scene.found
        ended = self._ended_by[chosen]
        lengths = found.end_ns[ended] - found.start_ns[ended]
        details = {"kernels_behind_ns": float(lengths.sum())}
        for name, pattern in (("optimizer_ns", _OPTIMIZER), ("zero_grad_ns", _ZERO_GRAD)):
            ranges = self._ranges(pattern)
            inside_steps = intervals.covered(
                intervals.intersect(times, ranges), self.scene.windows.start_ns, self.scene.windows.end_ns
            )
            details[name] = float(inside_steps.sum())
            begins = span.start_ns[rows]
            details[name.replace("_ns", "_launches")] = float(intervals.covered(ranges, begins, begins + 1).sum())
        return piece(self.scene, times, rows, weights, self._operators(rows), details)

    def _ranges(self, pattern: str) -> Intervals:
        """Ranges of the host with such names."""
        span = self.scene.span
        rows = np.flatnonzero(span.names.pick(matches(pattern, span.names.values).tolist()) & ~span.on_device)
        rows = rows[~span.categories.where(["gpu_user_annotation"])[rows]]
        return intervals.union(span.start_ns[rows], span.ends(rows))

    def working(self) -> Piece:
        """Long gaps in which the host ran operators or Python but launched nothing, where it is recorded what."""
        gaps = self.gaps
        known = intervals.merge(self.host.operators, self.host.python)
        known = intervals.intersect(self._rest, intervals.subtract(known, self._long_calls))
        lengths = intervals.covered(known, gaps.starts, gaps.ends)
        chosen = np.flatnonzero((self._rest_ns > LAUNCH_NS) & (lengths > 0) & (self.starved | (self.launch < 0)))
        longest = np.sort(chosen[np.argsort(-lengths[chosen], kind="stable")][:LONG_GAPS])
        rows = np.asarray([self._running(int(gap)) for gap in longest], np.int64)
        longest, rows = longest[rows >= 0], rows[rows >= 0]
        times = intervals.intersect(known, Intervals(gaps.starts[longest], gaps.ends[longest]))
        return piece(self.scene, times, rows, lengths[longest], rows)

    def _running(self, gap: int) -> int:
        """The innermost slice of the host that covers most of a gap, -1 for none."""
        span, rows = self.scene.span, self._long_slices
        start, end = int(self.gaps.starts[gap]), int(self.gaps.ends[gap])
        over = np.minimum(span.ends(rows), end) - np.maximum(span.start_ns[rows], start)
        covering = rows[over >= COVERING * (end - start)]
        return int(covering[np.lexsort((covering, span.duration_ns[covering]))[0]]) if len(covering) else NONE

    @cached_property
    def _long_slices(self) -> Int64:
        """Slices of the host that can cover most of a long gap, without the steps themselves."""
        span = self.scene.span
        rows = self.host.rows[span.duration_ns[self.host.rows] >= COVERING * LAUNCH_NS]
        rows = rows[~span.is_runtime[rows]]
        steps = span.names.pick([name.startswith("ProfilerStep#") for name in span.names.values])
        return rows[~steps[rows]]

    @cached_property
    def _long_calls(self) -> Intervals:
        """Calls of the runtime that take so long load code or set the device up: no line of the user's can help it."""
        span = self.scene.span
        rows = self._calls[span.duration_ns[self._calls] > LAUNCH_NS]
        return intervals.union(span.start_ns[rows], span.ends(rows))

    # ----------------------------------------------------------------------------------------------- pieces

    def synchronizing(self) -> Piece:
        """Waits of the host, and the copies to the host that it waits for and nothing hides."""
        found = self.scene.found
        out = self.copies(OUT)
        exposed = intervals.subtract(
            intervals.union(found.start_ns[out], found.end_ns[out]), found.covered(KERNEL, FILL, COMMUNICATION)
        )
        awaited = intervals.intersect(exposed, self.waits.times)
        copied = intervals.covered(awaited, self.waits.times.starts, self.waits.times.ends)
        weights = self.waits.idle_ns + copied
        rows, chosen = self.waits.rows, (weights > 0) & (self.scene.step_of(self.waits.times.starts) >= 0)
        waited = self.waits.times.ends - self.waits.times.starts
        details = {"waited_ns": float(waited[chosen].sum()), "copied_ns": float(copied[chosen].sum())}
        times = intervals.merge(intervals.intersect(self.waits.idle, self.scene.inside), awaited)
        return piece(self.scene, times, rows[chosen], weights[chosen], self._operators(rows[chosen]), details)

    def copying_in(self) -> Piece:
        """Copies from the host that nothing hides, and what the device idles because the host waits for them."""
        found, span = self.scene.found, self.scene.span
        slices = self.copies(IN)
        slices = slices[self.scene.step_of(found.start_ns[slices]) >= 0]
        others = intervals.merge(found.covered(KERNEL, FILL, COMMUNICATION), self._exclusive_of(slices))
        starts, ends = found.start_ns[slices], found.end_ns[slices]
        exposed = intervals.subtract(intervals.union(starts, ends), others)
        weights = intervals.covered(exposed, starts, ends)
        rows = found.launch[slices]
        waits = self.waits_in
        idle = np.zeros(len(slices), np.int64)
        at, hit = self._awaited(rows)
        first = np.flatnonzero(hit)[np.unique(at[hit], return_index=True)[1]]
        idle[first] = waits.idle_ns[at[first]]
        pageable = span.names.pick(["Pageable" in name for name in span.names.values])[found.rows[slices]]
        size = np.maximum(span.column("bytes", found.rows[slices]), 0)
        details = {
            "copied_ns": float((ends - starts).sum()),
            "copied_bytes": float(size.sum()),
            "pageable_copies": float(pageable.sum()),
            "blocking_copies": float(hit.sum()),
            "exposed_ns": float(weights.sum()),
            "idle_ns": float(idle.sum()),
        }
        times = intervals.merge(exposed, intervals.intersect(waits.idle, self.scene.inside))
        return piece(self.scene, times, rows, weights + idle, found.rows[slices], details)

    def _awaited(self, launches: Int64) -> tuple[Int64, Bools]:
        """For each launch of a copy the first wait behind its start, and whether the same operator waits there."""
        span, waits = self.scene.span, self.waits_in.times
        rows = np.maximum(launches, 0)
        around = span.parent[rows]
        inside = (around >= 0) & span.is_operator[np.maximum(around, 0)]
        ends = np.where(inside, span.ends(np.maximum(around, 0)), span.ends(rows))
        at = np.searchsorted(waits.ends, span.start_ns[rows], side="right")
        hit = (launches >= 0) & (at < len(waits.starts))
        hit[hit] = waits.starts[at[hit]] < ends[hit]
        return at, hit

    def _exclusive_of(self, slices: Int64) -> Intervals:
        """Copies of other kinds."""
        found = self.scene.found
        other = found.kind == COPY
        other[slices] = False
        return intervals.union(found.start_ns[other], found.end_ns[other])

    def allocating(self) -> Piece:
        """Calls that get or give back device memory while the device idles."""
        span, times = self.scene.span, intervals.intersect(self._allocating, self.scene.inside)
        rows = self._calls
        weights = intervals.covered(times, span.start_ns[rows], span.ends(rows))
        chosen = (weights > 0) & (intervals.covered(self.host.allocating, span.start_ns[rows], span.ends(rows)) > 0)
        rows = rows[chosen]
        return piece(self.scene, times, rows, weights[chosen], rows)

    def _operators(self, rows: Int64) -> Int64:
        """The rows of the outermost operators around each call, else the call's."""
        span = self.scene.span
        is_engine = span.names.pick([name.startswith("autograd::engine::") for name in span.names.values])
        named: Int64 = rows.copy()
        current = np.where(rows >= 0, span.parent[np.maximum(rows, 0)], NONE)
        for _ in range(MAX_LEVELS):
            up = (current >= 0) & span.is_operator[np.maximum(current, 0)] & ~is_engine[np.maximum(current, 0)]
            if not up.any():
                break
            named = np.where(up, current, named)
            current = np.where(up, span.parent[np.maximum(current, 0)], NONE)
        return named


def pieces(idle: Idle) -> dict[str, Piece]:
    """Every loss of idle time."""
    return {
        SYNC: idle.synchronizing(),
        COPY_IN: idle.copying_in(),
        ALLOCATOR: idle.allocating(),
        LAUNCH: idle.launching(),
        HOST: idle.working(),
    }
