"""The steps of several ranks side by side: whose own work is longest, and whether the others wait for it.

Ranks that exchange gradients take their steps together: one that works longer waits less, and the others wait for it
in the phases of the exchange. Only durations are compared, so that clocks of different hosts do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.steps import with_all_phases
from stepscope.engine.step_labels import STEADY, LabelledSteps
from stepscope.model import PHASES, Site
from stepscope.model.ranks import RanksFacts, RankWork
from stepscope.tables.arrays import Floats
from stepscope.tables.phases import DATA_WAIT

MIN_STEPS = 8  # two for each quarter of the run; fewer tell a slow rank from a slow moment by luck
QUARTERS = 4
ALSO_SLOW = 0.5  # of the slowest rank's excess: a rank with as much has the same loss
MIN_PHASE = 0.02  # of the loop's samples: a phase with so many inside torch.distributed is one of the exchange
_COLUMNS = tuple(f"{phase}_ns" for phase in PHASES)
_ASSUMED = ("backward", "optimizer", "other")


def facts(context: Context, labelled: LabelledSteps, sites: Sequence[Site]) -> RanksFacts | None:
    """None for one rank, or where too few steady steps are known of every rank, with their phases."""
    frame, ranks = _together(labelled)
    if frame is None:
        return None
    exchange, source = _exchange(context, sites)
    inside = np.array([phase in exchange for phase in PHASES])
    # (phases, ranks, steps), ms
    phases = np.stack([_matrix(frame, column, len(ranks)) for column in _COLUMNS])
    own, shared = phases[~inside].sum(axis=0), phases[inside].sum(axis=0)
    slowest = int(own.mean(axis=1).argmax())
    others = np.arange(len(ranks)) != slowest
    excess = own[slowest] - np.median(own[others], axis=0)
    waited = np.median(shared[others], axis=0) - shared[slowest]
    samples = _matrix(frame, "samples", len(ranks), 1.0)
    by_phase = phases[:, slowest] - np.median(phases[:, others], axis=1)
    return RanksFacts(
        ranks=tuple(
            RankWork(
                rank=rank,
                wall_ms=float(phases[:, row].sum(axis=0).mean()),
                own_ms=float(own[row].mean()),
                exchange_ms=float(shared[row].mean()),
                phases_ms=dict(zip(PHASES, phases[:, row].mean(axis=1).tolist(), strict=True)),
                samples=None if np.isnan(samples[row]).any() else float(samples[row].mean()),
            )
            for row, rank in enumerate(ranks)
        ),
        steps=own.shape[1],
        exchange=exchange,
        exchange_source=source,
        slowest=ranks[slowest],
        excess_ms=float(excess.mean()),
        least_excess_ms=float(min(part.mean() for part in np.array_split(excess, QUARTERS))),
        waited_ms=float(waited.mean()),
        slowest_share=float((own.argmax(axis=0) == slowest).mean()),
        excess_by_phase_ms={
            phase: float(by_phase[row].mean()) for row, phase in enumerate(PHASES) if phase not in exchange
        },
        most_excess_ms=_most(excess, own[slowest] + shared[slowest]),
        slow=tuple(rank for rank, late in zip(ranks, _slow(own.mean(axis=1), slowest), strict=True) if late),
        longest_own_ms=float(own.max(axis=0).mean()),
    )


def _most(excess: Floats, wall: Floats) -> float:
    """The excess in the quarter of the run in which it was the largest part of the step, of the mean step; ms."""
    quarters = zip(np.array_split(excess, QUARTERS), np.array_split(wall, QUARTERS), strict=True)
    return float(max(part.mean() / max(step.mean(), 1e-9) for part, step in quarters) * wall.mean())


def _slow(own: Floats, slowest: int) -> list[bool]:
    """Whether each rank shares what makes the slowest one late, by their mean own work."""
    usual = float(np.median(np.delete(own, slowest)))
    late: list[bool] = (own - usual >= ALSO_SLOW * max(own[slowest] - usual, 1e-9)).tolist()
    return late


def _together(labelled: LabelledSteps) -> tuple[pl.DataFrame | None, list[int]]:
    """Steps that are steady on all ranks, by rank and number: rows of `n` equal numbers, one per rank, in order.

    A rank's evaluation steps do not count, so the n-th training step is the n-th of every rank. Of a rank that was
    started again the longest part counts.
    """
    train = labelled.frame.filter((pl.col("kind") == "train") & pl.col("rank").is_not_null())
    longest = (
        train.group_by("rank", "process")
        .len()
        .sort(["len", "process"], descending=[True, False])
        .unique("rank", keep="first", maintain_order=True)
    )
    train = train.join(longest.select("process"), on="process", how="semi").sort("rank", "step")
    train = train.with_columns(n=pl.int_range(pl.len()).over("rank"))
    ranks: list[int] = train["rank"].unique().sort().to_list()
    train = with_all_phases(train)
    usable = (pl.col("reason") == STEADY) & pl.all_horizontal(pl.col(column).is_not_null() for column in _COLUMNS)
    steady = train.filter(usable)
    everywhere = steady.group_by("n").len().filter(pl.col("len") == len(ranks)).select("n")
    if len(ranks) < 2 or everywhere.height < MIN_STEPS:
        return None, ranks
    return steady.join(everywhere, on="n", how="semi").sort("rank", "n"), ranks


def _matrix(frame: pl.DataFrame, column: str, ranks: int, scale: float = 1e-6) -> Floats:
    """A column as (ranks, steps); what is missing is NaN."""
    values: Floats = frame[column].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    return values.reshape(ranks, -1) * scale


def _exchange(context: Context, sites: Sequence[Site]) -> tuple[tuple[str, ...], str]:
    """The phases in which ranks wait for each other, and how that is known."""
    found = _sampled(context)
    source = "sampled stacks inside torch.distributed"
    if any(site.what == "DistributedDataParallel" for site in sites):
        source = f"DistributedDataParallel, and {source}" if found else "DistributedDataParallel"
        found.add("backward")
    if not found:
        return _ASSUMED, "assumed: gradients are exchanged after the forward pass"
    return tuple(phase for phase in PHASES if phase in found), source


def _sampled(context: Context) -> set[str]:
    """Phases in which a notable part of the loop's samples stands in torch.distributed.

    Not the data wait: what a loader does there is its rank's own affair.
    """
    if context.sampled is None:
        return set()
    rows = context.sampled.rank_steps()
    total = int(rows["samples"].sum())
    tree = context.calls
    distributed = np.array([f"/{frame[1]}".find("/torch/distributed/") >= 0 for frame in tree.frames] + [False])
    node = rows["node"].fill_null(-1).to_numpy()
    leaf = np.append(tree.frame, -1)[node]
    within = rows.filter(pl.Series(distributed[leaf])).group_by("phase").agg(pl.col("samples").sum())
    return {
        str(phase) for phase, count in within.iter_rows() if phase != DATA_WAIT and count >= MIN_PHASE * max(total, 1)
    }
