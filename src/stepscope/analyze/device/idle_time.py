"""Idle time of the devices by its cause, each nanosecond once.

A gap begins when the queue runs empty. Where the host stood in a wait for the device at that moment, the wait is the
cause of more than itself: had the host not waited, it would have been ahead by as long as it waited, so that much of
the gap behind the wait is the wait's, too. What no wait, loader, compilation, allocation, file or operation with a rule
of its own explains is the host preparing its next launch (`launches`). Copies are in `copies`.
"""

from __future__ import annotations

from functools import cached_property
from math import prod

import numpy as np
from msgspec import Struct

from stepscope.analyze.device.trace_loss import TraceLoss, host_rows, trace_loss
from stepscope.engine import intervals
from stepscope.engine.collective_names import is_backend_range
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL
from stepscope.engine.host_activity import HostActivity
from stepscope.engine.intervals import EMPTY, Intervals
from stepscope.engine.journal import json_list
from stepscope.engine.scene import Scene
from stepscope.tables.arrays import NONE, Bools, Int64, climb

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
        wanted = names.containing(*marks)
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
        return span.times(rows)

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
        idle = intervals.intersect(self.gaps, span.times(rows))
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

    def synchronizing(self) -> TraceLoss:
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
        return trace_loss(self.scene, times, rows[chosen], weights[chosen], self.operators(rows[chosen]), details)

    def allocating(self) -> TraceLoss:
        """Calls that get or give back device memory while the device idles."""
        span, times = self.scene.span, intervals.intersect(self._allocating, self.scene.inside)
        rows = self.calls
        weights = intervals.covered(times, span.start_ns[rows], span.ends(rows))
        chosen = (weights > 0) & (intervals.covered(self.host.allocating, span.start_ns[rows], span.ends(rows)) > 0)
        rows = rows[chosen]
        return trace_loss(self.scene, times, rows, weights[chosen], rows)

    def operators(self, rows: Int64) -> Int64:
        """The rows of the outermost operators around each call, else the call's.

        Kernels that Python launches itself, as those of Triton, belong to the operator around that Python.
        """
        span = self.scene.span
        is_engine = span.names.starting("autograd::engine::")
        collective = span.names.pick([is_backend_range(name) for name in span.names.values])
        is_operator = (span.is_operator & ~is_engine) | (collective & ~span.on_device)
        named: Int64 = rows.copy()
        called = climb(span.parent, np.where(rows >= 0, span.parent[rows], NONE), ~span.is_function)
        climb(span.parent, called, ~is_operator, passed=named)
        return named


# A kernel that ends before the next could be launched is over before the device did anything worth a launch.
SHORT_NS = 10_000
# Of an operator's time on the device, in kernels that are neither short nor leave multiprocessors empty: with less
# than half of it the device mostly waits for the next small piece of a serial algorithm.
BUSY = 0.5
_LINALG = (
    r"^aten::_?(linalg_)?(qr|svd|eigh?|eigvalsh?|cholesky(_ex|_inverse|_solve)?|lu(_factor(_ex)?|_solve|_with_info)?"
    r"|solve(_ex)?|inv(_ex)?|inverse|det|slogdet|lstsq|pinv|ldl_factor(_ex)?|ldl_solve|householder_product|matrix_exp"
    r"|symeig|geqrf|orgqr|ormqr|svdvals|svd_helper|solve_triangular|triangular_solve)$"
)
_DATA_PARALLEL = r"^DataParallel\.forward$|(^|/)torch/nn/parallel/data_parallel\.py\(\d+\): forward$"
_DISTRIBUTING = (
    r"(^|/)torch/nn/parallel/(replicate|scatter_gather|comm|_functions)\.py\(\d+\): "
    r"|^(autograd::engine::evaluate_function: )?(Broadcast|Scatter|Gather|ReduceAddCoalesced)(Backward)?$"
)


class Operations(Struct, frozen=True, dict=True):
    """The owning operations of one trace; `gaps` is when no device works."""

    scene: Scene
    gaps: Intervals

    @property
    def times(self) -> Intervals:
        """When the host is inside one."""
        return intervals.merge(self._linalg, self._distributing)

    @cached_property
    def work(self) -> Bools:
        """Slices of work that they launched."""
        return self._launched_in(self._linalg_rows, self._linalg) | self._launched_in(
            self._distributing_rows, self._distributing
        )

    # ------------------------------------------------------------------------------------------ linear algebra

    @cached_property
    def _linalg_rows(self) -> Int64:
        span = self.scene.span
        rows = host_rows(span, _LINALG)
        return rows[span.is_operator[rows]]

    @cached_property
    def _linalg(self) -> Intervals:
        """Calls of linear algebra that leave the device empty for most of their time."""
        scene, span, rows = self.scene, self.scene.span, self._linalg_rows
        calls = span.times(rows)
        if not len(calls.starts):
            return calls
        found = scene.found
        mine = self._launched_in(rows, calls)
        at = self._call_of(calls, mine)
        lengths = (found.end_ns - found.start_ns)[mine]
        blocks = span.series("blocks_per_sm").gather(found.rows[mine]).fill_null(1.0).to_numpy()
        full = (found.kind[mine] == KERNEL) & (lengths > SHORT_NS) & (blocks >= 1)
        work = np.bincount(at, lengths, len(calls.starts))
        busy = np.bincount(at[full], lengths[full], len(calls.starts))
        serial = busy < BUSY * (work + intervals.covered(self.gaps, calls.starts, calls.ends))
        return Intervals(calls.starts[serial], calls.ends[serial])

    def linear_algebra(self, told: Intervals) -> TraceLoss:
        """Calls of linear algebra in which the device mostly waits for the next small piece."""
        rows, calls = self._linalg_rows, self._linalg
        found = self._owned(rows, calls, told)
        sizes = [self._matrices(int(row)) for row in found.rows if row >= 0]
        count = sum(number for number, _ in sizes)
        mine = self._launched_in(rows, calls) & (self.scene.step_of(self.scene.found.start_ns) >= 0)
        found.details.update(
            launches=float(mine.sum()),
            matrices=float(count),
            matrix_rows=float(sum(number * size for number, size in sizes)),
        )
        return found

    def _matrices(self, row: int) -> tuple[int, int]:
        """How many matrices the operator got, and the rows of each; (0, 0) where no shapes were recorded."""
        shape = _first_shape(self.scene.span.series("shapes")[row])
        return (prod(shape[:-2]), shape[-2]) if len(shape) >= 2 else (0, 0)

    # -------------------------------------------------------------------------------------------- DataParallel

    @cached_property
    def _distributing_rows(self) -> Int64:
        span, devices = self.scene.span, np.unique(self.scene.found.device)
        if (devices >= 0).sum() < 2 or not len(host_rows(span, _DATA_PARALLEL)):
            return np.empty(0, np.int64)
        return host_rows(span, _DISTRIBUTING)

    @cached_property
    def _distributing(self) -> Intervals:
        return self.scene.span.times(self._distributing_rows)

    def data_parallel(self, told: Intervals) -> TraceLoss:
        """DataParallel's replicate, scatter and gather, as far as nothing hides them."""
        found = self._owned(self._distributing_rows, self._distributing, told)
        found.details["devices"] = float(len(np.unique(self.scene.found.device)) * len(self.scene.windows))
        return found

    # ---------------------------------------------------------------------------------------------------- both

    def _launched_in(self, rows: Int64, times: Intervals) -> Bools:
        """Slices of work whose launch lies in these times, on a thread of the rows."""
        span, found = self.scene.span, self.scene.found
        tracks = np.unique(span.tracks.codes[rows])
        return self.scene.launched_during(times) & np.isin(span.tracks.codes[np.maximum(found.launch, 0)], tracks)

    def _call_of(self, calls: Intervals, mine: Bools) -> Int64:
        starts = self.scene.span.start_ns[self.scene.found.launch[mine]]
        at: Int64 = np.searchsorted(calls.starts, starts, side="right") - 1
        return at

    def _owned(self, rows: Int64, calls: Intervals, told: Intervals) -> TraceLoss:
        """Idle time inside the calls, without what is `told` elsewhere, and their work with nothing beside it."""
        scene, span = self.scene, self.scene.span
        mine = self._launched_in(rows, calls) if len(calls.starts) else np.zeros(len(scene.found), bool)
        idle = intervals.subtract(intervals.intersect(self.gaps, calls), told)
        times = intervals.intersect(intervals.merge(idle, scene.exclusive(mine)), scene.inside)
        ends = calls.ends.copy()
        np.maximum.at(ends, self._call_of(calls, mine), scene.found.end_ns[mine])
        ends[:-1] = np.minimum(ends[:-1], calls.starts[1:])  # what a later call began is that call's
        weights = intervals.covered(times, calls.starts, ends)
        order = np.lexsort((-span.duration_ns[rows], span.start_ns[rows]))
        begins = np.searchsorted(span.start_ns[rows][order], calls.starts)
        outer = rows[order][begins] if len(calls.starts) else np.full(0, NONE, np.int64)
        kept = weights > 0
        details = {"idle_ns": float(intervals.total(intervals.intersect(idle, scene.inside)))}
        return trace_loss(scene, times, outer[kept], weights[kept], outer[kept], details)


def _first_shape(text: str | None) -> list[int]:
    first = next(iter(json_list(text)), None)
    return first if isinstance(first, list) and all(type(size) is int for size in first) else []


WITHIN, BETWEEN = ("DtoD", "DeviceToDevice"), ("PtoP", "PeerToPeer")


def from_host(idle: Idle) -> TraceLoss:
    """Copies from the host that nothing hides, what the device idles because the host waits for them, and pinning.

    PyTorch waits behind a copy unless it was told `non_blocking=True`, so the wait, or its absence, tells the argument.
    Some writers (AMD's) do not tell the kind of memory.
    """
    scene = idle.scene
    found, span = scene.found, scene.span
    slices = idle.copies(IN)
    slices = slices[(scene.step_of(found.start_ns[slices]) >= 0) & ~idle.operations.work[slices]]
    others = intervals.merge(found.covered(KERNEL, FILL, COMMUNICATION), _copies_but(idle, slices))
    starts, ends = found.start_ns[slices], found.end_ns[slices]
    exposed = intervals.subtract(intervals.union(starts, ends), others)
    shown = intervals.covered(exposed, starts, ends)
    rows = found.launch[slices]
    waited = np.zeros(len(slices), np.int64)
    at, hit = _awaited(idle, rows)
    first = np.flatnonzero(hit)[np.unique(at[hit], return_index=True)[1]]
    waited[first] = idle.waits_in.idle_ns[at[first]]
    pageable, pinned = (span.names.containing(kind)[found.rows[slices]] for kind in ("Pageable", "Pinned"))
    size = np.maximum(span.column("bytes", found.rows[slices]), 0)
    weights = shown + waited
    synced = _synced(idle, rows)
    pinning = intervals.intersect(idle.pinning, scene.inside)
    pinned_ns = intervals.covered(pinning, span.start_ns[idle.pin_rows], span.ends(idle.pin_rows))
    details = {
        "copied_ns": float((ends - starts).sum()),
        "copied_bytes": float(size.sum()),
        "pageable_copies": float(pageable.sum()),
        "blocking_copies": float(hit.sum()),
        "exposed_ns": float(shown.sum()),
        "idle_ns": float(waited.sum()),
        "pageable_ns": float(weights[pageable & synced].sum()),
        "unpinned_async_ns": float(weights[pageable & ~synced].sum()),
        "pinned_blocking_ns": float(weights[pinned & synced].sum()),
        "pinned_async_ns": float(weights[pinned & ~synced].sum()),
        "untold_ns": float(weights[~pageable & ~pinned].sum()),
        "pinning_ns": float(intervals.total(pinning)),
    }
    times = intervals.merge(exposed, intervals.intersect(idle.waits_in.idle, scene.inside), pinning)
    rows, weights = np.concatenate([rows, idle.pin_rows]), np.concatenate([weights, pinned_ns])
    named = np.concatenate([found.rows[slices], idle.pin_rows])
    kept = np.concatenate([np.ones(len(slices), bool), pinned_ns > 0])
    return trace_loss(scene, times, rows[kept], weights[kept], named[kept], details)


def _awaited(idle: Idle, launches: Int64) -> tuple[Int64, Bools]:
    """For each launch of a copy the first wait behind its start, and whether the same operator waits there."""
    span, waits = idle.scene.span, idle.waits_in.times
    rows = np.maximum(launches, 0)
    around = span.parent[rows]
    inside = (around >= 0) & span.is_operator[np.maximum(around, 0)]
    ends = np.where(inside, span.ends(np.maximum(around, 0)), span.ends(rows))
    at = np.searchsorted(waits.ends, span.start_ns[rows], side="right")
    hit = (launches >= 0) & (at < len(waits.starts))
    hit[hit] = waits.starts[at[hit]] < ends[hit]
    return at, hit


def _synced(idle: Idle, launches: Int64) -> Bools:
    """Whether the operator around a copy's launch waits with a call of its own, or the call itself is no async one."""
    span = idle.scene.span
    names = span.names
    waits = names.containing("Synchronize")[idle.calls]
    marked = np.zeros(len(span) + 1, bool)  # the last for rows without a parent
    around = span.parent[idle.calls[waits]]
    marked[around[around >= 0]] = True
    rows = np.maximum(launches, 0)
    at_once = names.pick(["async" in name.lower() for name in names.values])[rows]
    synced: Bools = (launches >= 0) & (marked[span.parent[rows]] | ~at_once)
    return synced


def _copies_but(idle: Idle, slices: Int64) -> Intervals:
    """Copies of other kinds."""
    found = idle.scene.found
    other = found.kind == COPY
    other[slices] = False
    return intervals.union(found.start_ns[other], found.end_ns[other])


def on_devices(idle: Idle) -> TraceLoss:
    """Copies within a device or between devices in which nothing else runs."""
    scene, found, span = idle.scene, idle.scene.found, idle.scene.span
    slices = idle.copies((*WITHIN, *BETWEEN))
    slices = slices[(scene.step_of(found.start_ns[slices]) >= 0) & ~idle.operations.work[slices]]
    mine = np.zeros(len(found), bool)
    mine[slices] = True
    times = scene.exclusive(mine)
    weights = intervals.covered(times, found.start_ns[slices], found.end_ns[slices])
    between = span.names.containing(*BETWEEN)
    peer = between[found.rows[slices]]
    details = {
        "copied_ns": float((found.end_ns - found.start_ns)[slices].sum()),
        "copied_bytes": float(np.maximum(span.column("bytes", found.rows[slices]), 0).sum()),
        "between_ns": float(weights[peer].sum()),
        "between_copies": float(peer.sum()),
    }
    rows = found.launch[slices]
    operators = idle.operators(rows)
    return trace_loss(scene, times, rows, weights, np.where(operators >= 0, operators, found.rows[slices]), details)
