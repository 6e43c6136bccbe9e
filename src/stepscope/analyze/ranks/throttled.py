"""Devices that run at a lower clock than the others for some time, by telemetry, and how long steps last meanwhile.

A clock that drops now and then may miss every window; that all steps are longer just while it is low is as good a sign.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.case import Case
from stepscope.analyze.ranks.own_work import Matrix, middle
from stepscope.analyze.ranks.stragglers import with_host_mates
from stepscope.model.findings import Evidence
from stepscope.model.ranks import Straggler
from stepscope.tables.arrays import Int64
from stepscope.tables.reduced import BUCKET_NS

_BUCKET_US = BUCKET_NS // 1000
_MAX_BUCKETS = 2**16  # a week; more is damage


def throttled(case: Case) -> list[Straggler]:
    """Ranks, or all of a host, whose clock is low in a part of the run, in which steps are longer."""
    deficits = _deficits(case)
    if deficits is None:
        return []
    first, deficit = deficits
    layout, steps = case.layout, case.steps
    wall = middle(steps.wall[case.rows]).astype(np.float64)
    bucket = np.nan_to_num((steps.start_us[case.rows] - first) // _BUCKET_US, nan=-1).astype(np.int64)
    inside = (bucket >= 0) & (bucket < len(deficit)) & np.isfinite(wall)
    wall, by_step = wall[inside], deficit[bucket[inside]]
    usual_steps = by_step.max(axis=1, initial=0.0) < at.CLOCK_DROP / 2
    if usual_steps.sum() < at.MIN_STEPS:
        return []
    usual = float(np.median(wall[usual_steps]))
    low = (by_step >= at.CLOCK_DROP) & (by_step >= at.HOST_PART * by_step.max(axis=1, keepdims=True))
    share = low.mean(axis=0)
    candidates = np.flatnonzero(low.sum(axis=0) >= at.MIN_STEPS)
    found = []
    for part in with_host_mates(candidates, share, layout):
        its = low[:, part].any(axis=1)
        extra = float(wall[its].mean()) - usual
        lost = extra * float(its.mean())
        spread = float(wall[usual_steps].std() / np.sqrt(usual_steps.sum()) + wall[its].std() / np.sqrt(its.sum()))
        if lost < at.LEAST_SHARE * case.step_ms or extra < at.ERRORS * spread:
            continue
        found.append(_told(case, part, lost, extra, float(its.mean()), float(by_step[its][:, part].mean())))
    return found


def _told(case: Case, part: Int64, lost: float, extra: float, share: float, drop: float) -> Straggler:
    layout = case.layout
    source = "telemetry, and the steps of the same time"
    return Straggler(
        kind="host" if len(part) > 1 else "rank",
        ranks=tuple(layout.ranks[part].tolist()),
        hosts=tuple(sorted({layout.hosts[host] for host in layout.host[part]})),
        cause="clock",
        cause_source="the device's clock in telemetry: while it is below that of the others, all steps are longer",
        cost_ms=lost,
        excess_ms=extra,
        share_of_steps=share,
        peers="the devices of all ranks at the same time",
        evidence=(
            Evidence("device clock below the others' in these steps", round(drop, 3), "share", source),
            Evidence("longer steps meanwhile", round(extra, 3), "ms per step", source),
        ),
    )


def _deficits(case: Case) -> tuple[float, Matrix] | None:
    """When the first bucket begins, and by bucket and rank which part of the usual clock is missing."""
    rows = (
        case.reduced.scan("telemetry")
        .filter(
            (pl.col("metric") == "gpu_sm_clock_mhz") & pl.col("rank").is_not_null() & pl.col("mean").is_finite()
            & (pl.col("mean") > 0) & pl.col("start_us").is_not_null()
        )
        .select("host", "rank", "start_us", "mean")
        .collect()
    )  # fmt: skip
    # readings of a host by the clock of the first: its own steps tell how far both are apart
    ahead = rows["host"].replace_strict(case.steps.ahead_us, default=0.0, return_dtype=pl.Float64).to_numpy()
    at_us, column = rows["start_us"].to_numpy() - ahead, case.layout.at(rows["rank"].cast(pl.Int64).to_numpy())
    kept = (column >= 0) & (np.abs(at_us - np.nanmedian(case.steps.start_us)) < _MAX_BUCKETS * _BUCKET_US)
    if not kept.any():
        return None
    first = float(at_us[kept].min())
    number = np.rint((at_us[kept] - first) / _BUCKET_US).astype(np.int64)
    clock = np.full((int(number.max()) + 1, len(case.layout.ranks)), np.nan, np.float32)
    clock[number, column[kept]] = rows["mean"].to_numpy()[kept]
    usual = middle(clock)[:, None]
    with np.errstate(all="ignore"):
        deficit: Matrix = np.nan_to_num(1 - clock / usual)
    return first, deficit
