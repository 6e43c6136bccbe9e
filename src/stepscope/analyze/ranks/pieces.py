"""Pieces of work that windows recorded, in order: passes of microbatches, and what hosts did in between."""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.layout import Layout
from stepscope.engine.collective_names import POINT_TO_POINT
from stepscope.tables.arrays import Int64
from stepscope.tables.reduced import Index, Reduced

# Kinds beside forward (0) and backward (1): of the host in between, from the optimizer on, and idle before a call
HOST, BEHIND, BEFORE_CALL = 2, 3, 4
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
    """Groups all recorded members of which are tensor slots of one worker."""
    worker = worker_of(layout)
    found = []
    for group in layout.groups.values():
        members = layout.at(np.array(group.ranks, np.int64))
        if len(np.unique(worker[members[members >= 0]])) == 1:
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
    steps = pl.concat(found)["step"].unique().sort().gather_every(-(-total // at.MAX_PLAYED)).to_list()
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
    rows = pl.concat([_of_host(reduced, host, steps, inside, messages=layout.stages > 1) for host in hosts])
    rows = rows.join(places, on="rank")
    return None if rows.is_empty() else rows


_LASTED = pl.col("end_ns") - pl.col("start_ns")
_IN_TIME = (pl.col("step") >= 0) & (_LASTED > 0) & (_LASTED < _MAX_NS)
_SOUND = pl.col("kind").is_in(list(_KINDS)) & _IN_TIME


def _of_host(reduced: Reduced, host: Index, steps: list[int], inside: list[str], *, messages: bool) -> pl.DataFrame:
    """`inside`: groups whose calls lie inside passes. `messages`: without some, nothing tells waits from idle time."""
    of, kind = ["rank", "step"], pl.col("kind")
    chosen = pl.col("step").is_in(steps)
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
    is_pass, is_work = kind < HOST, kind <= BEHIND
    waits = (kind == _MESSAGE if messages else ~is_work).any().over(of)
    counted = pl.int_range(pl.len()).over(*of, "kind", "chunk")
    worked = pl.when(is_work).then("end_ns").cum_max().shift(1).over(of).fill_null(0)
    ran = pl.coalesce(pl.col("end_ns").cum_max().shift(1).over(of), "begin_ns", "start_ns")
    own = pl.col("end_ns") - pl.when(is_pass).then("start_ns").otherwise(pl.max_horizontal("start_ns", worked))
    code = (pl.col("microbatch").cast(pl.Int64) * CHUNKS + pl.col("chunk")) * 2 + kind
    frame = (
        pl.concat([work, calls], how="diagonal")
        .join(begins, on=of, how="left")
        .sort("rank", "step", "start_ns", "end_ns", maintain_order=True)
        .with_columns(
            microbatch=pl.coalesce("microbatch", counted).clip(0, _MICROBATCHES - 1),
            number=(is_pass.cast(pl.Int32).cum_sum() - is_pass.cast(pl.Int32)).over(of),
            # from the optimizer on, gradients have been exchanged
            behind=(kind == BEHIND).cum_max().over(of),
            ms=own.clip(0) / 1e6,
            idle=pl.when(waits).then((pl.col("start_ns") - ran).clip(0, _MAX_NS) / 1e6).otherwise(0.0),
        )
        .with_columns(code=pl.when(is_pass).then(code).otherwise(-1))
        .collect()
    )
    of_host = pl.when("behind").then(BEHIND).otherwise(HOST).cast(pl.Int8)
    names = ["rank", "step", "kind", "number", "code", "ms"]
    did = frame.filter(is_work).with_columns(kind=pl.when(kind == HOST).then(of_host).otherwise("kind"))
    none = pl.lit(-1, pl.Int64)
    of_idle = pl.when(is_work).then(of_host).otherwise(BEFORE_CALL).cast(pl.Int8)
    idle = frame.filter(pl.col("idle") > 0).with_columns(kind=of_idle, code=none, ms=pl.col("idle"))
    return pl.concat([part.select(names) for part in (did, idle)])
