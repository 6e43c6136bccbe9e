"""What one trace contributes to each kind of loss, and how the traces of a run are put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from stepscope.analyze.views.kernel_names import short_names
from stepscope.engine import intervals
from stepscope.engine.arrays import Bools, Int64
from stepscope.engine.attribution import place_of_row, place_sums
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL, Work
from stepscope.engine.host_activity import matches
from stepscope.engine.intervals import Intervals
from stepscope.engine.spans import Base, Span
from stepscope.engine.step_windows import StepWindows
from stepscope.model.views.device_losses import ATTENTION, LAYOUT, MATRIX, POINTWISE, Loss, LossLine

LINES = 5  # of each loss; more than a finding names
PARTS = 8
MAX_LEVELS = 1_000  # slices around each other; a broken tree ends here
KERNELS = (MATRIX, ATTENTION, LAYOUT, POINTWISE)  # whose parts are kernels


@dataclass(frozen=True)
class Scene:
    """A trace under analysis: its device work and its complete steps. `inside` is the time of these."""

    base: Base
    span: Span
    found: Work
    windows: StepWindows

    @property
    def inside(self) -> Intervals:
        return intervals.union(self.windows.start_ns, self.windows.end_ns)

    def step_of(self, times: Int64) -> Int64:
        """The number of the step each time lies in, -1 for none."""
        at = np.searchsorted(self.windows.start_ns, times, side="right") - 1
        lies = (at >= 0) & (times < self.windows.end_ns[np.maximum(at, 0)])
        return np.where(lies, at, -1)


@dataclass(frozen=True)
class Piece:
    """A loss in one trace: ns of each step, and what caused it, one value for each cause.

    `rows` are host slices from which the user's line is looked up, `weights` ns, and `named` rows whose names are told;
    -1 where there is none.
    """

    scene: Scene
    per_step_ns: Int64
    rows: Int64
    weights: Int64
    named: Int64
    details: dict[str, float] = field(default_factory=dict)  # sums over the trace; `joined` makes them per step
    labels: tuple[str, ...] | None = None  # texts to tell in place of the names of `named`, one for each row
    times: Intervals = intervals.EMPTY  # of the whole trace


def piece(
    scene: Scene,
    times: Intervals,
    rows: Int64,
    weights: Int64,
    named: Int64,
    details: dict[str, float] | None = None,
) -> Piece:
    """A piece whose time is the set `times`."""
    covered = intervals.covered(times, scene.windows.start_ns, scene.windows.end_ns)
    return Piece(scene, covered, rows, weights, named, details or {}, times=times)


def exclusive(scene: Scene, mine: Bools) -> Intervals:
    """When slices of work flagged `mine` run and no others do."""
    found = scene.found
    rest = ~mine & np.isin(found.kind, (KERNEL, FILL, COMMUNICATION, COPY))
    return intervals.subtract(
        intervals.union(found.start_ns[mine], found.end_ns[mine]),
        intervals.union(found.start_ns[rest], found.end_ns[rest]),
    )


def below(span: Span, rows: Int64, wanted: Bools) -> Bools:
    """Which rows of the span are one of `wanted`, flags by row of it, or lie below one. -1 among them is none."""
    result = np.zeros(len(rows), bool)
    above = rows.copy()
    left = np.flatnonzero(above >= 0)
    for _ in range(MAX_LEVELS):
        if not len(left):
            break
        hit = wanted[above[left]]
        result[left[hit]] = True
        left = left[~hit]
        above[left] = span.parent[above[left]]
        left = left[above[left] >= 0]
    return result


def host_rows(span: Span, pattern: str) -> Int64:
    """Slices of the host with such names."""
    rows = np.flatnonzero(span.names.pick(matches(pattern, span.names.values).tolist()) & ~span.on_device)
    return rows[~span.categories.where(["gpu_user_annotation"])[rows]]


def joined(kind: str, pieces: Sequence[Piece]) -> Loss | None:
    """One loss of all traces together; None where no step lost anything."""
    kernels = kind in KERNELS
    per_step = np.concatenate([one.per_step_ns for one in pieces]) if pieces else np.empty(0, np.int64)
    if not len(per_step) or not per_step.sum():
        return None
    steps = len(per_step)
    parts: dict[str, int] = {}
    details: dict[str, float] = {}
    for one in pieces:
        for name, weight in _by_name(one):
            parts[name] = parts.get(name, 0) + weight
        for name, value in one.details.items():
            details[name] = details.get(name, 0.0) + value
    ordered = sorted(parts.items(), key=lambda item: (-item[1], item[0]))[:PARTS]
    named = [name for name, _ in ordered]
    shown = dict(zip(named, short_names(named) if kernels else named, strict=True))
    return Loss(
        kind=kind,
        ns_per_step=float(per_step.mean()),
        median_ns=float(np.median(per_step)),
        calls_per_step=sum(len(one.rows) for one in pieces) / steps,
        lines=_lines(pieces, steps),
        parts={shown[name]: ns / steps for name, ns in ordered},
        details={name: value / steps for name, value in sorted(details.items())},
    )


def _by_name(one: Piece) -> Iterator[tuple[str, int]]:
    """(name, ns) of one trace."""
    if one.labels is not None:
        yield from zip(one.labels, one.weights.tolist(), strict=True)
        return
    names = one.scene.span.names
    known = one.named >= 0
    codes = names.codes[one.named[known]]
    distinct, number = np.unique(codes, return_inverse=True)
    sums = np.zeros(len(distinct), np.int64)
    np.add.at(sums, number, one.weights[known])
    for code, weight in zip(distinct.tolist(), sums.tolist(), strict=True):
        if code >= 0:
            yield names.values[code], weight


def _lines(pieces: Sequence[Piece], steps: int) -> tuple[LossLine, ...]:
    """The user's lines of most weight."""
    sums = [
        place_sums(one.scene.base, one.scene.span, np.zeros(len(one.rows), np.int64), one.rows, one.weights)
        for one in pieces
        if len(one.rows)
    ]
    if not sums:
        return ()
    keys = ["file", "line", "function", "exact"]
    total = (
        pl.concat(sums)
        .group_by(keys)
        .agg(pl.col("weight").sum(), pl.col("rows").sum())
        .sort("weight", "rows", *keys, descending=[True, True, False, False, False, False])
        .head(LINES)
    )
    found = []
    for row in total.iter_rows(named=True):
        place, exact = place_of_row(row)
        found.append(LossLine(place, row["weight"] / steps, row["rows"] / steps, exact))
    return tuple(found)
