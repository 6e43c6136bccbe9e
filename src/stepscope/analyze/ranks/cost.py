"""What a mean step would be shorter, had the late ranks worked as their peers do: the steps are played again.

Ranks that exchange gradients leave a step together, when the last of them has come: so a step is as much shorter as
the latest of all would be earlier. Pipelines are played through their dependencies in `pipeline`.
"""

from __future__ import annotations

import numpy as np

from stepscope.analyze.ranks.own_work import Matrix
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


def of_cells(excess: Matrix, cells: Spikes) -> Floats:
    """By step: what it would be shorter without what ranks have beyond their peers in these steps."""
    without = excess.copy()
    np.subtract.at(without, (cells.row, cells.column), cells.excess.astype(np.float32))
    # a spike is taken away whole, with the noise in it: the rank is then as the middle one
    return np.maximum(latest(excess) - np.maximum(latest(without), 0.0), 0.0)


def in_earnest(shown: Floats, played: Floats) -> float:
    """What is lost by host and device together, by what the host alone shows: its work is not all that varies."""
    alone, both = float(shown.mean()), float(played.mean())
    return min(max(both / alone, 0.0), 1.0) if len(shown) and alone > 0 else 1.0
