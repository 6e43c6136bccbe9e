"""Collectives of windows by durations alone: who came last to them, and whose transfers take longer than usual.

Who comes to a call last stays for the transfer only, so the shortest stay of all members is its length, whatever the
clocks of their hosts say. Where a member was not recorded the shortest stay may be a wait for it, but not in calls of
every kind: they leave the first one together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.layout import Layout, axis_of
from stepscope.analyze.ranks.own_work import MAX_NS, Matrix, matrix
from stepscope.engine.collective_names import POINT_TO_POINT
from stepscope.tables.arrays import Floats, Int64
from stepscope.tables.reduced import Group, Reduced

_KEY = ("step", "group", "kind", "sequence")
MESSAGE = "message"  # from one rank to another, whichever of the two says so


class Arrivals(Struct, frozen=True):
    """`late`: steps x ranks, by how much each came later than the middle one, summed over a step's collectives (ms).

    `calls`: a row for each collective, and each message of a pair: its key, bytes, members that were recorded, and
    their shortest stay (ms).
    """

    numbers: Int64  # steps
    late: Matrix
    calls: pl.DataFrame
    by_group: pl.DataFrame  # rank, step, group, late
    layout: Layout
    on_device: bool  # some are kernels

    def of_groups(self, groups: Collection[str], numbers: Int64) -> Matrix:
        """By step (of `numbers`) and rank: how much later than the middle one it came to calls of these groups."""
        mine = self.by_group.filter(pl.col("group").cast(pl.String).is_in(list(groups)))
        return matrix(mine.group_by("rank", "step").agg(pl.col("late").sum()), "late", numbers, self.layout)


def arrivals(reduced: Reduced, layout: Layout) -> Arrivals | None:
    lasted = pl.col("end_ns") - pl.col("start_ns")
    known = (
        reduced.scan("collectives")
        .filter(pl.all_horizontal(pl.col("sequence", "step", "group", "kind").is_not_null()))
        .filter((lasted > 0) & (lasted < MAX_NS))
        .with_columns(kind=pl.when(pl.col("kind").is_in(list(POINT_TO_POINT))).then(pl.lit(MESSAGE)).otherwise("kind"))
        .select("rank", *_KEY, "bytes", "basis", ms=(lasted / 1e6).cast(pl.Float32))
        .with_columns(pl.col("group", "kind").cast(pl.Categorical))
        .collect()
    )
    order, first = _alike(known)
    members = np.diff(np.append(first, len(order)))
    several = members > 1
    if not several.any():
        return None
    known, call = known[order], np.repeat(np.arange(len(first)), members)
    # as whole numbers, floats above 0 have the order that they have: one sort puts each call's stays in order, in a
    # third of the time that Polars takes to group by four columns
    stays = (call.astype(np.uint64) << np.uint64(32)) | known["ms"].to_numpy().view(np.uint32)
    stays.sort()
    ordered = (stays & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32).astype(np.float64)
    middle = (ordered[first + (members - 1) // 2] + ordered[first + members // 2]) / 2
    calls = known[first[several]].select(_KEY).with_columns(
        bytes=pl.Series(np.maximum.reduceat(known["bytes"].fill_null(0).to_numpy(), first)[several]),
        members=pl.Series(members[several]),
        least=pl.Series(ordered[first[several]]),
    )  # fmt: skip
    by_group = (
        known.select("rank", "step", "group", late=pl.Series(middle[call]) - pl.col("ms"))
        .filter(pl.Series(several[call]) & (known["kind"] != MESSAGE))
        .group_by("rank", "step", "group")
        .agg(pl.col("late").sum())
    )
    late = by_group.group_by("rank", "step").agg(pl.col("late").sum())
    numbers = np.unique(late["step"].to_numpy()).astype(np.int64)
    on_device = bool((known["basis"] == "device").any())
    return Arrivals(numbers, matrix(late, "late", numbers, layout), calls, by_group, layout, on_device)


def _alike(known: pl.DataFrame) -> tuple[Int64, Int64]:
    """An order of the rows that puts those of a call beside each other, and where in it each call begins."""
    key, most = np.zeros(len(known), np.int64), 1
    for name in _KEY:
        values = known[name].to_physical().to_numpy().astype(np.int64)
        least, span = (int(values.min()), int(values.max()) - int(values.min()) + 1) if len(values) else (0, 1)
        if most * span >= 2**62:  # of numbers that lie far apart, their places among each other
            key, values = (np.unique(each, return_inverse=True)[1].reshape(-1) for each in (key, values))
            least, most, span = 0, int(key.max()) + 1, int(values.max()) + 1
        key, most = key * span + (values - least), most * span
    order = np.argsort(key, kind="stable")
    key = key[order]
    return order, np.flatnonzero(np.append(True, key[1:] != key[:-1])[: len(key)])


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


class Awaited(Struct, frozen=True):
    """A group whose recorded members all wait long, as for one of which nothing was recorded."""

    members: Int64  # positions of those recorded
    absent: tuple[int, ...]  # ranks
    excess_ms: float  # of the wait beyond that in groups alike, in a mean step


class _Transfers(Struct):
    """A group's calls of one kind."""

    group: Group
    kind: str
    members: Int64  # positions of those recorded
    absent: tuple[int, ...]  # ranks
    by_step: Floats  # ms
    own_ms: float  # in a usual step
    calls: int  # in a step
    usual_ms: float = 0.0  # of groups alike
    slow: bool = False


def slow_links(calls: pl.DataFrame, layout: Layout, step_ms: float) -> tuple[list[SlowLink], list[Awaited]]:
    """Of `Arrivals.calls`: slow links, slowest first, and groups of which nobody can tell whether it is their link, or
    somebody absent."""
    by_step = calls.group_by("group", "kind", "step").agg(
        pl.col("least").sum(), pl.col("bytes").sum(), pl.col("members").min(), calls=pl.len()
    )
    classes: dict[tuple[str, int, str, bool, int, int], list[_Transfers]] = defaultdict(list)
    for (name, kind), part in by_step.partition_by("group", "kind", as_dict=True).items():
        group = layout.groups.get(str(name))
        if group is None:
            continue
        members = layout.members(group)
        absent = tuple(sorted(set(group.ranks) - set(layout.ranks[members].tolist())))
        whole = part.filter(pl.col("members") == len(members))
        if whole.height < at.MIN_LINK_STEPS or (absent and kind == MESSAGE):
            continue
        hosts = len(np.unique(layout.host[members]))
        size = int(whole["bytes"].median() or 0).bit_length()  # type: ignore[arg-type]
        count = int(whole["calls"].median() or 0)  # type: ignore[arg-type]
        axis = axis_of(group.description) or group.description
        spent = whole["least"].to_numpy()
        # who is absent may be late in a part of the steps
        own_ms = float(spent.mean() if absent else np.median(spent))
        alike = str(kind), len(members) + len(absent), axis, hosts > 1, size, count
        classes[alike].append(_Transfers(group, str(kind), members, absent, spent, own_ms, count))
    by_group: dict[str, list[_Transfers]] = defaultdict(list)
    for some in classes.values():
        if len(some) >= at.LINK_GROUPS:
            usual = sorted(one.own_ms for one in some)[(len(some) - 1) // 2]
            level = max(at.LINK_RATIO * usual, usual + at.LINK_PART * step_ms)
            for one in some:
                one.usual_ms, one.slow = usual, one.own_ms >= level
                by_group[one.group.id].append(one)
    awaited = []
    for each in by_group.values():
        more = sum(float(one.by_step.mean()) - one.usual_ms for one in each if one.slow)
        if each[0].absent and not _all_slow(each) and more >= at.LEAST_SHARE * step_ms:
            # tensor slots first: in other groups a whole worker of theirs comes late for it
            order = axis_of(each[0].group.description) != "tp", -more
            awaited.append((order, Awaited(each[0].members, each[0].absent, more)))
    found = []
    for some in classes.values():
        slow = [one for one in some if one.slow and (not one.absent or _all_slow(by_group[one.group.id]))]
        if 0 < len(slow) <= len(some) / 2:
            found.append(_link(sorted(slow, key=lambda one: -one.own_ms), some, layout))
    links = sorted(_merged(found), key=lambda one: -one.excess_ms)
    late = [each for _, each in sorted(awaited, key=lambda one: one[0])]
    return [one for one in links if one.excess_ms >= at.LEAST_SHARE * step_ms], late


def _all_slow(kinds: list[_Transfers]) -> bool:
    """Who is absent is waited for in the first call behind its work, a slow link in calls of every kind; with more
    calls of a kind in a step there is work before each of them, and both look the same."""
    return len(kinds) > 1 and all(one.slow and one.calls == 1 for one in kinds)


def _link(slow: list[_Transfers], alike: list[_Transfers], layout: Layout) -> SlowLink:
    worst, ids = slow[0], {one.group.id for one in slow}
    hosts = {one.group.id: set(layout.host[one.members].tolist()) for one in alike}
    # the one host that all slow groups cross and no other group does
    common = set.intersection(*(hosts[name] for name in ids)) - set().union(
        *(hosts[name] for name in hosts.keys() - ids)
    )
    alone = len(hosts[worst.group.id]) > 1 and len(common) == 1
    return SlowLink(
        groups=tuple(one.group for one in slow),
        host=common.pop() if alone else None,
        members=np.unique(np.concatenate([one.members for one in slow])),
        kind=worst.kind,
        excess_ms=float(worst.by_step.mean()) - worst.usual_ms,
        ratio=worst.own_ms / worst.usual_ms if worst.usual_ms > 0 else float("inf"),
        share=float((worst.by_step > worst.usual_ms * at.LINK_RATIO).mean()),
        alike=len(alike) - len(slow),
    )


def _merged(found: list[SlowLink]) -> list[SlowLink]:
    """Several kinds of calls of the same groups are one link."""
    kept: dict[str, SlowLink] = {}
    for one in sorted(found, key=lambda one: -one.excess_ms):
        worst = next((name for name in kept if name in {group.id for group in one.groups}), one.groups[0].id)
        first = kept.setdefault(worst, one)
        if first is not one:
            groups = {group.id: group for group in (*first.groups, *one.groups)}
            kept[worst] = replace(
                first,
                groups=tuple(groups.values()),
                host=first.host if first.host is not None else one.host,
                members=np.union1d(first.members, one.members),
                excess_ms=first.excess_ms + one.excess_ms,
            )
    return list(kept.values())
