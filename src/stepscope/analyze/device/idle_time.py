"""Idle time of the devices by its cause, each nanosecond once.

A gap begins when the queue runs empty. Where the host stood in a wait for the device at that moment, the wait is the
cause of more than itself: had the host not waited, it would have been ahead by as long as it waited, so that much of
the gap behind the wait is the wait's, too. What no wait, loader, compilation, allocation, file or operation with a rule
of its own explains is the host preparing its next launch (`launches`).
"""

from __future__ import annotations

from math import prod

import numpy as np
from msgspec import Struct

from stepscope.analyze.device.trace_loss import TraceLoss, host_rows
from stepscope.engine import intervals
from stepscope.engine.collective_names import is_backend_range
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL
from stepscope.engine.intervals import EMPTY, Intervals
from stepscope.engine.journal import first_sizes
from stepscope.engine.scene import Scene
from stepscope.model.device_losses import COMPILED, HOST, LAUNCH, OPERATORS, OPTIMIZER, ZERO_GRAD
from stepscope.tables.arrays import NONE, Bools, Int64, ancestors, climb, flags, has_ancestor, unique

# A call of the host returns a little after the device is done, and two calls of one operator lie as close together; by
# as much their clocks may disagree.
RETURN_NS = 10_000
# A launch reaches an idle device within some tens of microseconds. What was launched longer ago and has not begun waits
# for something on the device's side, so the host is not what the device waits for.
PENDING_NS = 100_000
# Preparing one launch takes eager PyTorch 5 to 100 us, and under a profiler with stacks a few times that. A longer gap
# is something else that runs on the host.
LAUNCH_NS = 1_000_000
# Nor does an operator that launches nothing take so long, unless it computes on the host.
OPERATOR_NS = 250_000
# Of idle time, as much as may end with work that has no launch before it, and of launches, as many as may come after
# their work: with more the trace holds not all launches, or the clocks of host and device disagree, and nothing tells
# what the device waited for.
UNTOLD = 0.2
COVERING = 0.5  # of a long gap: what must cover it to be named as what ran in it
IN, OUT = ("HtoD", "HostToDevice"), ("DtoH", "DeviceToHost")
_PIN = r"^aten::_?pin_memory$"
_HOLD = "StreamWaitEvent"  # tells a stream to wait for another one's event
_EMPTY_CACHE = r"^<built-in function _cuda_emptyCache>$|(^|/)torch/cuda/memory\.py\(\d+\): empty_cache$"


class Waits(Struct, frozen=True):
    """Waits for the device, merged where they lie close. `rows[i]` is the longest call of wait i, -1 for none.

    `idle` is the idle time under them, and behind them as far as the wait is its cause; `idle_ns[i]` the part of i.
    """

    times: Intervals
    rows: Int64
    idle: Intervals
    idle_ns: Int64


class CopiesIn(Struct, frozen=True):
    """Copies from the host in the steps, by slice: the part that nothing hides, and idle time while the host waits.

    `exposed` is when such a copy runs alone; `blocking` are those that the host waits for.
    """

    slices: Int64
    launches: Int64
    exposed: Intervals
    exposed_ns: Int64
    waited_ns: Int64
    blocking: Bools

    @property
    def lost_ns(self) -> Int64:
        return self.exposed_ns + self.waited_ns


class Made(Struct, frozen=True):
    """Idle time in operators (`rows`) that make on the host what is copied next, and which of the copies that is."""

    times: Intervals
    rows: Int64
    copies: Bools


class Idle:
    """The idle time of one trace, taken apart; `gaps` is when no device works.

    There are none where too much of their time is `UNTOLD`.
    For each gap `ended_by` is the slice of work that ends it and `launch` the row of the call that launched that, -1
    for none. Of gaps `in_graph`, between slices of one launch, nothing of the host's ends any. `starved` are those that
    ended because the host launched something: the call was not over when the queue ran empty.

    `calls` are rows of the runtime or driver, `pin_rows` operators of the training thread that pin memory, `pinning` is
    idle time meanwhile. `waits_in` are waits for copies from the host, `waits` all others. `made` is when the host
    makes what it copies next. `rest` is what nothing else explains: the host prepares a launch.
    """

    def __init__(self, scene: Scene) -> None:
        found, span, host, gaps = scene.found, scene.span, scene.host, scene.idle
        order = np.argsort(found.start_ns, kind="stable")
        at = np.searchsorted(found.start_ns[order], gaps.ends)
        slices = order[np.minimum(at, len(order) - 1)]
        hit = (at < len(order)) & (found.start_ns[slices] == gaps.ends)
        known, lengths = found.launch >= 0, gaps.ends - gaps.starts
        late = known & (span.start_ns[np.maximum(found.launch, 0)] > found.start_ns + RETURN_NS)
        untold = hit & (late | ~known)[slices]
        if late.sum() > UNTOLD * known.sum() or lengths[untold].sum() > UNTOLD * lengths.sum():
            gaps, slices, hit = EMPTY, slices[:0], hit[:0]
        self.scene, self.gaps = scene, gaps
        self.ended_by = np.where(hit, slices, NONE)
        # slices that are the first of their launch: a CUDA graph is launched once for all its kernels
        order = np.lexsort((found.start_ns, found.launch))
        launch = found.launch[order]
        self._first = np.ones(len(found), bool)
        self._first[order[1:]] = (launch[1:] != launch[:-1]) | (launch[1:] < 0)
        self.in_graph = hit & ~self._first[np.maximum(self.ended_by, 0)]
        self.launch = np.where(hit, found.launch[self.ended_by], NONE)
        over = span.ends(np.maximum(self.launch, 0))
        self.starved = (self.launch >= 0) & (over > gaps.starts) & ~self.in_graph

        self.operations = Operations(scene, gaps)
        self._other_causes = intervals.merge(self.operations.told, self.operations.times)
        self.calls = host.rows[span.is_runtime[host.rows]]
        rows = host_rows(span, _PIN)
        self.pin_rows = rows[np.isin(rows, host.rows)]
        idle = intervals.intersect(gaps, span.times(self.pin_rows))
        self.pinning = intervals.subtract(idle, self._other_causes)
        # calls below operators that copy from the host: the copy, and the wait for it behind
        launches = found.launch[self.copies(IN)]
        launches = unique(launches[launches >= 0])
        around = span.parent[launches]
        around = around[around >= 0]
        below = np.isin(span.parent[self.calls], around[span.is_operator[around]])
        copying = span.times(unique(np.concatenate([self.calls[below], launches])))
        # the allocator's calls are no consequence of a wait before them
        told = intervals.merge(self._other_causes, self.pinning)
        self._allocating = intervals.subtract(intervals.intersect(gaps, host.allocating), told)
        self.waits_in = self._waits(intervals.intersect(host.synchronizing, copying), EMPTY)
        self.waits = self._waits(intervals.subtract(host.synchronizing, copying), self.waits_in.idle)
        told = intervals.merge(told, self.waits.idle, self.waits_in.idle, host.synchronizing, self._allocating, host.io)
        self.rest = intervals.subtract(gaps, told)
        self.copies_in = self._copies_in()
        self.made = self._made()
        self.rest = intervals.subtract(self.rest, self.made.times)

    def copies(self, marks: tuple[str, ...]) -> Int64:
        found = self.scene.found
        return np.flatnonzero((found.kind == COPY) & self.scene.span.names.containing(*marks)[found.rows])

    def exposed_copies(self, marks: tuple[str, ...]) -> Int64:
        """Those in the steps, without what whole operations copy."""
        slices = self.copies(marks)
        inside = self.scene.step_of(self.scene.found.start_ns[slices]) >= 0
        return slices[inside & ~self.operations.work[slices]]

    def _waits(self, times: Intervals, told: Intervals) -> Waits:
        """`told`: idle time of other waits."""
        times = intervals.subtract(times, self._other_causes)
        if not len(times.starts):
            return Waits(EMPTY, np.empty(0, np.int64), EMPTY, np.empty(0, np.int64))
        wide = intervals.union(times.starts, times.ends + RETURN_NS)
        waits = Intervals(wide.starts, wide.ends - RETURN_NS)
        gaps, found, span, calls = self.gaps, self.scene.found, self.scene.span, self.calls
        at = np.searchsorted(waits.starts, gaps.starts, side="right") - 1
        safe = np.maximum(at, 0)
        caused = (at >= 0) & (gaps.starts <= waits.ends[safe] + RETURN_NS)
        behind = np.maximum(waits.ends[safe], gaps.starts)
        reach = np.minimum(gaps.ends, behind + gaps.starts - waits.starts[safe])
        behind, reach = behind[caused], np.maximum(reach, behind)[caused]
        known = np.flatnonzero((found.launch >= 0) & self._first)
        pending = intervals.union(span.ends(found.launch[known]) + PENDING_NS, found.start_ns[known])
        told = intervals.merge(self._other_causes, pending, self.pinning, self._allocating, told)
        after = intervals.subtract(intervals.union(behind, reach), told)
        after = intervals.subtract(after, self.scene.host.synchronizing)
        under = intervals.subtract(intervals.intersect(gaps, waits), told)
        own = intervals.covered(under, waits.starts, waits.ends)
        np.add.at(own, at[caused], intervals.covered(after, behind, reach))
        # the longest call of each wait
        at = np.searchsorted(waits.starts, span.start_ns[calls], side="right") - 1
        inside = (at >= 0) & (span.ends(calls) <= waits.ends[np.maximum(at, 0)])
        calls, at = calls[inside], at[inside]
        order = np.lexsort((span.duration_ns[calls], at))
        longest = np.full(len(waits.starts), NONE, np.int64)
        longest[at[order]] = calls[order]  # of several the last, which is the longest
        return Waits(waits, longest, intervals.merge(under, after), own)

    def _copies_in(self) -> CopiesIn:
        scene = self.scene
        found, span = scene.found, scene.span
        slices = self.exposed_copies(IN)
        exposed = scene.exclusive(flags(len(found), slices))
        launches = found.launch[slices]
        rows = np.maximum(launches, 0)
        around = span.parent[rows]
        # for each launch of a copy the first wait behind its start, and whether the same operator waits there
        waits = self.waits_in.times
        inside = (around >= 0) & span.is_operator[np.maximum(around, 0)]
        at = np.searchsorted(waits.ends, span.start_ns[rows], side="right")
        hit = (launches >= 0) & (at < len(waits.starts))
        hit[hit] = waits.starts[at[hit]] < span.ends(np.where(inside, around, rows))[hit]
        first = np.flatnonzero(hit)[np.unique(at[hit], return_index=True)[1]]
        waited = np.zeros(len(slices), np.int64)
        waited[first] = self.waits_in.idle_ns[at[first]]
        shown = intervals.covered(exposed, found.start_ns[slices], found.end_ns[slices])
        return CopiesIn(slices, launches, exposed, shown, waited, hit)

    def host_operators(self) -> Int64:
        """Operators of the training thread that lie in no other and launch nothing."""
        host, span = self.scene.host, self.scene.span
        rows = host.rows[host.sorts["operators"]]
        launches = self.scene.found.launch
        above = span.parent[rows]
        outer = ~has_ancestor(span.parent, above, flags(len(span), rows))
        found: Int64 = rows[outer & ~ancestors(span.parent, launches[launches >= 0])[rows]]
        return found

    def _made(self) -> Made:
        """By runs of copies with no other work between them, in which the operators before them take long."""
        copies, found, gaps, span = self.copies_in, self.scene.found, self.gaps, self.scene.span
        nothing = Made(EMPTY, np.empty(0, np.int64), np.zeros(len(copies.slices), bool))
        if not len(copies.slices):
            return nothing
        order = np.argsort(found.start_ns, kind="stable")
        run = np.empty(len(found), np.int64)
        run[order] = np.cumsum(~flags(len(found), copies.slices)[order])
        ends = self.starved & np.isin(self.ended_by, copies.slices)
        of_gap, of_copy = run[self.ended_by[ends]], run[copies.slices]
        rows = self.host_operators()
        making = intervals.intersect(self.rest, span.times(rows))
        before = Intervals(gaps.starts[ends], gaps.ends[ends])
        made_ns, rest_ns = (
            np.bincount(of_gap, intervals.covered(times, before.starts, before.ends), len(found) + 1)
            for times in (making, self.rest)
        )
        copies_ns = np.bincount(of_copy, copies.lost_ns, len(found) + 1)
        long = (made_ns > OPERATOR_NS) & (made_ns >= COVERING * np.maximum(rest_ns, copies_ns))
        times = intervals.intersect(making, Intervals(before.starts[long[of_gap]], before.ends[long[of_gap]]))
        rows = rows[intervals.covered(times, span.start_ns[rows], span.ends(rows)) > 0]
        return Made(times, rows, long[of_copy]) if len(rows) else nothing

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
        """Calls that get or give back device memory while the device idles.

        What gets memory behind an `empty_cache()` does so because of it.
        """
        span, host, times = self.scene.span, self.scene.host, intervals.intersect(self._allocating, self.scene.inside)
        starts, ends = span.start_ns[self.calls], span.ends(self.calls)
        weights = intervals.covered(times, starts, ends)
        chosen = (weights > 0) & (intervals.covered(host.allocating, starts, ends) > 0)
        rows, weights = self.calls[chosen], weights[chosen]
        freed = host.rows[host.freeing]
        emptied = freed[self._emptying(freed)] if len(freed) else freed
        emptied = emptied[np.argsort(span.start_ns[emptied], kind="stable")]
        at = np.searchsorted(span.start_ns[emptied], span.start_ns[rows], side="right")
        causes = np.append(emptied, NONE)[at - 1]  # the last one before each, NONE before the first
        details = {
            "emptied_ns": float(weights[causes >= 0].sum()),
            "freed_ns": float(weights[np.isin(rows, freed)].sum()),
        }
        return TraceLoss(self.scene, times, np.where(causes >= 0, causes, rows), weights, rows, details)

    def _emptying(self, freed: Int64) -> Bools:
        """Which of these calls `empty_cache()` makes: without Python's functions those that no operator asked for."""
        span, host = self.scene.span, self.scene.host
        if host.sorts["functions"].any():
            return has_ancestor(span.parent, freed, flags(len(span), host_rows(span, _EMPTY_CACHE)))
        asking = unique(np.concatenate([host.rows[host.sorts["operators"]], host_rows(span, _COMPILED)]))
        return ~has_ancestor(span.parent, freed, flags(len(span), asking))

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

    `told`: a loader or compilation in which anything happens has the better name. `times` is when the host is inside
    one, `work` the slices that they launched.
    """

    def __init__(self, scene: Scene, gaps: Intervals) -> None:
        self.scene, self.span, self.gaps = scene, scene.span, gaps
        self.told = intervals.merge(scene.host.data, scene.host.compiling)
        rows = host_rows(self.span, _LINALG)
        self._linalg_rows = rows[self.span.is_operator[rows]]
        # calls of linear algebra that leave the device empty for most of their time
        calls, found = self.span.times(self._linalg_rows), scene.found
        mine = self._launched_in(self._linalg_rows, calls)
        at = self._call_of(calls, mine)
        lengths = (found.end_ns - found.start_ns)[mine]
        blocks = self.span.series("blocks_per_sm").gather(found.rows[mine]).fill_null(1.0).to_numpy()
        full = (found.kind[mine] == KERNEL) & (lengths > SHORT_NS) & (blocks >= 1)
        done = np.bincount(at, lengths, len(calls.starts))
        busy = np.bincount(at[full], lengths[full], len(calls.starts))
        serial = busy < BUSY * (done + intervals.covered(gaps, calls.starts, calls.ends))
        self._linalg = Intervals(calls.starts[serial], calls.ends[serial])
        several = (unique(scene.found.device) >= 0).sum() > 1 and len(host_rows(self.span, _DATA_PARALLEL))
        self._distributing_rows = host_rows(self.span, _DISTRIBUTING) if several else np.empty(0, np.int64)
        self._distributing = self.span.times(self._distributing_rows)
        self.times = intervals.merge(self._linalg, self._distributing)
        distributed = self._launched_in(self._distributing_rows, self._distributing)
        self.work = self._launched_in(self._linalg_rows, self._linalg) | distributed

    def linear_algebra(self) -> TraceLoss:
        """Calls of linear algebra in which the device mostly waits for the next small piece."""
        rows, calls = self._linalg_rows, self._linalg
        found = self._owned(rows, calls)
        shapes = [first_sizes(self.span.series("shapes")[int(row)]) for row in found.rows if row >= 0]
        # how many matrices each operator got, and the rows of each; without recorded shapes none are known
        sizes = [(prod(shape[:-2]), shape[-2]) for shape in shapes if shape is not None and len(shape) >= 2]
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
        found.details["devices"] = float(len(unique(self.scene.found.device)) * len(self.scene))
        return found

    def _launched_in(self, rows: Int64, times: Intervals) -> Bools:
        """Slices of work whose launch lies in these times, on a thread of the rows."""
        codes = self.span.tracks.codes
        tracks = codes[np.maximum(self.scene.found.launch, 0)]
        return self.scene.launched_during(times) & np.isin(tracks, unique(codes[rows]))

    def _call_of(self, calls: Intervals, mine: Bools) -> Int64:
        return np.searchsorted(calls.starts, self.span.start_ns[self.scene.found.launch[mine]], side="right") - 1

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


WITHIN, BETWEEN = ("DtoD", "DeviceToDevice"), ("PtoP", "PeerToPeer")


def from_host(idle: Idle) -> TraceLoss:
    """Copies from the host that nothing hides, what the device idles because the host waits for them, and pinning.

    PyTorch waits behind a copy unless it was told `non_blocking=True`, so the wait, or its absence, tells the argument.
    Some writers (AMD's) do not tell the kind of memory.
    """
    scene, copies, mine = idle.scene, idle.copies_in, ~idle.made.copies
    found, span = scene.found, scene.span
    slices, launches, weights = copies.slices[mine], copies.launches[mine], copies.lost_ns[mine]
    rows = np.maximum(launches, 0)
    around = span.parent[rows]
    # whether the operator around a launch waits with a call of its own, or the call itself is no async one
    calls = idle.calls[span.names.containing("Synchronize")[idle.calls]]
    at_once = span.names.pick(["async" in name.lower() for name in span.names.values])[rows]
    synced = (launches >= 0) & (((around >= 0) & np.isin(around, span.parent[calls])) | ~at_once)
    pageable, pinned = (span.names.containing(kind)[found.rows[slices]] for kind in ("Pageable", "Pinned"))
    pinning = intervals.intersect(idle.pinning, scene.inside)
    pinned_ns = intervals.covered(pinning, span.start_ns[idle.pin_rows], span.ends(idle.pin_rows))
    details = {
        **_copied(scene, slices),
        "pageable_copies": float(pageable.sum()),
        "blocking_copies": float(copies.blocking[mine].sum()),
        "exposed_ns": float(copies.exposed_ns[mine].sum()),
        "idle_ns": float(copies.waited_ns[mine].sum()),
        "pageable_ns": float(weights[pageable & synced].sum()),
        "unpinned_async_ns": float(weights[pageable & ~synced].sum()),
        "pinned_blocking_ns": float(weights[pinned & synced].sum()),
        "pinned_async_ns": float(weights[pinned & ~synced].sum()),
        "untold_ns": float(weights[~pageable & ~pinned].sum()),
        "pinning_ns": float(intervals.total(pinning)),
    }
    times = intervals.merge(copies.exposed, intervals.intersect(idle.waits_in.idle, scene.inside), pinning)
    share_ns = intervals.covered(times, scene.starts, scene.ends) - _of_made(idle)
    pins = pinned_ns > 0
    named = np.concatenate([found.rows[slices], idle.pin_rows[pins]])
    rows, weights = np.concatenate([launches, idle.pin_rows[pins]]), np.concatenate([weights, pinned_ns[pins]])
    held = _holding(scene, slices[copies.lost_ns[mine] > 0])
    return TraceLoss(scene, times, rows, weights, named, details, share_ns=np.maximum(share_ns, 0), held=held)


def _holding(scene: Scene, copies: Int64) -> Int64:
    """The calls that make the device wait for copies on a stream without kernels.

    Of each copy the first call behind its launch on the same thread, if the kernel launched next began when the copy
    was over, although its launch was earlier.
    """
    found, span = scene.found, scene.span
    calls = np.flatnonzero(span.names.containing(_HOLD) & span.is_runtime)
    kernels = np.flatnonzero(found.is_kernel & (found.launch >= 0))
    if not len(calls):
        return calls
    stream, thread = span.column("stream", found.rows), span.tracks.codes
    copies = copies[(found.launch[copies] >= 0) & ~np.isin(stream[copies], stream[found.is_kernel])]
    held = [np.empty(0, np.int64)]
    for track in unique(thread[found.launch[copies]]).tolist():
        own, mine, behind = (
            rows[thread[on] == track]
            for rows, on in ((calls, calls), (copies, found.launch[copies]), (kernels, found.launch[kernels]))
        )
        own = own[np.argsort(span.start_ns[own])]
        behind = behind[np.argsort(span.start_ns[found.launch[behind]])]
        at = np.searchsorted(span.start_ns[own], span.start_ns[found.launch[mine]])
        mine, own = mine[at < len(own)], own[at[at < len(own)]]
        at = np.searchsorted(span.start_ns[found.launch[behind]], span.start_ns[own])
        mine, own, first = mine[at < len(behind)], own[at < len(behind)], behind[at[at < len(behind)]]
        late = found.start_ns[first] >= found.end_ns[mine]
        held.append(own[late & (span.start_ns[found.launch[first]] < found.end_ns[mine])])
    return unique(np.concatenate(held))


def made_on_host(idle: Idle) -> TraceLoss:
    """Idle time while the host makes what it copies to the device next, and what these copies lose."""
    scene, copies, made = idle.scene, idle.copies_in, idle.made
    slices, launches, lost_ns = copies.slices[made.copies], copies.launches[made.copies], copies.lost_ns[made.copies]
    times = intervals.intersect(made.times, scene.inside)
    weights = intervals.covered(times, scene.span.start_ns[made.rows], scene.span.ends(made.rows))
    rows = made.rows[weights > 0]
    details = {**_copied(scene, slices), "lost_to_copies_ns": float(lost_ns.sum()), "copies": float(len(slices))}
    return TraceLoss(
        scene,
        times,
        np.concatenate([rows, launches]),
        np.concatenate([weights[weights > 0], lost_ns]),
        np.concatenate([rows, scene.found.rows[slices]]),
        details,
        share_ns=intervals.covered(times, scene.starts, scene.ends) + _of_made(idle),
    )


def _of_made(idle: Idle) -> Int64:
    """Of each step what copies lose of what was made for them."""
    scene, copies, mine = idle.scene, idle.copies_in, idle.made.copies
    steps = scene.step_of(scene.found.start_ns[copies.slices[mine]])
    return np.bincount(steps, copies.lost_ns[mine], len(scene.starts)).astype(np.int64)


def _copied(scene: Scene, slices: Int64) -> dict[str, float]:
    found = scene.found
    sizes = scene.span.column("bytes", found.rows[slices]) if len(slices) else slices
    return {
        "copied_ns": float((found.end_ns - found.start_ns)[slices].sum()),
        "copied_bytes": float(np.maximum(sizes, 0).sum()),
    }


def on_devices(idle: Idle) -> TraceLoss:
    """Copies within a device or between devices in which nothing else runs."""
    scene, found, span = idle.scene, idle.scene.found, idle.scene.span
    slices = idle.exposed_copies((*WITHIN, *BETWEEN))
    starts, ends = found.start_ns[slices], found.end_ns[slices]
    times = scene.exclusive(flags(len(found), slices))
    weights = intervals.covered(times, starts, ends)
    peer = span.names.containing(*BETWEEN)[found.rows[slices]]
    details = {
        **_copied(scene, slices),
        "between_ns": float(weights[peer].sum()),
        "between_copies": float(peer.sum()),
    }
    rows = found.launch[slices]
    operators = idle.operators(rows)
    return TraceLoss(scene, times, rows, weights, np.where(operators >= 0, operators, found.rows[slices]), details)


LONG_GAPS = 200  # whose places are looked up, the longest first
# A fused update reads and writes about as much as the two longest operations of one that is not: of Adam's 18 tensors
# read or written 7, of SGD's with momentum 6 of 8.
FUSED_PASSES = 2
ONE_BY_ONE = 0.5  # of the optimizer's launches: fewer come from an update that is fused already
# PyTorch's optimizers that take fused=True, and those that take foreach=True alone. Others have neither.
_FUSABLE = r"^Optimizer\.step#(Adam|AdamW|SGD|Adagrad)\.step$"
_GROUPABLE = r"^Optimizer\.step#(Adadelta|Adamax|ASGD|NAdam|RAdam|RMSprop|Rprop)\.step$"
_ZERO_GRAD = r"^Optimizer\.zero_grad#|(^|/)torch/(optim/optimizer|nn/modules/module)\.py\(\d+\): zero_grad$"
# Code that a compiler made, as torch.compile and its forerunners mark it.
_COMPILED = (
    r"^CompiledFunction(Backward)?$|^Torch-Compiled Region|^## Call CompiledFxGraph|^torch::jit::fuser|^TorchDynamo"
)
_GENERATED = r"^triton_|^fused_|^kernel\d*$|CudaCodeGen"
# Updates of all parameters in one kernel (PyTorch's fused ones, apex', and those a compiler made), or operation by
# operation.
_FUSED, _GROUPED = r"_fused_|FusedOptimizer|FusedAdam|^triton_", r"_foreach_|multi_tensor"


def launch_losses(idle: Idle) -> dict[str, TraceLoss]:
    """Every loss to launching, by kind."""
    found = _Launches(idle)
    return {
        OPTIMIZER: found.optimizer(),
        ZERO_GRAD: found.operation(found.zeroing, found.zeros, found.zeros, {}),
        COMPILED: found.short(compiled=True),
        LAUNCH: found.short(compiled=False),
        HOST: found.working(),
        OPERATORS: found.operating(),
    }


class _Launches:
    """What of the idle time that is left belongs to launching, of one trace."""

    def __init__(self, idle: Idle) -> None:
        self.idle, self.scene, self.span, self.found = idle, idle.scene, idle.scene.span, idle.scene.found
        self.lengths = self.found.end_ns - self.found.start_ns
        # kernels of optimizers that could be fused and are not; and of those that could at least update in groups
        self.fusable = self._updates_of(_FUSABLE, _FUSED)
        self.groupable = self._updates_of(_GROUPABLE, f"{_FUSED}|{_GROUPED}")
        updates = ((_FUSABLE, self.fusable), (_GROUPABLE, self.groupable))
        self.optimizing = self._preparing(*(self._times(pattern) for pattern, mine in updates if mine.any()))
        clearing = self._times(_ZERO_GRAD)
        self.zeros = self._launched_in(clearing) & ~self.fusable & ~self.groupable
        preparing = self._preparing(clearing if self.zeros.any() else intervals.EMPTY)
        self.zeroing = intervals.subtract(preparing, self.optimizing)
        self.rest = intervals.subtract(idle.rest, intervals.merge(self.optimizing, self.zeroing))
        starts, ends = idle.gaps.starts, idle.gaps.ends
        self.rest_ns = intervals.covered(self.rest, starts, ends)
        rows = idle.host_operators()
        computing = self.span.times(rows[self.span.duration_ns[rows] > OPERATOR_NS])
        computing_ns = intervals.covered(intervals.intersect(self.rest, computing), starts, ends)
        self.long = self.rest_ns > LAUNCH_NS
        self.long |= (computing_ns > OPERATOR_NS) & (computing_ns >= COVERING * self.rest_ns)

    def _times(self, pattern: str) -> Intervals:
        return self.span.times(host_rows(self.span, pattern))

    def _launched_in(self, times: Intervals) -> Bools:
        """Slices of kernels and fills in the steps that were launched then."""
        inside = np.isin(self.found.kind, (KERNEL, FILL)) & (self.scene.step_of(self.found.start_ns) >= 0)
        return self.scene.launched_during(times) & inside

    def _updates_of(self, pattern: str, well_done: str) -> Bools:
        mine = self._launched_in(self._times(pattern))
        done = self._named(well_done, np.flatnonzero(mine))
        return mine if (~done).sum() >= ONE_BY_ONE * len(done) else np.zeros(len(mine), bool)

    def _named(self, pattern: str, slices: Int64) -> Bools:
        """Slices whose name or whose operator's is such."""
        flags = self.span.names.like(pattern)
        operators = self.idle.operators(self.found.launch[slices])
        named: Bools = flags[self.found.rows[slices]] | ((operators >= 0) & flags[np.maximum(operators, 0)])
        return named

    def _preparing(self, *ranges: Intervals) -> Intervals:
        """Idle time in these ranges: gaps as long as a launch takes, and of longer ones what operators took."""
        gaps, rest = self.idle.gaps, self.idle.rest
        short = intervals.covered(rest, gaps.starts, gaps.ends) <= LAUNCH_NS
        own = intervals.merge(self.scene.host.operators, Intervals(gaps.starts[short], gaps.ends[short]))
        return intervals.intersect(intervals.intersect(rest, intervals.merge(*ranges)), own)

    def optimizer(self) -> TraceLoss:
        """Idle time in an optimizer that is not fused, and the time of its kernels that fusing would leave out."""
        found = self.found
        slices = np.flatnonzero(self.fusable)
        operators = self.idle.operators(found.launch[slices])
        codes = self.span.names.codes[np.where(operators >= 0, operators, found.rows[slices])]
        distinct, number = np.unique(codes, return_inverse=True)
        sums = np.bincount(number, self.lengths[slices], len(distinct))
        lost = flags(len(found), slices[~np.isin(number, np.argsort(-sums, kind="stable")[:FUSED_PASSES])])
        mine = self.fusable | self.groupable
        every = np.flatnonzero(mine)
        details = {
            "foreach_launches": float(self._named(_GROUPED, every).sum()),
            "fusable_launches": float(len(slices)),
            "operator_calls": float(len(unique(self.idle.operators(found.launch[every])))),
        }
        return self.operation(self.optimizing, lost, mine, details)

    def operation(self, idle: Intervals, lost: Bools, mine: Bools, details: dict[str, float]) -> TraceLoss:
        """Idle time of an operation, and the time of the slices `lost` of all slices `mine` of it."""
        scene, found = self.scene, self.found
        work = scene.exclusive(lost)
        idle = intervals.intersect(idle, scene.inside)
        slices = np.flatnonzero(mine)
        order = slices[np.argsort(self.span.start_ns[found.launch[slices]], kind="stable")]
        rows = found.launch[order]
        # a kernel's part of the idle time: what lies between the launch before it and its own
        ends = self.span.ends(rows)
        starts = np.concatenate([ends[:1] - LAUNCH_NS, ends[:-1]])
        own = intervals.covered(work, found.start_ns[order], found.end_ns[order])
        weights = intervals.covered(idle, starts, ends) + np.where(lost[order], own, 0)
        details |= {
            "launches": float(len(slices)),
            "idle_ns": float(intervals.total(idle)),
            "kernels_ns": float(self.lengths[slices].sum()),
        }
        return TraceLoss(scene, intervals.merge(idle, work), rows, weights, self.idle.operators(rows), details)

    def short(self, *, compiled: bool) -> TraceLoss:
        """Short gaps in which the host prepared the launch that ended them: in compiled functions, or elsewhere."""
        idle, found = self.idle, self.found
        gaps = idle.gaps
        prepared = idle.starved & ~self.long & (self.rest_ns > 0)
        chosen = np.flatnonzero(prepared & (self.scene.step_of(gaps.ends - 1) >= 0))
        functions = flags(len(self.span), host_rows(self.span, _COMPILED))
        chosen = chosen[has_ancestor(self.span.parent, idle.launch[chosen], functions) == compiled]
        times = intervals.intersect(self.rest, Intervals(gaps.starts[chosen], gaps.ends[chosen]))
        rows, ended, weights = idle.launch[chosen], idle.ended_by[chosen], self.rest_ns[chosen]
        details = {"kernels_behind_ns": float(self.lengths[ended].sum())}
        if compiled:
            kernels = np.flatnonzero((found.kind == KERNEL) & (self.scene.step_of(found.start_ns) >= 0))
            kernels = kernels[has_ancestor(self.span.parent, found.launch[kernels], functions)]
            generated = self.span.names.like(_GENERATED)[found.rows[kernels]]
            details |= {
                "collectives_ns": float(weights[found.kind[ended] == COMMUNICATION].sum()),
                "compiled_kernels": float(len(kernels)),
                "generated_kernels": float(generated.sum()),
            }
        return TraceLoss(self.scene, times, rows, weights, idle.operators(rows), details)

    def _long(self, times: Intervals) -> tuple[Intervals, Int64, Int64]:
        """What of the idle time lies in such times of the host; the long gaps that hold some, and how much each gap."""
        idle, span, gaps = self.idle, self.span, self.idle.gaps
        # calls of the runtime that take so long load code or set the device up: no line of the user's can help it
        calls = span.times(idle.calls[span.duration_ns[idle.calls] > LAUNCH_NS])
        known = intervals.intersect(self.rest, intervals.subtract(times, calls))
        lengths = intervals.covered(known, gaps.starts, gaps.ends)
        ended = idle.starved | ((idle.launch < 0) & ~idle.in_graph)
        return known, np.flatnonzero(self.long & (lengths > 0) & ended), lengths

    def operating(self) -> TraceLoss:
        """Of long gaps those that pass in operators that launch nothing."""
        rows, span, gaps = self.idle.host_operators(), self.span, self.idle.gaps
        known, chosen, lengths = self._long(span.times(rows))
        chosen = chosen[lengths[chosen] >= COVERING * self.rest_ns[chosen]]
        times = intervals.intersect(known, Intervals(gaps.starts[chosen], gaps.ends[chosen]))
        times = intervals.intersect(times, self.scene.inside)
        weights = intervals.covered(times, span.start_ns[rows], span.ends(rows))
        rows, weights = rows[weights > 0], weights[weights > 0]
        return TraceLoss(self.scene, times, rows, weights, rows)

    def working(self) -> TraceLoss:
        """Long gaps in which the host ran operators or Python but launched nothing, where it is recorded what."""
        host, span, gaps = self.scene.host, self.span, self.idle.gaps
        known, chosen, lengths = self._long(intervals.merge(host.operators, host.python))
        longest = np.sort(chosen[np.argsort(-lengths[chosen], kind="stable")][:LONG_GAPS])
        # what can cover most of a long gap, without the steps themselves
        slices = host.rows[span.duration_ns[host.rows] >= COVERING * OPERATOR_NS]
        slices = slices[~span.is_runtime[slices] & ~span.names.starting("ProfilerStep#")[slices]]
        starts, ends = span.start_ns[slices], span.ends(slices)
        rows = np.full(len(longest), NONE, np.int64)  # the innermost of the slices that covers most of each gap
        for number, (begin, end) in enumerate(zip(gaps.starts[longest], gaps.ends[longest], strict=True)):
            # but for what is told as making tensors
            first, last = np.append(np.maximum(starts, begin), begin), np.append(np.minimum(ends, end), end)
            over = last - first - intervals.covered(self.idle.made.times, first, np.maximum(first, last))
            covering = slices[over[:-1] >= COVERING * over[-1]]
            if len(covering):
                rows[number] = covering[np.lexsort((covering, span.duration_ns[covering]))[0]]
        longest, rows = longest[rows >= 0], rows[rows >= 0]
        times = intervals.intersect(known, Intervals(gaps.starts[longest], gaps.ends[longest]))
        return TraceLoss(self.scene, times, rows, lengths[longest], rows)
