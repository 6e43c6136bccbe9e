"""A trace's training steps, and how much of their wall time a piece of work takes.

A step trains when a backward pass runs in it. On a device a piece of work takes the time in which only its kernels ran,
and the idle time while the host prepared them; without a device it takes the host's time.

Recording makes every slice a little longer. Where the journal tells how long steps are outside of windows, the excess
of the profiled step is spread over its slices, up to what recording one can take, and a piece of work is relieved of as
much as it has slices. What is left of the excess is how the machine was at that time, and shared in proportion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import polars as pl

from stepscope.engine import intervals
from stepscope.engine.arrays import NONE, Bools, Int32, Int64
from stepscope.engine.attribution import place_of_row, place_sums
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL, Work, work
from stepscope.engine.host_activity import host_activity
from stepscope.engine.intervals import EMPTY, Intervals
from stepscope.engine.module_calls import ModuleCalls
from stepscope.engine.spans import Base, Span
from stepscope.engine.step_labels import LabelledSteps
from stepscope.engine.step_windows import step_windows
from stepscope.engine.tree import nearest
from stepscope.model.views.passes import PassLine

RECURRING = 0.5  # of the mean: with a median below it few steps make the loss, and the median counts
STEPS_FOR_MEDIAN = 3
SLICE_NS = 1_000  # what recording adds to a slice at least; operators with shapes and stacks take a few times that
LINES = 5


class Scene:
    """One trace: `starts` and `ends` are its training steps."""

    def __init__(
        self, base: Base, span: Span, steady_ns: float | None, backward_ns: tuple[float, float] | None = None
    ) -> None:
        """`steady_ns`: the steady step; `backward_ns`: the backward pass in (profiled, steady) steps of the journal."""
        self.base, self.span = base, span
        self.found: Work = work(span)
        self.calls = ModuleCalls(span)
        windows = step_windows(span, self.found)
        self.has_steps = windows.has_steps
        backward = span.start_ns[np.flatnonzero(self.calls.is_backward)]
        order = np.sort(backward)
        trains = np.searchsorted(order, windows.end_ns) > np.searchsorted(order, windows.start_ns)
        self.starts, self.ends = windows.start_ns[trains], windows.end_ns[trains]
        self._steady_ns = steady_ns
        self.backward_ns = backward_ns
        self.recorded = steady_ns is not None

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def profiled_ns(self) -> float:
        """The mean profiled step."""
        return float((self.ends - self.starts).mean())

    @property
    def step_ms(self) -> float:
        """The mean step that times are told of: the steady one where the journal has it, else the profiled one."""
        return (self.profiled_ns if self._steady_ns is None else self._steady_ns) / 1e6

    def has(self, column: str) -> bool:
        """Whether the trace has any value of a column."""
        return bool(self.span.series(column).is_not_null().any())

    @cached_property
    def mine(self) -> Bools:
        """Slices of the training thread, and of those that run the backward pass for it, inside the steps."""
        found = np.zeros(len(self.span), bool)
        rows = host_activity(self.span, self.found).rows
        found[rows[self.step_around(rows) >= 0]] = True
        return found

    def step_around(self, rows: Int64) -> Int64:
        """The number of the step that the middle of each slice lies in, -1 for none.

        Journal and trace agree to some hundred microseconds: what begins with a step may seem to begin before it.
        """
        return self.step_of(self.span.start_ns[rows] + self.span.duration_ns[rows] // 2)

    @cached_property
    def operators(self) -> Bools:
        """The operators among `mine`."""
        found: Bools = self.span.is_operator & self.mine
        return found

    @cached_property
    def in_backward(self) -> Int32:
        """For each row the innermost operator of the backward pass around it, or itself; -1 for none."""
        return nearest(self.span.parent, self.calls.is_backward)

    @cached_property
    def node_times(self) -> Intervals:
        """When the backward pass ran nodes."""
        return self.times(np.flatnonzero(self.calls.is_backward & self.mine))

    def step_of(self, times: Int64) -> Int64:
        """The number of the step each time lies in, -1 for none."""
        if not len(self.starts):
            return np.full(len(times), NONE, np.int64)
        at = np.searchsorted(self.starts, times, side="right") - 1
        lies = (at >= 0) & (times < self.ends[np.maximum(at, 0)])
        return np.where(lies, at, NONE)

    def times(self, rows: Int64) -> Intervals:
        """When any of these slices ran."""
        return intervals.union(self.span.start_ns[rows], self.span.ends(rows))

    def launched_below(self, rows: Int64) -> Bools:
        """Device work launched inside these host slices."""
        if not len(self.found) or not len(rows):
            return np.zeros(len(self.found), bool)
        wanted = np.zeros(len(self.span) + 1, bool)
        wanted[rows] = True
        above = nearest(self.span.parent, wanted[:-1])
        links = self.span.links
        operator = np.full(len(self.span) + 1, NONE, np.int64)
        operator[links["event"].to_numpy()] = links["operator"].to_numpy()
        origin = np.where(self.found.launch >= 0, self.found.launch, operator[self.found.rows])
        found: Bools = (origin >= 0) & (above[np.maximum(origin, 0)] >= 0)
        return found

    def only(self, chosen: Bools) -> Intervals:
        """When no other device work ran than the chosen."""
        found = self.found
        rest = ~chosen & np.isin(found.kind, (KERNEL, FILL, COMMUNICATION, COPY))
        return intervals.subtract(
            intervals.union(found.start_ns[chosen], found.end_ns[chosen]),
            intervals.union(found.start_ns[rest], found.end_ns[rest]),
        )

    @cached_property
    def _idle(self) -> Intervals:
        busy = self.found.covered(KERNEL, FILL, COMMUNICATION, COPY)
        return intervals.complement(busy, int(self.starts[0]), int(self.ends[-1]))

    def lost(self, host: Intervals, rows: Int64) -> Intervals:
        """The wall time of work that the host does in `host`, and devices below `rows`."""
        if not len(self.found):
            return host
        return intervals.merge(self.only(self.launched_below(rows)), intervals.intersect(host, self._idle))

    def recorded_ns(self, lost: Intervals) -> float:
        """What the mean profiled step loses, as recorded."""
        return float(intervals.covered(lost, self.starts, self.ends).mean())

    def per_step_ns(self, lost: Intervals) -> Int64:
        """Of each step what it loses, in ns of the step that times are told of."""
        ns = intervals.covered(lost, self.starts, self.ends)
        if self._steady_ns is None:
            return ns
        if len(self.found):
            return np.round(ns * (self._steady_ns / self.profiled_ns)).astype(np.int64)
        begins = self.span.start_ns[self._own_rows]
        before = np.concatenate([[0], np.cumsum(_inside(lost, begins))])
        first, last = np.searchsorted(begins, self.starts), np.searchsorted(begins, self.ends)
        relieved = (ns - self._slice_ns * (before[last] - before[first])) * self._ratio
        per_step: Int64 = np.maximum(np.round(relieved), 0).astype(np.int64)
        return per_step

    @cached_property
    def _own_rows(self) -> Int64:
        """`mine` in order of time."""
        rows = np.flatnonzero(self.mine)
        return rows[np.argsort(self.span.start_ns[rows], kind="stable")]

    @property
    def _slices(self) -> float:
        """Per step."""
        return max(1.0, len(self._own_rows) / len(self))

    @property
    def _slice_ns(self) -> float:
        """What recording adds to a step for each slice of it."""
        excess = max(0.0, self.profiled_ns - (self._steady_ns or 0.0))
        return min(SLICE_NS, excess / self._slices)

    @property
    def _ratio(self) -> float:
        """The steady step by the profiled one without what recording adds."""
        return (self._steady_ns or 0.0) / max(1.0, self.profiled_ns - self._slice_ns * self._slices)


def scenes(base: Base, labelled: LabelledSteps) -> Iterator[Scene]:
    """The traces that hold training steps."""
    recorded = bool(base.tables.manifests) or base.tables.journal.height > 0
    outside = labelled.steady().filter(~pl.col("in_window").fill_null(False))
    mean = outside["wall_ns"].mean()
    steady = mean if recorded and isinstance(mean, float) else None
    profiled = labelled.frame.filter((pl.col("kind") == "train") & pl.col("in_window").fill_null(False))
    both = profiled["backward_ns"].mean(), outside["backward_ns"].mean()
    backward = (both[0], both[1]) if isinstance(both[0], float) and isinstance(both[1], float) else None
    for span in base.spans:
        scene = Scene(base, span, steady, backward if steady is not None else None)
        if len(scene) and (scene.ends > scene.starts).all():
            yield scene


def summed(parts: Sequence[tuple[Scene, Intervals]]) -> float:
    """ms per step of a loss over the steps of all scenes: the mean, or the median where few steps make the mean."""
    per_step = np.concatenate([scene.per_step_ns(lost) for scene, lost in parts])
    if not len(per_step):
        return 0.0
    mean, median = float(per_step.mean()), float(np.median(per_step))
    rare = len(per_step) >= STEPS_FOR_MEDIAN and median < RECURRING * mean
    return (median if rare else mean) / 1e6


def summed_backward(parts: Sequence[tuple[Scene, Intervals]]) -> tuple[float, float]:
    """`summed` of a loss in the backward pass, and the most that it can be, from the journal's times of that pass.

    Recording slows many small nodes far more than few large ones, and can fragment the heap under all of them: scaling
    in proportion gives what is slowed most too much, taking the others' recorded time as it is gives it too little. The
    middle is told, and the proportion is the most.
    """
    means = parts[0][0].backward_ns if parts else None
    if means is None or means[0] <= 0 or any(len(scene.found) for scene, _ in parts):
        ms = summed(parts)
        return ms, ms
    steps = sum(len(scene) for scene, _ in parts)
    recorded = sum(scene.recorded_ns(lost) * len(scene) for scene, lost in parts) / steps
    nodes = sum(scene.recorded_ns(scene.node_times) * len(scene) for scene, _ in parts) / steps
    ratio = means[1] / means[0]
    others, in_no_node = max(0.0, nodes - recorded), max(0.0, means[0] - nodes)
    most = min(recorded * ratio, means[1])
    least = max(0.0, means[1] - others * max(1.0, ratio) - in_no_node * ratio)
    return (min(least, most) + most) / 2e6, most / 1e6


def lines(parts: Sequence[tuple[Scene, Int64, Int64]], total_ms: float) -> tuple[PassLine, ...]:
    """The user's lines behind rows with weights, `total_ms` shared out among all rows by weight."""
    everything = sum(int(weights.sum()) for _, _, weights in parts)
    sums = [
        place_sums(scene.base, scene.span, np.zeros(len(rows), np.int64), rows, weights)
        for scene, rows, weights in parts
        if len(rows)
    ]
    if not sums or not everything:
        return ()
    keys = ["file", "line", "function", "exact"]
    top = (
        pl.concat(sums)
        .group_by(keys)
        .agg(pl.col("weight").sum())
        .sort("weight", *keys, descending=[True, False, False, False, False])
        .head(LINES)
    )
    found = []
    for row in top.iter_rows(named=True):
        place, exact = place_of_row(row)
        found.append(PassLine(place, row["weight"] / everything * total_ms, exact))
    return tuple(found)


def outermost(scene: Scene, wanted: Bools) -> Int64:
    """The wanted rows that lie in no other wanted row."""
    rows = np.flatnonzero(wanted)
    parent = scene.span.parent[rows]
    above = np.where(parent >= 0, nearest(scene.span.parent, wanted)[np.maximum(parent, 0)], NONE)
    found: Int64 = rows[above < 0]
    return found


def weights_of(scene: Scene, rows: Int64) -> Int64:
    """ns behind each row: of its device work where devices work, else its duration."""
    if not len(scene.found):
        return scene.span.duration_ns[rows]
    wanted = np.zeros(len(scene.span), bool)
    wanted[rows] = True
    above = nearest(scene.span.parent, wanted)
    launch = scene.found.launch
    known = np.flatnonzero(launch >= 0)
    owner = above[launch[known]]
    sums = np.zeros(len(scene.span) + 1, np.int64)
    np.add.at(sums, owner, (scene.found.end_ns - scene.found.start_ns)[known])
    return sums[rows]


def _inside(lost: Intervals, times: Int64) -> Int64:
    """1 for each time that lies in the set, else 0."""
    if lost is EMPTY or not len(lost.starts):
        return np.zeros(len(times), np.int64)
    at = np.searchsorted(lost.starts, times, side="right") - 1
    found: Int64 = ((at >= 0) & (times < lost.ends[np.maximum(at, 0)])).astype(np.int64)
    return found
