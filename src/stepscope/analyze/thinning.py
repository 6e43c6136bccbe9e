"""Fewer points of a long series, chosen so that its picture stays the same and no stall is lost.

The series is cut into stretches of equal length; of each the lowest and the highest value stay where they were. So a
single slow step among a million is still a point of its own, with its own number, which means over stretches would have
levelled. Nothing is computed anew: what is shown are values that were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Value = TypeVar("Value")
Series = Sequence[float | None] | npt.NDArray[np.generic]


def positions(values: Series, limit: int, *, always: Iterable[int] = ()) -> list[int]:
    """Which of `values` to show where at most `limit` (4 or more) can be, in ascending order; all if they are not more.

    The first and the last stay, the lowest and the highest of each stretch, and those of `always` (the highest of them
    where they would take more than half). Missing values (None, not a number) only stay where a stretch has no other.
    """
    return shared_positions([values], limit, always=always)


def shared_positions(series: Sequence[Series], limit: int, *, always: Iterable[int] = ()) -> list[int]:
    """Like `positions` for several series over one axis: what stands out in any of them stays in all.

    `limit` is at least 2 and 2 for each series. For stacked parts pass their totals alone to `positions`: with what it
    says the parts can be picked.
    """
    count = min((len(values) for values in series), default=0)
    if count <= limit:
        return list(range(count))
    columns = [_numbers(values)[:count] for values in series]
    forced = _forced(columns[0], {place for place in always if 0 <= place < count}, max(limit - 4, 0) // 2)
    room = max(limit - len(forced) - 2, 2)
    stretches = max(room // (2 * len(columns)), 1)
    kept = {0, count - 1, *forced}
    for column in columns:
        kept.update(_extremes(column, stretches))
    return sorted(kept)


def pick(values: Sequence[Value], kept: Sequence[int]) -> list[Value]:
    """`values` at the positions `kept`."""
    return [values[place] for place in kept]


def _numbers(values: Series) -> npt.NDArray[np.float64]:
    """As floats, with NaN for what is missing."""
    return np.asarray(
        [np.nan if value is None else value for value in values] if not isinstance(values, np.ndarray) else values,
        dtype=np.float64,
    )


def _forced(column: npt.NDArray[np.float64], always: set[int], most: int) -> list[int]:
    """Those that stay in any case, at most `most`: the highest of them."""
    if len(always) <= most:
        return sorted(always)
    return sorted(always, key=lambda place: (-np.nan_to_num(column[place], nan=-np.inf), place))[:most]


def _extremes(column: npt.NDArray[np.float64], stretches: int) -> list[int]:
    """Positions of the lowest and the highest value of each stretch."""
    edges = np.linspace(0, len(column), stretches + 1).astype(np.int64)[:-1]
    missing = np.isnan(column)
    stretch = np.repeat(np.arange(len(edges)), np.diff(np.append(edges, len(column))))
    found = []
    for hidden in (np.inf, -np.inf):
        shown = np.where(missing, hidden, column)
        best = (np.minimum if hidden > 0 else np.maximum).reduceat(shown, edges)
        first = np.flatnonzero(shown == best[stretch])
        _, at = np.unique(stretch[first], return_index=True)
        found += first[at].tolist()
    return found
