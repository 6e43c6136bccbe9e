"""Pieces of work that windows recorded, in order: passes of microbatches, and what hosts did in between."""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.layout import Layout
from stepscope.tables.arrays import Int64
from stepscope.tables.reduced import Reduced

HOST, BEHIND = 2, 3  # kinds beside forward (0) and backward (1): of the host in between, and from the optimizer on
CHUNKS, _MICROBATCHES = 2**8, 2**16
_KINDS = {"forward": 0, "backward": 1, "optimizer": BEHIND, "data": HOST, "gc": HOST, "other": HOST}
_MAX_NS = 3_600_000_000_000  # an hour in one piece is damage


def worker_of(layout: Layout) -> Int64:
    """By position of a rank: replica * stages + stage, where places are known; each by itself where they are not."""
    if (layout.dp < 0).any():
        return np.arange(len(layout.ranks))
    replica = np.unique(layout.dp, return_inverse=True)[1].reshape(-1).astype(np.int64)
    stages = max(layout.stages, 1)
    return replica * stages + np.maximum(layout.pp, 0)


def pieces(reduced: Reduced, layout: Layout) -> pl.DataFrame | None:
    """A row for each piece, by rank, step and time; None where there is none.

    Columns: rank, step, kind, number (of passes of the step before it), code (which pass; -1 of others), ms (of the
    host without what ran before it), and the rank's column, worker, stage and slot.
    """
    total = sum(host.tables["work"].rows for host in reduced.hosts)
    if not total:
        return None
    hosts = [host for host in reduced.hosts if host.tables["work"].rows]
    lasted = pl.col("end_ns") - pl.col("start_ns")
    sound = pl.col("kind").is_in(list(_KINDS)) & (pl.col("step") >= 0) & (lasted > 0) & (lasted < _MAX_NS)
    found = [reduced.part("work", host).filter(sound).select(pl.col("step").unique()).collect() for host in hosts]
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
    of = ["rank", "step"]
    kind = pl.col("kind").replace_strict(_KINDS, return_dtype=pl.Int8)
    is_pass = pl.col("kind") < HOST
    # from the optimizer on, gradients have been exchanged
    behind = (pl.col("kind") == HOST) & (pl.col("kind") == BEHIND).cum_max().over(of)
    counted = pl.int_range(pl.len()).over(*of, "kind", "chunk")
    ended = pl.col("end_ns").cum_max().shift(1).over(of).fill_null(0)
    own = pl.col("end_ns") - pl.when(is_pass).then("start_ns").otherwise(pl.max_horizontal("start_ns", ended))
    code = (pl.col("microbatch").cast(pl.Int64) * CHUNKS + pl.col("chunk")) * 2 + pl.col("kind")
    parts = []
    for host in hosts:
        frame = (
            reduced.part("work", host)
            .filter(sound & pl.col("step").is_in(steps))
            .sort("rank", "step", "start_ns", "end_ns", maintain_order=True)
            .with_columns(kind, chunk=pl.col("chunk").fill_null(0).clip(0, CHUNKS - 1))
            .with_columns(
                kind=pl.when(behind).then(pl.lit(BEHIND, pl.Int8)).otherwise("kind"),
                microbatch=pl.coalesce("microbatch", counted).clip(0, _MICROBATCHES - 1),
                number=(is_pass.cast(pl.Int32).cum_sum() - is_pass.cast(pl.Int32)).over(of),
                ms=own.clip(0) / 1e6,
            )
            .with_columns(code=pl.when(is_pass).then(code).otherwise(-1))
            .select("rank", "step", "kind", "number", "code", "ms")
            .collect()
        )
        parts.append(frame.join(places, on="rank"))
    rows = pl.concat(parts)
    return None if rows.is_empty() else rows
