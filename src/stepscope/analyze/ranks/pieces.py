"""Pieces of work that windows recorded, in order: passes of microbatches, and what hosts did in between."""

from __future__ import annotations

from functools import partial

import numpy as np
import polars as pl

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.layout import Layout, axis_of
from stepscope.engine.collective_names import POINT_TO_POINT
from stepscope.tables.arrays import Bools, Floats, Int64
from stepscope.tables.reduced import Index, Reduced
from stepscope.workers import side_by_side

# Kinds beside forward (0) and backward (1): of the host in between, from the optimizer on, idle before a call, of the
# host behind the last call of a step, for which nobody waits before the next one, and idle between message and pass
HOST, BEHIND, BEFORE_CALL, BEHIND_ALL, BEHIND_MESSAGE = 2, 3, 4, 7, 8
CHUNKS, _MICROBATCHES = 2**8, 2**16
_CALL, _MESSAGE = 5, 6
_KINDS = {"forward": 0, "backward": 1, "optimizer": BEHIND, "data": HOST, "gc": HOST, "other": HOST}
_MAX_NS = 3_600_000_000_000  # an hour in one piece is damage


def worker_of(layout: Layout) -> Int64:
    """By position of a rank: replica * stages + stage, where places are known; each by itself where they are not."""
    if (layout.dp < 0).any():
        return np.arange(len(layout.ranks))
    replica = np.unique(layout.dp, return_inverse=True)[1].reshape(-1).astype(np.int64)
    stages = max(layout.stages, 1)
    return replica * stages + np.maximum(layout.pp, 0)


def groups_inside(layout: Layout) -> list[str]:
    """Groups all recorded members of which are tensor slots of one worker; of one member alone its name tells."""
    worker = worker_of(layout)
    found = []
    for group in layout.groups.values():
        members = layout.at(np.array(group.ranks, np.int64))
        here = members[members >= 0]
        if len(np.unique(worker[here])) == 1 and (
            len(here) > 1 or len(members) == 1 or axis_of(group.description) == "tp"
        ):
            found.append(group.id)
    return found


def pieces(reduced: Reduced, layout: Layout) -> pl.DataFrame | None:
    """What each rank did itself in steps of windows; None where no work was recorded.

    Columns: rank, step, kind, number (of passes of the step before it), code (which pass; -1 of others), ms, and the
    rank's column, worker, stage and slot. Time before work in which neither work nor a call ran is the host's own,
    where calls were recorded: who waits for others does so inside one. Before a call it may be that, too, or a wait in
    another call that was not recorded.
    """
    total = sum(host.tables["work"].rows for host in reduced.hosts)
    if not total:
        return None
    hosts = [host for host in reduced.hosts if host.tables["work"].rows]
    found = [reduced.part("work", host).filter(_SOUND).select(pl.col("step").unique()).collect() for host in hosts]
    steps = pl.concat(found)["step"].unique().sort().gather_every(-(-total // at.MAX_PLAYED))
    places = pl.DataFrame(
        {
            "rank": layout.ranks.astype(np.int32),
            "column": np.arange(len(layout.ranks), dtype=np.int32),
            "worker": worker_of(layout).astype(np.int32),
            "stage": layout.pp.astype(np.int32),
            "slot": np.maximum(layout.tp, 0).astype(np.int32),
        }
    )
    inside = groups_inside(layout) if layout.slots > 1 else []
    of_host = partial(_of_host, reduced, steps=steps, inside=inside, messages=layout.stages > 1)
    rows = pl.concat(side_by_side(of_host, hosts)).join(places, on="rank")
    return None if rows.is_empty() else rows


_LASTED = pl.col("end_ns") - pl.col("start_ns")
_IN_TIME = (pl.col("step") >= 0) & (_LASTED > 0) & (_LASTED < _MAX_NS)
_SOUND = pl.col("kind").is_in(list(_KINDS)) & _IN_TIME


def _of_host(reduced: Reduced, host: Index, *, steps: pl.Series, inside: list[str], messages: bool) -> pl.DataFrame:
    """`inside`: groups whose calls lie inside passes. `messages`: without some, nothing tells waits from idle time."""
    kind = pl.col("kind")
    chosen = pl.col("step").is_in(steps.implode())  # of a list Polars takes twenty times as long
    work = (
        reduced.part("work", host)
        .filter(_SOUND & chosen)
        .select(
            "rank",
            "step",
            "start_ns",
            "end_ns",
            "microbatch",
            kind.replace_strict(_KINDS, return_dtype=pl.Int8),
            chunk=pl.col("chunk").fill_null(0).clip(0, CHUNKS - 1),
        )
    )
    message = kind.is_in(list(POINT_TO_POINT))
    calls = (
        reduced.part("collectives", host)
        .filter(_IN_TIME & chosen & ~pl.col("group").is_in(inside).fill_null(False))
        .select(
            "rank", "step", "start_ns", "end_ns", kind=pl.when(message).then(_MESSAGE).otherwise(_CALL).cast(pl.Int8)
        )
    )
    begins = (
        reduced.part("steps", host)
        .filter(chosen & pl.col("start_us").is_not_null())
        .select("rank", "step", begin_ns=pl.col("start_us") * 1000)
    )
    columns = (
        pl.concat([work, calls], how="diagonal")
        .join(begins, on=["rank", "step"], how="left")
        .sort("rank", "step", "start_ns", "end_ns", maintain_order=True)
        .collect()
    )
    return _in_order(columns, messages=messages)


def _in_order(columns: pl.DataFrame, *, messages: bool) -> pl.DataFrame:
    """Of one host's work and calls, by rank, step and start: passes by their number, and the time between."""
    rank, step, kind = (columns[name].to_numpy() for name in ("rank", "step", "kind"))
    start, end = columns["start_ns"].to_numpy(), columns["end_ns"].to_numpy()
    first = np.ones(len(rank), np.bool_)  # of its rank's step
    first[1:] = (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])
    part = np.cumsum(first) - 1
    is_pass, is_work = kind < HOST, kind <= BEHIND
    worked = _latest_before(end, part, is_work)
    ran = _latest_before(end, part, np.ones(len(end), np.bool_))
    begin = columns["begin_ns"].fill_null(columns["start_ns"]).to_numpy()
    # who waits for others does so in a message, or a call: of a step without, nothing tells waits from idle time
    counts = np.bincount(part, (kind == _MESSAGE) if messages else ~is_work)
    waits = (counts > 0)[part] if len(part) else np.zeros(0, np.bool_)
    idle = np.where(waits, np.clip(start - np.where(ran == _NOTHING, begin, ran), 0, _MAX_NS), 0) / 1e6
    ms = np.clip(end - np.where(is_pass, start, np.maximum(start, worked)), 0, None) / 1e6
    opened = np.flatnonzero(first)[part]  # the first row of its rank's step
    passes: Int64 = np.cumsum(is_pass) - is_pass
    number: Int64 = passes - passes[opened]
    ended: Int64 = np.cumsum(kind == BEHIND)  # from the optimizer on, gradients have been exchanged
    behind = ended - ended[opened] + (kind == BEHIND)[opened] > 0
    microbatch = columns["microbatch"].cast(pl.Int64)
    if microbatch.null_count():
        counted = columns.select(pl.int_range(pl.len()).over("rank", "step", "kind", "chunk")).to_series()
        microbatch = microbatch.fill_null(counted)
    chunk = columns["chunk"].fill_null(0).cast(pl.Int64).to_numpy()
    code = (np.clip(microbatch.to_numpy(), 0, _MICROBATCHES - 1) * CHUNKS + chunk) * 2 + kind
    called: Int64 = np.cumsum(~is_work)
    calls = np.bincount(part, ~is_work)
    ahead = called - called[opened] + (~is_work)[opened] < calls[part] if len(part) else behind
    of_host = np.where(behind, np.where(ahead, BEHIND, BEHIND_ALL), HOST)

    def rows(of: Bools, kinds: Int64, codes: Int64, lasted: Floats) -> pl.DataFrame:
        columns = {"rank": rank[of], "step": step[of], "kind": kinds[of].astype(np.int8), "number": number[of]}
        return pl.DataFrame({**columns, "code": codes[of], "ms": lasted[of]})

    did = rows(is_work, np.where(kind == HOST, of_host, kind), np.where(is_pass, code, -1), ms)
    after_message = np.zeros(len(kind), np.bool_)
    after_message[1:] = is_pass[1:] & (kind[:-1] == _MESSAGE) & ~first[1:]
    # before its first pass no stage waits for another one but in a message
    between = np.where(is_work | (messages & (number == 0) & ~behind), of_host, BEFORE_CALL)
    between = np.where(after_message & ~behind, BEHIND_MESSAGE, between)
    return pl.concat([did, rows(idle > 0, between, np.full(len(rank), -1), idle)])


_NOTHING = np.iinfo(np.int64).min


def _latest_before(end: Int64, part: Int64, counts: Bools) -> Int64:
    """By row, the latest end of the rows of its part before it that count; `_NOTHING` where there is none."""
    ends = np.where(counts, end, _NOTHING)
    order = np.lexsort((ends, part))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    # parts follow each other, so the largest place so far is one of the row's own part
    latest = ends[order[np.maximum.accumulate(place)]] if len(place) else ends
    before = np.full(len(ends), _NOTHING)
    same = part[1:] == part[:-1]
    before[1:][same] = latest[:-1][same]
    return before
