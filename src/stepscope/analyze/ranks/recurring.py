"""What comes again and again to other ranks, or to all: checkpoints, spikes of one kind, steps slow for all."""

from __future__ import annotations

import numpy as np

from stepscope.analyze.ranks import cost
from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.case import Case, cells_of
from stepscope.analyze.ranks.causes import STEPS_SOURCE, of_data
from stepscope.analyze.ranks.fixed import played_rows
from stepscope.analyze.ranks.own_work import Matrix, middle
from stepscope.analyze.ranks.stragglers import Rotating, Spikes, Together, rotating, spikes, together
from stepscope.model.findings import Evidence, Place
from stepscope.model.ranks import Straggler
from stepscope.tables.arrays import Int64


def checkpoints(case: Case) -> list[Straggler]:
    """Ranks that write checkpoints while the others wait: seldom and long, so their events tell it."""
    events = case.recorded.events("checkpoint")
    if events.is_empty():
        return []
    steps = case.steps.numbers[case.rows]
    row, column, ms = cells_of(events, steps)
    if len(np.unique(row)) < at.GLOBAL_EVENTS:
        return []
    longest = np.zeros(len(steps))
    np.maximum.at(longest, row, ms)
    # all ranks have come when the last has written
    lost = float(longest.sum() / len(steps))
    if lost < at.LEAST_SHARE * case.step_ms:
        return []
    writing = np.bincount(column, weights=ms, minlength=len(case.layout.ranks))
    part = np.flatnonzero(writing >= at.HOST_PART * writing.max())
    ranks = case.layout.ranks[part][: at.MAX_STRAGGLERS]
    first = events.filter(events["file"].is_not_null() & events["line"].is_not_null()).head(1)
    place = None if first.is_empty() else Place(first["file"][0], first["line"][0], first["function"][0])
    together_ = len(part) > len(case.layout.ranks) / 2
    return [
        Straggler(
            kind="global" if together_ else "rank",
            ranks=tuple(ranks.tolist()),
            hosts=tuple(sorted({case.layout.hosts[host] for host in case.layout.host[part]}))[: at.MAX_STRAGGLERS],
            cause="checkpoint",
            cause_source="checkpoints that were written, with their lengths",
            cost_ms=lost,
            excess_ms=float(np.median(longest[longest > 0])),
            share_of_steps=float((longest > 0).mean()),
            peers=case.layout.peers_text,
            place=place,
            evidence=(Evidence("checkpoints", len(np.unique(row)), "count", "events of reduced tables"),),
        )
    ]


_CAUSES = {"gc": "gc", "data_wait": "data"}


def rotating_causes(case: Case, late: Int64) -> list[Straggler]:
    steps, rows, layout = case.steps, case.rows, case.layout
    parts: list[tuple[str, Matrix]] = [] if steps.gc is None else [("gc", steps.gc[rows])]
    parts += [(name, values[rows]) for name, values in steps.phases.items()]
    found = []
    for one in rotating(parts, layout, late, case.step_ms):
        made = _of_spikes(case, one)
        if made is not None:
            found.append(made)
    return found


def _of_spikes(case: Case, one: Rotating) -> Straggler | None:
    layout = case.layout
    lost = float(cost.of_cells(_with(case.host, one.spikes), one.spikes).mean())
    if case.device is not None and (case.pipes is not None or case.passes or not case.steps.waits_inside):
        values = case.steps.gc if one.component == "gc" else case.steps.phases[one.component]
        assert values is not None
        cells = spikes(one.component, values[case.steps.windows], layout, at.LEAST_SHARE * case.step_ms / 2)
        shown = cost.of_cells(_with(case.host_in_windows, cells), cells)
        most = 1.0
        if case.pipes is not None:
            numbers = case.steps.numbers[case.steps.windows][cells.row]
            played, most = case.pipes.without_waits(numbers, cells.column, cells.excess), at.MOST_BY_PASSES
        elif case.passes:
            played, most = cost.of_cells_by_passes(case.passes, cells), at.MOST_BY_PASSES
        else:
            played = cost.of_cells(_with(case.device, cells), cells)
        lost *= cost.in_earnest(shown, played, most) * _arrived_late(case, cells)
        if one.component == "gc" and most > 1:  # it falls into phases in which ranks wait: their lengths tell more
            walls = case.steps.wall
            lost = cost.along_the_run(played, walls[played_rows(case, len(played))], walls[case.rows]) or lost
    lost *= _with_absent(case, len(one.spikes.row) / max(len(case.rows), 1))
    if lost < at.LEAST_SHARE * case.step_ms:
        return None
    cause = _CAUSES.get(one.component, "unknown")
    ranks = one.ranks[: at.MAX_STRAGGLERS]
    part = one.ranks[:4]
    place = None
    gc = cause == "gc"
    source = "Python's collections, recorded in every step" if gc else f"{one.component} takes longer on the host"
    if cause != "gc":
        line = case.recorded.line(part, one.component, case.step_ms, lost / len(layout.ranks))
        if cause == "data":
            cause, place, source = of_data(line, case.steps.loader_alone(part))
        else:
            cause, place = "unknown" if line.place is None or line.in_layers else "python", line.place
            source = f"{source}; {line.source}"
    return Straggler(
        kind="rotating",
        ranks=tuple(layout.ranks[ranks].tolist()),
        hosts=tuple(sorted({layout.hosts[host] for host in layout.host[ranks]})),
        cause=cause,
        cause_source=source,
        cost_ms=lost,
        excess_ms=float(np.median(one.spikes.excess)),
        share_of_steps=one.share,
        peers=layout.peers_text,
        place=place,
        evidence=(
            Evidence("ranks that were late", len(one.ranks), "count", STEPS_SOURCE),
            Evidence("times a rank was late", len(one.spikes.row), "count", STEPS_SOURCE),
        ),
    )


def _with_absent(case: Case, times: float) -> float:
    """How much more is lost when ranks of which nothing was recorded are late as often as the others.

    Args:
        times: how often any of those recorded is, in a mean step; where several are, all wait for the last alone.
    """
    absent, present = len(case.reduced.missing or ()), len(case.layout.ranks)
    if not absent or times <= 0:
        return 1.0
    return float(np.expm1(-times * (1 + absent / present)) / np.expm1(-times))


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
    by_step = np.sum([cost.uneven(values) for values in played], axis=0)
    of_run = cost.along_the_run(by_step, walls[case.steps.windows[known]], walls[case.rows])
    lost = float(by_step.mean()) if of_run is None else of_run
    last = np.bincount(np.nan_to_num(excess, nan=-np.inf).argmax(axis=1), minlength=excess.shape[1])
    # a rank that is last far more often than by chance is so itself, if only in a part of the windows
    if lost < at.ROTATING_WORK * case.step_ms or last.max() > max(3 / len(last), at.ROTATING_MOST) * last.sum():
        return []
    order = ranks[np.argsort(-last, kind="stable")[: min(at.MAX_STRAGGLERS, int((last > 0).sum()))]]
    return [
        Straggler(
            kind="rotating",
            ranks=tuple(case.layout.ranks[order].tolist()),
            hosts=tuple(sorted({case.layout.hosts[host] for host in case.layout.host[order]})),
            cause="unknown",
            cause_source="own work in windows differs from step to step; no tokens and no collections explain it",
            cost_ms=lost,
            excess_ms=lost,
            share_of_steps=1.0,
            peers=case.layout.peers_text,
            evidence=(Evidence("ranks that were last", int((last > 0).sum()), "count", "steps of windows"),),
        )
    ]


def _arrived_late(case: Case, cells: Spikes) -> float:
    """Which part of these spikes (rows: windows) makes a rank come later to its collectives; 1 where that is not known.

    A host that launches ahead of its device may collect while the device still has work: nobody waits for it.
    """
    if case.arrivals is None or case.steps.waits_inside or len(cells.row) < at.MIN_WINDOWED:
        return 1.0
    numbers = case.steps.numbers[case.steps.windows][cells.row]
    steps, row = np.unique(numbers, return_inverse=True)
    groups = list(case.layout.groups)
    # at the end of a step it delays the next one's calls
    both = [case.arrivals.of_groups(groups, steps + behind)[row, cells.column] for behind in (0, 1)]
    late = np.fmax(*both)
    known = np.isfinite(late)
    # who comes late to one call comes late to those that are queued behind it, too: no more than the spike is counted
    shown, whole = np.clip(late[known], 0, cells.excess[known]).sum(), cells.excess[known].sum()
    return float(shown / whole) if whole > 0 else 1.0


def _with(excess: Matrix, cells: Spikes) -> Matrix:
    """A collection delays in whatever phase it falls into, also in one of exchange."""
    more: Matrix = excess.copy()
    more[cells.row, cells.column] = np.fmax(more[cells.row, cells.column], cells.excess)
    return more


def _last_in(case: Case, found: Together) -> tuple[int | None, int]:
    """The rank (position) that came last in each of these steps that windows hold, and in how many; None where none
    did, or where so do others: all of a worker come late to other groups when one of its slots is."""
    if case.arrivals is None:
        return None, 0
    steps = case.steps
    slow = middle(steps.wall) > at.GLOBAL_RATIO * np.nanmedian(middle(steps.wall[case.rows]))
    late = case.arrivals.late[np.isin(case.arrivals.numbers, steps.numbers[slow])]
    if len(late) < at.GLOBAL_EVENTS or not np.isfinite(late).any(axis=1).all():
        return None, 0
    ordered = np.sort(np.nan_to_num(late), axis=1)
    alone = (ordered[:, -1] >= at.GLOBAL_OWN * found.excess_ms) & (ordered[:, -2] <= at.STEADY_LATE * ordered[:, -1])
    last = np.nanargmax(late, axis=1)
    return (int(last[0]) if alone.all() and (last == last[0]).all() else None), len(late)


def all_together(case: Case, saving: bool) -> list[Straggler]:
    """Steps in which all are slow.

    Args:
        saving: whether checkpoints of single ranks are told already, with the steps in which the others wait for them.
    """
    layout, steps = case.layout, case.steps
    events = case.recorded.events("checkpoint")
    saves = events["step"].to_numpy() if events.height else np.zeros(0, np.int64)
    saves = np.union1d(saves, saves + 1)  # the others wait when they next exchange: it may be in the step behind
    rows = case.rows[~np.isin(steps.numbers[case.rows], saves)] if saving else case.rows
    found = together(steps, rows, case.host[np.isin(case.rows, rows)])
    if found is None:
        return []
    saved = float(np.isin(steps.numbers[found.rows], saves).mean())
    usual = np.setdiff1d(case.rows, found.rows)
    cause, source = "unknown", "all ranks are slow in the same steps; nothing that was recorded explains it"
    data = steps.phases.get("data_wait")
    if saved >= at.PART_OF_EXCESS:
        cause, source = "checkpoint", "checkpoints in the same steps"
    elif data is not None and len(usual):
        # of the ranks that load at all: in a pipeline those of its first stage
        more = np.nanmedian(data[found.rows], axis=0) - np.nanmedian(data[usual[:2000]], axis=0)
        if np.nanmax(more) >= at.PART_OF_EXCESS * found.excess_ms:
            cause, source = "data", "all wait for data in the same steps: what they share is slow, as their storage"
    last, times = _last_in(case, found) if cause == "unknown" else (None, 0)
    absent = len(case.reduced.missing or ())
    if last is not None:
        source = f"it came last to collectives in all {times} of these steps that windows hold; nothing tells why"
    elif cause == "unknown" and absent:
        source += f"; one of {absent} ranks of which nothing was recorded may be late in them"
    return [
        Straggler(
            kind="global" if last is None else "rank",
            ranks=tuple(layout.ranks[: at.MAX_STRAGGLERS].tolist()) if last is None else (int(layout.ranks[last]),),
            hosts=() if last is None else (layout.hosts[layout.host[last]],),
            cause=cause,
            cause_source=source,
            cost_ms=found.extra_ms,
            excess_ms=found.excess_ms,
            share_of_steps=len(found.rows) / len(case.rows),
            peers="the same ranks in other steps" if last is None else layout.peers_text,
            evidence=(Evidence("steps in which all were slow", len(found.rows), "count", STEPS_SOURCE),),
        )
    ]
