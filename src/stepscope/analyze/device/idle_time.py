"""Idle time of the devices by its cause, each nanosecond once.

A gap begins when the queue runs empty. Where the host stood in a wait for the device at that moment, the wait is the
cause of more than itself: had the host not waited, it would have been ahead by as long as it waited, so that much of
the gap behind the wait is the wait's, too. What no wait, loader, compilation, allocation, file or operation with a rule
of its own explains is the host preparing its next launch (`launches`).
"""

from __future__ import annotations

from functools import cached_property
from math import prod

import numpy as np
from msgspec import Struct

from stepscope.analyze.device.trace_loss import TraceLoss, host_rows
from stepscope.engine import intervals
from stepscope.engine.collective_names import is_backend_range
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL
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

    @cached_property
    def gaps(self) -> Intervals:
        """Between the slices of all devices, from the first step's start to the last one's end."""
        busy = self.scene.found.covered(KERNEL, FILL, COMMUNICATION, COPY)
        return intervals.complement(busy, int(self.scene.starts[0]), int(self.scene.ends[-1]))

    @cached_property
    def ended_by(self) -> Int64:
        """For each gap the slice of work that ends it, -1 for none."""
        starts = self.scene.found.start_ns
        order = np.argsort(starts, kind="stable")
        at = np.searchsorted(starts[order], self.gaps.ends)
        slices = order[np.minimum(at, len(order) - 1)]
        return np.where((at < len(order)) & (starts[slices] == self.gaps.ends), slices, NONE)

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
        return np.where(self.ended_by >= 0, self.scene.found.launch[self.ended_by], NONE)

    @cached_property
    def starved(self) -> Bools:
        """Gaps that ended because the host launched something: the call was not over when the queue ran empty."""
        over = self.scene.span.ends(np.maximum(self.launch, 0))
        found: Bools = (self.launch >= 0) & (over > self.gaps.starts) & ~self.in_graph
        return found

    # ---------------------------------------------------------------------------------------------- waits

    def copies(self, marks: tuple[str, ...]) -> Int64:
        """Slices of work that copy in a direction."""
        found = self.scene.found
        return np.flatnonzero((found.kind == COPY) & self.scene.span.names.containing(*marks)[found.rows])

    def exposed_copies(self, marks: tuple[str, ...]) -> Int64:
        """Those in the steps, without what whole operations copy."""
        slices = self.copies(marks)
        inside = self.scene.step_of(self.scene.found.start_ns[slices]) >= 0
        return slices[inside & ~self.operations.work[slices]]

    @cached_property
    def calls(self) -> Int64:
        """Rows of the calls of the runtime or driver."""
        rows = self.scene.host.rows
        return rows[self.scene.span.is_runtime[rows]]

    @cached_property
    def _copying_in(self) -> Intervals:
        """Calls below operators that copy from the host: the copy, and the wait for it behind."""
        span = self.scene.span
        launches = self.scene.found.launch[self.copies(IN)]
        launches = np.unique(launches[launches >= 0])
        around = span.parent[launches]
        around = around[around >= 0]
        marked = np.zeros(len(span) + 1, bool)  # the last for rows without a parent
        marked[around[span.is_operator[around]]] = True
        return span.times(np.union1d(self.calls[marked[span.parent[self.calls]]], launches))

    @cached_property
    def operations(self) -> Operations:
        """Operations that own what happens in them."""
        return Operations(self.scene, self.gaps)

    @cached_property
    def _other_causes(self) -> Intervals:
        return intervals.merge(self.operations.told, self.operations.times)

    @cached_property
    def pin_rows(self) -> Int64:
        """Operators of the training thread that pin memory."""
        rows = host_rows(self.scene.span, _PIN)
        return rows[np.isin(rows, self.scene.host.rows)]

    @cached_property
    def pinning(self) -> Intervals:
        """Idle time while the host pins memory."""
        idle = intervals.intersect(self.gaps, self.scene.span.times(self.pin_rows))
        return intervals.subtract(idle, self._other_causes)

    @cached_property
    def waits_in(self) -> Waits:
        """Waits for copies from the host."""
        return self._waits(intervals.intersect(self.scene.host.synchronizing, self._copying_in), EMPTY)

    @cached_property
    def waits(self) -> Waits:
        """All other waits for the device."""
        return self._waits(intervals.subtract(self.scene.host.synchronizing, self._copying_in), self.waits_in.idle)

    def _waits(self, times: Intervals, told: Intervals) -> Waits:
        """`told`: idle time of other waits."""
        times = intervals.subtract(times, self._other_causes)
        if not len(times.starts):
            return Waits(EMPTY, np.empty(0, np.int64), EMPTY, np.empty(0, np.int64))
        wide = intervals.union(times.starts, times.ends + RETURN_NS)
        waits = Intervals(wide.starts, wide.ends - RETURN_NS)
        gaps, found, span = self.gaps, self.scene.found, self.scene.span
        at = np.searchsorted(waits.starts, gaps.starts, side="right") - 1
        safe = np.maximum(at, 0)
        caused = (at >= 0) & (gaps.starts <= waits.ends[safe] + RETURN_NS)
        behind = np.maximum(waits.ends[safe], gaps.starts)
        reach = np.minimum(gaps.ends, behind + gaps.starts - waits.starts[safe])
        behind, reach = behind[caused], np.maximum(reach, behind)[caused]
        known = np.flatnonzero((found.launch >= 0) & self._first)
        pending = intervals.union(span.ends(found.launch[known]) + PENDING_NS, found.start_ns[known])
        told = intervals.merge(self._other_causes, pending, self.pinning, told)
        after = intervals.subtract(intervals.union(behind, reach), told)
        after = intervals.subtract(after, self.scene.host.synchronizing)
        under = intervals.subtract(intervals.intersect(gaps, waits), told)
        own = intervals.covered(under, waits.starts, waits.ends)
        np.add.at(own, at[caused], intervals.covered(after, behind, reach))
        return Waits(waits, self._longest_calls(waits), intervals.merge(under, after), own)

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
    def _waited(self) -> Intervals:
        return intervals.merge(self._other_causes, self.waits.idle, self.waits_in.idle, self.pinning)

    @cached_property
    def _allocating(self) -> Intervals:
        return intervals.subtract(intervals.intersect(self.gaps, self.scene.host.allocating), self._waited)

    @cached_property
    def rest(self) -> Intervals:
        """Idle time that nothing above explains: the host prepares a launch."""
        told = intervals.merge(self._waited, self.scene.host.synchronizing, self._allocating)
        return intervals.subtract(intervals.subtract(self.gaps, told), self.scene.host.io)

    # ----------------------------------------------------------------------------------------------- losses

    def synchronizing(self) -> TraceLoss:
        """Waits of the host, and the copies to the host that it waits for and nothing hides."""
        found, scene, waits = self.scene.found, self.scene, self.waits.times
        out = self.copies(OUT)
        out = out[~self.operations.work[out]]
        exposed = intervals.subtract(
            intervals.union(found.start_ns[out], found.end_ns[out]), found.covered(KERNEL, FILL, COMMUNICATION)
        )
        awaited = intervals.intersect(exposed, waits)
        copied = intervals.covered(awaited, waits.starts, waits.ends)
        weights = self.waits.idle_ns + copied
        chosen = (weights > 0) & (scene.step_of(waits.starts) >= 0)
        waited = waits.ends - waits.starts
        details = {"waited_ns": float(waited[chosen].sum()), "copied_ns": float(copied[chosen].sum())}
        times = intervals.merge(intervals.intersect(self.waits.idle, scene.inside), awaited)
        rows = self.waits.rows[chosen]
        return TraceLoss(scene, times, rows, weights[chosen], self.operators(rows), details)

    def allocating(self) -> TraceLoss:
        """Calls that get or give back device memory while the device idles."""
        span, times = self.scene.span, intervals.intersect(self._allocating, self.scene.inside)
        starts, ends = span.start_ns[self.calls], span.ends(self.calls)
        weights = intervals.covered(times, starts, ends)
        chosen = (weights > 0) & (intervals.covered(self.scene.host.allocating, starts, ends) > 0)
        rows = self.calls[chosen]
        return TraceLoss(self.scene, times, rows, weights[chosen], rows)

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


class Operations:
    """The operations of one trace that own what happens in them; `gaps` is when no device works.

    `told`: a loader or compilation in which anything happens has the better name.
    """

    def __init__(self, scene: Scene, gaps: Intervals) -> None:
        self.scene, self.span, self.gaps = scene, scene.span, gaps
        self.told = intervals.merge(scene.host.data, scene.host.compiling)
        rows = host_rows(self.span, _LINALG)
        self._linalg_rows = rows[self.span.is_operator[rows]]
        self._linalg = self._serial(self._linalg_rows)
        several = (np.unique(scene.found.device) >= 0).sum() > 1 and len(host_rows(self.span, _DATA_PARALLEL))
        self._distributing_rows = host_rows(self.span, _DISTRIBUTING) if several else np.empty(0, np.int64)
        self._distributing = self.span.times(self._distributing_rows)

    @property
    def times(self) -> Intervals:
        """When the host is inside one."""
        return intervals.merge(self._linalg, self._distributing)

    @cached_property
    def work(self) -> Bools:
        """Slices of work that they launched."""
        distributed = self._launched_in(self._distributing_rows, self._distributing)
        return self._launched_in(self._linalg_rows, self._linalg) | distributed

    def _serial(self, rows: Int64) -> Intervals:
        """Calls of linear algebra that leave the device empty for most of their time."""
        found, calls = self.scene.found, self.span.times(rows)
        mine = self._launched_in(rows, calls)
        at = self._call_of(calls, mine)
        lengths = (found.end_ns - found.start_ns)[mine]
        blocks = self.span.series("blocks_per_sm").gather(found.rows[mine]).fill_null(1.0).to_numpy()
        full = (found.kind[mine] == KERNEL) & (lengths > SHORT_NS) & (blocks >= 1)
        work = np.bincount(at, lengths, len(calls.starts))
        busy = np.bincount(at[full], lengths[full], len(calls.starts))
        serial = busy < BUSY * (work + intervals.covered(self.gaps, calls.starts, calls.ends))
        return Intervals(calls.starts[serial], calls.ends[serial])

    def linear_algebra(self) -> TraceLoss:
        """Calls of linear algebra in which the device mostly waits for the next small piece."""
        rows, calls = self._linalg_rows, self._linalg
        found = self._owned(rows, calls)
        shapes = [_first_shape(self.span.series("shapes")[int(row)]) for row in found.rows if row >= 0]
        # how many matrices each operator got, and the rows of each; without recorded shapes none are known
        sizes = [(prod(shape[:-2]), shape[-2]) for shape in shapes if len(shape) >= 2]
        mine = self._launched_in(rows, calls) & (self.scene.step_of(self.scene.found.start_ns) >= 0)
        found.details.update(
            launches=float(mine.sum()),
            matrices=float(sum(number for number, _ in sizes)),
            matrix_rows=float(sum(number * size for number, size in sizes)),
        )
        return found

    def data_parallel(self) -> TraceLoss:
        """DataParallel's replicate, scatter and gather, as far as nothing hides them."""
        found = self._owned(self._distributing_rows, self._distributing)
        found.details["devices"] = float(len(np.unique(self.scene.found.device)) * len(self.scene))
        return found

    def _launched_in(self, rows: Int64, times: Intervals) -> Bools:
        """Slices of work whose launch lies in these times, on a thread of the rows."""
        codes = self.span.tracks.codes
        tracks = codes[np.maximum(self.scene.found.launch, 0)]
        return self.scene.launched_during(times) & np.isin(tracks, np.unique(codes[rows]))

    def _call_of(self, calls: Intervals, mine: Bools) -> Int64:
        starts = self.span.start_ns[self.scene.found.launch[mine]]
        at: Int64 = np.searchsorted(calls.starts, starts, side="right") - 1
        return at

    def _owned(self, rows: Int64, calls: Intervals) -> TraceLoss:
        """Idle time inside the calls, without what is told elsewhere, and their work with nothing beside it."""
        scene, span = self.scene, self.span
        mine = self._launched_in(rows, calls)
        idle = intervals.subtract(intervals.intersect(self.gaps, calls), self.told)
        times = intervals.intersect(intervals.merge(idle, scene.exclusive(mine)), scene.inside)
        ends = calls.ends.copy()
        np.maximum.at(ends, self._call_of(calls, mine), scene.found.end_ns[mine])
        ends[:-1] = np.minimum(ends[:-1], calls.starts[1:])  # what a later call began is that call's
        weights = intervals.covered(times, calls.starts, ends)
        ordered = rows[np.lexsort((-span.duration_ns[rows], span.start_ns[rows]))]
        outer = ordered[np.searchsorted(span.start_ns[ordered], calls.starts)][weights > 0]
        details = {"idle_ns": float(intervals.total(intervals.intersect(idle, scene.inside)))}
        return TraceLoss(scene, times, outer, weights[weights > 0], outer, details)


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
    slices = idle.exposed_copies(IN)
    starts, ends = found.start_ns[slices], found.end_ns[slices]
    mine = np.zeros(len(found), bool)
    mine[slices] = True
    exposed = scene.exclusive(mine)
    shown = intervals.covered(exposed, starts, ends)
    rows = found.launch[slices]
    waited = np.zeros(len(slices), np.int64)
    at, hit = _awaited(idle, rows)
    first = np.flatnonzero(hit)[np.unique(at[hit], return_index=True)[1]]
    waited[first] = idle.waits_in.idle_ns[at[first]]
    pageable, pinned = (span.names.containing(kind)[found.rows[slices]] for kind in ("Pageable", "Pinned"))
    weights = shown + waited
    synced = _synced(idle, rows)
    pinning = intervals.intersect(idle.pinning, scene.inside)
    pinned_ns = intervals.covered(pinning, span.start_ns[idle.pin_rows], span.ends(idle.pin_rows))
    details = {
        "copied_ns": float((ends - starts).sum()),
        "copied_bytes": float(np.maximum(span.column("bytes", found.rows[slices]), 0).sum()),
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
    pins = pinned_ns > 0
    named = np.concatenate([found.rows[slices], idle.pin_rows[pins]])
    rows, weights = np.concatenate([rows, idle.pin_rows[pins]]), np.concatenate([weights, pinned_ns[pins]])
    return TraceLoss(scene, times, rows, weights, named, details)


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
    waits = idle.calls[span.names.containing("Synchronize")[idle.calls]]
    marked = np.zeros(len(span) + 1, bool)  # the last for rows without a parent
    marked[span.parent[waits]] = True
    marked[NONE] = False
    rows = np.maximum(launches, 0)
    at_once = span.names.pick(["async" in name.lower() for name in span.names.values])[rows]
    synced: Bools = (launches >= 0) & (marked[span.parent[rows]] | ~at_once)
    return synced


def on_devices(idle: Idle) -> TraceLoss:
    """Copies within a device or between devices in which nothing else runs."""
    scene, found, span = idle.scene, idle.scene.found, idle.scene.span
    slices = idle.exposed_copies((*WITHIN, *BETWEEN))
    starts, ends = found.start_ns[slices], found.end_ns[slices]
    mine = np.zeros(len(found), bool)
    mine[slices] = True
    times = scene.exclusive(mine)
    weights = intervals.covered(times, starts, ends)
    peer = span.names.containing(*BETWEEN)[found.rows[slices]]
    details = {
        "copied_ns": float((ends - starts).sum()),
        "copied_bytes": float(np.maximum(span.column("bytes", found.rows[slices]), 0).sum()),
        "between_ns": float(weights[peer].sum()),
        "between_copies": float(peer.sum()),
    }
    rows = found.launch[slices]
    operators = idle.operators(rows)
    return TraceLoss(scene, times, rows, weights, np.where(operators >= 0, operators, found.rows[slices]), details)
