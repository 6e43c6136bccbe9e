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


Ends = tuple[Int32, Int64]  # tracks and times
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
        at = slices.track[missed], slices.start_ns[missed]
        operator[missing] = _open_at(slices, slices.is_operator, at, slack_ns=_ROUNDING_NS)
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


def last_until(known: tuple[Int64, Int64], wanted: tuple[Int64, Int64]) -> Int64:
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
    for process in np.unique(numbered.process[backward]):
        mine = numbered.process == process
        makers = np.flatnonzero(mine & ~backward & (numbered.sequence >= 0))
        threads, sizes = np.unique(numbered.forward_thread[mine & backward], return_counts=True)
        for thread in threads[np.argsort(-sizes)[:_MAX_THREADS]]:
            nodes = np.flatnonzero(mine & (numbered.forward_thread == thread) & (numbered.sequence >= 0))
            best = np.full(len(nodes), NONE, np.int64)
            for track in np.unique(numbered.track[makers]):
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
