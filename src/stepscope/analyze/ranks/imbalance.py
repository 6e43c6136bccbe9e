"""What is uneven by design and no machine's fault: a heavy pipeline stage, and batches of different lengths."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.layout import Layout
from stepscope.analyze.ranks.own_work import Matrix, middle
from stepscope.analyze.ranks.pipeline import Pipelines
from stepscope.tables.arrays import Floats, Int64


class HeavyStage(Struct, frozen=True):
    stage: int
    own_ms: float  # work of a middle worker of it
    usual_ms: float  # mean of the other stages
    share: float  # of the steps in which it works longest
    cost_ms: float


def heavy_stages(compute: Matrix, layout: Layout, pipes: Pipelines | None, step_ms: float) -> list[HeavyStage]:
    """Stages of which the middle worker does more than the mean of the other stages, by the work of windows.

    Without microbatches to play again, a step is as much longer as its longest stage works beyond the mean.
    """
    stages = layout.stages
    if stages < 2 or not len(compute):
        return []
    own = np.stack([middle(compute[:, layout.pp == stage]) for stage in range(stages)], axis=1).astype(np.float64)
    own = own[np.isfinite(own).all(axis=1)]
    if len(own) < at.MIN_WINDOWED:
        return []
    found = []
    for stage in range(stages):
        others = np.delete(own, stage, axis=1)
        mine, usual = float(own[:, stage].mean()), float(others.mean())
        if usual <= 0 or mine < (1 + at.STAGE_SHARE) * usual:
            continue
        if pipes is not None:
            lost = float(pipes.without_heavy(stage).mean())
        else:
            lost = float(np.maximum(own[:, stage] - others.max(axis=1), 0).mean())
        if lost >= at.LEAST_SHARE * step_ms:
            share = float((own[:, stage] >= others.max(axis=1)).mean())
            found.append(HeavyStage(stage, mine, usual, share, lost))
    return found


class Uneven(Struct, frozen=True):
    """Batches that differ."""

    replicas: Int64  # those with the longest, most often first
    explained: float  # part of the variance of passes
    longest: float  # the longest replica's batches by the mean, in a mean step
    cost_ms: float


def uneven_batches(pipes: Pipelines, step_ms: float) -> Uneven | None:
    """Microbatches that are long on all stages, forward and back: as only their content makes them."""
    factors = pipes.batch_factors()
    if factors is None or len(factors) < at.MIN_WINDOWED:
        return None
    lost, explained = pipes.without_uneven(factors)
    cost = float(lost.mean())
    if cost < at.LEAST_SHARE * step_ms or explained < at.TOKENS_FIT:
        return None
    by_replica: Floats = factors.mean(axis=2)
    times = np.bincount(by_replica.argmax(axis=1), minlength=by_replica.shape[1])
    if by_replica.shape[1] > 2 and times.max() > at.ROTATING_ONE * times.sum():
        return None  # one replica's own
    order = np.argsort(-times, kind="stable")[: int((times > 0).sum())]
    return Uneven(order, explained, float((by_replica.max(axis=1) / by_replica.mean(axis=1)).mean()), cost)
