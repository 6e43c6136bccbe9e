"""Clocks of the hosts in a merged export: by how much each source is moved, and why one stays where it is.

A source is moved as a whole, so that durations stay those that were measured and slices stay inside each other: by what
its host's clock is ahead in the middle of it. How far that is off at its edges counts to the bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.export.survey import NO_GROUP, Source, numbers

if TYPE_CHECKING:
    from stepscope.engine.clocks import Clocks, Members
    from stepscope.tables.arrays import Int64

MOST_BOUND_NS = 1_000_000  # waits that matter are longer; a move that may be off by more would only seem exact
LEAST_MOVE_NS = 20_000  # less does not show, and ends of ranks of one host differ by up to that

Steps = Callable[[Source], dict[int, tuple[int, int]]]


class HostMove(Struct, frozen=True):
    """What was done with the sources of a host, or of a rank whose host nothing tells.

    `moved_ns`: what is taken from the times of each that was moved, `bound_ns`: how far that can be off, at most.
    `reason`: why some, or all, were not.
    """

    host: str
    ranks: tuple[int, ...]
    reference: str
    moved_ns: tuple[int, ...] = ()
    bound_ns: int | None = None
    reason: str = ""

    @property
    def sentence(self) -> str:
        named = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {numbers(list(self.ranks))}"
        who = self.host if self.host == named else f"{self.host} ({named})"
        if self.bound_ns is None:
            return f"{who}: left on its own clock, beside that of {self.reference}: {self.reason}"
        least, most = (-ahead / 1e6 for ahead in (max(self.moved_ns), min(self.moved_ns)))
        by = f"{least:+.3f}" if least == most else f"{least:+.3f} to {most:+.3f}"
        text = f"{who}: moved by {by} ms onto the clock of {self.reference}, to ±{self.bound_ns / 1e3:.1f} us"
        return f"{text}; a part was not: {self.reason}" if self.reason else text


def hosts_of(sources: Sequence[Source]) -> dict[str, list[Source]]:
    """Sources by host; a rank whose host nothing tells has a clock of its own."""
    found: dict[str, list[Source]] = {}
    for source in sources:
        found.setdefault(source.rank.host or source.rank.label, []).append(source)
    return found


def move(sources: Sequence[Source], steps_of: Steps) -> tuple[HostMove, ...]:
    """Set `ahead_ns` of sources on other hosts than that of the lowest rank, where their collectives tell it well."""
    by_host = hosts_of(sources)
    if len(by_host) < 2:
        return ()
    from stepscope.engine.clocks import estimate

    hosts = sorted(by_host, key=lambda host: min(source.rank.number for source in by_host[host]))
    members = _members(sources, [hosts.index(source.rank.host or source.rank.label) for source in sources], steps_of)
    clocks = estimate(members, hosts)
    chosen = Counter(clocks.reference.values()).most_common(1)
    to = chosen[0][0] if chosen else 0
    return tuple(
        _moved(host, number, by_host[host], clocks, hosts[to]) for number, host in enumerate(hosts) if number != to
    )


def _moved(host: str, number: int, sources: Sequence[Source], clocks: Clocks, reference: str) -> HostMove:
    moved, bounds, reasons = [], [], []
    for source in sources:
        first, last = source.base_ns + source.first_ns, source.base_ns + source.last_ns
        pieces = [
            piece
            for piece in clocks.pieces
            if piece.host == number and piece.start_ns <= last and piece.end_ns >= first
        ]
        if not pieces:
            reasons.append("no collective in it could be matched with one of another host")
            continue
        # a rate that was told in a few milliseconds says nothing of the rest
        middle = min(max((first + last) // 2, pieces[0].start_ns), pieces[0].end_ns)
        offset, bound = clocks.ahead(number, np.array([first, middle, last], np.int64))
        ahead = float(offset[1])
        off = float(np.max(bound + np.abs(offset - ahead)))
        if len(pieces) > 1:
            reasons.append("; ".join(dict.fromkeys(piece.reason for piece in pieces[1:])) or "its clock broke")
        elif clocks.hosts[clocks.reference[pieces[0].window]] != reference or np.isnan(ahead):
            reasons.append(pieces[0].reason or f"no collective connects it with {reference}")
        elif not off <= MOST_BOUND_NS:
            reasons.append(f"its clock is known to ±{off / 1e6:.3g} ms only. {pieces[0].reason}".rstrip(". "))
        elif abs(ahead) <= max(off, LEAST_MOVE_NS):
            reasons.append(
                f"its clock is ahead by {ahead / 1e3:+.1f} us, less than the ±{off / 1e3:.1f} us it is known to"
            )
        else:
            source.ahead_ns = round(ahead)
            moved.append(source.ahead_ns)
            bounds.append(int(np.ceil(off)))
    ranks = tuple(sorted({source.rank.number for source in sources}))
    reason = "; ".join(dict.fromkeys(reasons))
    return HostMove(host, ranks, reference, tuple(moved), max(bounds, default=None), reason)


_COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("owner", "host", "rank", "step", "sequence", "start_ns", "end_ns", "bytes"), pl.Int64),
    "kind": pl.String,
    "group": pl.String,
    "on_device": pl.Boolean,
}


def _members(sources: Sequence[Source], hosts: Sequence[int], steps_of: Steps) -> Members:
    """The collectives of all sources, matched by group and number, else by step, kind and place among these."""
    from stepscope.engine.clocks import Members

    parts = [pl.DataFrame(schema=_COLUMNS)]
    for owner, (source, host) in enumerate(zip(sources, hosts, strict=True)):
        rows = source.collectives.rows if source.collectives is not None else []
        if rows:
            start, end, kind, group, sequence, size, correlation, on_device = zip(*rows, strict=True)
            starts = np.array(start, np.int64)
            step = _steps(source, starts, np.array(correlation, np.int64), steps_of(source))
            whose = {"owner": owner, "host": host, "rank": source.rank.number, "step": step, "sequence": sequence}
            when = {"start_ns": starts + source.base_ns, "end_ns": np.array(end, np.int64) + source.base_ns}
            what = {"bytes": size, "kind": kind, "group": group, "on_device": on_device}
            parts.append(pl.DataFrame(whose | when | what, schema=_COLUMNS))
    table = pl.concat(parts)
    if table["group"].n_unique() > 1:  # whose a call without a group is, nothing tells where there are several
        table = table.filter(pl.col("group") != NO_GROUP)
    # the library's number, which several kernels of one call share; else the place among those of a kind in the step
    told, own = pl.col("sequence") >= 0, ("call", "owner")
    at = pl.when(told).then("sequence").otherwise("step")
    table = (
        table.with_columns(call=pl.struct("group", "kind", told=told, at=at).hash(seed=1))
        .sort("call", "owner", "start_ns", maintain_order=True)
        .with_columns(place=pl.int_range(pl.len()).over(own), count=pl.len().over(own))
        # a source that has more or fewer of them than another has other ones: which, nothing tells
        .filter(pl.col("count").min().over("call") == pl.col("count").max().over("call"))
        .with_columns(call=pl.struct("call", "place").hash(seed=1))
    )
    kinds = table["kind"].unique().sort().to_list()
    table = table.with_columns(pl.col("call", "kind", "group").rank("dense").cast(pl.Int64) - 1)
    columns = {name: table[name].to_numpy() for name in Members.__struct_fields__ if name in table.columns}
    window = _windows(columns["call"], table["owner"].to_numpy(), columns["start_ns"], len(sources))
    return Members(**columns, window=window, kinds=tuple(kinds))


def _steps(source: Source, start: Int64, correlation: Int64, steps: dict[int, tuple[int, int]]) -> Int64:
    """The step in which each was launched, or began where no launch is known; -1 outside."""
    moments = start.copy()
    launched, ids = (np.array(part, np.int64) for part in source.launches)
    if len(ids):
        order = np.argsort(ids, kind="stable")
        at = np.minimum(np.searchsorted(ids[order], correlation), len(ids) - 1)
        known = (ids[order][at] == correlation) & (correlation > 0)
        moments[known] = launched[order][at][known]
    numbers = np.array(sorted(steps, key=lambda number: steps[number]), np.int64)
    if not len(numbers):
        return np.full(len(start), -1, np.int64)
    begins = np.array([steps[number][0] for number in numbers.tolist()], np.int64)
    place = np.searchsorted(begins, moments, side="right") - 1
    return np.where(place >= 0, numbers[np.maximum(place, 0)], -1)


def _windows(call: Int64, owner: Int64, start_ns: Int64, sources: int) -> Int64:
    """A window's number for each collective, in order of time: sources that share collectives are of one."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    size = sources + int(call.max(initial=-1)) + 1
    graph = coo_matrix((np.ones(len(call)), (owner, sources + call)), shape=(size, size))
    part = connected_components(graph, directed=False)[1][owner].astype(np.int64)
    begins = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(begins, part, start_ns)
    found: Int64 = np.argsort(np.argsort(begins, kind="stable"), kind="stable")[part].astype(np.int64)
    return found
