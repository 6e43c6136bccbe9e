"""What comes again and again: checkpoints, clocks of devices that drop for a time, steps that are slow for all."""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.case import STEPS_SOURCE, Case, events
from stepscope.analyze.ranks.lateness import with_host_mates
from stepscope.analyze.ranks.own_work import Matrix, cells, middle
from stepscope.model.findings import Evidence, Place
from stepscope.model.ranks import Straggler
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
    for part in with_host_mates(np.flatnonzero(low.sum(axis=0) >= at.MIN_STEPS), low.mean(axis=0), layout):
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
