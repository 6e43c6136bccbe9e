"""Columns as arrays: their types, what stands for no row, sweeps that tables and analyses share, their memory.

So are the ways through a tree of slices, of which `parent` is the row around each row: `climb` goes up from a few
rows, `nearest_ancestor` and `self_or_ancestor` from all of them at once.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Rows = Int32 | Int64  # positions in a table, `NONE` for none
Int8 = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
NONE = -1
MAX_DEPTH = 100_000  # a broken (cyclic) tree ends here

_MANY_SLICES = 1_000_000  # from here on it is worth the time to return their memory
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 1 << 20  # blocks from this size on are taken from the system and given back


_Value = TypeVar("_Value", bound=Hashable)
_Scalar = TypeVar("_Scalar", bound=np.generic)


class Numbers(dict[_Value, int]):
    """A number for each distinct value, the next one where it is asked for the first time; in order of the numbers."""

    def __missing__(self, value: _Value) -> int:
        number = self[value] = len(self)
        return number


def positions(ids: pl.Series, wanted: pl.Series) -> Int32:
    """Where each of `wanted` stands in `ids` (ascending, each once), `NONE` where it is null or not there."""
    count = len(ids)
    if not count:
        return np.full(len(wanted), NONE, np.int32)
    first = int(ids[0])
    found: Int32
    if int(ids[-1]) - first == count - 1:  # every number in between: the usual numbering of rows
        inside = (wanted >= first) & (wanted < first + count)
        if not inside.all():
            wanted = wanted.set(~inside.fill_null(False), None)
        found = (wanted - first).cast(pl.Int32).fill_null(NONE).to_numpy()
        return found
    known, sought = ids.to_numpy(), wanted.fill_null(NONE).to_numpy()
    found = np.searchsorted(known, sought).astype(np.int32)
    found[found == count] = 0
    found[known[found] != sought] = NONE
    return found


def flags(count: int, rows: Rows | Bools) -> Bools:
    """A flag for each of `count` rows, set for `rows`."""
    found: Bools = np.zeros(count, bool)
    found[rows] = True
    return found


def unique(values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """The different values in order; no NaN. `np.unique` takes up to eighty times as long since NumPy 2.3, by a table
    of hashes.
    """
    values = np.sort(values)
    first = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    found: npt.NDArray[_Scalar] = values[first]
    return found


def by_code(flags: Bools, codes: npt.NDArray[np.integer]) -> Bools:
    """`flags` of the code of each row, the last for -1: as `flags[codes]`, in a third of its time."""
    return flags.take(codes, mode="wrap") if flags.any() else np.zeros(len(codes), bool)


def climb(
    parent: Rows, start: Rows, stop: Bools | Callable[[Int64, Int64], Bools], passed: Int64 | None = None
) -> Int64:
    """For each of `start` the first row on the way up, itself included, that `stop` marks; `NONE` without any.

    Args:
        parent: the row around each row, `NONE` for none.
        stop: a flag for each row, or what says of (rows, their positions in `start`) which of them to stop at.
        passed: takes for each of `start` the last row before the end of its way.
    """
    found = np.full(len(start), NONE, np.int64)
    active = np.flatnonzero(start >= 0)
    at = start[active].astype(np.int64)
    for _ in range(MAX_DEPTH):
        if not len(active):
            break
        hit: Bools = stop(at, active) if callable(stop) else stop[at]
        found[active[hit]] = at[hit]
        active, at = active[~hit], at[~hit]
        if passed is not None:
            passed[active] = at
        at = parent[at].astype(np.int64)
        active, at = active[at >= 0], at[at >= 0]
    return found


def own_starts(starts: Int64, ends: Int64) -> Int64:
    """Where what each interval covers and no earlier one does begins; behind its end where it covers nothing new.

    Intervals are in order of their starts; so the parts from here to `ends` add up to the time that any of them covers.
    """
    begins: Int64 = starts.copy()
    np.maximum(begins[1:], np.maximum.accumulate(ends)[:-1], out=begins[1:])
    return begins


def covered_before(starts: Int64, ends: Int64, times: Int64) -> Int64:
    """For each of `times`, how much of it and all before windows [start, end) cover; they are in order and apart."""
    if not len(starts):
        return np.zeros(len(times), np.int64)
    lengths = np.concatenate([[0], np.cumsum(ends - starts)])
    began = np.searchsorted(starts, times, side="right")
    ahead = np.where(began > 0, ends[began - 1] - times, 0)  # of the last that began, what is still to come
    return lengths[began] - np.maximum(ahead, 0)


def window_at(starts: Int64, ends: Int64, times: Int64) -> Int64:
    """The number of the window [start, end) that each time lies in, by the last that began; `NONE` for none."""
    if not len(starts):
        return np.full(len(times), NONE, np.int64)
    at = np.searchsorted(starts, times, side="right") - 1  # NONE before the first
    at[times >= ends[at]] = NONE
    return at


def expanded(firsts: Int64, lengths: Int64) -> tuple[Int64, Int64]:
    """All whole numbers of ranges, one range behind the other, and for each where its range begins among them."""
    begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(firsts, lengths) + np.arange(len(begins)) - begins, begins


def place_among_equals(keys: Int64, order: Int64) -> Int64:
    """For each key how many equal ones stand before it in `order`, which sorts the keys."""
    place = np.empty(len(keys), np.int64)
    place[order] = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order], side="left")
    return place


def decode(values: Sequence[str | None], codes: npt.NDArray[np.integer]) -> pl.Series:
    """A column of texts from codes, which are positions in `values`; -1 is null."""
    index = pl.Series(codes, dtype=pl.Int32)
    if not len(values):
        return pl.repeat(None, len(codes), dtype=pl.String, eager=True)
    if len(codes) and codes.min() < 0:
        index = index.set(index < 0, None)
    return pl.Series(values, dtype=pl.String).gather(index)


def with_ids(columns: dict[str, Any], *ids: str) -> pl.DataFrame:
    """A frame of these columns; `ids` are numbers of rows, in which `NONE` becomes null."""
    known = (pl.when(pl.col(name) >= 0).then(pl.col(name).cast(pl.Int64)).alias(name) for name in ids)
    return pl.DataFrame(columns).with_columns(known)


def return_freed_memory(slices: int) -> None:
    """Give what one stage freed back to the system, of a large trace a quarter, and from then on large blocks at once.

    For few slices nothing is done.
    """
    if slices > _MANY_SLICES:
        trim_memory()
        option = getattr(ctypes.CDLL(None), "mallopt", None)
        if option is not None:
            option(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def trim_memory() -> None:
    """Give all freed memory back to the system: glibc keeps freed blocks for later, other C libraries have no such
    call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


DOUBLINGS = 20  # a million slices around each other; a broken (cyclic) tree ends there too


def nearest_ancestor(parent: Int64, wanted: Bools) -> Int64:
    """For each row the innermost wanted row around it, not itself, `NONE` without one."""
    return np.where(parent >= 0, self_or_ancestor(parent, wanted)[parent], NONE).astype(np.int64)


def self_or_ancestor(parent: Int64, stop: Bools) -> Int32:
    """For each row the first row that `stop` marks on the way up, itself included; `NONE` without any."""
    count = len(parent)
    ends = np.append(stop, True)  # the last entry stands for the outside
    hop = np.full(count + 1, count, np.int32)
    np.copyto(hop[:-1], parent, where=parent >= 0, casting="same_kind")
    own = np.flatnonzero(ends).astype(np.int32)
    hop[own] = own
    for _ in range(DOUBLINGS):  # each doubles how far a hop leads
        further = hop[hop]
        if np.array_equal(further, hop):
            break
        hop = further
    hop[(hop == count) | ~ends[hop]] = NONE
    return hop[:-1]


def has_ancestor(parent: Int64, rows: Int64, wanted: Bools) -> Bools:
    """Which of `rows` are wanted or lie below a wanted row; `NONE` among them is none."""
    return climb(parent, rows, wanted) >= 0


def ancestors(parent: Rows, rows: Int64, wanted: Bools | None = None) -> Bools:
    """By row, whether it lies around one of `rows`; with `wanted` each way ends before the first that is not."""
    met = np.zeros(len(parent), bool)
    while len(rows):
        rows = parent[rows].astype(np.int64)
        rows = rows[np.append(True, rows[1:] != rows[:-1])]  # neighbours mostly lie in the same; sorting takes longer
        rows = rows[(rows >= 0) & ~met[rows]]
        rows = rows if wanted is None else rows[wanted[rows]]
        met[rows] = True
    return met


def self_and_ancestors(parent: Int64, start: Int64) -> Iterator[tuple[Int64, Int64]]:
    """(positions in `start`, rows): first each row itself, then the one around it, and so on to the outermost."""
    left = np.flatnonzero(start >= 0)
    at = start[left]
    for _ in range(MAX_DEPTH):
        if not len(left):
            return
        yield left, at
        at = parent[at]
        left, at = left[at >= 0], at[at >= 0]
