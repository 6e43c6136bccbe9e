"""Ranks and hosts that keep being late: by every step of theirs or by windows, with cause and cost."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from stepscope.analyze.ranks import lateness as by
from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.case import Case
from stepscope.analyze.ranks.causes import cause_of, ms_per_token
from stepscope.analyze.ranks.own_work import beyond
from stepscope.model.counted import things
from stepscope.model.findings import Evidence
from stepscope.model.ranks import Straggler
from stepscope.tables.arrays import Floats, Int64


def fixed(case: Case, explained: Collection[int]) -> tuple[list[Straggler], Int64]:
    """Those that are late, but for the ranks in `explained`; and the positions of all ranks among them."""
    on_host = by.lateness(case.host, case.step_ms)
    late = by.late_ranks(case.host, on_host, case.step_ms)
    mean = np.nan_to_num(on_host.mean)
    with_device, there = np.zeros(0, np.int64), mean
    if case.device is not None and len(case.device):
        windows = by.lateness(case.device, case.step_ms)
        seen = by.late_ranks(case.device, windows, case.step_ms)
        # the device's part comes on top of what every step shows of the host
        more = np.nan_to_num(windows.mean) - np.nan_to_num(by.lateness(case.host_in_windows, case.step_ms).mean)
        sure = more >= np.maximum(at.LEAST_STEADY_SHARE / 2 * case.step_ms, at.ERRORS * windows.error)
        sure |= by.late_at_times(case.device - np.nan_to_num(case.host_in_windows), case.step_ms, ~sure)
        with_device = np.union1d(np.setdiff1d(seen, late), np.intersect1d(np.union1d(seen, late), np.flatnonzero(sure)))
        there = np.nan_to_num(windows.mean)
        mean[with_device] = np.maximum(mean + more, there)[with_device]
    both = np.setdiff1d(np.union1d(late, with_device), case.layout.at(sorted(explained))).astype(np.int64)
    parts = [
        part
        for part in (by.with_host_mates(both, mean, case.layout) if len(both) else ())
        if not _hidden(case, part) and not _waits_for_absent(case, part, float(mean[part].mean()))
    ]
    all_late = np.unique(np.concatenate([np.zeros(0, np.int64), *parts])).astype(np.int64)
    per_token_ms = ms_per_token(case) if parts else None
    found = []
    for part in parts:
        # whether windows show more of it than every step does
        in_windows = bool(np.isin(part, with_device).any())
        excess_ms, there_ms = float(mean[part].mean()), float(there[part].mean())
        cost_ms = _lost_ms(case, part, all_late, excess_ms / there_ms if there_ms > 0 else 1.0, in_windows=in_windows)
        found.append(_straggler(case, part, excess_ms, cost_ms, per_token_ms, in_windows=in_windows))
    return found, all_late


def _waits_for_absent(case: Case, part: Int64, excess_ms: float) -> bool:
    """Whether these ranks take longer because all that were recorded of their group wait: one that is not is late."""
    return any(
        bool(np.isin(part, group.members).all()) and group.excess_ms >= at.PART_OF_EXCESS * excess_ms
        for group in case.awaited
    )


def _hidden(case: Case, part: Int64) -> bool:
    """Whether windows show that these ranks come to collectives no later for it: what they do is hidden."""
    # calls of the host hide behind no device's queue, and end late where it has no core for their threads
    if case.arrivals is None or not case.arrivals.on_device or case.layout.waits_inside:
        return False
    at_windows = np.flatnonzero(np.isin(case.steps.numbers, case.arrivals.numbers))
    if not len(at_windows):
        return False
    late = case.arrivals.late[np.searchsorted(case.arrivals.numbers, case.steps.numbers[at_windows])][:, part]
    in_windows = np.flatnonzero(np.isin(case.steps.windows, at_windows))
    if case.device is not None and len(in_windows) == len(at_windows):
        excess = case.device[in_windows][:, part]
    else:
        excess = beyond(case.steps.own[at_windows], case.layout, part)
    own = float(np.nanmean(excess)) if np.isfinite(excess).any() else 0.0
    if own < at.LEAST_STEADY_SHARE * case.step_ms or not np.isfinite(late).any():
        return False
    return float(np.nanmean(late)) < at.HIDDEN * own


def _straggler(
    case: Case, part: Int64, excess_ms: float, cost_ms: float, per_token_ms: float | None, *, in_windows: bool
) -> Straggler:
    excess = case.device if in_windows and case.device is not None else case.host
    cause, cause_source, place, evidence = cause_of(case, part, excess_ms, per_token_ms)
    known = np.where(np.isfinite(excess), excess, -np.inf)
    source = f"{things(len(excess), 'step')} of windows" if in_windows else things(len(excess), "steady step")
    return case.straggler(
        "host" if len(part) > 1 else "rank", part, cause, cause_source, cost_ms,
        excess_ms=excess_ms,
        share_of_steps=float((known[:, part].max(axis=1) >= known.max(axis=1)).mean()),
        place=place,
        evidence=(Evidence("own work beyond the peers'", round(excess_ms, 3), "ms per step", source), *evidence),
    )  # fmt: skip


def _lost_ms(case: Case, part: Int64, late: Int64, in_run: float, *, in_windows: bool) -> float:
    """What a mean step would be shorter without it.

    Args:
        late: all that are late, these ranks among them.
        in_run: how much more they are late in a mean step of the run than in one of windows.
        in_windows: whether windows show more of it than every step does.
    """
    played: Floats | None = None if case.pipes is None else case.pipes.without(part, late)
    if played is None and case.passes and len(part) > 1:  # of one rank, what it does longer adds up
        # another one of them may be last in each pass
        played = np.sum([by.lost_by_ranks(excess, part, late) for excess in case.passes], axis=0)
    if in_windows and case.device is not None:
        lost = by.lost_by_ranks(case.device, part, late) if played is None else played
        own_ms = float(np.nanmean(case.device[:, part]))
        if len(part) == 1 and 0 < own_ms < lost.mean():
            lost = lost * (own_ms / lost.mean())  # no step is longer by more than what one rank does beyond the others
        walls = case.steps.wall
        of_run = by.along_the_run(lost, walls[case.played_rows(len(lost))], walls[case.rows])
        # without it, what every step tells of the host beside what the windows do of it
        return float(lost.mean()) * in_run if of_run is None else of_run
    lost_ms = float(by.lost_by_ranks(case.host, part, late).mean())
    if case.device is None or (played is None and case.steps.waits_inside):
        return lost_ms
    shown = by.lost_by_ranks(case.host_in_windows, part, late)
    most = at.MOST_BY_PASSES if case.steps.waits_inside and len(part) > 1 else 1.0
    played = by.lost_by_ranks(case.device, part, late) if played is None else played
    return lost_ms * by.in_earnest(shown, played, most)
