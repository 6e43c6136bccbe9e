"""Idle time of the devices by its cause, each nanosecond once.

A gap begins when the queue runs empty. Where the host stood in a wait for the device at that moment, the wait is the
cause of more than itself: had the host not waited, it would have been ahead by as long as it waited, so that much of
the gap behind the wait is the wait's, too. What no wait, loader, compilation, allocation, file or operation with a rule
of its own explains is the host preparing its next launch (`launches`). Copies are in `copies`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct

from stepscope.analyze.device_losses.operations import Operations
from stepscope.analyze.device_losses.pieces import Piece, host_rows, piece
from stepscope.engine import intervals
from stepscope.engine.collective_names import is_backend_range
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL
from stepscope.engine.host_activity import HostActivity
from stepscope.engine.intervals import EMPTY, Intervals
from stepscope.engine.scene import Scene
from stepscope.engine.tree import climb
from stepscope.tables.arrays import NONE, Bools, Int64

# A call of the host returns a little after the device is done, and two calls of one operator lie as close together.
RETURN_NS = 10_000
# A launch reaches an idle device within some tens of microseconds. What was launched longer ago and has not begun waits
# for something on the device's side, so the host is not what the device waits for.
PENDING_NS = 100_000
IN, OUT = ("HtoD", "HostToDevice"), ("DtoH", "DeviceToHost")
_PIN = r"^aten::_?pin_memory$"


class Waits(Struct, frozen=True):
    """Waits for the device, merged where they lie close. `rows[i]` is the longest call of wait i, -1 for none.

    `idle` is the idle time under them, and behind them as far as the wait is its cause; `idle_ns[i]` the part of i.
    """

    times: Intervals
    rows: Int64
    idle: Intervals
    idle_ns: Int64


class Idle(Struct, frozen=True, dict=True):
    """The idle time of one trace, taken apart."""

    scene: Scene

    @property
    def host(self) -> HostActivity:
        return self.scene.host

    @cached_property
    def gaps(self) -> Intervals:
        """Between the slices of all devices, from the first step's start to the last one's end."""
        windows = self.scene.windows
        busy = self.scene.found.covered(KERNEL, FILL, COMMUNICATION, COPY)
        return intervals.complement(busy, int(windows.start_ns[0]), int(windows.end_ns[-1]))

    @cached_property
    def ended_by(self) -> Int64:
        """For each gap the slice of work that ends it, -1 for none."""
        found = self.scene.found
        if not len(found):
            return np.full(len(self.gaps.ends), NONE, np.int64)
        order = np.argsort(found.start_ns, kind="stable")
        at = np.searchsorted(found.start_ns[order], self.gaps.ends)
        slices = order[np.minimum(at, len(order) - 1)]
        return np.where((at < len(order)) & (found.start_ns[slices] == self.gaps.ends), slices, NONE)

    @cached_property
    def _first(self) -> Bools:
        """Slices that are the first of their launch. A CUDA graph is launched once for all its kernels."""
        found = self.scene.found
        order = np.lexsort((found.start_ns, found.launch))
        launch = found.launch[order]
        first = np.ones(len(found), bool)
        first[order[1:]] = (launch[1:] != launch[:-1]) | (launch[1:] < 0)
        return first

    @cached_property
    def in_graph(self) -> Bools:
        """Gaps between slices of one launch: nothing of the host's ends them."""
        ended: Bools = (self.ended_by >= 0) & ~self._first[np.maximum(self.ended_by, 0)]
        return ended

    @cached_property
    def launch(self) -> Int64:
        """For each gap the row of the call that launched the slice behind it, -1 for none."""
        found = self.scene.found
        return np.where(self.ended_by >= 0, found.launch[self.ended_by], NONE) if len(found) else self.ended_by

    @cached_property
    def starved(self) -> Bools:
        """Gaps that ended because the host launched something: the call was not over when the queue ran empty."""
        span = self.scene.span
        found: Bools = (self.launch >= 0) & (span.ends(np.maximum(self.launch, 0)) > self.gaps.starts) & ~self.in_graph
        return found

    @cached_property
    def _pending(self) -> Intervals:
        """When something had been launched long ago that had not begun."""
        found, span = self.scene.found, self.scene.span
        known = np.flatnonzero((found.launch >= 0) & self._first)
        return intervals.union(span.ends(found.launch[known]) + PENDING_NS, found.start_ns[known])

    # ---------------------------------------------------------------------------------------------- waits

    def copies(self, marks: tuple[str, ...]) -> Int64:
        """Slices of work that copy in a direction."""
        found, names = self.scene.found, self.scene.span.names
        wanted = names.pick([any(mark in name for mark in marks) for name in names.values])
        return np.flatnonzero((found.kind == COPY) & wanted[found.rows])

    @cached_property
    def calls(self) -> Int64:
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
        rows = np.union1d(self.calls[marked[span.parent[self.calls]]], launches)
        return intervals.union(span.start_ns[rows], span.ends(rows))

    @cached_property
    def operations(self) -> Operations:
        """Operations that own what happens in them."""
        return Operations(self.scene, self.gaps)

    @cached_property
    def before_operations(self) -> Intervals:
        """A loader or compilation in which anything happens has the better name."""
        return intervals.merge(self.host.data, self.host.compiling)

    @cached_property
    def _other_causes(self) -> Intervals:
        return intervals.merge(self.before_operations, self.operations.times)

    @cached_property
    def pin_rows(self) -> Int64:
        """Operators of the training thread that pin memory."""
        rows = host_rows(self.scene.span, _PIN)
        return rows[np.isin(rows, self.host.rows)]

    @cached_property
    def pinning(self) -> Intervals:
        """Idle time while the host pins memory."""
        span, rows = self.scene.span, self.pin_rows
        idle = intervals.intersect(self.gaps, intervals.union(span.start_ns[rows], span.ends(rows)))
        return intervals.subtract(idle, self._other_causes)

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
        told = intervals.merge(self._other_causes, self._pending, self.pinning, told)
        after = intervals.subtract(intervals.union(behind, reach), told)
        after = intervals.subtract(after, self.host.synchronizing)
        under = intervals.subtract(intervals.intersect(gaps, waits), told)
        idle = intervals.merge(under, after)
        own = intervals.covered(under, waits.starts, waits.ends)
        np.add.at(own, at[caused], intervals.covered(after, behind, reach))
        return Waits(waits, self._longest_calls(waits), idle, own)

    def _longest_calls(self, waits: Intervals) -> Int64:
        span, calls = self.scene.span, self.calls
        at = np.searchsorted(waits.starts, span.start_ns[calls], side="right") - 1
        inside = (at >= 0) & (span.ends(calls) <= waits.ends[np.maximum(at, 0)])
        calls, at = calls[inside], at[inside]
        order = np.lexsort((span.duration_ns[calls], at))
        longest = np.full(len(waits.starts), NONE, np.int64)
        longest[at[order]] = calls[order]  # of several the last, which is the longest
        return longest

    # ------------------------------------------------------------------------------------------- what is left

    @cached_property
    def _allocating(self) -> Intervals:
        told = intervals.merge(self._other_causes, self.waits.idle, self.waits_in.idle, self.pinning)
        return intervals.subtract(intervals.intersect(self.gaps, self.host.allocating), told)

    @cached_property
    def rest(self) -> Intervals:
        """Idle time that nothing above explains: the host prepares a launch."""
        told = intervals.merge(
            self._other_causes,
            self.waits.idle,
            self.waits_in.idle,
            self.pinning,
            self.host.synchronizing,
            self._allocating,
        )
        return intervals.subtract(intervals.subtract(self.gaps, told), self.host.io)

    # ----------------------------------------------------------------------------------------------- pieces

    def synchronizing(self) -> Piece:
        """Waits of the host, and the copies to the host that it waits for and nothing hides."""
        found = self.scene.found
        out = self.copies(OUT)
        out = out[~self.operations.work[out]]
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
        return piece(self.scene, times, rows[chosen], weights[chosen], self.operators(rows[chosen]), details)

    def allocating(self) -> Piece:
        """Calls that get or give back device memory while the device idles."""
        span, times = self.scene.span, intervals.intersect(self._allocating, self.scene.inside)
        rows = self.calls
        weights = intervals.covered(times, span.start_ns[rows], span.ends(rows))
        chosen = (weights > 0) & (intervals.covered(self.host.allocating, span.start_ns[rows], span.ends(rows)) > 0)
        rows = rows[chosen]
        return piece(self.scene, times, rows, weights[chosen], rows)

    def operators(self, rows: Int64) -> Int64:
        """The rows of the outermost operators around each call, else the call's.

        Kernels that Python launches itself, as those of Triton, belong to the operator around that Python.
        """
        span = self.scene.span
        is_engine = span.names.pick([name.startswith("autograd::engine::") for name in span.names.values])
        collective = span.names.pick([is_backend_range(name) for name in span.names.values])
        is_operator = (span.is_operator & ~is_engine) | (collective & ~span.on_device)
        named: Int64 = rows.copy()
        called = climb(span.parent, np.where(rows >= 0, span.parent[rows], NONE), ~span.is_function)
        climb(span.parent, called, ~is_operator, passed=named)
        return named
