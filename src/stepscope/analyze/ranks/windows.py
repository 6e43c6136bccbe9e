"""What ranks do themselves in the steps of windows, beside their peers: with devices, and with pieces of work."""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.arrivals import Arrivals
from stepscope.analyze.ranks.layout import Layout
from stepscope.analyze.ranks.links import LateGroup
from stepscope.analyze.ranks.own_work import Matrix, Steps, beyond
from stepscope.analyze.ranks.pieces import BEFORE_CALL, BEHIND, BEHIND_ALL, worker_of
from stepscope.analyze.ranks.stragglers import late_at_times
from stepscope.tables.arrays import Int64


def beyond_in_windows(
    steps: Steps, layout: Layout, rows: pl.DataFrame | None, found: Arrivals | None, step_ms: float,
    missing: tuple[int, ...],
) -> tuple[Matrix | None, list[LateGroup]]:  # fmt: skip
    """Own work of host and device beyond the peers', rows: `steps.windows`; None where devices were not recorded.

    And workers whose passes are long as for one of `missing` (ranks): of no tensor slot that was recorded is it known.
    """
    if steps.compute is None:
        return None, []
    excess = beyond(steps.compute, layout)
    own = steps.own[steps.windows]
    forward = steps.phases.get("forward")
    if forward is not None:
        # the host waits for its device in it, or it does not: the longer of both is what delays
        excess = _with(excess, beyond(forward[steps.windows], layout), step_ms)
        own = own - forward[steps.windows]
    excess = excess + np.nan_to_num(beyond(own, layout))
    if rows is None:
        return excess, []
    worked, awaited = _worked(rows, steps, layout), []
    if layout.slots > 1:
        unexplained, partial = _of_slots(worked - excess, steps, layout, found)
        worked = excess + unexplained
        awaited = [
            LateGroup(members, missing, ms, of_slots=True)
            for members, ms in sorted(partial, key=lambda one: -one[1])
            if missing and ms >= at.LEAST_SHARE * step_ms
        ]
    # pieces tell what hosts do inside passes, too; else both say the same
    return _with(excess, worked, step_ms), awaited


def _with(excess: Matrix, other: Matrix, step_ms: float) -> Matrix:
    """The second measure of the same ranks where it keeps telling more than the first, noise apart."""
    gap = other - excess
    known = np.isfinite(gap)
    count = np.maximum(known.sum(axis=0), 1)
    gap = np.where(known, gap, 0)
    mean = gap.sum(axis=0) / count
    error = np.sqrt((np.where(known, gap - mean, 0) ** 2).sum(axis=0)) / count
    more = mean >= np.maximum(at.LEAST_STEADY_SHARE / 2 * step_ms, at.ERRORS * error)
    more |= late_at_times(np.where(known, gap, np.nan).astype(np.float32), step_ms, ~more)
    found: Matrix = (excess + np.where(more[None, :], gap, 0)).astype(np.float32)
    return found


def _worked(rows: pl.DataFrame, steps: Steps, layout: Layout) -> Matrix:
    """All pieces of a rank together, beyond its peers'; those of tensor slots hold waits for each other.

    A wait in a call that was not recorded most of the peers have as well, where there are several, so what one is idle
    beyond them before its calls is its host's own; in a pipeline stages wait for each other, and it tells nothing.
    """
    if layout.stages > 1 or min(map(len, layout.peer_groups())) < at.MIN_PEERS:
        rows = rows.filter(pl.col("kind") != BEFORE_CALL)
    sums = rows.group_by("column", "step").agg(pl.col("ms").sum())
    numbers = steps.numbers[steps.windows]
    found = np.full((len(numbers), len(layout.ranks)), np.nan, np.float32)
    row = np.minimum(np.searchsorted(numbers, sums["step"].to_numpy()), max(len(numbers) - 1, 0))
    kept = numbers[row] == sums["step"].to_numpy() if len(numbers) else np.zeros(0, bool)
    found[row[kept], sums["column"].to_numpy()[kept]] = sums["ms"].to_numpy()[kept]
    return beyond(found, layout)


def by_passes(rows: pl.DataFrame, steps: Steps, layout: Layout) -> tuple[Matrix, ...]:
    """Own work beyond the peers', of each pass with what the host does before it, rows: `steps.windows`.

    Where ranks wait for each other in each pass, what one does longer in one of them and another one in the next is
    lost twice. What is done from the optimizer on delays the first pass of the step behind.
    """
    if min(map(len, layout.peer_groups())) < at.MIN_PEERS:
        rows = rows.filter(pl.col("kind") != BEFORE_CALL)
    numbers = steps.numbers[steps.windows]
    last = rows.filter(pl.col("kind") < 2).group_by("column", "step").agg(pl.col("number").max().alias("last"))
    number = pl.when(pl.col("kind").is_in([BEHIND, BEHIND_ALL])).then(-1).otherwise(pl.min_horizontal("number", "last"))
    sums = (
        rows.filter(pl.col("step").is_in(pl.Series(numbers).implode()))
        .join(last, on=["column", "step"])
        .group_by("column", "step", number=number)
        .agg(pl.col("ms").sum())
    )
    count = int(sums["number"].max() or 0) + 1 if sums.height else 0  # type: ignore[arg-type]
    if not 0 < count * len(numbers) * len(layout.ranks) <= at.MAX_CELLS:
        return ()
    found = np.full((count + 1, len(numbers), len(layout.ranks)), np.nan, np.float32)
    row = np.searchsorted(numbers, sums["step"].to_numpy())
    found[sums["number"].to_numpy(), row, sums["column"].to_numpy()] = sums["ms"].to_numpy()
    found[0] += np.nan_to_num(np.roll(found[-1], 1, axis=0))
    return tuple(beyond(values, layout) for values in found[:-1])


def _of_slots(
    gap: Matrix, steps: Steps, layout: Layout, found: Arrivals | None
) -> tuple[Matrix, list[tuple[Int64, float]]]:
    """What a worker's passes are longer than any of its slots explains, given to those that others waited for.

    Slots wait for each other inside passes: what makes one late makes the passes of all longer. Who came last to
    their collectives is the one; where nobody stands out, it is all of them, or one that was not recorded: of such
    workers the members and the mean (ms) are given instead.
    """
    worker = worker_of(layout)
    order = np.argsort(worker, kind="stable")
    edges = np.flatnonzero(np.r_[True, np.diff(worker[order]) > 0])
    unexplained = np.full_like(gap, np.nan)
    least = np.fmin.reduceat(gap[:, order], edges, axis=1)
    late = None if found is None else found.inside(steps.numbers[steps.windows])
    partial: list[tuple[Int64, float]] = []
    for number, members in enumerate(np.split(order, edges[1:])):
        part, mean = members, np.nan_to_num(least[:, number]).mean()
        if late is not None and len(members) > 1:
            stand_out = np.nan_to_num(late[:, members]).mean(axis=0) >= at.HOST_PART * max(float(mean), 1e-9)
            part = members[stand_out] if stand_out.any() else members
        if len(part) == len(members) < layout.slots:
            partial.append((members, float(mean)))
            continue
        unexplained[:, part] = least[:, number : number + 1]
    return unexplained, partial
