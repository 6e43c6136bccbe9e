"""What the devices did in the traces: time by kind, and how much of it could be linked.

Times are unions of intervals over all streams of a trace's devices, so work that runs beside other work counts once.
Kernels and memsets are compute; kernels of collectives, told by name, are communication; the rest are copies. Waiting
for an event on a stream is no work and is left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.model import DeviceTime, ReadingFacts, TraceFacts
from stepscope.tables.schema import Tables

COMPUTE, COMMUNICATION, MEMCPY = "compute", "communication", "memcpy"
LAUNCHED, ALL = "launched", "all"
LINKED, BEFORE_RECORDING, GRAPH = "linked", "before_recording", "graph"
_COLLECTIVE = r"(?i)nccl|rccl|cross_device_reduce"
_COPY = r"(?i)memcpy"
_DMA = ("mtia_ccp_events", "dma_request")  # copies of a device that has one category for all it does
_NO_WORK = ("mtia_ccp_events", ("event_wait", "event_record"))

Int64 = npt.NDArray[np.int64]


def positions(ids: pl.Series, wanted: pl.Series) -> Int64:
    """Where each of `wanted` stands in `ids` (ascending), -1 where it is null or not there."""
    known = ids.to_numpy()
    if not len(known):
        return np.full(len(wanted), -1, np.int64)
    sought = wanted.fill_null(-1).to_numpy()
    found = np.searchsorted(known, sought).astype(np.int64)
    found[found == len(known)] = 0
    found[known[found] != sought] = -1
    return found


def slices(tables: Tables) -> pl.DataFrame:
    """Device slices that are work, one row each in order of `links`.

    Columns: those of `links` and of the slice `rank`, `category`, `name`, `step`, `start_ns`, `duration_ns`,
    `end_ns`, and `kind` (compute | communication | memcpy).
    """
    at = positions(tables.events["id"], tables.links["event"])
    own = _rows(tables.events.select("rank", "category", "name", "step", "start_ns", "duration_ns"), at[at >= 0])
    rows = pl.concat([tables.links.filter(pl.Series(at >= 0, dtype=pl.Boolean)), own], how="horizontal")
    category, name = pl.col("category").fill_null(""), pl.col("name").fill_null("")
    waits = (category == _NO_WORK[0]) & name.is_in(_NO_WORK[1])
    copies = category.str.contains(_COPY) | ((category == _DMA[0]) & (name == _DMA[1]))
    return rows.filter(pl.col("duration_ns").is_not_null() & ~waits).with_columns(
        (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"),
        pl.when(copies)
        .then(pl.lit(MEMCPY))
        .when(name.str.contains(_COLLECTIVE))
        .then(pl.lit(COMMUNICATION))
        .otherwise(pl.lit(COMPUTE))
        .alias("kind"),
    )


def _rows(frame: pl.DataFrame, at: Int64) -> pl.DataFrame:
    """The rows at these numbers. Picking them out of a frame of many parts would first join all of them in memory."""
    if not (np.diff(at) > 0).all():
        return frame[at]
    wanted = np.zeros(frame.height, bool)
    wanted[at] = True
    return frame.filter(pl.Series(wanted))


def covered_ns(rows: pl.DataFrame) -> int:
    """Length of the union of the intervals from `start_ns` to `end_ns`."""
    ordered = rows.select("start_ns", "end_ns").sort("start_ns")
    reached = pl.col("end_ns").cum_max().shift(1)
    begins = pl.max_horizontal("start_ns", reached)
    return int(ordered.select((pl.col("end_ns") - begins).clip(lower_bound=0).sum()).item())


def times(found: pl.DataFrame) -> tuple[DeviceTime, ...]:
    """Two per trace with device slices, one for each scope; `found` as `slices` makes them."""
    result: list[DeviceTime] = []
    found = found.select("process", "trace", "rank", "category", "kind", "launch", "start_ns", "end_ns", "duration_ns")
    for own in found.partition_by("process", "trace", maintain_order=True):
        result.append(_time(own, LAUNCHED, own.filter(pl.col("launch").is_not_null())))
        result.append(_time(own, ALL, own))
    return tuple(result)


def _time(trace: pl.DataFrame, scope: str, rows: pl.DataFrame) -> DeviceTime:
    compute = rows.filter(pl.col("kind") == COMPUTE)
    communication = rows.filter(pl.col("kind") == COMMUNICATION)
    copies = rows.filter(pl.col("kind") == MEMCPY)
    compute_ns, busy_ns = covered_ns(compute), covered_ns(rows)
    without_copies_ns = covered_ns(rows.filter(pl.col("kind") != MEMCPY)) if communication.height else compute_ns
    total_ns = int(rows.select(pl.col("end_ns").max() - pl.col("start_ns").min()).item() or 0)
    sums = rows.group_by("category").agg(pl.col("duration_ns").sum()).sort("duration_ns", descending=True)
    return DeviceTime(
        rank=trace["rank"][0],
        trace=trace["trace"][0],
        scope=scope,
        total_ns=total_ns,
        busy_ns=busy_ns,
        compute_ns=compute_ns,
        communication_ns=covered_ns(communication),
        memcpy_ns=covered_ns(copies),
        exposed_communication_ns=without_copies_ns - compute_ns,
        exposed_memcpy_ns=busy_ns - without_copies_ns,
        idle_ns=total_ns - busy_ns,
        busy_share=busy_ns / total_ns if total_ns else None,
        events=rows.height,
        kind_ns={str(category): int(ns) for category, ns in sums.rows()},
    )


def traces(tables: Tables, found: pl.DataFrame) -> tuple[TraceFacts, ...]:
    """What reading each trace cost and how its device time is linked, in order of the table."""
    needed = found.select("process", "trace", "state", "method", "duration_ns")
    parts = needed.partition_by("process", "trace", as_dict=True)
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


def _trace(row: dict[str, Any], rows: pl.DataFrame | None) -> TraceFacts:
    """The facts of one trace from its row of the table and its device slices."""
    linked: dict[str, int] = {}
    states = {BEFORE_RECORDING: 0, GRAPH: 0}
    unlinked = 0
    if rows is not None:
        sums = rows.group_by("state", "method").agg(pl.col("duration_ns").sum()).sort("state", "method")
        for state, method, ns in sums.rows():
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
        device_events=rows.height if rows is not None else 0,
        device_ns=launched + states[BEFORE_RECORDING],
        linked_ns=linked,
        before_recording_ns=states[BEFORE_RECORDING],
        graph_ns=states[GRAPH],
        unlinked_ns=unlinked,
        link_rate=sum(linked.values()) / launched if launched else None,
    )
