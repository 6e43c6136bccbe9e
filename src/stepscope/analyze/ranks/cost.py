"""What a mean step would be shorter, had the late ranks worked as their peers do: the steps are played again.

Ranks that exchange gradients leave a step together, when the last of them has come: so a step is as much shorter as
the latest of all would be earlier. Pipelines are played through their dependencies in `pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.own_work import Matrix, middle
from stepscope.analyze.ranks.stragglers import Spikes
from stepscope.tables.arrays import Floats, Int64


def latest(excess: Matrix) -> Floats:
    """How much later than the middle one the last rank is, by step; 0 where nothing is known."""
    known = np.where(np.isfinite(excess), excess, -np.inf).max(axis=1, initial=-np.inf)
    return np.where(np.isfinite(known), known, 0.0).astype(np.float64)


def of_ranks(excess: Matrix, part: Int64, late: Int64) -> Floats:
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


def of_ranks_by_passes(passes: Sequence[Matrix], part: Int64, late: Int64) -> Floats:
    """The same where ranks wait for each other in each pass: another one of `part` may be last in each."""
    lost: Floats = np.sum([of_ranks(excess, part, late) for excess in passes], axis=0)
    return lost


def of_cells_by_passes(passes: Sequence[Matrix], cells: Spikes) -> Floats:
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


def uneven(excess: Matrix) -> Floats:
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


def of_cells(excess: Matrix, cells: Spikes) -> Floats:
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
