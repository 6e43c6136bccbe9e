"""Who is late: ranks whose own work is beyond their peers' again and again, hosts of which all are, and what rotates.

Works on what each rank has beyond the middle one of its peers, step by step (`own_work.beyond`), in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.layout import Layout
from stepscope.analyze.ranks.own_work import Matrix, Steps, block_means, middle
from stepscope.tables.arrays import Bools, Floats, Int64


class Lateness(Struct, frozen=True):
    """By rank: mean excess over the run but for its largest blocks, and how sure it is."""

    mean: Floats
    error: Floats  # standard error of it
    usual: float  # robust deviation between ranks
    steps: int

    def least(self, step_ms: float) -> float:
        return max(at.LEAST_SHARE * step_ms, at.SIGMAS * self.usual)


def lateness(excess: Matrix, step_ms: float) -> Lateness:
    """Of steps x ranks beyond their peers."""
    blocks = block_means(excess, at.BLOCKS).astype(np.float64)
    count = np.isfinite(blocks).sum(axis=0)
    ordered = np.sort(np.where(np.isfinite(blocks), blocks, -np.inf), axis=0)[::-1]
    # the largest blocks of each rank count for nothing, as far as enough others are left
    left_out = np.minimum(at.SPIKE_BLOCKS, np.maximum(count - 3, 0))
    row = np.arange(len(blocks))[:, None]
    kept = (row >= left_out) & (row < count)
    number = np.maximum(kept.sum(axis=0), 1)
    values = np.where(kept, np.where(np.isfinite(ordered), ordered, 0), 0)
    mean = values.sum(axis=0) / number
    spread = np.sqrt((np.where(kept, values - mean, 0) ** 2).sum(axis=0) / np.maximum(number - 1, 1))
    mean[count == 0] = np.nan
    known = np.abs(mean[np.isfinite(mean)])
    # two ranks are as far from each other as each from the other: that tells nothing of what is usual
    usual = 1.4826 * float(np.sort(known)[(len(known) - 1) // 2]) if len(known) > 2 else 0.0
    usual = max(usual, at.FLOOR_SHARE * step_ms)
    return Lateness(mean, spread / np.sqrt(number), usual, len(excess))


def late_share(excess: Matrix, level: float) -> float:
    """Part of the steps in which one rank's excess is above `level`."""
    known = excess[np.isfinite(excess)]
    return float((known > level).mean()) if len(known) else 0.0


def late_ranks(excess: Matrix, found: Lateness, step_ms: float) -> Int64:
    """Positions of ranks that keep being late."""
    mean = np.where(np.isfinite(found.mean), found.mean, 0.0)
    sure = mean > at.ERRORS * found.error
    late: Bools = sure & (mean >= found.least(step_ms))
    steady = sure & ~late & (mean >= max(at.LEAST_STEADY_SHARE * step_ms, at.STEADY_SIGMAS * found.usual))
    for rank in np.flatnonzero(steady):
        late[rank] = late_share(excess[:, rank], at.HOST_PART * mean[rank]) >= at.STEADY_LATE
    late |= late_at_times(excess, step_ms, ~late)
    return np.flatnonzero(late)


def late_at_times(excess: Matrix, step_ms: float, among: Bools) -> Bools:
    """Which ranks are late now and then, far beyond all noise, and so in most of the steps in which any of `among` is.

    A mean and its error tell little of who is late by much in a part of the steps and as usual in the others.
    """
    some = np.abs(excess[:: -(-len(excess) // 64)])
    noise = 1.4826 * float(np.nanmedian(some)) if np.isfinite(some).any() else 0.0
    high = (excess > np.float32(max(at.LEAST_SHARE * step_ms, at.SPIKE_SIGMAS * noise))) & among
    times, steps = high.sum(axis=0), int(high.any(axis=1).sum())
    known = np.maximum(np.isfinite(excess).sum(axis=0), 1)
    often = (times >= at.MIN_SPIKES) & (times >= at.ROTATING_STEPS * known) & (times > at.ROTATING_ONE * steps)
    for rank in np.flatnonzero(often):
        often[rank] = float(np.nanmean(excess[:, rank])) >= at.LEAST_STEADY_SHARE * step_ms
    found: Bools = often
    return found


def with_host_mates(late: Int64, mean: Floats, layout: Layout) -> list[Int64]:
    """Late ranks, all of a host together where nearly all of its ranks are late to a like degree; latest first."""
    parts: list[Int64] = []
    for host in np.unique(layout.host[late]):
        mine = late[layout.host[late] == host]
        all_of_it = np.flatnonzero(layout.host == host)
        top = float(mean[mine].max())
        alike = all_of_it[np.nan_to_num(mean[all_of_it]) >= at.HOST_PART * top]
        elsewhere = len(all_of_it) < len(layout.host)
        if (
            elsewhere
            and len(all_of_it) > 1
            and len(alike) >= at.HOST_SHARE * len(all_of_it)
            and top <= at.SAME_HOST_SPREAD * float(np.median(mean[alike]))
        ):
            parts.append(alike)
        else:
            parts.extend(np.array([rank]) for rank in mine)
    return sorted(parts, key=lambda part: -float(mean[part].max()))


class Spikes(Struct, frozen=True):
    """Cells in which a part of a rank's work stands out of all its peers' in the same step."""

    row: Int64
    column: Int64
    excess: Floats


def spikes(component: str, values: Matrix, layout: Layout, least: float) -> Spikes:
    """Where `values` exceed the peers' middle one by `least` and by what no noise of a thousand ranks makes.

    Args:
        component: a phase, in which ranks of other stages do other work, or "gc", which is the same to all.
    """
    rows, columns, found = [], [], []
    for group in [np.arange(values.shape[1])] if component == "gc" else layout.peer_groups():
        mine = values if len(group) == values.shape[1] else values[:, group]
        some = mine[:, :: -(-len(group) // 33)]
        centre = middle(some)
        noise = 1.4826 * float(np.nanmedian(np.abs(some - centre[:, None]))) if np.isfinite(some).any() else np.nan
        level = max(least, at.SPIKE_SIGMAS * noise) if np.isfinite(noise) else least
        row, column = np.nonzero(mine > (centre + np.float32(level))[:, None])
        rows.append(row)
        columns.append(group[column])
        found.append((mine[row, column] - centre[row]).astype(np.float64))
    none = np.zeros(0, np.int64)
    return Spikes(
        np.concatenate([none, *rows]),
        np.concatenate([none, *columns]),
        np.concatenate([np.zeros(0), *found]),
    )


class Rotating(Struct, frozen=True):
    component: str
    spikes: Spikes
    ranks: Int64  # most often first
    share: float  # of the steps


def rotating(parts: Sequence[tuple[str, Matrix]], layout: Layout, known: Int64, step_ms: float) -> list[Rotating]:
    """Parts of the work that make another rank late in each step.

    Args:
        parts: by name, in the order in which they explain: collections lie inside the phases.
        known: ranks that are late as such.
    """
    found: list[Rotating] = []
    taken: set[int] = set()
    for name, values in parts:
        cells = spikes(name, values, layout, at.LEAST_SHARE * step_ms / 2)
        key = cells.row * values.shape[1] + cells.column
        kept = ~np.isin(cells.column, known) & np.isfinite(cells.excess)
        if taken:
            kept &= ~np.isin(key, np.fromiter(taken, np.int64, len(taken)))
        cells, key = Spikes(cells.row[kept], cells.column[kept], cells.excess[kept]), key[kept]
        if not len(key):
            continue
        times = np.bincount(cells.column, minlength=values.shape[1])
        share = len(np.unique(cells.row)) / max(len(values), 1)
        several = (times > 0).sum() >= at.ROTATING_RANKS and times.max() <= at.ROTATING_ONE * times.sum()
        if share >= at.ROTATING_STEPS and several:
            order = np.argsort(-times, kind="stable")
            found.append(Rotating(name, cells, order[: int((times > 0).sum())], share))
            taken.update(key.tolist())
    return found


class Together(Struct, frozen=True):
    """Steps in which all ranks were slow."""

    rows: Int64
    extra_ms: float  # by mean step
    excess_ms: float  # in such a step


def together(steps: Steps, rows: Int64, excess: Matrix) -> Together | None:
    """Steps much longer than the usual one, though no rank's own work explains it."""
    wall = middle(steps.wall[rows]).astype(np.float64)
    if not len(wall):
        return None
    usual = float(np.nanmedian(wall))
    slow = np.flatnonzero(wall > at.GLOBAL_RATIO * usual)
    if not len(slow):
        return None
    own = np.nan_to_num(np.nanmax(np.where(np.isfinite(excess[slow]), excess[slow], 0), axis=1))
    slow = slow[own < at.GLOBAL_OWN * (wall[slow] - usual)]
    if len(slow) < at.GLOBAL_EVENTS:
        return None
    extra = wall[slow] - usual
    # the longest ones count for nothing, as with ranks: what happens once is no habit
    lasting = np.sort(extra)[: -at.SPIKE_BLOCKS] if len(extra) > 2 * at.SPIKE_BLOCKS else extra
    if lasting.sum() / len(wall) < at.LEAST_SHARE * usual:
        return None
    return Together(rows[slow], float(extra.sum() / len(wall)), float(np.median(extra)))
