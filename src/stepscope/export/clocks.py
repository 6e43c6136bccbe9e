"""Clocks of the hosts in a merged export: by how much each source is moved, and why one stays where it is.

A source is moved as a whole, so that durations stay those that were measured and slices stay inside each other: by what
its host's clock is ahead in the middle of it. How far that is off at its edges counts to the bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from stepscope.export.collectives import NO_GROUP
from stepscope.export.survey import Source, numbers

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


def _members(sources: Sequence[Source], hosts: Sequence[int], steps_of: Steps) -> Members:
    """The collectives of all sources, matched by group and number, else by step, kind and place among these."""
    from stepscope.engine.clocks import Members

    kinds: dict[str, int] = {}
    groups: dict[str, int] = {}
    columns: dict[str, list[Any]] = {
        name: [] for name in Members.__struct_fields__ if name not in ("kinds", "call", "window")
    }
    sequences, owners = [], []
    for at, (source, host) in enumerate(zip(sources, hosts, strict=True)):
        found = source.collectives
        if found is None or not found.start:
            continue
        names = list(found.names)
        start = np.array(found.start, np.int64)
        step = _steps(source, start, np.array(found.correlation, np.int64), steps_of(source))
        count = len(start)
        columns["kind"].append(np.array([kinds.setdefault(names[code], len(kinds)) for code in found.kind], np.int64))
        columns["group"].append(
            np.array([groups.setdefault(names[code], len(groups)) for code in found.group], np.int64)
        )
        columns["step"].append(step)
        columns["start_ns"].append(start + source.base_ns)
        columns["end_ns"].append(np.array(found.end, np.int64) + source.base_ns)
        columns["bytes"].append(np.array(found.bytes, np.int64))
        columns["on_device"].append(np.array(found.on_device, bool))
        columns["host"].append(np.full(count, host))
        columns["rank"].append(np.full(count, source.rank.number))
        sequences.append(np.array(found.sequence, np.int64))
        owners.append(np.full(count, at))
    empty = np.zeros(0, np.int64)
    table = {name: np.concatenate(parts) if parts else empty for name, parts in columns.items()}
    sequence = np.concatenate(sequences) if sequences else empty
    owner = np.concatenate(owners) if owners else empty
    usable = np.ones(len(sequence), bool)
    if len(groups) > 1 and NO_GROUP in groups:  # whose a call without a group is, nothing tells where there are several
        usable = table["group"] != groups[NO_GROUP]
    call, matched = _matched(table, sequence, owner, np.flatnonzero(usable))
    table = {name: values[matched] for name, values in table.items()}
    table["window"] = _windows(call, owner[matched], table["start_ns"], len(sources))
    return Members(call=call, kinds=tuple(kinds), on_device=table.pop("on_device").astype(bool), **table)


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


def _matched(table: dict[str, Int64], sequence: Int64, owner: Int64, usable: Int64) -> tuple[Int64, Int64]:
    """A number for each collective of the usable rows, and the rows that have one."""
    # the library's number, which several kernels of one call share; else the place among those of a kind in the step
    told = sequence >= 0
    key = [table["group"], table["kind"], told, np.where(told, 0, table["step"]), np.where(told, sequence, -1)]
    _, call = np.unique(np.stack(key)[:, usable], axis=1, return_inverse=True)
    call, owner, start = call.reshape(-1).astype(np.int64), owner[usable], table["start_ns"][usable]
    order = np.lexsort((start, owner, call))
    own = call[order] * (int(owner.max(initial=0)) + 1) + owner[order]
    begins = np.flatnonzero(np.diff(own, prepend=own[:1] - 1))
    counts = np.diff(np.append(begins, len(order)))
    place = np.arange(len(order)) - np.repeat(begins, counts)
    # a source that has more or fewer of them than another has other ones: which, nothing tells
    calls = int(call.max(initial=-1)) + 1
    most, least = np.zeros(calls, np.int64), np.full(calls, len(order) + 1)
    np.maximum.at(most, call[order[begins]], counts)
    np.minimum.at(least, call[order[begins]], counts)
    even = (most == least)[call[order]]
    rows = order[even]
    _, numbers = np.unique(np.stack([call[rows], place[even]]), axis=1, return_inverse=True)
    return numbers.reshape(-1).astype(np.int64), usable[rows]


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
