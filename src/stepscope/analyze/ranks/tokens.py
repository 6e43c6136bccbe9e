"""Batches of different lengths: what a token more costs, and what the longest batch of a step makes all wait for."""

from __future__ import annotations

import numpy as np

from stepscope.analyze.ranks import cost
from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.case import Case
from stepscope.analyze.ranks.causes import STEPS_SOURCE
from stepscope.analyze.ranks.imbalance import uneven_batches
from stepscope.analyze.ranks.own_work import beyond
from stepscope.analyze.ranks.pipeline import Pipelines
from stepscope.model.findings import Evidence
from stepscope.model.ranks import Straggler
from stepscope.tables.arrays import Floats, Int64


def ms_per_token(case: Case) -> float | None:
    """Milliseconds that a token more makes a rank's work longer, where tokens tell it from its peers'."""
    steps = case.steps
    if steps.tokens is None:
        return None
    pairs = []
    if steps.compute is not None:
        pairs.append((steps.compute, steps.tokens[steps.windows]))
    if "forward" in steps.phases:
        some = case.rows[:: max(len(case.rows) // 500, 1)]
        pairs.append((steps.phases["forward"][some], steps.tokens[some]))
    for work, tokens in pairs:
        y, x = beyond(work, case.layout), beyond(tokens, case.layout)
        known = np.isfinite(x) & np.isfinite(y)
        if known.sum() < 2 * at.MIN_STEPS:
            continue
        x, y = x[known].astype(np.float64), y[known].astype(np.float64)
        x, y = x - x.mean(), y - y.mean()
        both = float((x**2).sum()) * float((y**2).sum())
        if both > 0 and float((x * y).sum()) ** 2 / both >= at.TOKENS_FIT and (x * y).sum() > 0:
            return float((x * y).sum() / (x**2).sum())
    return None


def sequence_length(case: Case, late: Int64) -> Straggler | None:
    """Batches of different lengths: the longest in a step makes all wait."""
    steps, layout = case.steps, case.layout
    if case.pipes is not None:
        return _of_pipelines(case, case.pipes)
    if steps.tokens is None:
        return None
    per_token = ms_per_token(case)
    if per_token is None:
        return None
    tokens = steps.tokens[case.rows].copy()
    if len(late):
        tokens[:, late] = np.nan
    with np.errstate(invalid="ignore"):
        mean = np.nanmean(np.where(np.isfinite(tokens), tokens, np.nan), axis=1)
    most = np.where(np.isfinite(tokens), tokens, -np.inf).max(axis=1)
    known = np.isfinite(mean) & np.isfinite(most) & (mean > 0)
    if known.sum() < at.MIN_STEPS or float((most[known] / mean[known]).mean()) < 1 + at.TOKENS_SPREAD:
        return None
    lost = float((most[known] - mean[known]).mean()) * per_token
    if case.device is not None and len(case.device):
        # what of it is the maximum of other noise, too, windows tell: played with and without what tokens explain
        more = beyond(steps.tokens[steps.windows], layout) * np.float32(per_token)
        played = float((cost.latest(case.device) - cost.latest(case.device - more)).mean())
        at_windows = cost.latest(more)
        if at_windows.mean() > 0:
            lost *= min(max(played / float(at_windows.mean()), 0.0), 1.0)
    if lost < at.LEAST_SHARE * case.step_ms:
        return None
    longest = np.where(np.isfinite(tokens), tokens, -np.inf).argmax(axis=1)[known]
    times = np.bincount(longest, minlength=len(layout.ranks))
    if times.max() > at.ROTATING_ONE * times.sum():
        return None  # one rank's own: it is judged as a rank
    ranks = np.argsort(-times, kind="stable")[: min(at.MAX_STRAGGLERS, int((times > 0).sum()))]
    return Straggler(
        kind="rotating",
        ranks=tuple(layout.ranks[ranks].tolist()),
        hosts=tuple(sorted({layout.hosts[host] for host in layout.host[ranks]})),
        cause="sequence_length",
        cause_source="tokens of every step, and by how much more of them make a rank's work longer",
        cost_ms=lost,
        excess_ms=lost,
        share_of_steps=1.0,
        peers=layout.peers_text,
        evidence=(
            Evidence(
                "most tokens of a rank by their mean",
                round(float((most[known] / mean[known]).mean()), 3),
                "ratio",
                STEPS_SOURCE,
            ),
        ),
    )  # fmt: skip


def _of_pipelines(case: Case, pipes: Pipelines) -> Straggler | None:
    found = uneven_batches(pipes, case.step_ms)
    if found is None:
        return None
    layout = case.layout
    first = np.flatnonzero(layout.pp == 0)
    stages = pipes.work.shape[2]
    by_replica = {int(pipes.worker[rank]) // stages: int(rank) for rank in first[::-1]}
    ranks = np.array([by_replica[row] for row in found.replicas.tolist() if row in by_replica][: at.MAX_STRAGGLERS])
    source = "microbatches that are long on all stages, in both directions: what they hold makes them so"
    lost, times = found.cost_ms, _whole_run(case, pipes, found.by_replica)
    if times is not None:
        lost *= times
        source += "; tokens of every step say how much they differ along the run"
    return Straggler(
        kind="rotating",
        ranks=tuple(layout.ranks[ranks].tolist()),
        hosts=tuple(sorted({layout.hosts[host] for host in layout.host[ranks]})),
        cause="sequence_length",
        cause_source=source,
        cost_ms=lost,
        excess_ms=lost,
        share_of_steps=1.0,
        peers="the other microbatches of the same steps",
        evidence=(
            Evidence("longest replica's batches by their mean", round(found.longest, 3), "ratio", "work of windows"),
            Evidence("part of the variance of passes that batches explain", round(found.explained, 3), "share",
                     "work of windows"),
        ),
    )  # fmt: skip


def _whole_run(case: Case, pipes: Pipelines, factors: Floats) -> float | None:
    """How much more tokens differ between replicas in all steps than in those of windows, by the spread of a step;
    None where tokens do not tell how long a replica's passes are."""
    steps = case.steps
    if steps.tokens is None:
        return None
    replica = pipes.worker // pipes.work.shape[2]
    first = np.array([np.flatnonzero(replica == row)[0] for row in range(factors.shape[1])])
    tokens = steps.tokens[:, first].astype(np.float64)
    known = np.isfinite(tokens).all(axis=1)
    row = np.searchsorted(steps.numbers, pipes.numbers)
    row = row[(row < len(steps.numbers)) & np.isin(pipes.numbers, steps.numbers)]
    kept = np.isin(pipes.numbers, steps.numbers[known])
    if kept.sum() < at.MIN_WINDOWED or len(row) != len(pipes.numbers):
        return None
    x, y = tokens[row[kept]].ravel(), factors[kept].ravel()
    if x.std() <= 0 or y.std() <= 0 or float(np.corrcoef(x, y)[0, 1]) ** 2 < at.TOKENS_FIT:
        return None
    spread = tokens.max(axis=1) - tokens.mean(axis=1)
    rows = np.intersect1d(case.rows, np.flatnonzero(known))
    in_windows = float(spread[row[kept]].mean())
    return float(spread[rows].mean()) / in_windows if len(rows) and in_windows > 0 else None
