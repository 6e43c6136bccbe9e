"""Stages and links that keep all waiting: what lies in the layout of the job, not in one of its machines' work."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.case import Case
from stepscope.analyze.ranks.collectives import MESSAGE, Arrivals, SlowLink
from stepscope.analyze.ranks.own_work import middle
from stepscope.model.findings import Evidence
from stepscope.model.ranks import Straggler
from stepscope.tables.arrays import Int64


def stages(case: Case, late: Int64) -> list[Straggler]:
    """Stages that work longer than the others; `late` are ranks that are late themselves."""
    found, source = [], "work of windows"
    for stage, own_ms, usual_ms, share, cost_ms in _heavy(case, late):
        if not _told(case, stage):
            continue
        known = "the work of its middle worker in windows beside that of other stages"
        alone = "" if len(np.unique(case.layout.dp)) > 1 else "; with one replica, a slow device would look the same"
        found.append(
            case.straggler(
                "stage", np.flatnonzero(case.layout.pp == stage), "stage", known + alone, cost_ms,
                stage=stage,
                excess_ms=own_ms - usual_ms,
                share_of_steps=share,
                peers="the other pipeline stages",
                evidence=(
                    Evidence("own work of the stage", round(own_ms, 3), "ms per step", source),
                    Evidence("mean own work of the other stages", round(usual_ms, 3), "ms per step", source),
                ),
            )
        )  # fmt: skip
    return found


def untold_stage(case: Case) -> tuple[int, str] | None:
    """A stage that works longer than the others, and the one host from which it is known; None where none is."""
    heavy = (stage for stage, *_ in _heavy(case, np.zeros(0, np.int64)) if not _told(case, stage))
    stage = next(heavy, None)
    layout = case.layout
    return None if stage is None else (stage, layout.hosts[layout.host[layout.pp == stage][0]])


def _told(case: Case, stage: int) -> bool:
    """Whether a stage is known from more than one host: of one alone its stage's work and its own look the same."""
    hosts = [len(np.unique(case.layout.host[case.layout.pp == each])) for each in range(case.layout.stages)]
    return hosts[stage] > 1 or max(hosts) == 1 or not case.reduced.missing


def _heavy(case: Case, late: Int64) -> Iterator[tuple[int, float, float, float, float]]:
    """Stages of which the middle worker does more than the mean of the other stages, by the work of windows: with its
    work, the mean of the others', the share of the steps in which it works longest, and what that costs.

    Late ranks tell nothing of their stage where others are there. Without microbatches to play again, a step is as much
    longer as its longest stage works beyond the mean.
    """
    compute, count = case.steps.compute, case.layout.stages
    if compute is None or count < 2 or not len(compute):
        return
    of_stage = [np.flatnonzero(case.layout.pp == stage) for stage in range(count)]
    of_stage = [usual if len(usual := np.setdiff1d(ranks, late)) else ranks for ranks in of_stage]
    own = np.stack([middle(compute[:, ranks]) for ranks in of_stage], axis=1).astype(np.float64)
    own = own[np.isfinite(own).all(axis=1)]
    if len(own) < at.MIN_WINDOWED:
        return
    for stage in range(count):
        others = np.delete(own, stage, axis=1)
        mine, usual_ms = float(own[:, stage].mean()), float(others.mean())
        if usual_ms <= 0 or mine < (1 + at.STAGE_SHARE) * usual_ms:
            continue
        if case.pipes is not None:
            lost = float(case.pipes.without_heavy(stage, late).mean())
        else:
            lost = float(np.maximum(own[:, stage] - others.max(axis=1), 0).mean())
        if lost >= at.LEAST_SHARE * case.step_ms:
            yield stage, mine, usual_ms, float((own[:, stage] >= others.max(axis=1)).mean()), lost


def links(case: Case) -> list[Straggler]:
    layout, found = case.layout, list[Straggler]()
    if case.arrivals is None:
        return found
    for one in case.links[: at.MAX_STRAGGLERS]:
        ranks = one.members if one.host is None else one.members[layout.host[one.members] == one.host]
        source = "collectives of windows"
        found.append(
            case.straggler(
                "link", ranks, "link", "the shortest stay of all members in each call, which is its transfer",
                _lost_ms(case, case.arrivals, one),
                group=one.groups[0].id,
                excess_ms=one.excess_ms,
                share_of_steps=one.share,
                peers=f"{one.alike} group{'s' if one.alike > 1 else ''} of the same kind and size",
                evidence=(
                    Evidence(f"transfers of {one.kind} by those of groups alike", round(one.ratio, 2), "ratio", source),
                    Evidence("slow groups", len(one.groups), "count", source),
                ),
            )
        )  # fmt: skip
    return found


def _lost_ms(case: Case, found: Arrivals, one: SlowLink) -> float:
    """Transfers beside work cost nothing: what is lost is by how much later the group comes to calls with others."""
    steps, layout = case.steps, case.layout
    if case.pipes is not None and one.kind == MESSAGE:
        replica, stage = divmod(int(case.pipes.worker[one.members].min()), layout.stages)
        return float(case.pipes.without_slow_hop(replica, stage).mean())
    slow = {group.id for group in one.groups}
    wider = []
    for group in layout.groups.values():
        mine = np.isin(layout.at(group.ranks), one.members)
        if group.id not in slow and mine.any() and not mine.all():
            wider.append(group.id)
    late = found.of_groups(wider, found.numbers)
    inside, outside = late[:, one.members], np.delete(late, one.members, axis=1)
    if np.isfinite(inside).any() and np.isfinite(outside).any():
        later = np.nanmedian(inside, axis=1) - np.nanmedian(outside, axis=1)
        return min(max(float(np.nanmean(later)), 0.0), one.excess_ms)
    if steps.compute is None:
        return one.excess_ms
    idle = steps.wall[steps.windows][:, one.members] - steps.compute[:, one.members]
    return min(one.excess_ms, float(np.nanmean(idle))) if np.isfinite(idle).any() else one.excess_ms
