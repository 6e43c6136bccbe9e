"""A trace's training steps, and how much of their wall time a piece of work takes.

A step trains when a backward pass runs in it. On a device a piece of work takes the time in which only its kernels ran,
and the idle time while the host prepared them; without a device it takes the host's time.

Recording makes every slice a little longer. Where the journal tells how long steps are outside of windows, the excess
of the profiled step is spread over its slices, up to what recording one can take, and a piece of work is relieved of as
much as it has slices. What is left of the excess is how the machine was at that time, and shared in proportion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import polars as pl

from stepscope.analyze.host.loops import in_steady_backward
from stepscope.engine import attribution, intervals
from stepscope.engine.intervals import Intervals
from stepscope.engine.scene import Scene
from stepscope.engine.scene import scenes as all_scenes
from stepscope.engine.spans import Base
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model.device_losses import PassLine
from stepscope.tables.arrays import NONE, Bools, Int64, flags, self_or_ancestor

RECURRING = 0.5  # of the mean: with a median below it few steps make the loss, and the median counts
STEPS_FOR_MEDIAN = 3
SLICE_NS = 1_000  # what recording adds to a slice at least; operators with shapes and stacks take a few times that
LINES = 5


class TrainingScene(Scene, frozen=True, eq=False, dict=True):
    """A trace with its training steps alone.

    `steady_ns`: the steady step of the journal; `backward_ns`: the backward pass in (profiled, steady) steps of it.
    """

    steady_ns: float | None
    backward_ns: tuple[float, float] | None

    @property
    def profiled_ns(self) -> float:
        return float((self.ends - self.starts).mean())

    @property
    def step_ms(self) -> float:
        """The mean step that times are told of: the steady one where the journal has it, else the profiled one."""
        return (self.profiled_ns if self.steady_ns is None else self.steady_ns) / 1e6

    @cached_property
    def node_times(self) -> Intervals:
        """When the backward pass ran nodes."""
        return self.times(np.flatnonzero(self.calls.is_backward & self.mine))

    def lost(self, host: Intervals, rows: Int64) -> Intervals:
        """The wall time of work that the host does in `host`, and devices below `rows`."""
        if not len(self.found):
            return host
        return intervals.merge(self.exclusive(self.launched_below(rows)), intervals.intersect(host, self.idle))

    def recorded_ns(self, lost: Intervals) -> float:
        """What the mean profiled step loses, as recorded."""
        return float(intervals.covered(lost, self.starts, self.ends).mean())

    def per_step_ns(self, lost: Intervals) -> Int64:
        """Of each step what it loses, in ns of the step that times are told of."""
        ns = intervals.covered(lost, self.starts, self.ends)
        if self.steady_ns is None:
            return ns
        if len(self.found):
            return np.round(ns * (self.steady_ns / self.profiled_ns)).astype(np.int64)
        begins = self._begins
        # what recording adds to a step for each slice of it, and the steady step by the profiled one without that
        slices = max(1.0, len(begins) / len(self))
        slice_ns = min(SLICE_NS, max(0.0, self.profiled_ns - self.steady_ns) / slices)
        ratio = self.steady_ns / max(1.0, self.profiled_ns - slice_ns * slices)
        before = np.concatenate([[0], np.cumsum(intervals.inside(lost, begins))])
        first, last = np.searchsorted(begins, self.starts), np.searchsorted(begins, self.ends)
        relieved = (ns - slice_ns * (before[last] - before[first])) * ratio
        per_step: Int64 = np.maximum(np.round(relieved), 0).astype(np.int64)
        return per_step

    @cached_property
    def _begins(self) -> Int64:
        """Of the slices `mine`, in order."""
        return np.sort(self.span.start_ns[np.flatnonzero(self.mine)])


def scenes(base: Base, labelled: LabelledSteps) -> Iterator[TrainingScene]:
    """The traces that hold training steps."""
    recorded = bool(base.tables.manifests) or base.tables.journal.height > 0
    outside = labelled.steady().filter(~pl.col("in_window").fill_null(False))
    mean = outside["wall_ns"].mean()
    steady = mean if recorded and isinstance(mean, float) else None
    profiled = labelled.frame.filter((pl.col("kind") == "train") & pl.col("in_window").fill_null(False))
    one, other = profiled["backward_ns"].mean(), outside["backward_ns"].mean()
    backward = (one, other) if steady is not None and isinstance(one, float) and isinstance(other, float) else None
    for scene in all_scenes(base):
        steps = scene.windows.only(scene.trains)
        if len(steps) and (steps.end_ns > steps.start_ns).all():
            yield TrainingScene(scene.base, scene.span, scene.found, steps, scene.calls, steady, backward)


def summed(scenes: Sequence[TrainingScene], parts: Iterable[tuple[TrainingScene, Intervals]]) -> float:
    """ms per step of a loss over the steps of all scenes: the mean, or the median where few steps make the mean."""
    lost = dict.fromkeys(map(id, scenes), intervals.EMPTY)
    for scene, times in parts:
        lost[id(scene)] = intervals.merge(lost[id(scene)], times)
    per_step = np.concatenate([scene.per_step_ns(lost[id(scene)]) for scene in scenes])
    mean, median = float(per_step.mean()), float(np.median(per_step))
    rare = len(per_step) >= STEPS_FOR_MEDIAN and median < RECURRING * mean
    return (median if rare else mean) / 1e6


def summed_backward(parts: Sequence[tuple[TrainingScene, Intervals]]) -> tuple[float, float]:
    """`summed` of a loss in the backward pass, and the most that it can be, from the journal's times of that pass."""
    means = parts[0][0].backward_ns
    if means is None or means[0] <= 0 or any(len(scene.found) for scene, _ in parts):
        ms = summed([scene for scene, _ in parts], parts)
        return ms, ms
    steps = sum(len(scene) for scene, _ in parts)
    recorded = sum(scene.recorded_ns(lost) * len(scene) for scene, lost in parts) / steps
    nodes = sum(scene.recorded_ns(scene.node_times) * len(scene) for scene, _ in parts) / steps
    least, most = in_steady_backward(recorded, nodes, means)
    most = min(most, means[1])
    return (min(least, most) + most) / 2e6, most / 1e6


def lines(parts: Sequence[tuple[Scene, Int64, Int64]], total_ms: float) -> tuple[PassLine, ...]:
    """The user's lines behind rows with weights, `total_ms` shared out among all rows by weight."""
    everything = sum(int(weights.sum()) for _, _, weights in parts)
    if not everything:
        return ()
    found = attribution.heaviest_lines(((one.base, one.span, rows, weights) for one, rows, weights in parts), LINES)
    return tuple(PassLine(line.place, line.weight / everything * total_ms, line.exact) for line in found)


def outermost(scene: Scene, wanted: Bools) -> Int64:
    """The wanted rows that lie in no other wanted row."""
    rows = np.flatnonzero(wanted)
    parent = scene.span.parent[rows]
    above = np.where(parent >= 0, self_or_ancestor(scene.span.parent, wanted)[np.maximum(parent, 0)], NONE)
    found: Int64 = rows[above < 0]
    return found


def weights_of(scene: Scene, rows: Int64) -> Int64:
    """ns behind each row: of its device work where devices work, else its duration."""
    span, found = scene.span, scene.found
    if not len(found):
        return span.duration_ns[rows]
    known = np.flatnonzero(found.launch >= 0)
    owner = self_or_ancestor(span.parent, flags(len(span), rows))[found.launch[known]]
    sums = np.zeros(len(span) + 1, np.int64)
    np.add.at(sums, owner, (found.end_ns - found.start_ns)[known])
    return sums[rows]
