"""Who came last to collectives of windows, by durations alone: the rank that others wait for stays shortest.

Who comes last to a call waits for none, so the shortest stay of all members is the transfer itself.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.ranks.layout import Layout
from stepscope.analyze.ranks.own_work import Matrix
from stepscope.analyze.ranks.pieces import groups_inside
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
    by_group: pl.DataFrame  # rank, step, group, late
    layout: Layout
    on_device: bool = True  # some are kernels

    def of_groups(self, groups: Collection[str], numbers: Int64) -> Matrix:
        """By step (of `numbers`) and rank: how much later than the middle one it came to calls of these groups."""
        mine = self.by_group.filter(pl.col("group").cast(pl.String).is_in(list(groups)))
        return _matrix(mine.group_by("rank", "step").agg(pl.col("late").sum()), numbers, self.layout)

    def inside(self, numbers: Int64) -> Matrix:
        """The same, of groups of tensor slots: all members in one worker."""
        return self.of_groups(groups_inside(self.layout), numbers)


def arrivals(reduced: Reduced, layout: Layout) -> Arrivals | None:
    lasted = pl.col("end_ns") - pl.col("start_ns")
    known = (
        reduced.scan("collectives")
        .filter(pl.all_horizontal(pl.col("sequence", "step", "group", "kind").is_not_null()))
        .filter((lasted > 0) & (lasted < _MAX_NS))
        .with_columns(kind=pl.when(pl.col("kind").is_in(list(POINT_TO_POINT))).then(pl.lit(MESSAGE)).otherwise("kind"))
        .select("rank", *_KEY, "bytes", "basis", ms=(lasted / 1e6).cast(pl.Float32))
        .with_columns(pl.col("group", "kind").cast(pl.Categorical))
        .collect()
    )
    order, first = _alike(known)
    members = np.diff(np.append(first, len(order)))
    if not (members > 1).any():
        return None
    known, call = known[order], np.repeat(np.arange(len(first)), members)
    # as whole numbers, floats above 0 have the order that they have: one sort puts each call's stays in order
    stays = (call.astype(np.uint64) << np.uint64(32)) | known["ms"].to_numpy().view(np.uint32)
    stays.sort()
    ordered = (stays & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32).astype(np.float64)
    middle = (ordered[first + (members - 1) // 2] + ordered[first + members // 2]) / 2
    several = members > 1
    calls = known[first[several]].select(_KEY).with_columns(
        bytes=pl.Series(np.maximum.reduceat(known["bytes"].fill_null(-1).to_numpy(), first)[several]),
        members=pl.Series(members[several]),
        least=pl.Series(ordered[first[several]]),
        middle=pl.Series(middle[several]),
    ).with_columns(pl.col("bytes").replace(-1, None))  # fmt: skip
    by_group = (
        known.select("rank", "step", "group", late=pl.Series(middle[call]) - pl.col("ms"))
        .filter(pl.Series(several[call]) & (known["kind"] != MESSAGE))
        .group_by("rank", "step", "group")
        .agg(pl.col("late").sum())
    )
    late = by_group.group_by("rank", "step").agg(pl.col("late").sum())
    numbers = np.unique(late["step"].to_numpy()).astype(np.int64)
    on_device = bool((known["basis"] == "device").any())
    return Arrivals(numbers, _matrix(late, numbers, layout), calls, by_group, layout, on_device)


def _alike(known: pl.DataFrame) -> tuple[Int64, Int64]:
    """An order of the rows that puts those of a call beside each other, and where in it each call begins."""
    key, most = np.zeros(len(known), np.int64), 1
    for name in _KEY:
        values = known[name].to_physical().to_numpy().astype(np.int64)
        least, span = (int(values.min()), int(values.max()) - int(values.min()) + 1) if len(values) else (0, 1)
        if most * span >= 2**62:  # of numbers that lie far apart, their places among each other
            key, values, least = _places(key), _places(values), 0
            most, span = int(key.max()) + 1, int(values.max()) + 1
        key, most = key * span + (values - least), most * span
    order = np.argsort(key, kind="stable")
    key = key[order]
    return order, np.flatnonzero(np.append(True, key[1:] != key[:-1])[: len(key)])


def _places(values: Int64) -> Int64:
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _matrix(late: pl.DataFrame, numbers: Int64, layout: Layout) -> Matrix:
    found = np.full((len(numbers), len(layout.ranks)), np.nan, np.float32)
    if not len(numbers):
        return found
    column = layout.at(late["rank"].cast(pl.Int64).to_numpy())
    row = np.minimum(np.searchsorted(numbers, late["step"].to_numpy()), len(numbers) - 1)
    kept = (column >= 0) & (numbers[row] == late["step"].to_numpy())
    found[row[kept], column[kept]] = late["late"].to_numpy()[kept]
    return found
