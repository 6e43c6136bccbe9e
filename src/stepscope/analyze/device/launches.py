"""Idle time in which the host prepares launches, by what it launches: an optimizer's updates, gradients set to zero,
compiled functions, or all else; and long host work without a launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property

import numpy as np

from stepscope.analyze.device.idle_time import Idle
from stepscope.analyze.device.trace_loss import TraceLoss, host_rows
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


def launch_losses(idle: Idle) -> dict[str, TraceLoss]:
    """Every loss to launching, by kind."""
    found = _Launches(idle)
    return {
        OPTIMIZER: found.optimizer(),
        ZERO_GRAD: found.operation(found.zeroing, found.zeros, found.zeros, {}),
        COMPILED: found.short(compiled=True),
        LAUNCH: found.short(compiled=False),
        HOST: found.working(),
    }


class _Launches:
    """What of the idle time that is left belongs to launching, of one trace."""

    def __init__(self, idle: Idle) -> None:
        self.idle, self.scene, self.span, self.found = idle, idle.scene, idle.scene.span, idle.scene.found
        self.lengths = self.found.end_ns - self.found.start_ns
        # kernels of optimizers that could be fused and are not; and of those that could at least update in groups
        self.fusable = self._updates_of(_FUSABLE, _is_fused)
        self.groupable = self._updates_of(_GROUPABLE, lambda name: _is_fused(name) or _is_grouped(name))
        updates = ((_FUSABLE, self.fusable), (_GROUPABLE, self.groupable))
        self.optimizing = self._preparing(*(self._times(pattern) for pattern, mine in updates if mine.any()))
        clearing = self._times(_ZERO_GRAD)
        self.zeros = self._launched_in(clearing) & ~self.fusable & ~self.groupable
        preparing = self._preparing(clearing if self.zeros.any() else intervals.EMPTY)
        self.zeroing = intervals.subtract(preparing, self.optimizing)
        self.rest = intervals.subtract(idle.rest, intervals.merge(self.optimizing, self.zeroing))
        self.rest_ns = intervals.covered(self.rest, idle.gaps.starts, idle.gaps.ends)

    def _times(self, pattern: str) -> Intervals:
        return self.span.times(host_rows(self.span, pattern))

    def _launched_in(self, times: Intervals) -> Bools:
        """Slices of kernels and fills in the steps that were launched then."""
        inside = np.isin(self.found.kind, (KERNEL, FILL)) & (self.scene.step_of(self.found.start_ns) >= 0)
        return self.scene.launched_during(times) & inside

    def _updates_of(self, pattern: str, well_done: Callable[[str], bool]) -> Bools:
        mine = self._launched_in(self._times(pattern))
        done = self._named(well_done, np.flatnonzero(mine))
        return mine if (~done).sum() >= ONE_BY_ONE * len(done) else np.zeros(len(mine), bool)

    def _named(self, wanted: Callable[[str], bool], slices: Int64) -> Bools:
        """Slices whose name or whose operator's is wanted."""
        names = self.span.names
        flags = names.pick([wanted(name) for name in names.values])
        operators = self.idle.operators(self.found.launch[slices])
        named: Bools = flags[self.found.rows[slices]] | ((operators >= 0) & flags[np.maximum(operators, 0)])
        return named

    def _preparing(self, *ranges: Intervals) -> Intervals:
        """Idle time in these ranges: gaps as long as a launch takes, and of longer ones what operators took."""
        gaps, rest = self.idle.gaps, self.idle.rest
        short = intervals.covered(rest, gaps.starts, gaps.ends) <= LAUNCH_NS
        own = intervals.merge(self.scene.host.operators, Intervals(gaps.starts[short], gaps.ends[short]))
        return intervals.intersect(intervals.intersect(rest, intervals.merge(*ranges)), own)

    # ----------------------------------------------------------------------------------------- whole operations

    def optimizer(self) -> TraceLoss:
        """Idle time in an optimizer that is not fused, and the time of its kernels that fusing would leave out."""
        found = self.found
        slices = np.flatnonzero(self.fusable)
        operators = self.idle.operators(found.launch[slices])
        codes = self.span.names.codes[np.where(operators >= 0, operators, found.rows[slices])]
        distinct, number = np.unique(codes, return_inverse=True)
        sums = np.bincount(number, self.lengths[slices], len(distinct))
        lost = np.zeros(len(found), bool)
        lost[slices[~np.isin(number, np.argsort(-sums, kind="stable")[:FUSED_PASSES])]] = True
        mine = self.fusable | self.groupable
        every = np.flatnonzero(mine)
        details = {
            "foreach_launches": float(self._named(_is_grouped, every).sum()),
            "fusable_launches": float(len(slices)),
            "operator_calls": float(len(np.unique(self.idle.operators(found.launch[every])))),
        }
        return self.operation(self.optimizing, lost, mine, details)

    def operation(self, idle: Intervals, lost: Bools, mine: Bools, details: dict[str, float]) -> TraceLoss:
        """Idle time of an operation, and the time of the slices `lost` of all slices `mine` of it."""
        scene, found = self.scene, self.found
        work = scene.exclusive(lost)
        idle = intervals.intersect(idle, scene.inside)
        slices = np.flatnonzero(mine)
        order = slices[np.argsort(self.span.start_ns[found.launch[slices]], kind="stable")]
        rows = found.launch[order]
        # a kernel's part of the idle time: what lies between the launch before it and its own
        ends = self.span.ends(rows)
        starts = np.concatenate([ends[:1] - LAUNCH_NS, ends[:-1]])
        own = intervals.covered(work, found.start_ns[order], found.end_ns[order])
        weights = intervals.covered(idle, starts, ends) + np.where(lost[order], own, 0)
        details |= {
            "launches": float(len(slices)),
            "idle_ns": float(intervals.total(idle)),
            "kernels_ns": float(self.lengths[slices].sum()),
        }
        return TraceLoss(scene, intervals.merge(idle, work), rows, weights, self.idle.operators(rows), details)

    # ------------------------------------------------------------------------------------------------- launches

    def short(self, *, compiled: bool) -> TraceLoss:
        """Short gaps in which the host prepared the launch that ended them: in compiled functions, or elsewhere."""
        idle, found = self.idle, self.found
        gaps = idle.gaps
        prepared = idle.starved & (self.rest_ns <= LAUNCH_NS) & (self.rest_ns > 0)
        chosen = np.flatnonzero(prepared & (self.scene.step_of(gaps.ends - 1) >= 0))
        chosen = chosen[has_ancestor(self.span.parent, idle.launch[chosen], self._compiled) == compiled]
        times = intervals.intersect(self.rest, Intervals(gaps.starts[chosen], gaps.ends[chosen]))
        rows, ended, weights = idle.launch[chosen], idle.ended_by[chosen], self.rest_ns[chosen]
        details = {"kernels_behind_ns": float(self.lengths[ended].sum())}
        if compiled:
            kernels = np.flatnonzero((found.kind == KERNEL) & (self.scene.step_of(found.start_ns) >= 0))
            kernels = kernels[has_ancestor(self.span.parent, found.launch[kernels], self._compiled)]
            generated = self.span.names.matching(_GENERATED.search)[found.rows[kernels]]
            details |= {
                "collectives_ns": float(weights[found.kind[ended] == COMMUNICATION].sum()),
                "compiled_kernels": float(len(kernels)),
                "generated_kernels": float(generated.sum()),
            }
        return TraceLoss(self.scene, times, rows, weights, idle.operators(rows), details)

    @cached_property
    def _compiled(self) -> Bools:
        """Rows of compiled functions."""
        marks = np.zeros(len(self.span), bool)
        marks[host_rows(self.span, _COMPILED)] = True
        return marks

    def working(self) -> TraceLoss:
        """Long gaps in which the host ran operators or Python but launched nothing, where it is recorded what."""
        idle, host, span, gaps = self.idle, self.scene.host, self.span, self.idle.gaps
        # calls of the runtime that take so long load code or set the device up: no line of the user's can help it
        calls = span.times(idle.calls[span.duration_ns[idle.calls] > LAUNCH_NS])
        known = intervals.subtract(intervals.merge(host.operators, host.python), calls)
        known = intervals.intersect(self.rest, known)
        lengths = intervals.covered(known, gaps.starts, gaps.ends)
        ended = idle.starved | ((idle.launch < 0) & ~idle.in_graph)
        chosen = np.flatnonzero((self.rest_ns > LAUNCH_NS) & (lengths > 0) & ended)
        longest = np.sort(chosen[np.argsort(-lengths[chosen], kind="stable")][:LONG_GAPS])
        # what can cover most of a long gap, without the steps themselves
        slices = host.rows[span.duration_ns[host.rows] >= COVERING * LAUNCH_NS]
        slices = slices[~span.is_runtime[slices] & ~span.names.starting("ProfilerStep#")[slices]]
        rows = np.asarray([self._running(slices, int(gap)) for gap in longest], np.int64)
        longest, rows = longest[rows >= 0], rows[rows >= 0]
        times = intervals.intersect(known, Intervals(gaps.starts[longest], gaps.ends[longest]))
        return TraceLoss(self.scene, times, rows, lengths[longest], rows)

    def _running(self, slices: Int64, gap: int) -> int:
        """The innermost of the slices of the host that covers most of a gap, -1 for none."""
        span, start, end = self.span, int(self.idle.gaps.starts[gap]), int(self.idle.gaps.ends[gap])
        over = np.minimum(span.ends(slices), end) - np.maximum(span.start_ns[slices], start)
        covering = slices[over >= COVERING * (end - start)]
        return int(covering[np.lexsort((covering, span.duration_ns[covering]))[0]]) if len(covering) else NONE


def _is_fused(name: str) -> bool:
    """An update of all parameters in one kernel: PyTorch's fused ones, apex', and those a compiler made."""
    return "_fused_" in name or "FusedOptimizer" in name or "FusedAdam" in name or name.startswith("triton_")


def _is_grouped(name: str) -> bool:
    """An operation on all parameters at once."""
    return "_foreach_" in name or "multi_tensor" in name
