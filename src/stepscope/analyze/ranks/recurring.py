"""What comes again and again, to other ranks or to all: checkpoints, clocks of devices that drop for a time, steps that
are slow for all, spikes of one kind, batches of different lengths, work of no known kind."""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.analyze.ranks import lateness as by
from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.case import STEPS_SOURCE, Case, events
from stepscope.analyze.ranks.fixed import line_of, ms_per_token, of_data
from stepscope.analyze.ranks.lateness import Spikes, spikes
from stepscope.analyze.ranks.own_work import Matrix, beyond, cells, middle
from stepscope.analyze.ranks.pipeline import Pipelines
from stepscope.model.findings import Evidence, Place
from stepscope.model.ranks import Straggler
from stepscope.tables.arrays import Floats, Int64
from stepscope.tables.reduced import BUCKET_NS

_BUCKET_US = BUCKET_NS // 1000
_MAX_BUCKETS = 2**16  # a week; more is damage


def checkpoints(case: Case) -> list[Straggler]:
    """Ranks that write checkpoints while the others wait: seldom and long, so their events tell it."""
    told = events(case.reduced, "checkpoint")
    kept, row, column = cells(told, case.steps.numbers[case.rows], case.layout)
    told, times = told.filter(pl.Series(kept)), len(np.unique(row))
    if times < at.GLOBAL_EVENTS:
        return []
    ms = told["ms"].to_numpy()
    longest = np.zeros(len(case.rows))
    np.maximum.at(longest, row, ms)
    lost = float(longest.mean())  # all ranks have come when the last has written
    if lost < at.LEAST_SHARE * case.step_ms:
        return []
    writing = np.bincount(column, weights=ms, minlength=len(case.layout.ranks))
    part = np.flatnonzero(writing >= at.HOST_PART * writing.max())
    first = told.filter(pl.col("file").is_not_null() & pl.col("line").is_not_null()).head(1)
    return [
        case.straggler(
            "global" if len(part) > len(case.layout.ranks) / 2 else "rank", part,
            "checkpoint", "checkpoints that were written, with their lengths", lost,
            excess_ms=float(np.median(longest[longest > 0])),
            share_of_steps=float((longest > 0).mean()),
            place=None if first.is_empty() else Place(first["file"][0], first["line"][0], first["function"][0]),
            evidence=(Evidence("checkpoints", times, "count", "events of reduced tables"),),
        )
    ]  # fmt: skip


def throttled(case: Case) -> list[Straggler]:
    """Ranks, or all of a host, whose device's clock is low in a part of the run, in which steps are longer.

    A clock that drops now and then may miss every window; that all steps are longer just while it is low is as good a
    sign.
    """
    begun_us, deficit = _deficits(case)
    layout, steps = case.layout, case.steps
    wall = middle(steps.wall[case.rows]).astype(np.float64)
    bucket = np.nan_to_num((steps.start_us[case.rows] - begun_us) // _BUCKET_US, nan=-1).astype(np.int64)
    inside = (bucket >= 0) & (bucket < len(deficit)) & np.isfinite(wall)
    wall, by_step = wall[inside], deficit[bucket[inside]]
    usual_steps = by_step.max(axis=1, initial=0.0) < at.CLOCK_DROP / 2
    if usual_steps.sum() < at.MIN_STEPS:
        return []
    usual = float(np.median(wall[usual_steps]))
    low = (by_step >= at.CLOCK_DROP) & (by_step >= at.HOST_PART * by_step.max(axis=1, keepdims=True))
    found, source = [], "telemetry, and the steps of the same time"
    for part in by.with_host_mates(np.flatnonzero(low.sum(axis=0) >= at.MIN_STEPS), low.mean(axis=0), layout):
        its = low[:, part].any(axis=1)
        extra, share = float(wall[its].mean()) - usual, float(its.mean())
        spread = float(wall[usual_steps].std() / np.sqrt(usual_steps.sum()) + wall[its].std() / np.sqrt(its.sum()))
        if extra * share < at.LEAST_SHARE * case.step_ms or extra < at.ERRORS * spread:
            continue
        drop = round(float(by_step[its][:, part].mean()), 3)
        found.append(
            case.straggler(
                "host" if len(part) > 1 else "rank", part, "clock",
                "the device's clock in telemetry: while it is below that of the others, all steps are longer",
                extra * share,
                excess_ms=extra,
                share_of_steps=share,
                peers="the devices of all ranks at the same time",
                evidence=(
                    Evidence("device clock below the others' in these steps", drop, "share", source),
                    Evidence("longer steps meanwhile", round(extra, 3), "ms per step", source),
                ),
            )
        )  # fmt: skip
    return found


def _deficits(case: Case) -> tuple[float, Matrix]:
    """When the first bucket begins (us), and by bucket and rank which part of the usual clock is missing."""
    known = pl.col("rank").is_not_null() & pl.col("start_us").is_not_null() & pl.col("mean").is_finite()
    rows = (
        case.reduced.scan("telemetry")
        .filter((pl.col("metric") == "gpu_sm_clock_mhz") & known & (pl.col("mean") > 0))
        .select("host", "rank", "start_us", "mean")
        .collect()
    )
    # readings of a host by the clock of the first: its own steps tell how far both are apart
    ahead = rows["host"].replace_strict(case.steps.ahead_us, default=0.0, return_dtype=pl.Float64).to_numpy()
    at_us, column = rows["start_us"].to_numpy() - ahead, case.layout.at(rows["rank"].cast(pl.Int64).to_numpy())
    kept = (column >= 0) & (np.abs(at_us - np.nanmedian(case.steps.start_us)) < _MAX_BUCKETS * _BUCKET_US)
    if not kept.any():
        return 0.0, np.zeros((0, len(case.layout.ranks)), np.float32)
    first = float(at_us[kept].min())
    number = np.rint((at_us[kept] - first) / _BUCKET_US).astype(np.int64)
    clock = np.full((int(number.max()) + 1, len(case.layout.ranks)), np.nan, np.float32)
    clock[number, column[kept]] = rows["mean"].to_numpy()[kept]
    with np.errstate(all="ignore"):
        return first, np.nan_to_num(1 - clock / middle(clock)[:, None])


def all_together(case: Case, *, saving: bool) -> list[Straggler]:
    """Steps much longer than the usual one, though no rank's own work explains it.

    Args:
        saving: whether checkpoints of single ranks are told already, with the steps in which the others wait for them.
    """
    layout, steps = case.layout, case.steps
    saves = events(case.reduced, "checkpoint").filter(pl.col("rank").is_in(layout.ranks.tolist()))["step"].to_numpy()
    saves = np.union1d(saves, saves + 1)  # the others wait when they next exchange: it may be in the step behind
    judged = ~np.isin(steps.numbers[case.rows], saves) if saving else np.ones(len(case.rows), np.bool_)
    wall, excess = middle(steps.wall[case.rows[judged]]).astype(np.float64), case.host[judged]
    if not len(wall):
        return []
    usual_ms = float(np.nanmedian(wall))
    slow = np.flatnonzero(wall > at.GLOBAL_RATIO * usual_ms)
    own = np.where(np.isfinite(excess[slow]), excess[slow], 0).max(axis=1, initial=-np.inf)
    slow = slow[own < at.GLOBAL_OWN * (wall[slow] - usual_ms)]
    extra = wall[slow] - usual_ms
    # the longest ones count for nothing, as with ranks: what happens once is no habit
    lasting = np.sort(extra)[: -at.SPIKE_BLOCKS] if len(extra) > 2 * at.SPIKE_BLOCKS else extra
    if len(slow) < at.GLOBAL_EVENTS or lasting.sum() / len(wall) < at.LEAST_SHARE * usual_ms:
        return []
    rows, excess_ms = case.rows[judged][slow], float(np.median(extra))
    usual = np.setdiff1d(case.rows, rows)
    data = steps.phases.get("data_wait")
    cause, source, part, absent = "unknown", "", None, len(case.reduced.missing or ())
    if np.isin(steps.numbers[rows], saves).mean() >= at.PART_OF_EXCESS:
        cause, source = "checkpoint", "checkpoints in the same steps"
    elif data is not None and len(usual):
        # of the ranks that load at all: in a pipeline those of its first stage
        more = np.nanmedian(data[rows], axis=0) - np.nanmedian(data[usual[:2000]], axis=0)
        if np.nanmax(more) >= at.PART_OF_EXCESS * excess_ms:
            cause, source = "data", "all wait for data in the same steps: what they share is slow, as their storage"
    if cause == "unknown":
        source = "all ranks are slow in the same steps; nothing that was recorded explains it"
        part, times = _last_in(case, excess_ms)
        if part is not None:
            source = f"it came last to collectives in all {times} of these steps that windows hold; nothing tells why"
        elif absent:
            source += f"; one of {absent} ranks of which nothing was recorded may be late in them"
    said = {"hosts": (), "peers": "the same ranks in other steps"} if part is None else {}
    return [
        case.straggler(
            "global" if part is None else "rank", np.arange(len(layout.ranks)) if part is None else part,
            cause, source, float(extra.sum() / len(wall)),
            excess_ms=excess_ms,
            share_of_steps=len(rows) / len(case.rows),
            evidence=(Evidence("steps in which all were slow", len(rows), "count", STEPS_SOURCE),),
            **said,
        )
    ]  # fmt: skip


def _last_in(case: Case, excess_ms: float) -> tuple[np.ndarray | None, int]:
    """The rank (position) that came last in each slow step that windows hold, and in how many; None where none did, or
    where so do others: all of a worker come late to other groups when one of its slots is."""
    if case.arrivals is None:
        return None, 0
    walls = middle(case.steps.wall)
    slow = walls > at.GLOBAL_RATIO * np.nanmedian(walls[case.rows])
    late = case.arrivals.late[np.isin(case.arrivals.numbers, case.steps.numbers[slow])]
    if len(late) < at.GLOBAL_EVENTS or not np.isfinite(late).any(axis=1).all():
        return None, 0
    ordered = np.sort(np.nan_to_num(late), axis=1)
    alone = (ordered[:, -1] >= at.GLOBAL_OWN * excess_ms) & (ordered[:, -2] <= at.STEADY_LATE * ordered[:, -1])
    last = np.unique(np.nanargmax(late, axis=1))
    return (last if alone.all() and len(last) == 1 else None), len(late)


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
