"""Slices of lanes, merged where they are too thin to be seen.

A lane is one depth of one track: its slices follow each other. `merge` makes one item of neighbours that are shorter
than a bin and begin in the same bin; what is longer stays as it is, and so does a gap of a bin or more. An item knows
how many slices it holds and which is the longest, packed into one number so that one maximum finds both.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from stepscope.tables.arrays import Bools, Int8, Int32, Int64, expanded

_FINEST_NS = 4_096  # bins of the first level: most kernels and operators are this long or longer
_FEW = 50_000  # items that are thinned quickly enough as they are
_BINS = 64  # a window is never drawn in fewer
_MOST_LEFT = 0.75  # a level that does not leave out a quarter is not worth its memory
_LONGEST = np.int64(2**31 - 1)
_POSITION = np.int64(2**32 - 1)


class Items(Struct, frozen=True):
    """Slices, or groups of them, by lane and start. `best` packs the longest slice's length and position."""

    lane: Int32
    start: Int64
    end: Int64
    count: Int32
    best: Int64

    def __len__(self) -> int:
        return len(self.start)

    @property
    def position(self) -> Int64:
        """The position, in the index, of the longest slice of each."""
        found: Int64 = self.best & _POSITION
        return found

    def grouped(self, cut: Bools) -> Items:
        """One item for each stretch that begins where `cut` is set."""
        first = np.flatnonzero(cut)
        if len(first) == len(self):
            return self
        return Items(
            self.lane[first],
            self.start[first],
            np.maximum.reduceat(self.end, first),
            np.add.reduceat(self.count, first),
            np.maximum.reduceat(self.best, first),
        )


def packed(start: Int64, end: Int64, position: Int64) -> Int64:
    """`best` of single slices."""
    found: Int64 = (np.minimum(end - start, _LONGEST) << 32) | position
    return found


def merge(items: Items, bin_ns: int) -> Items:
    """Thin neighbours that begin in the same bin become one."""
    if len(items) < 2:
        return items
    thin = items.end - items.start < bin_ns
    place = items.start // bin_ns
    cut = np.ones(len(items), bool)
    cut[1:] = ~(thin[1:] & thin[:-1] & (place[1:] == place[:-1]) & (items.lane[1:] == items.lane[:-1]))
    return items.grouped(cut)


def join(items: Items, bin_ns: int, kind: Int8) -> Items:
    """Neighbours of one kind without a gap that could be seen become one, except slices that can be seen themselves.

    `kind` is by position of the index.
    """
    if len(items) < 2:
        return items
    alone = (items.count == 1) & (items.end - items.start >= bin_ns)
    kinds = kind[items.position]
    together = (items.lane[1:] == items.lane[:-1]) & (kinds[1:] == kinds[:-1]) & ~alone[1:] & ~alone[:-1]
    together &= items.start[1:] - items.end[:-1] < bin_ns
    return items.grouped(np.append(True, ~together))


def thinned(items: Items, bin_ns: int, kind: Int8, limit: int) -> Items:
    """At most `limit` items: as many as bins of `bin_ns` leave, else of wider ones."""
    found = join(merge(items, bin_ns), bin_ns, kind)
    while len(found) > limit:
        fewer = join(merge(found, bin_ns * 2), bin_ns * 2, kind)
        bin_ns *= 2
        if len(fewer) == len(found) and bin_ns > int(found.end.max()) + 1:
            break  # one item a lane, and more lanes than asked for
        found = fewer
    return found


class Level(Struct, frozen=True):
    """All slices of a run merged to bins of `bin_ns`; at 0 every slice is an item of its own.

    Lane i lies between `bounds[i]` and `bounds[i + 1]`. `count` and `best` are None at 0.
    """

    bin_ns: int
    bounds: Int64
    start: Int64
    end: Int64
    count: Int32 | None
    best: Int64 | None

    def between(self, lanes: Int64, from_ns: int, to_ns: int) -> Items:
        """The items of `lanes` that lie, with any part of them, between two moments."""
        low, high = self.bounds[lanes], self.bounds[lanes + 1]
        first = _first_from(self.start, low, high, from_ns)
        before = first - 1
        reaches = (before >= low) & (self.end[np.maximum(before, 0)] > from_ns) if len(self.end) else before >= low
        first = np.where(reaches, before, first)
        last = _first_from(self.start, first, high, to_ns)
        rows, _ = expanded(first, last - first)
        start, end = self.start[rows], self.end[rows]
        return Items(
            np.repeat(lanes, last - first).astype(np.int32),
            start,
            end,
            self.count[rows] if self.count is not None else np.ones(len(rows), np.int32),
            self.best[rows] if self.best is not None else packed(start, end, rows),
        )


def pyramid(lanes: int, lane: Int32, start: Int64, end: Int64) -> tuple[Level, ...]:
    """Levels of slices that are given by lane and start, each a quarter as fine as the one before it."""
    bounds = np.searchsorted(lane, np.arange(lanes + 1))
    levels = [Level(0, bounds, start, end, None, None)]
    span = int(end.max()) if len(end) else 0
    items = Items(lane, start, end, np.ones(len(start), np.int32), packed(start, end, np.arange(len(start))))
    bin_ns = _FINEST_NS
    while len(items) > _FEW and bin_ns * _BINS < span:
        before = len(items)
        items = merge(items, bin_ns)
        if len(items) < before * _MOST_LEFT:
            bounds = np.searchsorted(items.lane, np.arange(lanes + 1))
            levels.append(Level(bin_ns, bounds, items.start, items.end, items.count, items.best))
        bin_ns *= 4
    return tuple(levels)


def _first_from(start: Int64, low: Int64, high: Int64, moment: int) -> Int64:
    """For every range of positions the first whose start is not before `moment`, or the range's end."""
    low, high = low.copy(), high.copy()
    while True:
        searched = np.flatnonzero(low < high)
        if not len(searched):
            return low
        middle = (low[searched] + high[searched]) // 2
        before = start[middle] < moment
        low[searched[before]] = middle[before] + 1
        high[searched[~before]] = middle[~before]
