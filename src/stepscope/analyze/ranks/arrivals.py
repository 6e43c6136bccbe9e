"""Who came last to collectives of windows, by durations alone: the rank that others wait for stays shortest.

Who comes last to a call waits for none, so the shortest stay of all members is the transfer itself.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.ranks.layout import Layout
from stepscope.analyze.ranks.own_work import Matrix
from stepscope.engine.collective_names import POINT_TO_POINT
from stepscope.tables.arrays import Int64
from stepscope.tables.reduced import Reduced

_KEY = ("step", "group", "kind", "sequence")
MESSAGE = "message"  # from one rank to another, whichever of the two says so
_MAX_NS = 3_600_000_000_000  # a call of an hour is damage


class Arrivals(Struct, frozen=True):
    """`late`: steps x ranks, by how much each came later than the middle one, summed over a step's collectives (ms).

    `calls`: a row for each collective, and each message of a pair: its key, bytes, members that were recorded,
    shortest and middle stay (ms).
    """

    numbers: Int64  # steps
    late: Matrix
    calls: pl.DataFrame


def arrivals(reduced: Reduced, layout: Layout) -> Arrivals | None:
    stay = ((pl.col("end_ns") - pl.col("start_ns")) / 1e6).alias("ms")
    known = (
        reduced.scan("collectives")
        .filter(
            pl.col("sequence").is_not_null()
            & (pl.col("end_ns") > pl.col("start_ns"))
            & (pl.col("end_ns") - pl.col("start_ns") < _MAX_NS)
        )
        .with_columns(kind=pl.when(pl.col("kind").is_in(list(POINT_TO_POINT))).then(pl.lit(MESSAGE)).otherwise("kind"))
        .select("rank", *_KEY, "bytes", stay)
        .with_columns(pl.col("group", "kind").cast(pl.Categorical))
        .collect()
    )
    if known.is_empty():
        return None
    calls = known.group_by(_KEY).agg(
        pl.col("bytes").max(), members=pl.len(), least=pl.col("ms").min(), middle=pl.col("ms").median()
    )
    calls = calls.filter(pl.col("members") > 1)
    late = (
        known.filter(pl.col("kind") != MESSAGE)
        .join(calls.select(*_KEY, "middle"), on=_KEY)
        .group_by("rank", "step")
        .agg((pl.col("middle") - pl.col("ms")).sum().alias("late"))
    )
    if calls.is_empty():
        return None
    numbers = np.unique(late["step"].to_numpy()).astype(np.int64)
    found = np.full((len(numbers), len(layout.ranks)), np.nan, np.float32)
    column = layout.at(late["rank"].cast(pl.Int64).to_numpy())
    row = np.searchsorted(numbers, late["step"].to_numpy())
    kept = column >= 0
    found[row[kept], column[kept]] = late["late"].to_numpy()[kept]
    return Arrivals(numbers, found, calls)
