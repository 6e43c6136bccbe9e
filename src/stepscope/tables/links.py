"""Where each device slice comes from: its launch, the operator and the Python function around it, the forward operator.

The launch is the runtime call with the same correlation, else the one an arrow starts at. The operator is the innermost
one around the launch, else the one with the same External id, else the last one that was open on the launch's thread
within the clock's rounding. A launch of a whole graph is no link: its operators ran when the graph was captured.

Autograd numbers its nodes per thread. The forward operator of a backward one is the last that began with its sequence
number on the thread that made the node; which track that is, no writer says: it is the one whose numbers fit best.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from stepscope.tables.arrays import NONE, Bools, Int32, Int64, climb, decode, with_ids
from stepscope.tables.nesting import by_value

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


class Arrows(Struct, frozen=True):
    from_track: Int32
    from_ns: Int64
    to_track: Int32
    to_ns: Int64


def link(slices: Slices, launches: Arrows, numbered: Numbered, forwards: Arrows) -> tuple[pl.DataFrame, Int32]:
    """The links of all device slices, as far as the trace allows, and of every slice its forward operator."""
    device = np.flatnonzero(slices.is_device)
    launch = _by_correlation(slices, device)
    method = np.where(launch >= 0, CORRELATION, NONE).astype(np.int8)
    missing = np.flatnonzero(launch < 0)
    if len(missing) and len(launches.to_ns):
        launch[missing] = _by_arrow(slices, launches, device[missing])
        method[missing[launch[missing] >= 0]] = FLOW
    operator = climb(slices.parent, np.where(launch >= 0, slices.parent[launch], NONE), slices.is_operator)
    missing = np.flatnonzero(operator < 0)
    if len(missing):
        operator[missing] = _by_external_id(slices, device[missing], launch[missing])
        method[missing[operator[missing] >= 0]] = EXTERNAL_ID
    missing = np.flatnonzero((operator < 0) & (launch >= 0))
    if len(missing):
        around = _moments(slices, np.flatnonzero(slices.is_operator))
        missed = launch[missing]
        operator[missing] = around.at(slices.track[missed], slices.start_ns[missed], slack_ns=_ROUNDING_NS)
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
    for i in np.flatnonzero(found & (after - first > 1)).tolist():
        same = calls[first[i] : after[i]]
        place = int(np.searchsorted(slices.start_ns[same], slices.start_ns[device[i]], side="right"))
        result[i] = same[max(place - 1, 0)]
    return result


def value_at(column: tuple[Int64, Int64], rows: Int64) -> Int64:
    known, values = column
    if not len(known):
        return np.full(len(rows), NONE, np.int64)
    place = np.minimum(np.searchsorted(known, rows), len(known) - 1)
    return np.where(known[place] == rows, values[place], NONE)


class Moments:
    """Some slices, to be found by the moment they begin at or by a moment inside them."""

    def __init__(self, rows: Int64, track: Int32, start_ns: Int64, end_ns: Int64) -> None:
        """The last three hold a value for each of `rows`."""
        order = np.lexsort((start_ns, track))
        self._rows, self._start_ns, self._end_ns = rows[order], start_ns[order], end_ns[order]
        self._tracks, self._first = np.unique(track[order], return_index=True)
        self._after = np.append(self._first[1:], len(order))

    def at(self, track: Int32, time_ns: Int64, *, slack_ns: int = 0, exact: bool = False) -> Int64:
        """The last slice on the track that began up to `time_ns` and lasts until it, give or take `slack_ns`.

        With `exact` only slices that begin right then count.
        """
        result = np.full(len(time_ns), NONE, np.int64)
        for mine in by_value(track):
            code = track[mine[0]]
            place = int(np.searchsorted(self._tracks, code))
            if place == len(self._tracks) or self._tracks[place] != code:
                continue
            part = slice(int(self._first[place]), int(self._after[place]))
            starts, ends, rows = self._start_ns[part], self._end_ns[part], self._rows[part]
            last = np.searchsorted(starts, time_ns[mine], side="right") - 1
            at = np.maximum(last, 0)
            right = starts[at] == time_ns[mine] if exact else ends[at] + slack_ns >= time_ns[mine]
            result[mine] = np.where((last >= 0) & right, rows[at], NONE)
        return result


def _moments(slices: Slices, rows: Int64) -> Moments:
    starts = slices.start_ns[rows]
    return Moments(rows, slices.track[rows], starts, starts + slices.duration_ns[rows])


def _by_arrow(slices: Slices, arrows: Arrows, device: Int64) -> Int64:
    heads = Moments(np.arange(len(arrows.to_ns)), arrows.to_track, arrows.to_ns, arrows.to_ns)
    arrow = heads.at(slices.track[device], slices.start_ns[device], exact=True)
    found = np.flatnonzero(arrow >= 0)
    tails = _moments(slices, np.flatnonzero(slices.is_runtime))
    result = np.full(len(device), NONE, np.int64)
    result[found] = tails.at(arrows.from_track[arrow[found]], arrows.from_ns[arrow[found]])
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
    for process in np.unique(numbered.process[backward]):
        mine = numbered.process == process
        makers = np.flatnonzero(mine & ~backward & (numbered.sequence >= 0))
        threads, sizes = np.unique(numbered.forward_thread[mine & backward], return_counts=True)
        for thread in threads[np.argsort(-sizes)[:_MAX_THREADS]]:
            nodes = np.flatnonzero(mine & (numbered.forward_thread == thread) & (numbered.sequence >= 0))
            found = _best_thread(numbered, makers, nodes)
            known = found >= 0
            forward[numbered.row[nodes[known]]] = numbered.row[found[known]]
            method[numbered.row[nodes[known]]] = BY_SEQUENCE
    if len(arrows.to_ns):
        operators = _moments(slices, np.flatnonzero(slices.is_operator))
        ends = operators.at(arrows.to_track, arrows.to_ns, exact=True)
        starts = operators.at(arrows.from_track, arrows.from_ns, exact=True)
        use = np.flatnonzero((ends >= 0) & (starts >= 0))
        use = use[forward[ends[use]] < 0]
        forward[ends[use]] = starts[use]
        method[ends[use]] = BY_FLOW
    return forward, method


def _best_thread(numbered: Numbered, makers: Int64, nodes: Int64) -> Int64:
    best = np.full(len(nodes), NONE, np.int64)
    for track in np.unique(numbered.track[makers]):
        found = _makers(numbered, makers[numbered.track[makers] == track], nodes)
        if (found >= 0).sum() > (best >= 0).sum():
            best = found
    return best


def _makers(numbered: Numbered, makers: Int64, nodes: Int64) -> Int64:
    order = np.lexsort((numbered.start_ns[makers], numbered.sequence[makers]))
    makers = makers[order]
    sequence, start_ns = numbered.sequence[makers], numbered.start_ns[makers]
    wanted = numbered.sequence[nodes]
    last = np.searchsorted(sequence, wanted, side="right") - 1
    result = np.where((last >= 0) & (sequence[np.maximum(last, 0)] == wanted), last, NONE)
    # The same number may come again, on the way back: step over those that began after the node.
    while True:
        late = np.flatnonzero((result >= 0) & (start_ns[np.maximum(result, 0)] > numbered.start_ns[nodes]))
        if not len(late):
            break
        below = result[late] - 1
        result[late] = np.where((below >= 0) & (sequence[np.maximum(below, 0)] == wanted[late]), below, NONE)
    return np.where(result >= 0, makers[np.maximum(result, 0)], NONE)
