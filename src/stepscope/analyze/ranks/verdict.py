"""The verdict over a run's ranks, from its reduced tables alone.

Stages and links that keep all waiting: what lies in the layout of the job, not in one of its machines' work.

Clocks of a reduced run's hosts, by the collectives of its windows; what the verdict says of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import polars as pl
from msgspec.structs import replace

from stepscope.analyze.ranks import lateness as by
from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.case import Case, gather
from stepscope.analyze.ranks.collectives import MESSAGE, Arrivals, SlowLink
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
from stepscope.engine.clocks import RATE_BOUND_PPM, Clocks, Members, Piece, estimate
from stepscope.engine.collective_names import UNKNOWN
from stepscope.model.counted import things
from stepscope.model.findings import Evidence
from stepscope.model.ranks import NONE, NOT_ENOUGH, HostClock, RanksVerdict, Straggler
from stepscope.tables.arrays import Int64
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
    if judged.sum() < at.MIN_PEERS and (np.nanmean(case.host, axis=0) > at.LEAST_SHARE * case.step_ms).any():
        return f"of {int(judged.sum())} ranks none can be told to be the usual one, at least {at.MIN_PEERS} are needed"
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


MAX_STEPS = 100  # of a window whose clocks are straight lines between their steps
GAP = 10  # times the usual distance of recorded steps: from here on a new window begins
MOST_SET = 3  # times that a clock was set that are told of a window
_PAIR = ("send", "recv")


def clocks(reduced: Reduced) -> tuple[Clocks, tuple[HostClock, ...]]:
    """Of all hosts, and by window and host what a report says of them; empty where no window recorded a collective."""
    # the first host by rank is the reference where others serve as well
    hosts = tuple(sorted({host.host for host in reduced.hosts}))
    calls = _calls(reduced)
    if calls.is_empty():
        return Clocks(hosts, {}, ()), ()
    windows = _windows(np.unique(calls["step"].to_numpy()).astype(np.int64))
    step = calls["step"].cast(pl.Int64).to_numpy()
    numbers = np.array(sorted(windows), np.int64)
    distinct = calls["kind"].unique()
    codes, kind = np.unique(calls["kind"].to_physical().to_numpy(), return_inverse=True)
    name_of = dict(zip(distinct.to_physical().to_list(), distinct.cast(pl.String).to_list(), strict=True))
    host = calls["host"].replace_strict(list(hosts), list(range(len(hosts))), return_dtype=pl.Int64)
    members = Members(
        host=host.to_numpy(),
        rank=calls["rank"].cast(pl.Int64).to_numpy(),
        window=numbers[np.searchsorted(numbers, step, side="right") - 1],
        step=step,
        call=calls["call"].to_numpy(),
        group=calls["group"].to_physical().cast(pl.Int64).to_numpy(),
        kind=kind,
        bytes=calls["bytes"].fill_null(-1).to_numpy(),
        start_ns=calls["start_ns"].to_numpy(),
        end_ns=calls["end_ns"].to_numpy(),
        on_device=(calls["basis"] != "host").fill_null(True).to_numpy(),
        kinds=tuple(name_of[code] for code in codes.tolist()),
    )
    found = estimate(members, hosts)
    return found, tuple(_table(reduced, found, windows))


def _calls(reduced: Reduced) -> pl.DataFrame:
    """Members of collectives with `host` and the number of their `call`, of groups whose members are known."""
    pairs, unknown, inside = [], [], []
    host_of = reduced.host_of
    for group in {group.id: group for host in reduced.hosts for group in host.groups}.values():
        if len({host_of.get(rank) for rank in group.ranks}) == 1 and len(reduced.hosts) > 1:
            inside.append(group.id)  # most calls are such, and tell nothing of one host's clock beside another's
        if len(set(group.ranks)) == 2:
            pairs.append(group.id)
        elif not group.ranks:
            unknown.append(group.id)
    message = pl.col("kind").is_in(_PAIR)
    rows = (
        reduced.scan("collectives")
        .filter(
            pl.all_horizontal(pl.col("rank", "step", "group", "kind", "start_ns", "end_ns").is_not_null())
            & (pl.col("kind") != UNKNOWN)
            # in larger groups a message's number is its rank's own, and says nothing of the other side
            & (~message | pl.col("group").is_in(pairs))
            & ~pl.col("group").is_in(inside)
        )
        .select("host", "rank", "step", "group", "kind", "sequence", "bytes", "start_ns", "end_ns", "basis")
        .with_columns(pl.col("host", "group", "kind").cast(pl.Categorical))
        .collect()
    )
    if rows["sequence"].null_count():  # the how-manieth of its kind in the step
        place = pl.col("start_ns").rank("ordinal").over("rank", "step", "group", "kind").cast(pl.Int64) - 1
        rows = rows.with_columns(pl.coalesce("sequence", place).alias("sequence"))
    if unknown:
        # of a group without members: the only one there is, if all ranks call it equally often
        key = ["step", "group", "kind"]
        counts = rows.filter(pl.col("group").cast(pl.String).is_in(unknown)).group_by(*key, "rank").len()
        uneven = counts.group_by(key).agg(n=pl.col("len").n_unique()).filter(pl.col("n") > 1)
        rows = rows.join(uneven, on=key, how="anti")
    matched = pl.when(message).then(pl.lit("message")).otherwise(pl.col("kind").cast(pl.String))
    call = pl.struct("step", "group", matched.cast(pl.Categorical).alias("matched"), "sequence").hash(seed=1)
    return rows.with_columns(call=call.reinterpret(signed=True))


def _windows(steps: Int64) -> dict[int, tuple[int, int]]:
    """First step of each window -> (first, last); `steps` ascend."""
    distance = np.diff(steps)
    usual = max(float(np.median(distance)), 1.0) if len(distance) else 1.0
    parts = np.split(steps, np.flatnonzero(distance > GAP * usual) + 1)
    pieces = [part[at : at + MAX_STEPS] for part in parts for at in range(0, len(part), MAX_STEPS)]
    return {int(piece[0]): (int(piece[0]), int(piece[-1])) for piece in pieces}


def _table(reduced: Reduced, found: Clocks, windows: dict[int, tuple[int, int]]) -> list[HostClock]:
    """A row for each window and host, for the middle of the window."""
    of: dict[tuple[int, int], list[Piece]] = {}
    for piece in found.pieces:
        of.setdefault((piece.window, piece.host), []).append(piece)
    middles = _middles(reduced, windows, found.hosts)
    events = reduced.scan("events").filter(
        (pl.col("kind") == "clock") & pl.col("rank").is_null() & pl.col("start_us").is_not_null()
    )
    was_set: dict[str, list[tuple[int, str]]] = {}  # when hosts recorded that their clocks were set, ns
    for name, start_us, text in events.select("host", "start_us", "text").sort("host", "start_us").collect().rows():
        was_set.setdefault(name, []).append((start_us * 1000, f"recorded on it: {text or 'the clock was set'}"))
    nothing = "no collective with other hosts was recorded on it in this window"
    seen, rows = dict[str, int](), []
    for window in sorted(windows):
        for host, name in enumerate(found.hosts):
            pieces = of.get((window, host), [])
            if not pieces:
                rows.append(HostClock(name, window, None, None, None, 0, nothing))
                continue
            middle = middles.get((window, host), (pieces[0].start_ns + pieces[-1].end_ns) // 2)
            row = _row(name, pieces, middle, found.hosts[found.reference[window]])
            recorded = [
                text for at_ns, text in was_set.get(name, ()) if seen.get(name, at_ns) <= at_ns <= pieces[-1].end_ns
            ]
            seen[name] = pieces[-1].end_ns
            rows.append(replace(row, reason="; ".join(filter(None, [row.reason, *recorded[:MOST_SET]]))))
    return rows


def _row(name: str, pieces: list[Piece], middle: int, reference: str) -> HostClock:
    # the piece that holds in the middle, or comes nearest
    piece = min(pieces, key=lambda piece: max(piece.start_ns - middle, middle - piece.end_ns, 0))
    reasons = list(dict.fromkeys(one.reason for one in pieces if one.reason))
    calls = sum(one.calls for one in pieces)
    if piece.offset_ns is None or piece.bound_ns is None:
        return HostClock(name, piece.window, None, None, None, calls, "; ".join(reasons))
    away_ns = float(middle - piece.middle_ns)
    offset_us = (piece.offset_ns + 1e-6 * piece.rate_ppm * away_ns) / 1e3
    bound_us = (piece.bound_ns + 1e-6 * piece.rate_bound_ppm * abs(away_ns)) / 1e3
    if not piece.claimed:
        span = f"{(offset_us - bound_us) / 1e3:+.3g} to {(offset_us + bound_us) / 1e3:+.3g} ms ahead"
        return HostClock(name, piece.window, None, None, None, calls, "; ".join([*reasons, span]))
    if name == reference:
        residual = piece.residual_ns
        own = "" if residual is None else f", the ends of whose ranks deviate by {residual / 1e3:.3g} us"
        reasons.insert(0, f"the reference{own}")
    rate = piece.rate_ppm if piece.rate_bound_ppm <= RATE_BOUND_PPM else None
    return HostClock(name, piece.window, offset_us, rate, bound_us, calls, "; ".join(reasons))


def _middles(
    reduced: Reduced, windows: dict[int, tuple[int, int]], hosts: tuple[str, ...]
) -> dict[tuple[int, int], int]:
    """The middle of each window on each host's own clock, by the steps of its ranks, where these are recorded."""
    first = {edges[0]: window for window, edges in windows.items()}
    last = {edges[1]: window for window, edges in windows.items()}
    edges = (
        reduced.scan("steps")
        .filter(
            pl.col("step").is_in([*first, *last]) & pl.col("start_us").is_not_null() & pl.col("wall_us").is_not_null()
        )
        .group_by("host", "step")
        .agg(begun=pl.col("start_us").median(), ended=(pl.col("start_us") + pl.col("wall_us")).median())
        .collect()
    )
    begun, ended = {}, {}
    for host, step, start_us, end_us in edges.iter_rows():
        number = hosts.index(host)
        if step in first:
            begun[first[step], number] = start_us
        if step in last:
            ended[last[step], number] = end_us
    return {key: int((begun[key] + ended[key]) * 500) for key in begun.keys() & ended.keys()}
