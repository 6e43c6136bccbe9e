"""Who is late, and what it costs: by what each rank has beyond the middle one of its peers, step by step (ms).

Cost is what a mean step would be shorter, had the late ranks worked as their peers do: the steps are played again.
Ranks that exchange gradients leave a step together, when the last of them has come: so a step is as much shorter as
the latest of all would be earlier. Pipelines are played through their dependencies in `pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.layout import Layout
from stepscope.analyze.ranks.own_work import Matrix, block_means, middle
from stepscope.tables.arrays import Bools, Floats, Int64


class Lateness(Struct, frozen=True):
    """By rank: mean excess over the run but for its largest blocks, and how sure it is."""

    mean: Floats
    error: Floats  # standard error of it
    usual: float  # robust deviation between ranks
    least: float  # so late a rank must be


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
    return Lateness(mean, spread / np.sqrt(number), usual, max(at.LEAST_SHARE * step_ms, at.SIGMAS * usual))


def late_ranks(excess: Matrix, found: Lateness, step_ms: float) -> Int64:
    """Positions of ranks that keep being late."""
    mean = np.where(np.isfinite(found.mean), found.mean, 0.0)
    sure = mean > at.ERRORS * found.error
    late: Bools = sure & (mean >= found.least)
    steady = sure & ~late & (mean >= max(at.LEAST_STEADY_SHARE * step_ms, at.STEADY_SIGMAS * found.usual))
    for rank in np.flatnonzero(steady):
        known = excess[np.isfinite(excess[:, rank]), rank]
        late[rank] = len(known) > 0 and (known > at.HOST_PART * mean[rank]).mean() >= at.STEADY_LATE
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
    often: Bools = (times >= at.MIN_SPIKES) & (times >= at.ROTATING_STEPS * known) & (times > at.ROTATING_ONE * steps)
    for rank in np.flatnonzero(often):
        often[rank] = float(np.nanmean(excess[:, rank])) >= at.LEAST_STEADY_SHARE * step_ms
    return often


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


def latest(excess: Matrix) -> Floats:
    """How much later than the middle one the last rank is, by step; 0 where nothing is known."""
    known = np.where(np.isfinite(excess), excess, -np.inf).max(axis=1, initial=-np.inf)
    return np.where(np.isfinite(known), known, 0.0).astype(np.float64)


def lost_by_ranks(excess: Matrix, part: Int64, late: Int64) -> Floats:
    """By step: what it would be shorter were the ranks of `part` as usual, the other late ones being so too.

    Usual is what healthy ranks have: a late one's work is replaced by that of a healthy one in other steps, so that
    the chance by which one of many is last stays as it is.
    """
    healthy = np.setdiff1d(np.arange(excess.shape[1]), np.union1d(part, late))
    if not len(healthy):
        return latest(excess)
    rest = latest(excess[:, healthy])
    with_part = np.maximum(rest, latest(excess[:, part]))
    middling = healthy[np.argsort(np.abs(np.nan_to_num(np.nanmedian(excess[:, healthy], axis=0))), kind="stable")]
    twins = np.resize(middling[: max(len(part), 1)], len(part))
    usual = np.roll(excess[:, twins], len(excess) // 3 + 1, axis=0)
    return with_part - np.maximum(rest, latest(usual))


def lost_by_differing(excess: Matrix) -> Floats:
    """By step: what it would be shorter had all ranks the mean of their work."""
    lost: Floats = latest(excess) - np.nan_to_num(np.nanmean(excess, axis=1))
    return lost


def along_the_run(lost: Floats, there: Matrix, everywhere: Matrix) -> float | None:
    """Mean loss of a step of the run by that in steps of windows; None where it is not what makes their lengths differ.

    Windows may hit upon more or fewer of the steps in which somebody is late than there are: as all steps are known by
    their length, the loss in windows stands for that by which the others differ from the shortest tenth of theirs.

    Args:
        there: how long the steps of `lost` were, by step and rank.
        everywhere: the same of all steps that count.
    """
    walls = [middle(values).astype(np.float64) for values in (there, everywhere)]
    if min(np.isfinite(values).sum() for values in walls) < at.MIN_STEPS:
        return None
    x, y = (values - np.nanquantile(values, at.SHORTEST) for values in walls)
    known = x <= at.LENGTHENS_MOST * lost.max()
    x, lost = x[known], lost[known]
    spread = float(x.std()) * float(lost.std()) if len(x) >= at.MIN_STEPS else 0.0
    if spread <= 0:
        return None
    both = float(np.mean((x - x.mean()) * (lost - lost.mean())))
    if both / spread < np.sqrt(at.PART_OF_EXCESS):
        return None
    alike = y[y <= at.SEEN_LENGTH * x.max()]
    return max(float(lost.mean()) + both / float(x.var()) * float(alike.mean() - x.mean()), 0.0)


def lost_by_cells_in_passes(passes: Sequence[Matrix], cells: Spikes) -> Floats:
    """By step: what it would be shorter had these ranks in these steps done nothing longer than their peers."""
    its = np.zeros(passes[0].shape, np.bool_)
    its[cells.row, cells.column] = True
    lost = np.zeros(len(its))
    for number, excess in enumerate(passes):
        # what is done last in a step delays the first pass of the next one
        mine = its | np.roll(its, 1, axis=0) if number == 0 else its
        without = np.where(mine, np.minimum(excess, 0), excess)
        lost += np.maximum(latest(excess) - np.maximum(latest(without), 0.0), 0.0)
    return lost


def lost_by_cells(excess: Matrix, cells: Spikes) -> Floats:
    """By step: what it would be shorter without what ranks have beyond their peers in these steps."""
    without = excess.copy()
    np.subtract.at(without, (cells.row, cells.column), cells.excess.astype(np.float32))
    # a spike is taken away whole, with the noise in it: the rank is then as the middle one
    return np.maximum(latest(excess) - np.maximum(latest(without), 0.0), 0.0)


def in_earnest(shown: Floats, played: Floats, most: float = 1.0) -> float:
    """What is lost by host and device together, by what the host alone shows: its work is not all that varies.

    Args:
        most: 1 where nobody waits inside a step; where ranks do, more is lost than what the longest one does more.
    """
    alone, both = float(shown.mean()), float(played.mean())
    return min(max(both / alone, 0.0), most) if len(shown) and alone > 0 else 1.0
