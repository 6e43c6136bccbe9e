"""What ranks do themselves in the steps of windows, beside their peers: with devices, and with pieces of work."""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.arrivals import Arrivals
from stepscope.analyze.ranks.layout import Layout
from stepscope.analyze.ranks.own_work import Matrix, Steps, beyond
from stepscope.analyze.ranks.pieces import worker_of
from stepscope.tables.arrays import Floats


def beyond_in_windows(
    steps: Steps, layout: Layout, rows: pl.DataFrame | None, found: Arrivals | None, step_ms: float
) -> Matrix | None:
    """Own work of host and device beyond the peers', rows: `steps.windows`; None where devices were not recorded."""
    if steps.compute is None:
        return None
    compute = beyond(steps.compute, layout)
    own = steps.own[steps.windows]
    forward = steps.phases.get("forward")
    if forward is not None:
        # the host waits for its device in it, or it does not: the longer of both is what delays
        compute = np.fmax(compute, beyond(forward[steps.windows], layout))
        own = own - forward[steps.windows]
    excess: Matrix = compute + np.nan_to_num(beyond(own, layout))
    if rows is None:
        return excess
    gap = _worked(rows, steps, layout) - excess
    if layout.slots > 1:
        gap = _of_slots(gap, steps, layout, found)
    # what pieces tell beyond device and phases is the host's inside passes; else both say the same, noise apart
    with np.errstate(all="ignore"):
        count = np.maximum(np.isfinite(gap).sum(axis=0), 1)
        mean, error = np.nanmean(gap, axis=0), np.nanstd(gap, axis=0) / np.sqrt(count)
    more = np.nan_to_num(mean) >= np.maximum(at.LEAST_STEADY_SHARE / 2 * step_ms, at.ERRORS * np.nan_to_num(error))
    return excess + np.where(more[None, :], np.nan_to_num(gap), 0).astype(np.float32)


def _worked(rows: pl.DataFrame, steps: Steps, layout: Layout) -> Matrix:
    """All pieces of a rank together, beyond its peers'; those of tensor slots hold waits for each other."""
    sums = rows.group_by("column", "step").agg(pl.col("ms").sum())
    numbers = steps.numbers[steps.windows]
    found = np.full((len(numbers), len(layout.ranks)), np.nan, np.float32)
    row = np.minimum(np.searchsorted(numbers, sums["step"].to_numpy()), max(len(numbers) - 1, 0))
    kept = numbers[row] == sums["step"].to_numpy() if len(numbers) else np.zeros(0, bool)
    found[row[kept], sums["column"].to_numpy()[kept]] = sums["ms"].to_numpy()[kept]
    return beyond(found, layout)


def _of_slots(gap: Matrix, steps: Steps, layout: Layout, found: Arrivals | None) -> Matrix:
    """What a worker's passes are longer than any of its slots explains, given to those that others waited for.

    Slots wait for each other inside passes: what makes one late makes the passes of all longer. Who came last to
    their collectives is the one; where nobody stands out, it is all of them.
    """
    worker = worker_of(layout)
    order = np.argsort(worker, kind="stable")
    edges = np.flatnonzero(np.r_[True, np.diff(worker[order]) > 0])
    unexplained = np.full_like(gap, np.nan)
    least = np.fmin.reduceat(gap[:, order], edges, axis=1)
    late = None if found is None else found.inside(steps.numbers[steps.windows])
    for number, members in enumerate(np.split(order, edges[1:])):
        late_ones: Floats | None = None if late is None else np.nan_to_num(np.nanmean(late[:, members], axis=0))
        part = members
        if late_ones is not None and len(members) > 1:
            stand_out = late_ones >= at.HOST_PART * max(float(np.nanmean(least[:, number])), 1e-9)
            part = members[stand_out] if stand_out.any() else members
        unexplained[:, part] = least[:, number : number + 1]
    return unexplained
