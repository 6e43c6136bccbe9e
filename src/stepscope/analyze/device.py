"""What the devices did in the traces: time by kind, and how much of it could be linked.

Times are unions of intervals over all streams of a trace's devices, so work that runs beside other work counts once.
Kernels and memsets are compute; kernels of collectives, told by name, are communication; the rest are copies. Waiting
for an event on a stream is no work and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from stepscope.engine import intervals
from stepscope.engine.device_work import (
    BEFORE_RECORDING,
    COMMUNICATION,
    COPY,
    FILL,
    GRAPH,
    KERNEL,
    LINKED,
    Work,
    links_of,
    work,
)
from stepscope.engine.spans import Span
from stepscope.model import DeviceTime, ReadingFacts, TraceFacts
from stepscope.tables.arrays import Bools
from stepscope.tables.schema import Tables

LAUNCHED, ALL = "launched", "all"


def times(spans: Sequence[Span]) -> tuple[DeviceTime, ...]:
    """Two per trace with device work, one for each scope, in order of the tables."""
    result = []
    for span in sorted(spans, key=lambda span: span.first):
        found = work(span)
        if len(found):
            result.append(time(span, found, LAUNCHED, found.launch >= 0))
            result.append(time(span, found, ALL, np.ones(len(found), bool)))
    return tuple(result)


def time(span: Span, found: Work, scope: str, wanted: Bools) -> DeviceTime:
    """The times of the `wanted` work of a trace."""

    def covered(*kinds: int) -> int:
        chosen = wanted & np.isin(found.kind, kinds)
        return intervals.total(intervals.union(found.start_ns[chosen], found.end_ns[chosen]))

    count = int(wanted.sum())
    total_ns = int(found.end_ns[wanted].max() - found.start_ns[wanted].min()) if count else 0
    compute_ns, busy_ns = covered(KERNEL, FILL), covered(KERNEL, FILL, COMMUNICATION, COPY)
    without_copies_ns = covered(KERNEL, FILL, COMMUNICATION)
    lengths = found.end_ns - found.start_ns
    sums = np.bincount(span.categories.codes[found.rows][wanted], lengths[wanted]).astype(np.int64)
    by_category = [(span.categories.values[code], int(sums[code])) for code in np.flatnonzero(sums).tolist()]
    return DeviceTime(
        rank=span.series("rank")[0],
        trace=span.ref.trace,
        scope=scope,
        total_ns=total_ns,
        busy_ns=busy_ns,
        compute_ns=compute_ns,
        communication_ns=covered(COMMUNICATION),
        memcpy_ns=covered(COPY),
        exposed_communication_ns=without_copies_ns - compute_ns,
        exposed_memcpy_ns=busy_ns - without_copies_ns,
        idle_ns=total_ns - busy_ns,
        busy_share=busy_ns / total_ns if total_ns else None,
        events=count,
        kind_ns=dict(sorted(by_category, key=lambda pair: (-pair[1], pair[0]))),
    )


def traces(tables: Tables, spans: Sequence[Span]) -> tuple[TraceFacts, ...]:
    """What reading each trace cost and how its device time is linked, in order of the table."""
    parts = {(span.ref.process, span.ref.trace): span for span in spans}
    return tuple(_trace(row, parts.get((row["process"], row["trace"]))) for row in tables.traces.iter_rows(named=True))


def reading(traces: tuple[TraceFacts, ...]) -> ReadingFacts | None:
    """All traces together, None without any."""
    if not traces:
        return None
    linked: dict[str, int] = {}
    for trace in traces:
        for method, ns in trace.linked_ns.items():
            linked[method] = linked.get(method, 0) + ns
    device_ns = sum(trace.device_ns for trace in traces)
    early_ns = sum(trace.before_recording_ns for trace in traces)
    launched_ns = device_ns - early_ns

    def of_launched(ns: int) -> float | None:
        return ns / launched_ns if launched_ns else None

    return ReadingFacts(
        traces=len(traces),
        events=sum(trace.events for trace in traces),
        salvaged=sum(trace.salvaged for trace in traces),
        lost=sum(trace.lost for trace in traces),
        clipped=sum(trace.clipped for trace in traces),
        repaired=sum(trace.repaired for trace in traces),
        device_events=sum(trace.device_events for trace in traces),
        link_rate=of_launched(sum(linked.values())),
        linked_shares={
            method: ns / launched_ns for method, ns in sorted(linked.items(), key=lambda pair: -pair[1]) if ns
        },
        graph_share=of_launched(sum(trace.graph_ns for trace in traces)),
        unlinked_share=of_launched(sum(trace.unlinked_ns for trace in traces)),
        before_recording_share=early_ns / device_ns if device_ns else None,
    )


def _trace(row: dict[str, Any], span: Span | None) -> TraceFacts:
    """The facts of one trace from its row of the table and its device work."""
    linked: dict[str, int] = {}
    states = {BEFORE_RECORDING: 0, GRAPH: 0}
    unlinked = slices = 0
    found = work(span) if span is not None else None
    if span is not None and found is not None and len(found):
        slices = len(found)
        words = links_of(span, found, "state", "method")
        sums = words.with_columns(ns=pl.Series(found.end_ns - found.start_ns)).group_by("state", "method").sum()
        for state, method, ns in sums.sort("state", "method").rows():
            if state == LINKED:
                linked[str(method)] = linked.get(str(method), 0) + int(ns)
            elif state in states:
                states[state] += int(ns)
            else:
                unlinked += int(ns)
    launched = sum(linked.values()) + states[GRAPH] + unlinked
    return TraceFacts(
        trace=row["trace"],
        rank=row["rank"] or 0,
        owner=row["owner"] or "user",
        events=row["events"] or 0,
        salvaged=row["salvaged"] or 0,
        lost=row["lost"] or 0,
        unsupported=row["unsupported"] or 0,
        clipped=row["clipped"] or 0,
        repaired=row["repaired"] or 0,
        problems=tuple(row["problems"] or ()),
        device_events=slices,
        device_ns=launched + states[BEFORE_RECORDING],
        linked_ns=linked,
        before_recording_ns=states[BEFORE_RECORDING],
        graph_ns=states[GRAPH],
        unlinked_ns=unlinked,
        link_rate=sum(linked.values()) / launched if launched else None,
    )
