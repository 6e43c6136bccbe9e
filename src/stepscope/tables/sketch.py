"""A histogram of whole numbers that merges exactly: 64 bins to each doubling, so a value is known to within 0.8 %.

Bins are integers made of a value's leading bits, so any order of merging, on any machine, gives the same bytes. Kept
sparse: the numbers of the bins that hold something, ascending, and how many values each holds.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from stepscope.tables.arrays import Floats, Int64

_SUB = 6  # bits kept behind the leading one
_EXACT = 2 << _SUB  # smaller values have a bin each
MAX_VALUE = 2**53


class Sketch(Struct, frozen=True):
    """`bins` ascending without doubles, `counts` above 0; shape (used bins,) both."""

    bins: Int64
    counts: Int64

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def quantile(self, share: float) -> float:
        """The value below which `share` (0 to 1) of the values lie, to within 0.8 %; NaN of nothing."""
        if not len(self.bins):
            return float("nan")
        row = int(np.searchsorted(np.cumsum(self.counts), share * self.count))
        return float(middles(self.bins)[min(row, len(self.bins) - 1)])


def bins_of(values: Int64) -> Int64:
    """The bin of each value; those below 0 count as 0, above 2^53 as 2^53."""
    values = np.clip(values, 0, MAX_VALUE - 1)
    # the exponent of a double is its number of leading bits, exactly: values are below 2^53
    shift = np.maximum(np.frexp(values.astype(np.float64))[1] - _SUB - 1, 0).astype(np.int64)
    bins: Int64 = (values >> shift) + shift * (_EXACT // 2)
    return bins


def middles(bins: Int64) -> Floats:
    """The middle of each bin's range of values."""
    shift = np.maximum(bins // (_EXACT // 2) - 1, 0)
    first = (bins - shift * (_EXACT // 2)) << shift
    return np.asarray(first + ((1 << shift) - 1) / 2, np.float64)


def sketch(values: Int64) -> Sketch:
    bins, counts = np.unique(bins_of(np.asarray(values, np.int64)), return_counts=True)
    return Sketch(bins.astype(np.int64), counts.astype(np.int64))


def merged(sketches: Iterable[Sketch]) -> Sketch:
    parts = list(sketches)
    none = np.zeros(0, np.int64)
    bins, row = np.unique(np.concatenate([none, *(part.bins for part in parts)]), return_inverse=True)
    counts = np.zeros(len(bins), np.int64)
    np.add.at(counts, row, np.concatenate([none, *(part.counts for part in parts)]))
    return Sketch(bins, counts)
