"""Lines of equal height over a grid: marching squares, cell by cell, of straight pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

Place = tuple[float, float]  # column and row, from 0 on


def pieces(rows: Sequence[Sequence[float]], level: float) -> Iterator[tuple[Place, Place]]:
    """The pieces of the lines on which the grid reaches `level`, each within a cell of four neighbours."""
    for y, (upper, lower) in enumerate(itertools.pairwise(rows)):
        for x in range(len(upper) - 1):
            corners = [upper[x], upper[x + 1], lower[x + 1], lower[x]]  # clockwise
            ends = [end for side in range(4) if (end := _crossing(side, corners, level, x, y)) is not None]
            if len(ends) == 4 and (corners[0] > level) != (sum(corners) / 4 > level):  # a saddle: by its middle
                ends = [*ends[1:], ends[0]]
            yield from zip(ends[::2], ends[1::2], strict=True)


_SIDES = (((0, 0), (1, 0)), ((1, 0), (1, 1)), ((1, 1), (0, 1)), ((0, 1), (0, 0)))


def _crossing(side: int, corners: Sequence[float], level: float, x: int, y: int) -> Place | None:
    start, end = corners[side], corners[(side + 1) % 4]
    if (start > level) == (end > level):
        return None
    share = (level - start) / (end - start)
    (x0, y0), (x1, y1) = _SIDES[side]
    return x + x0 + share * (x1 - x0), y + y0 + share * (y1 - y0)
