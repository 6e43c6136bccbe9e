"""Groups whose transfers take longer than those of groups alike, by durations alone.

Who comes to a collective last stays for the transfer only, so the shortest stay of all members is its length, whatever
the clocks of their hosts say. Where a member was not recorded the shortest stay may be a wait for it, but not in calls
of every kind: they leave the first one together.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.arrivals import MESSAGE
from stepscope.analyze.ranks.layout import Layout, axis_of
from stepscope.tables.arrays import Int64
from stepscope.tables.reduced import Group


class SlowLink(Struct, frozen=True):
    """Transfers of these groups, or of all that leave a host, beside groups alike."""

    groups: tuple[Group, ...]  # slowest first
    host: int | None  # position of the one host whose groups these are; None where several have the same
    members: Int64  # positions of the ranks
    kind: str
    excess_ms: float  # of the slowest group, in a mean step
    ratio: float  # of its transfers and the usual ones
    share: float  # of the steps in which it is slower than usual
    alike: int  # groups it was compared with


class LateGroup(Struct, frozen=True):
    """A group whose recorded members all wait long, as for one of which nothing was recorded."""

    members: Int64  # positions of those recorded
    absent: tuple[int, ...]  # ranks
    excess_ms: float  # of the wait beyond that in groups alike, in a mean step
    of_slots: bool


class _Transfers(Struct, frozen=True):
    group: Group
    kind: str
    usual_ms: float  # of its calls in a step
    by_step: dict[int, float]
    absent: tuple[int, ...]
    calls: int  # in a step


def slow_links(calls: pl.DataFrame, layout: Layout, step_ms: float) -> tuple[list[SlowLink], list[LateGroup]]:
    """Of collectives and messages (`arrivals.Arrivals.calls`): slow links, slowest first, and groups of which nobody
    can tell whether it is their link, or somebody absent."""
    if calls.is_empty():
        return [], []
    by_step = calls.group_by("group", "kind", "step").agg(
        pl.col("least").sum(), pl.col("bytes").sum(), pl.col("members").min(), calls=pl.len()
    )
    classes: dict[tuple[str, int, str, bool, int, int], list[_Transfers]] = defaultdict(list)
    for (name, kind), part in by_step.partition_by("group", "kind", as_dict=True).items():
        group = layout.groups.get(str(name))
        if group is None:
            continue
        ranks = np.array(sorted(set(group.ranks)), np.int64)
        members = layout.at(ranks)
        absent = tuple(ranks[members < 0].tolist())
        whole = part.filter(pl.col("members") == len(ranks) - len(absent))
        if whole.height < at.MIN_LINK_STEPS or (absent and kind == MESSAGE):
            continue
        hosts = len(np.unique(layout.host[members[members >= 0]]))
        size = int(whole["bytes"].fill_null(0).median() or 0).bit_length()  # type: ignore[arg-type]
        count = int(whole["calls"].median() or 0)  # type: ignore[arg-type]
        alike = str(kind), len(members), axis_of(group.description) or group.description, hosts > 1, size, count
        by = dict(zip(whole["step"].to_list(), whole["least"].to_list(), strict=True))
        # who is absent may be late in a part of the steps
        usual_ms = float((np.mean if absent else np.median)(list(by.values())))
        classes[alike].append(_Transfers(group, str(kind), usual_ms, by, absent, count))
    kinds: dict[str, list[tuple[_Transfers, float, bool]]] = defaultdict(list)  # of a group; what is usual; if slow
    slow = []
    for alike, members_of in classes.items():
        if len(members_of) < at.LINK_GROUPS:
            continue
        usual = float(np.sort([one.usual_ms for one in members_of])[(len(members_of) - 1) // 2])
        level = max(at.LINK_RATIO * usual, usual + at.LINK_PART * step_ms)
        for one in members_of:
            kinds[one.group.id].append((one, usual, one.usual_ms >= level))
        slow.append((alike, members_of, usual, [one for one in members_of if one.usual_ms >= level]))
    late = _late_groups(kinds, layout, step_ms)
    found = []
    for alike, members_of, usual, those in slow:
        its = [one for one in those if not one.absent or _all_slow(kinds[one.group.id])]
        if its and len(its) <= len(members_of) / 2:
            found.append(_told(sorted(its, key=lambda one: -one.usual_ms), members_of, usual, layout, alike[3]))
    merged = [one for one in _merged(found) if one.excess_ms >= at.LEAST_SHARE * step_ms]
    return sorted(merged, key=lambda one: -one.excess_ms), late


def _all_slow(kinds: list[tuple[_Transfers, float, bool]]) -> bool:
    """Who is absent is waited for in the first call behind its work, a slow link in calls of every kind; with more
    calls of a kind in a step there is work before each of them, and both look the same."""
    return len(kinds) > 1 and all(slow and one.calls == 1 for one, _, slow in kinds)


def _late_groups(
    kinds: dict[str, list[tuple[_Transfers, float, bool]]], layout: Layout, step_ms: float
) -> list[LateGroup]:
    found = []
    for each in kinds.values():
        first = each[0][0]
        more = sum(float(np.mean(list(one.by_step.values()))) - usual for one, usual, slow in each if slow)
        if first.absent and not _all_slow(each) and more >= at.LEAST_SHARE * step_ms:
            slots = axis_of(first.group.description) == "tp"
            found.append(LateGroup(_recorded(first.group, layout), first.absent, more, slots))
    # tensor slots first: in other groups a whole worker of theirs comes late for it
    return sorted(found, key=lambda one: (not one.of_slots, -one.excess_ms))


def _merged(found: list[SlowLink]) -> list[SlowLink]:
    """Several kinds of calls of the same groups are one link."""
    kept: dict[str, SlowLink] = {}
    for one in sorted(found, key=lambda one: -one.excess_ms):
        worst = next((id_ for id_ in kept if id_ in {group.id for group in one.groups}), one.groups[0].id)
        if worst in kept:
            first = kept[worst]
            groups = tuple({group.id: group for group in (*first.groups, *one.groups)}.values())
            kept[worst] = replace(
                first,
                groups=groups,
                host=first.host if first.host is not None else one.host,
                members=np.union1d(first.members, one.members),
                excess_ms=first.excess_ms + one.excess_ms,
            )
        else:
            kept[worst] = one
    return list(kept.values())


def _told(slow: list[_Transfers], all_: list[_Transfers], usual: float, layout: Layout, leave: bool) -> SlowLink:
    worst = slow[0]
    late = [value > usual * at.LINK_RATIO for value in worst.by_step.values()]
    groups = tuple(one.group for one in slow)
    return SlowLink(
        groups=groups,
        host=_host(slow, all_, layout) if leave else None,
        members=np.unique(np.concatenate([_recorded(group, layout) for group in groups])),
        kind=worst.kind,
        excess_ms=float(np.mean(list(worst.by_step.values()))) - usual,
        ratio=worst.usual_ms / usual if usual > 0 else float("inf"),
        share=float(np.mean(late)),
        alike=len(all_) - len(slow),
    )


def _recorded(group: Group, layout: Layout) -> Int64:
    members = layout.at(np.array(sorted(set(group.ranks)), np.int64))
    return members[members >= 0]


def _host(slow: list[_Transfers], all_: list[_Transfers], layout: Layout) -> int | None:
    """The one host that all slow groups cross and no other group does; None where there are several, or none."""

    def hosts(one: _Transfers) -> set[int]:
        return set(layout.host[_recorded(one.group, layout)].tolist())

    common = set.intersection(*(hosts(one) for one in slow))
    ids = {one.group.id for one in slow}
    healthy = set().union(*(hosts(one) for one in all_ if one.group.id not in ids))
    left = common - healthy
    return left.pop() if len(left) == 1 else None
