"""Clocks of a reduced run's hosts, by the collectives of its windows; what the verdict says of them."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec.structs import replace

from stepscope.engine.clocks import RATE_BOUND_PPM, Clocks, Members, Piece, estimate
from stepscope.engine.collective_names import UNKNOWN
from stepscope.model.ranks import HostClock
from stepscope.tables.arrays import Int64
from stepscope.tables.reduced import Reduced

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
