"""The verdict over a run's ranks, from its reduced tables alone."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec.structs import replace

from stepscope.analyze.ranks import lateness as by
from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.case import Case, gather
from stepscope.analyze.ranks.clocks import clocks
from stepscope.analyze.ranks.fixed import fixed
from stepscope.analyze.ranks.layout import layout_of
from stepscope.analyze.ranks.own_work import middle, own_steps
from stepscope.analyze.ranks.recurring import (
    all_together,
    checkpoints,
    rotating_causes,
    rotating_work,
    sequence_length,
    throttled,
)
from stepscope.analyze.ranks.structure import links, stages, untold_stage
from stepscope.model.counted import things
from stepscope.model.ranks import NONE, NOT_ENOUGH, RanksVerdict, Straggler
from stepscope.tables.reduced import Reduced


def judge(reduced: Reduced) -> RanksVerdict:
    with ThreadPoolExecutor(1) as pool:  # beside each other: what takes Polars' time here takes Python's there
        told = pool.submit(clocks, reduced)
        return replace(_judged(reduced), clocks=told.result()[1])


def _judged(reduced: Reduced) -> RanksVerdict:
    layout = layout_of(reduced)
    steps = own_steps(reduced, layout)
    steady = steps.steady
    rows = steady if len(steady) >= at.MIN_STEPS else np.arange(len(steps.numbers))
    present = int(np.isfinite(steps.wall[rows]).any(axis=0).sum()) if len(rows) else 0
    verdict = RanksVerdict(
        NOT_ENOUGH, "", (), present, reduced.world_size, reduced.missing, len(steady), len(steps.windows),
        None, None, layout.text,
    )  # fmt: skip
    if present < at.MIN_RANKS:
        return replace(verdict, reason=f"{present} rank has steps that count, at least {at.MIN_RANKS} are needed")
    verdict = replace(verdict, step_ms=float(np.nanmean(middle(steps.wall[rows]))))
    if len(rows) < at.MIN_STEPS:
        return replace(verdict, reason=f"{things(len(rows), 'step')} count, at least {at.MIN_STEPS} are needed")
    case = gather(reduced, layout, steps, rows, verdict.step_ms or 0.0)
    found = _stragglers(case)
    seen = [case.host] if case.device is None else [case.host, case.device]
    verdict = replace(
        verdict,
        verdict=found[0].kind if found else NONE,
        stragglers=tuple(found),
        least_ms=max(by.lateness(excess, case.step_ms).least for excess in seen),
        suspects=_suspects(case, found),
        slowdown=_slowdown(case),
    )
    if found:
        return replace(verdict, reason=_sentence(found[0], case))
    need = _needed(case)
    if need:
        return replace(verdict, verdict=NOT_ENOUGH, reason=need)
    least, absent = _number(verdict.least_ms or 0.0), len(reduced.missing or ())
    text = f"no rank, host or group keeps the others waiting by {least} ms of {_number(case.step_ms)} ms a step"
    if absent:
        text += f"; of {absent} rank{'s' if absent > 1 else ''} nothing was recorded"
    return replace(verdict, reason=text)


def _slowdown(case: Case) -> float | None:
    if case.pipes is not None:
        lasted, lost = float(case.pipes.play().mean()), float(case.pipes.beyond_ideal().mean())
    elif case.layout.stages > 1:
        return None
    else:
        excess = case.host if case.device is None else case.device
        excess = excess[np.isfinite(excess).any(axis=1)]
        if not len(excess):
            return None
        lasted, lost = case.step_ms, float((by.latest(excess) - np.nanmean(excess, axis=1)).mean())
    return lasted / (lasted - lost) if lost < lasted else None


def _stragglers(case: Case) -> list[Straggler]:
    """All that keeps others waiting, largest cost first."""
    saves = checkpoints(case)
    found = [*saves, *throttled(case)]
    of_ranks, late = fixed(case, {rank for one in found if one.kind != "global" for rank in one.ranks})
    found += [*of_ranks, *rotating_causes(case, late), *sequence_length(case, late), *stages(case, late), *links(case)]
    # what is slow for all, or for another rank each time, needs no second, unknown cause where one explains it
    most = max((one.cost_ms for one in found), default=0.0)
    shared = all_together(case, saving=bool(saves)) + rotating_work(case, late)
    found += [one for one in shared if one.cause != "unknown" or most < at.PART_OF_EXCESS * one.cost_ms]
    awaited = max((group.excess_ms for group in case.awaited), default=0.0)
    least = at.LEAST_STEADY_SHARE / 2 * case.step_ms
    found = [
        one for one in found
        if one.cost_ms >= least
        and ((one.kind, one.cause) != ("global", "unknown") or awaited < at.PART_OF_EXCESS * one.cost_ms)
    ]  # fmt: skip
    return sorted(found, key=lambda one: -one.cost_ms)[: at.MAX_STRAGGLERS]


def _needed(case: Case) -> str:
    """What is missing to say that nobody is late; empty where nothing is."""
    layout = case.layout
    if case.awaited:
        first = case.awaited[0]
        wait = "waits" if len(first.members) == 1 else "wait"
        return (
            f"{_ranks(layout.ranks[first.members])} {wait} {_number(first.excess_ms)} ms a step longer than others for "
            f"what their group shares with {_ranks(first.absent)}, of which nothing was recorded"
        )
    stage = untold_stage(case)
    if stage is not None:
        return (
            f"pipeline stage {stage[0]} works longer than the others, but nothing was recorded of it on other hosts "
            f"than {stage[1]}: whether the stage or the host is slow, {_ranks(case.reduced.missing or ())} would tell"
        )
    if layout.waits_inside and (case.device is None or len(case.steps.windows) < at.MIN_WINDOWED):
        return (
            "stages and tensor slots wait for each other inside their phases, and too few windows tell their own work"
        )
    if case.device is None and not np.isfinite(case.host).any():
        return "neither phases of the host nor the work of devices were recorded"
    judged = np.isfinite(case.host).any(axis=0)
    if case.device is not None:
        judged |= np.isfinite(case.device).any(axis=0)
    # a place is a rank's in the layout, as far as it is known: of some jobs one rank stands for its tensor group
    known = len(layout.dp) > 0 and (layout.dp >= 0).all()
    places = int(layout.dp.max() + 1) * max(layout.stages, 1) * max(layout.slots, 1) if known else None
    places = places if places is not None else case.reduced.world_size or len(layout.ranks)
    alone = np.flatnonzero(~judged)
    absent = case.reduced.missing or ()
    if layout.waits_inside and absent and len(alone) > 0 and len(layout.peer_groups()) > 1:
        return (
            f"{_ranks(layout.ranks[alone])} could be laid beside no peer, because nothing was recorded of "
            f"{_ranks(absent)}; none of the others is late"
        )
    if judged.sum() < (1 - at.MISSING_SHARE) * places:
        return f"{int(judged.sum())} of {places} ranks could be laid beside peers, too few to say that none is late"
    return ""


def _ranks(numbers: Iterable[int], most: int = 4) -> str:
    found = [str(int(number)) for number in numbers]
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(found[:most])}{more}"


def _suspects(case: Case, stragglers: list[Straggler]) -> tuple[int, ...]:
    """Late ranks, the first of each straggler first, and a peer or two of each."""
    layout, found = case.layout, []
    for one in stragglers:
        if one.kind == "global":
            continue
        part = layout.at(one.ranks[:4])
        peers = np.setdiff1d(np.flatnonzero(np.isin(layout.peers, layout.peers[part])), layout.at(one.ranks))
        found += [*one.ranks[:4], *layout.ranks[peers[:2]].tolist()]
    return tuple(dict.fromkeys(found))[: at.MAX_SUSPECTS]


def _sentence(first: Straggler, case: Case) -> str:
    who = {
        "rank": f"rank {first.ranks[0]}",
        "host": f"host {first.hosts[0] if first.hosts else ''}",
        "stage": f"pipeline stage {first.stage}",
        "link": "the transfers of a group",
        "rotating": "another rank in each step",
        "global": "all ranks together in some steps",
    }[first.kind]
    verb = {"global": "are slow", "link": "keep the others waiting"}.get(first.kind, "keeps the others waiting")
    cause = first.cause.replace("_", " ")
    return f"{who} {verb} ({cause}): {_number(first.cost_ms)} of {_number(case.step_ms)} ms a step"


def _number(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.1f}"
