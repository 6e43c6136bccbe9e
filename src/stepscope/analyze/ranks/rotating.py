"""What makes another rank late in each step: spikes of one kind, batches of different lengths, unknown work."""

from __future__ import annotations

import numpy as np

from stepscope.analyze.ranks import lateness as by
from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.case import STEPS_SOURCE, Case
from stepscope.analyze.ranks.causes import line_of, ms_per_token, of_data
from stepscope.analyze.ranks.lateness import Spikes, spikes
from stepscope.analyze.ranks.own_work import Matrix, beyond
from stepscope.analyze.ranks.pipeline import Pipelines
from stepscope.model.findings import Evidence, Place
from stepscope.model.ranks import Straggler
from stepscope.tables.arrays import Floats, Int64

# ------------------------------------------------------------------------------------------------------------- spikes


def rotating_causes(case: Case, late: Int64) -> list[Straggler]:
    """Parts of the work that make another rank late in each step; `late` are late as such."""
    steps, layout, found = case.steps, case.layout, list[Straggler]()
    taken = np.zeros(0, np.int64)  # cells that are explained: collections lie inside the phases, so they come first
    for name, values in (("gc", steps.gc), *steps.phases.items()):
        if values is None:
            continue
        mine = spikes(name, values[case.rows], layout, at.LEAST_SHARE * case.step_ms / 2)
        key = mine.row * len(layout.ranks) + mine.column
        kept = ~np.isin(mine.column, late) & np.isfinite(mine.excess) & ~np.isin(key, taken)
        mine, key = Spikes(mine.row[kept], mine.column[kept], mine.excess[kept]), key[kept]
        times = np.bincount(mine.column, minlength=len(layout.ranks))
        several = (times > 0).sum() >= at.ROTATING_RANKS and times.max() <= at.ROTATING_ONE * times.sum()
        share = len(np.unique(mine.row)) / len(case.rows)
        if several and share >= at.ROTATING_STEPS:
            taken = np.union1d(taken, key)
            found += _of_spikes(case, name, mine, values, times, share)
    return found


def _of_spikes(case: Case, name: str, mine: Spikes, values: Matrix, times: Int64, share: float) -> list[Straggler]:
    """What these cells cost and why, where that is enough. `values`: of all steps; `times`: that each rank was late."""
    lost = _lost_to_spikes(case, name, mine, values)
    # those of which nothing was recorded are late as often as the others; where several are, all wait for the last
    absent, often = len(case.reduced.missing or ()), len(mine.row) / len(case.rows)
    lost *= float(np.expm1(-often * (1 + absent / len(case.layout.ranks))) / np.expm1(-often))
    if lost < at.LEAST_SHARE * case.step_ms:
        return []
    ranks = np.argsort(-times, kind="stable")[: int((times > 0).sum())]  # most often first
    part, excess_ms = ranks[:4], lost / len(case.layout.ranks)
    place: Place | None = None
    if name == "gc":
        cause, source = "gc", "Python's collections, recorded in every step"
    elif name == "data_wait":
        cause, source, place = of_data(case, part, excess_ms)
    else:
        line = line_of(case, part, name, excess_ms)
        cause, place = "unknown" if line.place is None or line.in_layers else "python", line.place
        source = f"{name} takes longer on the host; {line.source}"
    return [
        case.straggler(
            "rotating", ranks[: at.MAX_STRAGGLERS], cause, source, lost,
            excess_ms=float(np.median(mine.excess)),
            share_of_steps=share,
            place=place,
            evidence=(
                Evidence("ranks that were late", len(ranks), "count", STEPS_SOURCE),
                Evidence("times a rank was late", len(mine.row), "count", STEPS_SOURCE),
            ),
        )
    ]  # fmt: skip


def _lost_to_spikes(case: Case, name: str, mine: Spikes, values: Matrix) -> float:
    lost = float(by.lost_by_cells(_with(case.host, mine), mine).mean())
    if case.device is None or (case.pipes is None and not case.passes and case.steps.waits_inside):
        return lost
    # what of it is lost in earnest windows tell, where devices and all waits are known
    there = spikes(name, values[case.steps.windows], case.layout, at.LEAST_SHARE * case.step_ms / 2)
    most = at.MOST_BY_PASSES
    if case.pipes is not None:
        numbers = case.steps.numbers[case.steps.windows][there.row]
        played = case.pipes.without_waits(numbers, there.column, there.excess)
    elif case.passes:
        played = by.lost_by_cells_in_passes(case.passes, there)
    else:
        played, most = by.lost_by_cells(_with(case.device, there), there), 1.0
    if name == "gc" and most > 1:  # it falls into phases in which ranks wait: their lengths tell more
        walls = case.steps.wall
        of_run = by.along_the_run(played, walls[case.played_rows(len(played))], walls[case.rows])
        if of_run:
            return of_run
    shown = by.lost_by_cells(_with(case.host_in_windows, there), there)
    return lost * by.in_earnest(shown, played, most) * _arrived_late(case, there)


def _with(excess: Matrix, cells: Spikes) -> Matrix:
    """A collection delays in whatever phase it falls into, also in one of exchange."""
    more: Matrix = excess.copy()
    more[cells.row, cells.column] = np.fmax(more[cells.row, cells.column], cells.excess)
    return more


def _arrived_late(case: Case, cells: Spikes) -> float:
    """Which part of these spikes (rows: windows) makes a rank come later to its collectives; 1 where that is not known.

    A host that launches ahead of its device may collect while the device still has work: nobody waits for it.
    """
    if case.arrivals is None or case.steps.waits_inside or len(cells.row) < at.MIN_WINDOWED:
        return 1.0
    steps, row = np.unique(case.steps.numbers[case.steps.windows][cells.row], return_inverse=True)
    groups = list(case.layout.groups)
    # at the end of a step it delays the next one's calls
    late = np.fmax(*(case.arrivals.of_groups(groups, steps + behind)[row, cells.column] for behind in (0, 1)))
    known = np.isfinite(late)
    # who comes late to one call comes late to those that are queued behind it, too: no more than the spike is counted
    shown, whole = np.clip(late[known], 0, cells.excess[known]).sum(), cells.excess[known].sum()
    return float(shown / whole) if whole > 0 else 1.0


# ------------------------------------------------------------------------------------------------ work of unknown kind


def rotating_work(case: Case, late: Int64) -> list[Straggler]:
    """Work in windows that makes another rank last in each step, where nothing else that was recorded tells why."""
    if case.device is None or case.layout.stages > 1:
        return []
    # where ranks wait in each pass, what the host does before it counts whoever does it
    own = np.sum(case.passes, axis=0) if case.passes else case.device
    excess = np.delete(own, late, axis=1)
    ranks = np.delete(np.arange(case.device.shape[1]), late)
    known = np.isfinite(excess).any(axis=1)
    excess = excess[known]
    if len(excess) < at.MIN_STEPS or excess.shape[1] < at.ROTATING_RANKS:
        return []
    played = [np.delete(values, late, axis=1)[known] for values in case.passes] if case.passes else [excess]
    # by what a rank is slower in all steps it is no other one each time
    excess, *played = (values - np.nan_to_num(np.nanmedian(values, axis=0)) for values in (excess, *played))
    walls = case.steps.wall
    by_step = np.sum([by.lost_by_differing(values) for values in played], axis=0)
    of_run = by.along_the_run(by_step, walls[case.steps.windows[known]], walls[case.rows])
    lost = float(by_step.mean()) if of_run is None else of_run
    last = np.bincount(np.nan_to_num(excess, nan=-np.inf).argmax(axis=1), minlength=excess.shape[1])
    # a rank that is last far more often than by chance is so itself, if only in a part of the windows
    if lost < at.ROTATING_WORK * case.step_ms or last.max() > max(3 / len(last), at.ROTATING_MOST) * last.sum():
        return []
    order = ranks[np.argsort(-last, kind="stable")[: min(at.MAX_STRAGGLERS, int((last > 0).sum()))]]
    source = "own work in windows differs from step to step; no tokens and no collections explain it"
    evidence = (Evidence("ranks that were last", int((last > 0).sum()), "count", "steps of windows"),)
    return [case.straggler("rotating", order, "unknown", source, lost, evidence=evidence)]


# ------------------------------------------------------------------------------------------------------------- batches


def sequence_length(case: Case, late: Int64) -> list[Straggler]:
    """Batches of different lengths: the longest in a step makes all wait."""
    steps = case.steps
    if case.pipes is not None:
        return _uneven_microbatches(case, case.pipes)
    per_token = ms_per_token(case)
    if steps.tokens is None or per_token is None:
        return []
    tokens = steps.tokens[case.rows].copy()
    tokens[:, late] = np.nan
    mean = np.nanmean(np.where(np.isfinite(tokens), tokens, np.nan), axis=1)
    most = np.where(np.isfinite(tokens), tokens, -np.inf).max(axis=1)
    known = np.isfinite(mean) & np.isfinite(most) & (mean > 0)
    if known.sum() < at.MIN_STEPS or float((most[known] / mean[known]).mean()) < 1 + at.TOKENS_SPREAD:
        return []
    lost = float((most[known] - mean[known]).mean()) * per_token
    if case.device is not None and len(case.device):
        # what of it is the maximum of other noise, too, windows tell: played with and without what tokens explain
        more = beyond(steps.tokens[steps.windows], case.layout) * np.float32(per_token)
        played, at_windows = by.latest(case.device) - by.latest(case.device - more), by.latest(more)
        lost *= by.in_earnest(at_windows, played)
    longest = np.where(np.isfinite(tokens), tokens, -np.inf).argmax(axis=1)[known]
    times = np.bincount(longest, minlength=len(case.layout.ranks))
    if lost < at.LEAST_SHARE * case.step_ms or times.max() > at.ROTATING_ONE * times.sum():
        return []  # too little, or one rank's own: it is judged as a rank
    ranks = np.argsort(-times, kind="stable")[: min(at.MAX_STRAGGLERS, int((times > 0).sum()))]
    source = "tokens of every step, and by how much more of them make a rank's work longer"
    ratio = round(float((most[known] / mean[known]).mean()), 3)
    evidence = (Evidence("most tokens of a rank by their mean", ratio, "ratio", STEPS_SOURCE),)
    return [case.straggler("rotating", ranks, "sequence_length", source, lost, evidence=evidence)]


def _uneven_microbatches(case: Case, pipes: Pipelines) -> list[Straggler]:
    """Microbatches that are long on all stages, forward and back: as only their content makes them."""
    factors = pipes.batch_factors()
    if factors is None or len(factors) < at.MIN_WINDOWED:
        return []
    shorter, explained = pipes.without_uneven(factors)
    lost = float(shorter.mean())
    if lost < at.LEAST_SHARE * case.step_ms or explained < at.TOKENS_FIT:
        return []
    by_replica: Floats = factors.mean(axis=2)  # how long its batches are, by step; 1 is usual
    times = np.bincount(by_replica.argmax(axis=1), minlength=by_replica.shape[1])
    if len(times) > 2 and times.max() > at.ROTATING_ONE * times.sum():
        return []  # one replica's own
    replicas = np.argsort(-times, kind="stable")[: int((times > 0).sum())]
    firsts = [np.flatnonzero((pipes.worker // case.layout.stages == row) & (case.layout.pp == 0)) for row in replicas]
    ranks = np.array([first[0] for first in firsts if len(first)][: at.MAX_STRAGGLERS], np.int64)
    source = "microbatches that are long on all stages, in both directions: what they hold makes them so"
    in_run = _tokens_in_run(case, pipes, by_replica)
    if in_run is not None:
        lost *= in_run
        source += "; tokens of every step say how much they differ along the run"
    longest, windows = float((by_replica.max(axis=1) / by_replica.mean(axis=1)).mean()), "work of windows"
    return [
        case.straggler(
            "rotating", ranks, "sequence_length", source, lost,
            peers="the other microbatches of the same steps",
            evidence=(
                Evidence("longest replica's batches by their mean", round(longest, 3), "ratio", windows),
                Evidence("part of the variance of passes that batches explain", round(explained, 3), "share", windows),
            ),
        )
    ]  # fmt: skip


def _tokens_in_run(case: Case, pipes: Pipelines, by_replica: Floats) -> float | None:
    """How much more tokens differ between replicas in all steps than in those of windows, by the spread of a step;
    None where tokens do not tell how long a replica's passes are."""
    steps = case.steps
    if steps.tokens is None:
        return None
    replica = pipes.worker // case.layout.stages
    first = np.array([np.flatnonzero(replica == row)[0] for row in range(by_replica.shape[1])])
    tokens = steps.tokens[:, first].astype(np.float64)
    known = np.isfinite(tokens).all(axis=1)
    kept = np.isin(pipes.numbers, steps.numbers[known])
    if kept.sum() < at.MIN_WINDOWED or not np.isin(pipes.numbers, steps.numbers).all():
        return None
    row = np.searchsorted(steps.numbers, pipes.numbers)[kept]
    x, y = tokens[row].ravel(), by_replica[kept].ravel()
    if x.std() <= 0 or y.std() <= 0 or float(np.corrcoef(x, y)[0, 1]) ** 2 < at.TOKENS_FIT:
        return None
    spread = tokens.max(axis=1) - tokens.mean(axis=1)
    rows = np.intersect1d(case.rows, np.flatnonzero(known))
    in_windows = float(spread[row].mean())
    return float(spread[rows].mean()) / in_windows if len(rows) and in_windows > 0 else None
