"""Idle time in which the host prepares launches, by what it launches: an optimizer's updates, gradients set to zero,
compiled functions, or all else; and long host work without a launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np
from msgspec import Struct

from stepscope.analyze.device.idle_time import Idle
from stepscope.analyze.device.trace_loss import TraceLoss, host_rows, trace_loss
from stepscope.engine import intervals
from stepscope.engine.device_work import COMMUNICATION, FILL, KERNEL
from stepscope.engine.intervals import Intervals
from stepscope.engine.slice_tree import has_ancestor
from stepscope.model.device_losses import COMPILED, HOST, LAUNCH, OPTIMIZER, ZERO_GRAD
from stepscope.tables.arrays import NONE, Bools, Int64

# Preparing one launch takes eager PyTorch 5 to 100 us, and under a profiler with stacks a few times that. A longer gap
# is something else that runs on the host.
LAUNCH_NS = 1_000_000
LONG_GAPS = 200  # whose places are looked up, the longest first
COVERING = 0.5  # of a long gap: what a slice must cover to be named as what ran in it
# A fused update reads and writes about as much as the two longest operations of one that is not: of Adam's 18 tensors
# read or written 7, of SGD's with momentum 6 of 8.
FUSED_PASSES = 2
ONE_BY_ONE = 0.5  # of the optimizer's launches: fewer come from an update that is fused already
# PyTorch's optimizers that take fused=True, and those that take foreach=True alone. Others have neither.
_FUSABLE = r"^Optimizer\.step#(Adam|AdamW|SGD|Adagrad)\.step$"
_GROUPABLE = r"^Optimizer\.step#(Adadelta|Adamax|ASGD|NAdam|RAdam|RMSprop|Rprop)\.step$"
_ZERO_GRAD = r"^Optimizer\.zero_grad#|(^|/)torch/(optim/optimizer|nn/modules/module)\.py\(\d+\): zero_grad$"
# Code that a compiler made, as torch.compile and its forerunners mark it.
_COMPILED = (
    r"^CompiledFunction(Backward)?$|^Torch-Compiled Region|^## Call CompiledFxGraph|^torch::jit::fuser|^TorchDynamo"
)
_GENERATED = re.compile(r"^triton_|^fused_|^kernel\d*$|CudaCodeGen")


class Launches(Struct, frozen=True, dict=True):
    """What of the idle time that is left belongs to launching, of one trace."""

    idle: Idle

    @cached_property
    def _zero_times(self) -> Intervals:
        span = self.idle.scene.span
        return span.times(host_rows(span, _ZERO_GRAD))

    def _launched_in(self, times: Intervals) -> Bools:
        """Slices of kernels and fills in the steps that were launched then."""
        scene, found = self.idle.scene, self.idle.scene.found
        return scene.launched_during(times) & np.isin(found.kind, (KERNEL, FILL)) & (scene.step_of(found.start_ns) >= 0)

    @cached_property
    def _fusable(self) -> Bools:
        """Kernels of optimizers that could be fused and are not."""
        return self._updates_of(_FUSABLE, _is_fused)

    @cached_property
    def _groupable(self) -> Bools:
        """Kernels of optimizers that could update in groups, but not fused, and do not."""
        return self._updates_of(_GROUPABLE, lambda name: _is_fused(name) or _is_grouped(name))

    def _updates_of(self, pattern: str, well_done: Callable[[str], bool]) -> Bools:
        scene, found, names = self.idle.scene, self.idle.scene.found, self.idle.scene.span.names
        mine = self._launched_in(scene.span.times(host_rows(scene.span, pattern)))
        done = self._flagged(names.pick([well_done(name) for name in names.values]), np.flatnonzero(mine))
        return mine if (~done).sum() >= ONE_BY_ONE * len(done) else np.zeros(len(found), bool)

    def _flagged(self, flags: Bools, slices: Int64) -> Bools:
        """Slices whose row or whose operator's is flagged."""
        found = self.idle.scene.found
        operators = self.idle.operators(found.launch[slices])
        flagged: Bools = flags[found.rows[slices]] | ((operators >= 0) & flags[np.maximum(operators, 0)])
        return flagged

    @cached_property
    def _optimizing(self) -> Intervals:
        """Idle time in such optimizers."""
        span = self.idle.scene.span
        patterns = [
            pattern for pattern, mine in ((_FUSABLE, self._fusable), (_GROUPABLE, self._groupable)) if mine.any()
        ]
        return self._preparing(*(span.times(host_rows(span, pattern)) for pattern in patterns))

    def _preparing(self, *ranges: Intervals) -> Intervals:
        """Idle time in these ranges: gaps as long as a launch takes, and of longer ones what operators took."""
        gaps, rest = self.idle.gaps, self.idle.rest
        short = intervals.covered(rest, gaps.starts, gaps.ends) <= LAUNCH_NS
        own = intervals.merge(self.idle.host.operators, Intervals(gaps.starts[short], gaps.ends[short]))
        return intervals.intersect(intervals.intersect(rest, intervals.merge(*ranges)), own)

    @cached_property
    def _zeros(self) -> Bools:
        return self._launched_in(self._zero_times) & ~self._fusable & ~self._groupable

    @cached_property
    def _zeroing(self) -> Intervals:
        own = self._zero_times if self._zeros.any() else intervals.EMPTY
        return intervals.subtract(self._preparing(own), self._optimizing)

    @cached_property
    def _rest(self) -> Intervals:
        return intervals.subtract(self.idle.rest, intervals.merge(self._optimizing, self._zeroing))

    @cached_property
    def _rest_ns(self) -> Int64:
        gaps = self.idle.gaps
        return intervals.covered(self._rest, gaps.starts, gaps.ends)

    # ----------------------------------------------------------------------------------------- whole operations

    def optimizer(self) -> TraceLoss:
        """Idle time in an optimizer that is not fused, and the time of its kernels that fusing would leave out."""
        found, span = self.idle.scene.found, self.idle.scene.span
        slices = np.flatnonzero(self._fusable)
        operators = self.idle.operators(found.launch[slices])
        codes = span.names.codes[np.where(operators >= 0, operators, found.rows[slices])]
        distinct, number = np.unique(codes, return_inverse=True)
        sums = np.bincount(number, (found.end_ns - found.start_ns)[slices], len(distinct))
        kept = np.argsort(-sums, kind="stable")[:FUSED_PASSES]
        lost = np.zeros(len(found), bool)
        lost[slices[~np.isin(number, kept)]] = True
        mine = self._fusable | self._groupable
        every = np.flatnonzero(mine)
        grouped = self._flagged(span.names.pick([_is_grouped(name) for name in span.names.values]), every)
        calls = self.idle.operators(found.launch[every])
        details = {
            "foreach_launches": float(grouped.sum()),
            "fusable_launches": float(len(slices)),
            "operator_calls": float(len(np.unique(calls))),
        }
        return self._operation(self._optimizing, lost, mine, details)

    def zero_grad(self) -> TraceLoss:
        """Idle time while gradients are set to zero, and the kernels that do it."""
        return self._operation(self._zeroing, self._zeros, self._zeros, {})

    def _operation(self, idle: Intervals, lost: Bools, mine: Bools, details: dict[str, float]) -> TraceLoss:
        """`lost`: slices whose time goes, of all slices `mine` of the operation."""
        scene, found = self.idle.scene, self.idle.scene.found
        work = scene.exclusive(lost)
        idle = intervals.intersect(idle, scene.inside)
        times = intervals.merge(idle, work)
        slices = np.flatnonzero(mine)
        order = slices[np.argsort(scene.span.start_ns[found.launch[slices]], kind="stable")]
        rows = found.launch[order]
        # a kernel's part of the idle time: what lies between the launch before it and its own
        ends = scene.span.ends(rows)
        starts = np.concatenate([ends[:1] - LAUNCH_NS, ends[:-1]]) if len(ends) else ends
        own = intervals.covered(work, found.start_ns[order], found.end_ns[order])
        weights = intervals.covered(idle, starts, ends) + np.where(lost[order], own, 0)
        details |= {
            "launches": float(len(slices)),
            "idle_ns": float(intervals.total(idle)),
            "kernels_ns": float((found.end_ns - found.start_ns)[slices].sum()),
        }
        return trace_loss(scene, times, rows, weights, self.idle.operators(rows), details)

    # ------------------------------------------------------------------------------------------------- launches

    def short(self) -> Iterator[tuple[str, TraceLoss]]:
        """Short gaps in which the host prepared the launch that ended them: in compiled functions, and elsewhere."""
        scene, gaps = self.idle.scene, self.idle.gaps
        span, found = scene.span, scene.found
        inside = scene.step_of(gaps.ends - 1) >= 0
        chosen = np.flatnonzero(self.idle.starved & (self._rest_ns <= LAUNCH_NS) & (self._rest_ns > 0) & inside)
        marks = np.zeros(len(span), bool)
        marks[host_rows(span, _COMPILED)] = True
        compiled = has_ancestor(span.parent, self.idle.launch[chosen], marks)
        for kind, own in ((COMPILED, chosen[compiled]), (LAUNCH, chosen[~compiled])):
            times = intervals.intersect(self._rest, Intervals(gaps.starts[own], gaps.ends[own]))
            rows, ended = self.idle.launch[own], self.idle.ended_by[own]
            details = {"kernels_behind_ns": float((found.end_ns - found.start_ns)[ended].sum())}
            if kind == COMPILED:
                collective = found.kind[ended] == COMMUNICATION
                details["collectives_ns"] = float(self._rest_ns[own][collective].sum())
                details |= self._compiled_kernels(marks)
            yield kind, trace_loss(scene, times, rows, self._rest_ns[own], self.idle.operators(rows), details)

    def _compiled_kernels(self, marks: Bools) -> dict[str, float]:
        """Kernels launched below `marks`, and those of them that a compiler made."""
        scene, found, names = self.idle.scene, self.idle.scene.found, self.idle.scene.span.names
        slices = np.flatnonzero((found.kind == KERNEL) & (scene.step_of(found.start_ns) >= 0))
        slices = slices[has_ancestor(scene.span.parent, found.launch[slices], marks)]
        generated = names.matching(_GENERATED.search)[found.rows[slices]]
        return {"compiled_kernels": float(len(slices)), "generated_kernels": float(generated.sum())}

    def working(self) -> TraceLoss:
        """Long gaps in which the host ran operators or Python but launched nothing, where it is recorded what."""
        idle, host = self.idle, self.idle.host
        gaps = idle.gaps
        known = intervals.merge(host.operators, host.python)
        known = intervals.intersect(self._rest, intervals.subtract(known, self._long_calls))
        lengths = intervals.covered(known, gaps.starts, gaps.ends)
        ended = idle.starved | ((idle.launch < 0) & ~idle.in_graph)
        chosen = np.flatnonzero((self._rest_ns > LAUNCH_NS) & (lengths > 0) & ended)
        longest = np.sort(chosen[np.argsort(-lengths[chosen], kind="stable")][:LONG_GAPS])
        rows = np.asarray([self._running(int(gap)) for gap in longest], np.int64)
        longest, rows = longest[rows >= 0], rows[rows >= 0]
        times = intervals.intersect(known, Intervals(gaps.starts[longest], gaps.ends[longest]))
        return trace_loss(idle.scene, times, rows, lengths[longest], rows)

    def _running(self, gap: int) -> int:
        """The innermost slice of the host that covers most of a gap, -1 for none."""
        span, rows, gaps = self.idle.scene.span, self._long_slices, self.idle.gaps
        start, end = int(gaps.starts[gap]), int(gaps.ends[gap])
        over = np.minimum(span.ends(rows), end) - np.maximum(span.start_ns[rows], start)
        covering = rows[over >= COVERING * (end - start)]
        return int(covering[np.lexsort((covering, span.duration_ns[covering]))[0]]) if len(covering) else NONE

    @cached_property
    def _long_slices(self) -> Int64:
        """Slices of the host that can cover most of a long gap, without the steps themselves."""
        span, host = self.idle.scene.span, self.idle.host
        rows = host.rows[span.duration_ns[host.rows] >= COVERING * LAUNCH_NS]
        rows = rows[~span.is_runtime[rows]]
        steps = span.names.starting("ProfilerStep#")
        return rows[~steps[rows]]

    @cached_property
    def _long_calls(self) -> Intervals:
        """Calls of the runtime that take so long load code or set the device up: no line of the user's can help it."""
        span, calls = self.idle.scene.span, self.idle.calls
        return span.times(calls[span.duration_ns[calls] > LAUNCH_NS])


def _is_fused(name: str) -> bool:
    """An update of all parameters in one kernel: PyTorch's fused ones, apex', and those a compiler made."""
    return "_fused_" in name or "FusedOptimizer" in name or "FusedAdam" in name or name.startswith("triton_")


def _is_grouped(name: str) -> bool:
    """An operation on all parameters at once."""
    return "_foreach_" in name or "multi_tensor" in name


def launch_losses(launches: Launches) -> Iterator[tuple[str, TraceLoss]]:
    """Every loss to launching, by kind."""
    yield OPTIMIZER, launches.optimizer()
    yield ZERO_GRAD, launches.zero_grad()
    yield from launches.short()
    yield HOST, launches.working()
