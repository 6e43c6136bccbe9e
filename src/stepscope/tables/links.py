"""Slices of a track as a tree, and where each device slice comes from.

A tree tells parent, depth, self time, and the Python function around each slice. A slice that reaches over its parent's
end by less than it lies inside is cut off there; one that lies mostly outside is a sibling that begins at that end, as
is an annotation that outlives the `__enter__` it began in. Both are counted, so self times of a track add up to its
roots' times. What nests perfectly is a matter of sorting and counting; around a slice that does not, the track is swept
slice by slice.

Of a device slice, the launch is the runtime call with the same correlation, else the one an arrow starts at. The
operator is the innermost one around the launch, else the one with the same External id, else the last one that was open
on the launch's thread within the clock's rounding. A launch of a whole graph is no link: its operators ran when the
graph was captured. Autograd numbers its nodes per thread. The forward operator of a backward one is the last that began
with its sequence number on the thread that made the node; which track that is, no writer says: it is the one whose
numbers fit best.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from stepscope.tables.arrays import NONE, Bools, Int32, Int64, Rows, climb, decode, unique, with_ids

_BLOCK = 1 << 10  # slices that are swept before it is asked whether those behind nest perfectly
_RESUMED = 4  # times that counting is taken up again: a track that nests nowhere is swept as a whole
_DEEPEST = 2000  # levels up to which counting is quicker than sweeping
_ENDLESS = 2**63 - 1


class Nesting(Struct):
    """One entry per slice, in the order given; `NONE` where there is no parent or frame.

    `extent_ns` is the slice's duration after cutting, `clipped` counts the slices that were cut. `alike` are those that
    share track, times and precedence with another.
    """

    parent: Int32
    depth: Int32
    self_ns: Int64
    frame: Int32
    extent_ns: Int64
    clipped: int
    alike: Int64


def nest(
    track: npt.NDArray[np.integer],
    start_ns: Int64,
    duration_ns: Int64,
    *,
    is_function: Bools,
    is_annotation: Bools,
    precedence: npt.NDArray[np.integer],
) -> Nesting:
    """Nest slices of equal `track` by time. Of slices with equal times the one with the lower `precedence` is outer.

    `is_function` marks the slices that can be another's `frame` (the innermost of them around it), `is_annotation`
    those that a function may open and leave open.
    """
    count = len(start_ns)
    result = Nesting(
        parent=np.full(count, NONE, np.int32),
        depth=np.zeros(count, np.int32),
        self_ns=np.zeros(count, np.int64),
        frame=np.full(count, NONE, np.int32),
        extent_ns=np.zeros(count, np.int64),
        clipped=0,
        alike=np.empty(0, np.int64),
    )
    alike = [result.alike]
    for rows in by_value(track):
        if len(rows) == 1:
            result.self_ns[rows] = result.extent_ns[rows] = duration_ns[rows]
            continue
        order, same = _outer_first(start_ns[rows], duration_ns[rows], precedence[rows])
        alike.append(rows[same])
        rows = rows[order]
        starts, functions = start_ns[rows], is_function[rows]
        ends = starts + duration_ns[rows]
        parent, depth, known = _counted(starts, ends)
        clipped = _Track(starts, ends, functions, is_annotation[rows], parent, depth).nest(known)
        frame = np.full(len(rows), NONE, np.int32)
        for level in by_value(depth)[1:]:
            above = parent[level]
            frame[level] = np.where(functions[above], above, frame[above])
        extent, inner = ends - starts, parent >= 0
        # Sums of nanoseconds in floats are exact up to 104 days.
        inside = np.bincount(parent[inner], weights=extent[inner], minlength=len(extent)).astype(np.int64)
        # positions among the sorted slices of a track as positions among all slices
        result.parent[rows] = np.where(inner, rows[parent], NONE)
        result.frame[rows] = np.where(frame >= 0, rows[frame], NONE)
        result.depth[rows], result.extent_ns[rows], result.self_ns[rows] = depth, extent, extent - inside
        result.clipped += clipped
    result.alike = np.concatenate(alike)
    return result


def by_value(codes: npt.NDArray[np.integer]) -> list[Int64]:
    """The positions of each distinct value of small non-negative `codes`, ascending; values without any left out."""
    if not len(codes):
        return []
    low, high = int(codes.min()), int(codes.max())
    # 16-bit integers sort by radix, in time proportional to their number.
    keys = (codes - low).astype(np.uint16) if high - low < 1 << 16 else codes
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order])) + 1
    return np.split(order, bounds)


def _outer_first(starts: Int64, durations: Int64, precedence: npt.NDArray[np.integer]) -> tuple[Int64, Int64]:
    """The order, and those of which there are several that differ in nothing that is given."""
    order = np.argsort(starts, kind="stable")
    in_order = starts[order]
    same = in_order[1:] == in_order[:-1]
    if not same.any():
        return order, order[:0]
    places = np.flatnonzero(_tied(same))
    rows = order[places]
    rows = rows[np.lexsort((precedence[rows], -durations[rows], in_order[places]))]
    order[places] = rows
    known = starts[rows], durations[rows], precedence[rows]
    return order, rows[_tied(np.all([values[1:] == values[:-1] for values in known], axis=0))]


def _tied(same: Bools) -> Bools:
    """Of neighbours those that are the `same` as one next to them."""
    return np.concatenate(([False], same)) | np.concatenate((same, [False]))


class _Track(Struct):
    """The slices of a track, outer first, and what is found of them; `starts` and `ends` are corrected in place."""

    starts: Int64
    ends: Int64
    functions: Bools
    annotations: Bools
    parent: Int32
    depth: Int32

    def nest(self, known: int) -> int:
        """Find all but the `known` first slices, and how many of them were cut."""
        clipped, resumed, around = 0, 0, self._around(known)
        while known < len(self.starts):
            sweep = _Sweep(self, around)
            known = sweep.run(known, whole=resumed == _RESUMED)
            clipped += len(sweep.cut)
            around, resumed, before = sweep.stack[1:], resumed + 1, known
            if known < len(self.starts):
                known = self._count(known, around)
                around = self._around(known) if known > before else around
        return clipped

    def _count(self, known: int, around: list[int]) -> int:
        """Find the slices from `known` on that nest perfectly, also in those `around`, and how many are known then."""
        rows = np.concatenate([np.array(around, np.int64), np.arange(known, len(self.starts))])
        parent, depth, nested = _counted(self.starts[rows], self.ends[rows])
        behind = slice(len(around), max(nested, len(around)))
        own = rows[behind]
        self.parent[own] = np.where(parent[behind] >= 0, rows[parent[behind]], NONE)
        self.depth[own] = depth[behind]
        return known + len(own)

    def _around(self, row: int) -> list[int]:
        """What is open where `row` begins, outermost first; the row before it is known, and nests perfectly."""
        at, found = row - 1, list[int]()
        while at != NONE and row < len(self.starts):
            if self.ends[at] > self.starts[row]:
                found.append(at)
            at = int(self.parent[at])
        return found[::-1]


def _counted(starts: Int64, ends: Int64) -> tuple[Int32, Int32, int]:
    """Parents and depths of slices, outer first, and for how many of the first ones they hold.

    A slice's depth is the number of slices that came before it and have not ended. Its parent is the last one before it
    that is one level up. Both hold up to the first slice that reaches over its parent's end, so that one is found.
    """
    ended = np.searchsorted(np.sort(ends), starts, side="right")
    empty = ends == starts
    if empty.any():
        # Empty slices end where they start: those behind a slice with the same start have not come yet.
        before = np.concatenate(([0], np.cumsum(empty)))
        ended -= before[np.searchsorted(starts, starts, side="right")] - before[:-1]
    depth = np.arange(len(starts))
    depth -= ended
    del ended
    parent, whole = np.full(len(starts), NONE, np.int32), len(starts)
    if depth.max() > _DEEPEST:
        return parent, depth.astype(np.int32), 0
    levels = by_value(depth)
    for number, level in enumerate(levels):
        if depth[level[0]] != number:
            return parent, depth.astype(np.int32), 0
        if number:
            places = np.searchsorted(levels[number - 1], level) - 1
            above = levels[number - 1][places]
            wrong = (places < 0) | (ends[level] > ends[above])
            if wrong.any():
                whole = min(whole, int(level[wrong.argmax()]))
            parent[level] = above
    return parent, depth.astype(np.int32), whole


class _Sweep:
    """Slices one after the other, with the open ones, at first those `around`, on a stack."""

    def __init__(self, track: _Track, around: list[int]) -> None:
        self.track = track
        self.stack, self.stack_ends = [NONE, *around], [_ENDLESS, *track.ends[around].tolist()]
        self.late: list[tuple[int, int, int]] = []  # (start, -end, slice): those that wait for the end of another
        self.cut: dict[int, tuple[int, int, int, int]] = {}  # slice -> start, end, parent, depth

    def _close(self, time: int) -> None:
        while self.stack_ends[-1] <= time:
            self.stack_ends.pop()
            self.stack.pop()

    def _place(self, start: int, negative_end: int, i: int) -> None:
        end = -negative_end
        self._close(start)
        above, last = self.stack[-1], self.stack_ends[-1]
        if end > last:
            if last - start < end - last or (self.track.annotations[i] and self.track.functions[above]):
                # What else begins before that end still belongs to the slices now open, so this one waits its turn.
                heapq.heappush(self.late, (last, -end, i))
                return
            end = last
        self.cut[i] = (start, end, above, len(self.stack) - 1)
        self.stack.append(i)
        self.stack_ends.append(end)

    def _block(self, first: int) -> int:
        """Place the slices from `first` on, and say how many there were."""
        track, stack, stack_ends, late = self.track, self.stack, self.stack_ends, self.late
        block = slice(first, first + _BLOCK)
        parents, depths = list[int](), list[int]()
        both = zip(track.starts[block].tolist(), track.ends[block].tolist(), strict=True)
        for i, (start, end) in enumerate(both, first):
            while late and late[0][:2] <= (start, -end):
                self._place(*heapq.heappop(late))
            while stack_ends[-1] <= start:
                stack_ends.pop()
                stack.pop()
            inside = end <= stack_ends[-1]
            parents.append(stack[-1] if inside else NONE)
            depths.append(len(stack) - 1)
            if inside:
                stack.append(i)
                stack_ends.append(end)
            else:
                self._place(start, -end, i)
        track.parent[block], track.depth[block] = parents, depths
        return len(parents)

    def run(self, begin: int, *, whole: bool) -> int:
        """Place slices from `begin` on, up to a block without a cut or the `whole` rest; how many are known then."""
        track, count, known = self.track, len(self.track.starts), begin
        while known < count:
            before = len(self.cut)
            known += self._block(known)
            if not (whole or self.late or len(self.cut) > before):
                break
        while self.late:
            self._place(*heapq.heappop(self.late))
        for i, found in self.cut.items():
            track.starts[i], track.ends[i], track.parent[i], track.depth[i] = found
        if known < count:
            self._close(track.starts[known])
        return known


METHODS = ("correlation", "flow", "external_id", "containment")
CORRELATION, FLOW, EXTERNAL_ID, CONTAINMENT = range(4)
STATES = ("linked", "before_recording", "graph", "unlinked")
LINKED, BEFORE_RECORDING, GRAPH, UNLINKED = range(4)
_ROUNDING_NS = 1000  # older writers cut times to whole microseconds


class Slices(Struct, frozen=True):
    """The columns links are made from: whole ones by row, sparse ones as (rows ascending, values)."""

    track: Int32
    start_ns: Int64
    duration_ns: Int64
    parent: Int32
    frame: Int32
    is_device: Bools
    is_runtime: Bools
    is_operator: Bools
    is_graph_launch: Bools
    correlation: tuple[Int64, Int64]
    external_id: tuple[Int64, Int64]


Ends = tuple[Rows, Int64]  # tracks (or other numbers) and times
Arrows = tuple[Ends, Ends]  # from where to where


def link(slices: Slices, launches: Arrows, numbered: Numbered, forwards: Arrows) -> tuple[pl.DataFrame, Int32]:
    """The links of all device slices, as far as the trace allows, and of every slice its forward operator."""
    device = np.flatnonzero(slices.is_device)
    launch = _by_correlation(slices, device)
    method = np.where(launch >= 0, CORRELATION, NONE).astype(np.int8)
    missing = np.flatnonzero(launch < 0)
    if len(missing) and len(launches[1][1]):
        launch[missing] = _by_arrow(slices, launches, device[missing])
        method[missing[launch[missing] >= 0]] = FLOW
    operator = climb(slices.parent, np.where(launch >= 0, slices.parent[launch], NONE), slices.is_operator)
    missing = np.flatnonzero(operator < 0)
    if len(missing):
        operator[missing] = _by_external_id(slices, device[missing], launch[missing])
        method[missing[operator[missing] >= 0]] = EXTERNAL_ID
    missing = np.flatnonzero((operator < 0) & (launch >= 0))
    if len(missing):
        missed = launch[missing]
        moments = slices.track[missed], slices.start_ns[missed]
        operator[missing] = _open_at(slices, slices.is_operator, moments, slack_ns=_ROUNDING_NS)
        method[missing[operator[missing] >= 0]] = CONTAINMENT
    known = launch >= 0
    state = np.where(operator >= 0, LINKED, np.where(known, UNLINKED, BEFORE_RECORDING)).astype(np.int8)
    state[known & slices.is_graph_launch[launch]] = GRAPH
    at = np.where(known, launch, operator)
    forward, how = _forwards(numbered, forwards, slices)
    holder = climb(slices.parent, operator, forward >= 0)  # the slice itself, or the nearest around it that has one
    found = {
        "event": device,
        "launch": launch,
        "operator": operator,
        "frame": np.where(at >= 0, slices.frame[at], NONE),
        "method": decode(METHODS, method),
        "state": decode(STATES, state),
        "forward": np.where(holder >= 0, forward[holder], NONE),
        "forward_method": decode(FORWARD_METHODS, np.where(holder >= 0, how[holder], NONE)),
    }
    return with_ids(found, "launch", "operator", "frame", "forward"), forward


def _by_correlation(slices: Slices, device: Int64) -> Int64:
    """Of several calls with a slice's correlation the last that began before it, else the first."""
    rows, values = slices.correlation
    calls = rows[slices.is_runtime[rows] & (values > 0)]
    call_values = value_at(slices.correlation, calls)
    wanted = value_at(slices.correlation, device)
    result = np.full(len(device), NONE, np.int64)
    if not len(calls):
        return result
    order = np.lexsort((slices.start_ns[calls], call_values))
    calls, call_values = calls[order], call_values[order]
    first = np.searchsorted(call_values, wanted, side="left")
    after = np.searchsorted(call_values, wanted, side="right")
    found = (after > first) & (wanted > 0)
    result[found] = calls[first[found]]
    several = np.flatnonzero(found & (after - first > 1))
    if len(several):
        last = last_until((call_values, slices.start_ns[calls]), (wanted[several], slices.start_ns[device[several]]))
        result[several[last >= 0]] = calls[last[last >= 0]]
    return result


def value_at(column: tuple[Int64, Int64], rows: Int64) -> Int64:
    known, values = column
    if not len(known):
        return np.full(len(rows), NONE, np.int64)
    place = np.minimum(np.searchsorted(known, rows), len(known) - 1)
    return np.where(known[place] == rows, values[place], NONE)


def last_until(known: Ends, wanted: Ends) -> Int64:
    """For each wanted (key, time) the position of the last known one with that key and no later time, else `NONE`."""
    keys, times = (np.concatenate([one, other]) for one, other in zip(known, wanted, strict=True))
    count = len(known[0])
    asked = np.arange(len(keys)) >= count
    order = np.lexsort((asked, times, keys))  # of the same time what is known comes first
    before = np.maximum.accumulate(np.where(asked[order], NONE, np.arange(len(order))))
    found = np.where((before >= 0) & (keys[order[before]] == keys[order]), order[before], NONE)
    result = np.empty(len(keys), np.int64)
    result[order] = found
    return result[count:]


def _open_at(slices: Slices, among: Bools, at: Ends, *, slack_ns: int = 0, exact: bool = False) -> Int64:
    """The last of these slices on the track that began up to the time and lasts until it, give or take `slack_ns`.

    With `exact` only slices that begin right then count.
    """
    rows = np.flatnonzero(among)
    if not len(rows):
        return np.full(len(at[0]), NONE, np.int64)
    last = last_until((slices.track[rows], slices.start_ns[rows]), at)
    found = np.where(last >= 0, rows[last], NONE)
    began = slices.start_ns[found]
    right = began == at[1] if exact else began + slices.duration_ns[found] + slack_ns >= at[1]
    return np.where(right, found, NONE)


def _by_arrow(slices: Slices, arrows: Arrows, device: Int64) -> Int64:
    (from_track, from_ns), heads = arrows
    arrow = last_until(heads, (slices.track[device], slices.start_ns[device]))
    arrow[heads[1][arrow] != slices.start_ns[device]] = NONE
    found = np.flatnonzero(arrow >= 0)
    result = np.full(len(device), NONE, np.int64)
    result[found] = _open_at(slices, slices.is_runtime, (from_track[arrow[found]], from_ns[arrow[found]]))
    return result


def _by_external_id(slices: Slices, device: Int64, launch: Int64) -> Int64:
    rows, values = slices.external_id
    operators = slices.is_operator[rows] & (values > 0)
    rows, values = rows[operators], values[operators]
    if not len(rows):
        return np.full(len(device), NONE, np.int64)
    order = np.argsort(values, kind="stable")
    rows, values = rows[order], values[order]
    result = np.full(len(device), NONE, np.int64)
    for source in (launch, device):
        wanted = np.where(source >= 0, value_at(slices.external_id, source), NONE)
        place = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
        fits = (result < 0) & (wanted > 0) & (values[place] == wanted)
        fits &= slices.start_ns[rows[place]] <= slices.start_ns[device]
        result[fits] = rows[place[fits]]
    return result


FORWARD_METHODS = ("sequence", "flow")
BY_SEQUENCE, BY_FLOW = range(2)
_MAX_THREADS = 256  # of a process; damaged numbers make up threads that never were


class Numbered(Struct, frozen=True):
    """Operators that carry a sequence number: their row, process (by number), track, start and forward thread."""

    row: Int64
    process: Int64
    track: Int32
    start_ns: Int64
    sequence: Int64
    forward_thread: Int64  # 0 or below: an operator of a forward pass


def _forwards(numbered: Numbered, arrows: Arrows, slices: Slices) -> tuple[Int32, npt.NDArray[np.int8]]:
    """For each slice the forward operator's row, and how it was found; `NONE` elsewhere."""
    forward = np.full(len(slices.start_ns), NONE, np.int32)
    method = np.full(len(slices.start_ns), NONE, np.int8)
    backward = numbered.forward_thread > 0
    for process in unique(numbered.process[backward]):
        mine = numbered.process == process
        makers = np.flatnonzero(mine & ~backward & (numbered.sequence >= 0))
        threads, sizes = np.unique(numbered.forward_thread[mine & backward], return_counts=True)
        for thread in threads[np.argsort(-sizes)[:_MAX_THREADS]]:
            nodes = np.flatnonzero(mine & (numbered.forward_thread == thread) & (numbered.sequence >= 0))
            best = np.full(len(nodes), NONE, np.int64)
            for track in unique(numbered.track[makers]):
                own = makers[numbered.track[makers] == track]
                last = last_until(
                    (numbered.sequence[own], numbered.start_ns[own]),
                    (numbered.sequence[nodes], numbered.start_ns[nodes]),
                )
                found = np.where(last >= 0, own[last], NONE)
                if (found >= 0).sum() > (best >= 0).sum():
                    best = found
            known = best >= 0
            forward[numbered.row[nodes[known]]] = numbered.row[best[known]]
            method[numbered.row[nodes[known]]] = BY_SEQUENCE
    if len(arrows[1][1]):
        starts, ends = (_open_at(slices, slices.is_operator, at, exact=True) for at in arrows)
        use = np.flatnonzero((ends >= 0) & (starts >= 0))
        use = use[forward[ends[use]] < 0]
        forward[ends[use]] = starts[use]
        method[ends[use]] = BY_FLOW
    return forward, method
