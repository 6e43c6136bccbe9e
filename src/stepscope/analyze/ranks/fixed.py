"""Ranks and hosts that keep being late: by every step of theirs or by windows, with cause and cost."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from msgspec import Struct

from stepscope.analyze.ranks import cost
from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.case import Case, cells_of
from stepscope.analyze.ranks.causes import Parts, cause_of
from stepscope.analyze.ranks.own_work import Matrix, beyond
from stepscope.analyze.ranks.stragglers import late_at_times, late_ranks, lateness, with_host_mates
from stepscope.analyze.ranks.tokens import ms_per_token
from stepscope.model.counted import things
from stepscope.model.findings import Evidence
from stepscope.model.ranks import Straggler
from stepscope.tables.arrays import Int64


class Draft(Struct, frozen=True):
    """A straggler of fixed ranks before its cause is known."""

    part: Int64
    excess_ms: float
    in_windows: bool  # windows show more of it than every step does
    there_ms: float = 0.0  # `excess_ms` in windows alone


def drafts(case: Case, explained: Collection[int]) -> list[Draft]:
    """Those that are late, but for the ranks (positions) in `explained`."""
    on_host = lateness(case.host, case.step_ms)
    late = late_ranks(case.host, on_host, case.step_ms)
    mean = np.nan_to_num(on_host.mean)
    with_device, there = np.zeros(0, np.int64), mean
    if case.device is not None and len(case.device):
        windows = lateness(case.device, case.step_ms)
        seen = late_ranks(case.device, windows, case.step_ms)
        # the device's part comes on top of what every step shows of the host
        shown = np.nan_to_num(lateness(case.host_in_windows, case.step_ms).mean)
        more = np.nan_to_num(windows.mean) - shown
        sure = more >= np.maximum(at.LEAST_STEADY_SHARE / 2 * case.step_ms, at.ERRORS * windows.error)
        sure |= late_at_times(case.device - np.nan_to_num(case.host_in_windows), case.step_ms, ~sure)
        with_device = np.union1d(np.setdiff1d(seen, late), np.intersect1d(np.union1d(seen, late), np.flatnonzero(sure)))
        there = np.nan_to_num(windows.mean)
        mean[with_device] = np.maximum(mean + more, np.nan_to_num(windows.mean))[with_device]
    both = np.setdiff1d(np.union1d(late, with_device), np.array(sorted(explained), np.int64)).astype(np.int64)
    if not len(both):
        return []
    found = []
    for part in with_host_mates(both, mean, case.layout):
        if _hidden(case, part) < 1 and not _waits_for_absent(case, part, float(np.mean(mean[part]))):
            in_windows = bool(np.isin(part, with_device).any())
            found.append(Draft(part, float(np.mean(mean[part])), in_windows, float(np.mean(there[part]))))
    return found


def _waits_for_absent(case: Case, part: Int64, excess_ms: float) -> bool:
    """Whether these ranks take longer because all that were recorded of their group wait: one that is not is late."""
    return any(
        bool(np.isin(part, group.members).all()) and group.excess_ms >= at.PART_OF_EXCESS * excess_ms
        for group in case.awaited
    )


def _hidden(case: Case, part: Int64) -> float:
    """1 where windows show that these ranks come to collectives no later for it: what they do is hidden, else 0."""
    # calls of the host hide behind no device's queue, and end late where it has no core for their threads
    if case.arrivals is None or not case.arrivals.on_device or case.layout.waits_inside:
        return 0.0
    at_windows = np.flatnonzero(np.isin(case.steps.numbers, case.arrivals.numbers))
    row = np.searchsorted(case.arrivals.numbers, case.steps.numbers[at_windows])
    if not len(row):
        return 0.0
    excess = beyond(case.steps.own[at_windows], case.layout, part)
    if case.device is not None:
        in_windows = np.flatnonzero(np.isin(case.steps.windows, at_windows))
        if len(in_windows) == len(at_windows):
            excess = case.device[in_windows][:, part]
    own = float(np.nanmean(excess)) if np.isfinite(excess).any() else 0.0
    late = case.arrivals.late[row][:, part]
    if own < at.LEAST_STEADY_SHARE * case.step_ms or not np.isfinite(late).any():
        return 0.0
    return 1.0 if float(np.nanmean(late)) < at.HIDDEN * own else 0.0


def straggler(case: Case, draft: Draft, late: Int64) -> Straggler:
    part = draft.part
    excess = case.device if draft.in_windows and case.device is not None else case.host
    cause = cause_of(part, _parts(case, part, draft), case.recorded, case.layout, case.step_ms)
    with np.errstate(all="ignore"):
        last = np.where(np.isfinite(excess), excess, -np.inf).max(axis=1)
        came_last = np.where(np.isfinite(excess[:, part]), excess[:, part], -np.inf).max(axis=1) >= last
    source = f"{things(len(excess), 'step')} of windows" if draft.in_windows else things(len(excess), "steady step")
    return Straggler(
        kind="host" if len(part) > 1 else "rank",
        ranks=tuple(case.layout.ranks[part].tolist()),
        hosts=tuple(sorted({case.layout.hosts[host] for host in case.layout.host[part]})),
        cause=cause.name,
        cause_source=cause.source,
        cost_ms=_lost_ms(case, draft, late),
        excess_ms=draft.excess_ms,
        share_of_steps=float(came_last.mean()),
        peers=case.layout.peers_text,
        place=cause.place,
        evidence=(
            Evidence("own work beyond the peers'", round(draft.excess_ms, 3), "ms per step", source),
            *cause.evidence,
        ),
    )


def _lost_ms(case: Case, draft: Draft, late: Int64) -> float:
    part = draft.part
    played = None if case.pipes is None else case.pipes.without(part, late)
    if played is None and case.passes and len(part) > 1:  # of one rank, what it does longer adds up
        played = cost.of_ranks_by_passes(case.passes, part, late)
    if draft.in_windows and case.device is not None:
        lost = cost.of_ranks(case.device, part, late) if played is None else played
        own_ms = float(np.nanmean(case.device[:, part]))
        if len(part) == 1 and 0 < own_ms < lost.mean():
            lost = lost * (own_ms / lost.mean())  # no step is longer by more than what one rank does beyond the others
        walls = case.steps.wall
        of_run = cost.along_the_run(lost, walls[played_rows(case, len(lost))], walls[case.rows])
        if of_run is not None:
            return of_run
        # what every step tells of the host beside what the windows do of it
        return float(lost.mean()) * (draft.excess_ms / draft.there_ms if draft.there_ms > 0 else 1.0)
    lost_ms = float(cost.of_ranks(case.host, part, late).mean())
    if case.device is None or (played is None and case.steps.waits_inside):
        return lost_ms
    shown = cost.of_ranks(case.host_in_windows, part, late)
    most = at.MOST_BY_PASSES if case.steps.waits_inside and len(part) > 1 else 1.0
    played = cost.of_ranks(case.device, part, late) if played is None else played
    return lost_ms * cost.in_earnest(shown, played, most)


def played_rows(case: Case, steps: int) -> Int64:
    """Positions of the steps of windows of which a loss was made: of all, or of those that pipelines are played for."""
    if case.pipes is not None and len(case.pipes.numbers) == steps != len(case.steps.windows):
        return np.flatnonzero(np.isin(case.steps.numbers, case.pipes.numbers))
    return case.steps.windows


def _parts(case: Case, part: Int64, draft: Draft) -> Parts:
    """What these ranks do longer than their peers, by what was recorded, in a mean step."""

    def mean(values: Matrix | None) -> float | None:
        if values is None or not len(values):
            return None
        more = beyond(values, case.layout, part)
        return float(np.nanmean(more)) if np.isfinite(more).any() else None

    steps, rows = case.steps, case.rows
    phases = {name: mean(values[rows]) or 0.0 for name, values in steps.phases.items()}
    gc = None if steps.gc is None else mean(steps.gc[rows])
    compute = mean(steps.compute)
    if gc and not case.layout.waits_inside:
        # collections run inside the phases; which is not known: those that are beyond share them
        more = {name: value for name, value in phases.items() if value > 0}
        total = sum(more.values())
        phases.update({name: value - min(gc, total) * value / total for name, value in more.items()})
    retries = 0.0
    events = case.recorded.events("retry")
    if events.height:
        _, column, ms = cells_of(events, steps.numbers[rows])
        retries = float(ms[np.isin(column, part)].sum() / len(rows) / len(part))
    per_token = ms_per_token(case)
    tokens = None
    if per_token is not None and steps.tokens is not None:
        more_tokens = mean(steps.tokens[rows])
        tokens = None if more_tokens is None else more_tokens * per_token
    if case.has_pieces:  # what windows show beyond all that is the host's, inside passes
        rest = draft.excess_ms - sum(phases.values()) - (compute or 0.0) - (gc or 0.0) - retries
        phases["passes"] = max(rest, 0.0)
    return Parts(phases, gc, compute, retries, tokens, draft.excess_ms, steps.loader_alone(part))
