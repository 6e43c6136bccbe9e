"""The types of columns as arrays, and what stands for no row in them."""

from __future__ import annotations

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
