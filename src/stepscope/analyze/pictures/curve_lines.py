"""Curves as a page draws them: on one axis, thinned to what a screen can show, smoothed, and what happened meanwhile.

On the axis of steps a step has one value: of several the last, of telemetry the mean, and one that is not finite before
all others. On the axis of time every value is drawn. What is not finite is a mark of its own: thinning keeps the first
of each stretch, as it keeps the lowest and the highest value. A smoothed curve is made of all values, not of those that
are drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from stepscope.analyze.curves import TELEMETRY, Curve
from stepscope.analyze.happenings import Happenings
from stepscope.analyze.pictures.series import positions
from stepscope.engine.step_labels import LabelledSteps
from stepscope.tables.arrays import NONE, Floats, Int64
from stepscope.tables.schema import Tables

SECOND = 1e9


class Points(NamedTuple):
    """`x` ascends and holds nothing twice; steps are whole numbers."""

    x: Floats | Int64
    values: Floats


class Line(NamedTuple):
    """Values at the x of all lines, None where this one has none; `odd`: position and word of those not finite."""

    values: list[float | None]
    odd: list[tuple[int, str]]


class Lines(NamedTuple):
    """`lines` in the order of the curves, `smooth` the same smoothed, empty where that was not asked for."""

    x: list[float]
    lines: list[Line]
    smooth: list[Line]


class Moment(NamedTuple):
    """What happened, and where: `step` is the one in which or after which it did."""

    kind: str
    label: str
    step: int
    time_ns: int


def on_steps(curve: Curve) -> Points:
    """One value for each step."""
    known = curve.steps != NONE
    steps, values = curve.steps[known], curve.values[known]
    order = np.lexsort((np.arange(len(steps)), ~np.isfinite(values), steps))
    steps, values = steps[order], values[order]
    ends = np.flatnonzero(np.append(steps[1:] != steps[:-1], True)) if len(steps) else steps
    if curve.source == TELEMETRY and len(steps):
        firsts = np.append(0, ends[:-1] + 1)
        return Points(steps[ends], np.add.reduceat(values, firsts) / (ends - firsts + 1))
    return Points(steps[ends], values[ends])


def over_time(curve: Curve, origin_ns: int) -> Points:
    """Every value, in seconds since `origin_ns`."""
    last = np.append(curve.times_ns[1:] != curve.times_ns[:-1], True)
    return Points((curve.times_ns[last] - origin_ns) / SECOND, curve.values[last])


def held(points: Points, end: float) -> Points:
    """With its last value once more at `end`, of a curve that is kept when it changes."""
    if not len(points.x) or points.x[-1] >= end:
        return points
    return Points(np.append(points.x, end), np.append(points.values, points.values[-1]))


def lines(drawn: Sequence[Points], limit: int, window: int = 0) -> Lines:
    """Curves on one axis, of each at most about `limit` points of its own; smoothed over `window` values."""
    kept = []
    for points in drawn:
        finite = np.where(np.isfinite(points.values), points.values, np.nan)
        odd = np.flatnonzero(np.isnan(finite))
        first = np.unique(odd * limit // max(len(finite), 1), return_index=True)[1]  # of each stretch
        kept.append(points.x[sorted({*positions(finite, limit), *odd[first].tolist()})])
    x = np.unique(np.concatenate(kept)) if kept else np.empty(0)
    made: list[Line] = []
    smooth: list[Line] = []
    for points in drawn:
        at = np.minimum(np.searchsorted(points.x, x), len(points.x) - 1)
        there = np.flatnonzero(points.x[at] == x)
        made.append(_line(len(x), there, points.values[at[there]]))
        if window:
            # the mean of the last finite values; where the value itself is none, its mark says so
            finite = np.flatnonzero(np.isfinite(points.values))
            ends, known = np.searchsorted(finite, at[there], side="right"), points.values[finite]
            means = [known[max(0, end - window) : end].mean() if end else np.nan for end in ends.tolist()]
            shown = np.where(np.isfinite(points.values[at[there]]), np.array(means, np.float64), np.nan)
            smooth.append(_line(len(x), there, shown)._replace(odd=[]))
    return Lines(x.tolist(), made, smooth)


def _line(length: int, there: Any, values: Floats) -> Line:
    known: list[float | None] = [None] * length
    odd = []
    for position, value in zip(there.tolist(), values.tolist(), strict=True):
        if np.isfinite(value):
            known[position] = value
        else:
            odd.append((position, word(value)))
    return Line(known, odd)


def word(value: float) -> str:
    """What a value that is not finite is called."""
    return "NaN" if np.isnan(value) else "inf" if value > 0 else "-inf"


def heat(found: Mapping[str, Curve], limit: int) -> Lines:
    """Layers beside each other on the steps, at most `limit` columns: each the highest of its stretch of steps."""
    drawn = [on_steps(curve) for curve in found.values()]
    x = np.unique(np.concatenate([points.x for points in drawn]))
    stretch = np.arange(len(x)) * min(limit, len(x)) // max(len(x), 1)
    firsts = np.flatnonzero(np.append(True, stretch[1:] != stretch[:-1]))
    lowest = np.finfo(np.float64).min
    made = []
    for points in drawn:
        column = np.full(len(x), -np.inf)  # what is missing
        at = np.searchsorted(x, points.x)
        column[at] = np.where(points.values == -np.inf, lowest, points.values)
        most = np.maximum.reduceat(column, firsts)  # NaN comes before all
        there = np.flatnonzero(most != -np.inf)
        made.append(_line(len(firsts), there, np.where(most[there] == lowest, -np.inf, most[there])))
    return Lines(x[firsts].tolist(), made, [])


def moments(tables: Tables, labelled: LabelledSteps, process: str | None) -> list[Moment]:
    """Epochs, evaluations, checkpoints, recompilations and jumps of learning rates, each kind once a step."""
    own = (
        tables.steps.filter(pl.col("process").eq_missing(process)).drop_nulls(["start_ns", "wall_ns"]).sort("start_ns")
    )
    if own.is_empty():
        return []
    starts, numbers = own["start_ns"].to_numpy(), own["step"].to_numpy()
    end = int((own["start_ns"] + own["wall_ns"]).max())
    made: dict[tuple[str, int], Moment] = {}
    for time_ns, happening, mark in Happenings(tables, labelled, process).all:
        at = int(np.searchsorted(starts, time_ns, side="right")) - 1
        if mark and at >= 0 and time_ns <= end:
            step = int(numbers[at])
            made.setdefault((happening.kind, step), Moment(happening.kind, mark, step, time_ns))
    return list(made.values())


Place = tuple[float, float]  # column and row, from 0 on


def contour(rows: Sequence[Sequence[float]], level: float) -> Iterator[tuple[Place, Place]]:
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
