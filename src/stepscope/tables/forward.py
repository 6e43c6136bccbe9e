"""Operators of the backward pass and the forward operators they belong to.

Autograd numbers its nodes per thread. A backward operator carries the number of its node and the logical number of the
thread that made it; the forward operator is the last one that began on that thread with that sequence number before
it. Which track a logical thread is, no writer says: it is the one whose sequence numbers fit best. What has no number
may have an arrow.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from stepscope.tables.arrays import NONE, Int32, Int64, climb
from stepscope.tables.links import Arrows, Moments

METHODS = ("sequence", "flow")
SEQUENCE, FLOW = range(2)
_MAX_THREADS = 256  # of a process; damaged numbers make up threads that never were


class Numbered(Struct, frozen=True):
    """Operators that carry a sequence number: their row, process (by number), track, start and forward thread."""

    row: Int64
    process: Int64
    track: Int32
    start_ns: Int64
    sequence: Int64
    forward_thread: Int64  # 0 or below: an operator of a forward pass


def forwards(count: int, numbered: Numbered, arrows: Arrows, operators: Moments) -> tuple[Int32, npt.NDArray[np.int8]]:
    """For each of `count` rows the forward operator's row, and how it was found; `NONE` elsewhere.

    `operators` finds any operator of the trace by its track and start.
    """
    forward = np.full(count, NONE, np.int32)
    method = np.full(count, NONE, np.int8)
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
            method[numbered.row[nodes[known]]] = SEQUENCE
    if len(arrows.to_ns):
        ends = operators.at(arrows.to_track, arrows.to_ns, exact=True)
        starts = operators.at(arrows.from_track, arrows.from_ns, exact=True)
        use = np.flatnonzero((ends >= 0) & (starts >= 0))
        use = use[forward[ends[use]] < 0]
        forward[ends[use]] = starts[use]
        method[ends[use]] = FLOW
    return forward, method


def _best_thread(numbered: Numbered, makers: Int64, nodes: Int64) -> Int64:
    """For each node the position of its forward operator, all on the one track that knows most of them."""
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


def nearest(parent: Int32, forward: Int32, rows: Int64) -> tuple[Int64, Int64]:
    """For each row the forward operator of the row or the nearest slice around it, and the slice that has it."""
    holder = climb(parent, rows, forward >= 0)
    return np.where(holder >= 0, forward[holder], NONE).astype(np.int64), holder
