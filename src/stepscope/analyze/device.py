"""What the devices did in the traces: time by kind, and how much of it could be linked.

Times are unions of intervals over all streams of a trace's devices, so work that runs beside other work counts once.
Kernels and memsets are compute; kernels of collectives, told by name, are communication; the rest are copies. Waiting
for an event on a stream is no work and is left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from stepscope.engine import intervals
from stepscope.model import DeviceTime, ReadingFacts, TraceFacts
from stepscope.tables.arrays import Int64, Rows, positions
from stepscope.tables.schema import Tables

COMPUTE, COMMUNICATION, MEMCPY = "compute", "communication", "memcpy"
LAUNCHED, ALL = "launched", "all"
LINKED, BEFORE_RECORDING, GRAPH = "linked", "before_recording", "graph"
_COLLECTIVE = r"(?i)nccl|rccl|cross_device_reduce"
_COPY = r"(?i)memcpy"
_DMA = ("mtia_ccp_events", "dma_request")  # copies of a device that has one category for all it does
_NO_WORK = ("mtia_ccp_events", ("event_wait", "event_record"))


def slices(tables: Tables) -> pl.DataFrame:
    """Device slices that are work, one row each in order of `links`.

    Columns: those of `links` and of the slice `rank`, `category`, `name`, `step`, `start_ns`, `duration_ns`,
    `end_ns`, and `kind` (compute | communication | memcpy).

    The columns share the memory of the tables where they can, and so lie in parts of different sizes. Any query of the
    frame first copies all its columns into parts of the same size: take the few that are needed, `found[["a", "b"]]`.
    """
    at = positions(tables.events["id"], tables.links["event"])
    own = _rows(tables.events.select("rank", "category", "name", "step", "start_ns", "duration_ns"), at[at >= 0])
    work = own["duration_ns"].is_not_null() & ~_waits(own)
    links = _kept(tables.links, pl.Series(at >= 0, dtype=pl.Boolean))
    own = _kept(own, work).with_columns((pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"))
    return pl.concat([_kept(links, work), own.with_columns(_kind(own))], how="horizontal")


def _waits(own: pl.DataFrame) -> pl.Series:
    """Which rows wait for an event: no work."""
    return ((own["category"] == _NO_WORK[0]) & own["name"].is_in(_NO_WORK[1])).fill_null(False)


def _kind(own: pl.DataFrame) -> pl.Expr:
    """`kind` by category and name. Names are as many as kernels, so the patterns look at each of them once."""
    names, categories = own["name"].unique().drop_nulls(), own["category"].unique().drop_nulls()
    collectives = names.filter(names.str.contains(_COLLECTIVE))
    copies = categories.filter(categories.str.contains(_COPY))
    compute, communication = pl.lit(COMPUTE), pl.lit(COMMUNICATION)
    kind: pl.Expr = compute
    if len(collectives):
        kind = pl.when(pl.col("name").is_in(collectives.implode())).then(communication).otherwise(compute)
    dma = (pl.col("category") == _DMA[0]) & (pl.col("name") == _DMA[1])
    return pl.when(pl.col("category").is_in(copies.implode()) | dma).then(pl.lit(MEMCPY)).otherwise(kind).alias("kind")


def _kept(frame: pl.DataFrame, mask: pl.Series) -> pl.DataFrame:
    return frame if mask.all() else frame.filter(mask)


def _rows(frame: pl.DataFrame, at: Rows) -> pl.DataFrame:
    """The rows at these numbers. Picking them out of a frame of many parts would first join all of them in memory."""
    if not (np.diff(at) > 0).all():
        return frame[at]
    wanted = np.zeros(frame.height, bool)
    wanted[at] = True
    return frame.filter(pl.Series(wanted))


def _length(starts: Int64, ends: Int64) -> int:
    return intervals.total(intervals.union(starts, ends))


def times(found: pl.DataFrame) -> tuple[DeviceTime, ...]:
    """Two per trace with device slices, one for each scope; `found` as `slices` makes them."""
    columns = ["process", "trace", "rank", "category", "kind", "launch", "start_ns", "end_ns", "duration_ns"]
    result: list[DeviceTime] = []
    for (_, trace), own in _by_trace(found[columns]).items():
        launched = own["launch"].is_not_null()
        result.append(_time(trace, LAUNCHED, own, launched))
        result.append(_time(trace, ALL, own, None))
    return tuple(result)


def _by_trace(found: pl.DataFrame) -> dict[tuple[Any, ...], pl.DataFrame]:
    """(process, trace), the first two columns -> its rows, in order of appearance; a single trace is not copied."""
    if not found.height:
        return {}
    keys = ["process", "trace"]
    if is_one_trace(found[keys]):
        return {found.row(0)[:2]: found}
    codes = found.with_columns(pl.col(keys).cast(pl.Categorical))
    return codes.partition_by(keys, maintain_order=True, include_key=False, as_dict=True)


def is_one_trace(whose: pl.DataFrame) -> bool:
    """Whether all rows have the same `process` and `trace`, the only columns."""
    return all(count == 1 for count in whose.select(pl.all().n_unique()).row(0))


def _time(trace: str, scope: str, own: pl.DataFrame, wanted: pl.Series | None) -> DeviceTime:
    """The times of the rows of a trace that are `wanted`, of all of them where it is None."""
    kinds = own["kind"]
    every = np.ones(own.height, bool) if wanted is None else wanted.to_numpy()
    start, end = own["start_ns"].to_numpy()[every], own["end_ns"].to_numpy()[every]
    total_ns = int(end.max() - start.min()) if len(start) else 0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    masks = {kind: (kinds == kind).to_numpy()[every][order] for kind in (COMPUTE, COMMUNICATION, MEMCPY)}
    covered = {kind: _length(start[mask], end[mask]) for kind, mask in masks.items()}
    compute_ns, busy_ns = covered[COMPUTE], _length(start, end)
    without_copies_ns = compute_ns
    if masks[COMMUNICATION].any():
        kernels = ~masks[MEMCPY]
        without_copies_ns = _length(start[kernels], end[kernels])
    sums = own[["category", "duration_ns"]]
    sums = (sums if wanted is None else _kept(sums, wanted)).group_by("category").agg(pl.col("duration_ns").sum())
    sums = sums.sort(-pl.col("duration_ns"), pl.col("category").cast(pl.String))
    return DeviceTime(
        rank=own["rank"][0],
        trace=trace,
        scope=scope,
        total_ns=total_ns,
        busy_ns=busy_ns,
        compute_ns=compute_ns,
        communication_ns=covered[COMMUNICATION],
        memcpy_ns=covered[MEMCPY],
        exposed_communication_ns=without_copies_ns - compute_ns,
        exposed_memcpy_ns=busy_ns - without_copies_ns,
        idle_ns=total_ns - busy_ns,
        busy_share=busy_ns / total_ns if total_ns else None,
        events=len(start),
        kind_ns={str(category): int(ns) for category, ns in sums.rows()},
    )


def traces(tables: Tables, found: pl.DataFrame) -> tuple[TraceFacts, ...]:
    """What reading each trace cost and how its device time is linked, in order of the table."""
    parts = _by_trace(found[["process", "trace", "state", "method", "duration_ns"]])
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
        words = pl.DataFrame([rows[name].cast(pl.Categorical) for name in ("state", "method")] + [rows["duration_ns"]])
        sums = words.group_by("state", "method").agg(pl.col("duration_ns").sum())
        sums = sums.with_columns(pl.col("state", "method").cast(pl.String)).sort("state", "method")
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
