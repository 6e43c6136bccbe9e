"""Stages and links that keep all waiting: what lies in the layout of the job, not in one of its machines' work."""

from __future__ import annotations

import numpy as np

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.arrivals import MESSAGE, Arrivals
from stepscope.analyze.ranks.case import Case
from stepscope.analyze.ranks.imbalance import heavy_stages
from stepscope.analyze.ranks.links import SlowLink
from stepscope.model.findings import Evidence
from stepscope.model.ranks import Straggler
from stepscope.tables.arrays import Int64


def stages(case: Case, late: Int64) -> list[Straggler]:
    if case.steps.compute is None:
        return []
    layout = case.layout
    found = []
    for one in heavy_stages(case.steps.compute, layout, case.pipes, late, case.step_ms):
        if not _told(case, one.stage):
            continue
        ranks = np.flatnonzero(layout.pp == one.stage)
        source = "work of windows"
        found.append(
            Straggler(
                kind="stage",
                ranks=tuple(layout.ranks[ranks][: at.MAX_STRAGGLERS].tolist()),
                hosts=tuple(sorted({layout.hosts[host] for host in layout.host[ranks]}))[: at.MAX_STRAGGLERS],
                stage=one.stage,
                cause="stage",
                cause_source="the work of its middle worker in windows beside that of other stages"
                + ("" if len(np.unique(layout.dp)) > 1 else "; with one replica, a slow device would look the same"),
                cost_ms=one.cost_ms,
                excess_ms=one.own_ms - one.usual_ms,
                share_of_steps=one.share,
                peers="the other pipeline stages",
                evidence=(
                    Evidence("own work of the stage", round(one.own_ms, 3), "ms per step", source),
                    Evidence("mean own work of the other stages", round(one.usual_ms, 3), "ms per step", source),
                ),
            )
        )
    return found


def _told(case: Case, stage: int) -> bool:
    """Whether a stage is known from more than one host: of one alone its stage's work and its own look the same."""
    hosts = [len(np.unique(case.layout.host[case.layout.pp == each])) for each in range(case.layout.stages)]
    return hosts[stage] > 1 or max(hosts) == 1 or not case.reduced.missing


def untold_stage(case: Case) -> tuple[int, str] | None:
    """A stage that works longer than the others, and the one host from which it is known; None where none is."""
    if case.steps.compute is None:
        return None
    none = np.zeros(0, np.int64)
    for one in heavy_stages(case.steps.compute, case.layout, case.pipes, none, case.step_ms):
        if not _told(case, one.stage):
            return one.stage, case.layout.hosts[case.layout.host[case.layout.pp == one.stage][0]]
    return None


def links(case: Case) -> list[Straggler]:
    if case.arrivals is None:
        return []
    layout, found = case.layout, []
    for one in case.links[: at.MAX_STRAGGLERS]:
        ranks = one.members if one.host is None else one.members[layout.host[one.members] == one.host]
        found.append(
            Straggler(
                kind="link",
                ranks=tuple(layout.ranks[ranks][: at.MAX_STRAGGLERS].tolist()),
                hosts=tuple(sorted({layout.hosts[host] for host in layout.host[ranks]}))[: at.MAX_STRAGGLERS],
                group=one.groups[0].id,
                cause="link",
                cause_source="the shortest stay of all members in each call, which is its transfer",
                cost_ms=_lost_ms(case, case.arrivals, one),
                excess_ms=one.excess_ms,
                share_of_steps=one.share,
                peers=f"{one.alike} group{'s' if one.alike > 1 else ''} of the same kind and size",
                evidence=(
                    Evidence(f"transfers of {one.kind} by those of groups alike", round(one.ratio, 2), "ratio",
                             "collectives of windows"),
                    Evidence("slow groups", len(one.groups), "count", "collectives of windows"),
                ),
            )
        )  # fmt: skip
    return found


def _lost_ms(case: Case, found: Arrivals, one: SlowLink) -> float:
    """Transfers beside work cost nothing: what is lost is by how much later the group comes to calls with others."""
    steps, layout = case.steps, case.layout
    inside = set(one.members.tolist())
    slow = {group.id for group in one.groups}
    wider = []
    for group in layout.groups.values():
        ranks = layout.at(np.array(group.ranks, np.int64))
        mine = np.isin(ranks, one.members)
        if group.id not in slow and mine.any() and not mine.all():
            wider.append(group.id)
    if case.pipes is not None and one.kind == MESSAGE:
        replica, stage = divmod(int(case.pipes.worker[one.members].min()), layout.stages)
        return float(case.pipes.without_slow_hop(replica, stage).mean())
    late = found.of_groups(wider, found.numbers)
    others = np.array([rank for rank in range(len(layout.ranks)) if rank not in inside], np.int64)
    if len(others) and np.isfinite(late[:, one.members]).any() and np.isfinite(late[:, others]).any():
        with np.errstate(all="ignore"):
            mine_ms, others_ms = np.nanmedian(late[:, one.members], axis=1), np.nanmedian(late[:, others], axis=1)
        return min(max(float(np.nanmean(mine_ms - others_ms)), 0.0), one.excess_ms)
    if steps.compute is None:
        return one.excess_ms
    idle = steps.wall[steps.windows][:, one.members] - steps.compute[:, one.members]
    return min(one.excess_ms, float(np.nanmean(idle))) if np.isfinite(idle).any() else one.excess_ms
