"""All that the verdict over many ranks looks at, gathered once; and what ranks do themselves in windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.collectives import Arrivals, Awaited, SlowLink, arrivals, slow_links
from stepscope.analyze.ranks.lateness import late_at_times
from stepscope.analyze.ranks.layout import Layout
from stepscope.analyze.ranks.own_work import Matrix, Steps, beyond, cells, matrix
from stepscope.analyze.ranks.pipeline import BEFORE_CALL, BEHIND, BEHIND_ALL, HOST, Pipelines, pieces, pipelines
from stepscope.model.ranks import Straggler
from stepscope.tables.arrays import Int64
from stepscope.tables.reduced import Reduced

STEPS_SOURCE = "steps of reduced tables"


class Case(Struct, frozen=True):
    """`host`: beyond the peers on the host, steady steps; `device`: with devices, in windows. Milliseconds."""

    reduced: Reduced
    layout: Layout
    steps: Steps
    rows: Int64  # of steps that are judged
    step_ms: float
    host: Matrix
    host_in_windows: Matrix  # the same of the steps of windows
    device: Matrix | None  # rows: those of `steps.windows`
    arrivals: Arrivals | None
    pipes: Pipelines | None
    has_pieces: bool  # what hosts did inside passes is known
    links: list[SlowLink]
    awaited: list[Awaited]  # whose absent members may be late
    passes: tuple[Matrix, ...]  # `device` by passes, where ranks wait for each other in each and nothing is played

    def played_rows(self, steps: int) -> Int64:
        """Positions of the steps of which as many losses were made: of all windows, or of those that are played."""
        if self.pipes is not None and len(self.pipes.numbers) == steps != len(self.steps.windows):
            return np.flatnonzero(np.isin(self.steps.numbers, self.pipes.numbers))
        return self.steps.windows

    def straggler(
        self, kind: str, part: Int64, cause: str, cause_source: str, cost_ms: float, **said: Any
    ) -> Straggler:
        """What is said of ranks (positions) that keep the others waiting.

        Args:
            said: what else. Left out, the excess is the cost, the share of the steps 1, and peers are the layout's.
        """
        ranks = part if kind == "host" else part[: at.MAX_STRAGGLERS]
        given = {
            "ranks": tuple(self.layout.ranks[ranks].tolist()),
            "hosts": tuple(sorted({self.layout.hosts[host] for host in self.layout.host[part]}))[: at.MAX_STRAGGLERS],
            "excess_ms": cost_ms,
            "share_of_steps": 1.0,
            "peers": self.layout.peers_text,
            **said,
        }
        return Straggler(kind=kind, cause=cause, cause_source=cause_source, cost_ms=cost_ms, **given)


def gather(reduced: Reduced, layout: Layout, steps: Steps, rows: Int64, step_ms: float) -> Case:
    found, work = arrivals(reduced, layout), pieces(reduced, layout)
    device, partial = _beyond_in_windows(reduced, layout, steps, work, found, step_ms)
    host, in_windows = beyond(steps.own[rows], layout), beyond(steps.own[steps.windows], layout)
    retries = events(reduced, "retry")  # of the allocator: a rank's own work in whatever phase
    if retries.height:
        for excess, numbers in ((host, rows), (in_windows, steps.windows), (device, steps.windows)):
            if excess is not None:
                kept, row, column = cells(retries, steps.numbers[numbers], layout)
                known = np.nan_to_num(excess[row, column])
                excess[row, column] = np.maximum(known, retries["ms"].to_numpy()[kept])
    pipes = None if work is None else pipelines(reduced, layout, steps, work)
    passes = _by_passes(work, steps, layout) if work is not None and pipes is None and steps.waits_inside else ()
    slow, awaited = ([], []) if found is None else slow_links(found.calls, layout, step_ms)
    return Case(
        reduced, layout, steps, rows, step_ms, host, in_windows, device, found, pipes, work is not None, slow,
        [*awaited, *partial], passes,
    )  # fmt: skip


def events(reduced: Reduced, kind: str) -> pl.DataFrame:
    """Events of ranks with a known length (`ms`)."""
    timed = (pl.col("duration_us") > 0) & pl.col("step").is_not_null() & pl.col("rank").is_not_null()
    found = reduced.scan("events").filter((pl.col("kind") == kind) & timed)
    return found.select("rank", "step", "file", "line", "function", ms=pl.col("duration_us") / 1000).collect()


def _beyond_in_windows(
    reduced: Reduced, layout: Layout, steps: Steps, rows: pl.DataFrame | None, found: Arrivals | None, step_ms: float
) -> tuple[Matrix | None, list[Awaited]]:
    """Own work of host and device beyond the peers', rows: `steps.windows`; None where devices were not recorded.

    And workers whose passes are long as for a missing rank: of no tensor slot that was recorded is it known.
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
    # A wait in a call that was not recorded most of the peers have as well, where there are several, so what one is
    # idle beyond them before its calls is its host's own; in a pipeline stages wait for each other: it tells nothing
    own_rows = rows if layout.stages <= 1 else rows.filter(pl.col("kind") != BEFORE_CALL)
    sums = _of_several(own_rows, layout).group_by("rank", "step").agg(pl.col("ms").sum())
    worked = beyond(matrix(sums, "ms", steps.numbers[steps.windows], layout), layout)
    awaited = []
    if layout.slots > 1:
        unexplained, partial = _of_slots(worked - excess, steps, layout, found)
        worked, missing = excess + unexplained, reduced.missing
        awaited = [
            Awaited(members, missing, ms)
            for members, ms in sorted(partial, key=lambda one: -one[1])
            if missing and ms >= at.LEAST_SHARE * step_ms
        ]
    # pieces tell what hosts do inside passes, too; else both say the same
    return _with(excess, worked, step_ms), awaited


def _of_several(rows: pl.DataFrame, layout: Layout) -> pl.DataFrame:
    """Without what is idle before calls, where too few peers tell a wait of all from what one does."""
    few = min(map(len, layout.peer_groups())) < at.MIN_PEERS
    return rows.filter(pl.col("kind") != BEFORE_CALL) if few else rows


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


def _by_passes(rows: pl.DataFrame, steps: Steps, layout: Layout) -> tuple[Matrix, ...]:
    """Own work beyond the peers', of each pass with what the host does before it, rows: `steps.windows`.

    Where ranks wait for each other in each pass, what one does longer in one of them and another one in the next is
    lost twice. What is done from the optimizer on delays the first pass of the step behind.
    """
    rows, numbers = _of_several(rows, layout), steps.numbers[steps.windows]
    last = rows.filter(pl.col("kind") < HOST).group_by("column", "step").agg(last=pl.col("number").max())
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
    worker = layout.workers
    order = np.argsort(worker, kind="stable")
    edges = np.flatnonzero(np.r_[True, np.diff(worker[order]) > 0])
    unexplained = np.full_like(gap, np.nan)
    least = np.fmin.reduceat(gap[:, order], edges, axis=1)
    late = None if found is None else found.of_groups(layout.groups_of_slots(), steps.numbers[steps.windows])
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
