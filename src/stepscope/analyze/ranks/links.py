"""Groups whose transfers take longer than those of groups alike, by durations alone.

Who comes to a collective last stays for the transfer only, so the shortest stay of all members is its length, whatever
the clocks of their hosts say. Groups of which a member was not recorded tell nothing: the shortest stay may be a wait.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.ranks import thresholds as at
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


class _Transfers(Struct, frozen=True):
    group: Group
    kind: str
    usual_ms: float  # of its calls in a step
    by_step: dict[int, float]


def slow_links(calls: pl.DataFrame, layout: Layout, step_ms: float) -> list[SlowLink]:
    """Of collectives and messages with all members (`arrivals.Arrivals.calls`); slowest first."""
    if calls.is_empty():
        return []
    sizes = {id_: len(set(group.ranks)) for id_, group in layout.groups.items()}
    whole = calls.filter(
        pl.col("members") == pl.col("group").cast(pl.String).replace_strict(sizes, default=-1, return_dtype=pl.Int64)
    )
    by_step = whole.group_by("group", "kind", "step").agg(pl.col("least").sum(), pl.col("bytes").sum(), calls=pl.len())
    classes: dict[tuple[str, int, str, bool, int, int], list[_Transfers]] = defaultdict(list)
    for (name, kind), part in by_step.partition_by("group", "kind", as_dict=True).items():
        group = layout.groups[str(name)]
        members = layout.at(np.array(sorted(set(group.ranks)), np.int64))
        if (members < 0).any() or part.height < at.MIN_LINK_STEPS:
            continue
        hosts = len(np.unique(layout.host[members]))
        size = int(part["bytes"].fill_null(0).median() or 0).bit_length()  # type: ignore[arg-type]
        alike = (str(kind), len(members), axis_of(group.description) or group.description, hosts > 1, size,
                 int(part["calls"].median() or 0))  # type: ignore[arg-type]  # fmt: skip
        by = dict(zip(part["step"].to_list(), part["least"].to_list(), strict=True))
        classes[alike].append(_Transfers(group, str(kind), float(np.median(list(by.values()))), by))
    slow = []
    for alike, members_of in classes.items():
        if len(members_of) < at.LINK_GROUPS:
            continue
        usual = float(np.sort([one.usual_ms for one in members_of])[(len(members_of) - 1) // 2])
        level = max(at.LINK_RATIO * usual, usual + at.LEAST_SHARE * step_ms)
        found = [one for one in members_of if one.usual_ms >= level]
        if found and len(found) <= len(members_of) / 2:
            slow.append(_told(sorted(found, key=lambda one: -one.usual_ms), members_of, usual, layout, alike[3]))
    return sorted(slow, key=lambda one: -one.excess_ms)


def _told(slow: list[_Transfers], all_: list[_Transfers], usual: float, layout: Layout, leave: bool) -> SlowLink:
    worst = slow[0]
    late = [value > usual * at.LINK_RATIO for value in worst.by_step.values()]
    groups = tuple(one.group for one in slow)
    return SlowLink(
        groups=groups,
        host=_host(slow, all_, layout) if leave else None,
        members=layout.at(np.array(sorted({rank for group in groups for rank in group.ranks}), np.int64)),
        kind=worst.kind,
        excess_ms=float(np.mean(list(worst.by_step.values()))) - usual,
        ratio=worst.usual_ms / usual if usual > 0 else float("inf"),
        share=float(np.mean(late)),
        alike=len(all_) - len(slow),
    )


def _host(slow: list[_Transfers], all_: list[_Transfers], layout: Layout) -> int | None:
    """The one host that all slow groups cross and no other group does; None where there are several, or none."""

    def hosts(one: _Transfers) -> set[int]:
        return set(layout.host[layout.at(np.array(one.group.ranks, np.int64))].tolist())

    common = set.intersection(*(hosts(one) for one in slow))
    ids = {one.group.id for one in slow}
    healthy = set().union(*(hosts(one) for one in all_ if one.group.id not in ids))
    left = common - healthy
    return left.pop() if len(left) == 1 else None
