"""Flame graphs of traces: device time by call path, operator and kernel; host time of the training thread by call path.

Both add up whole nanoseconds, which are divided by the steps of the windows at the end: the root of "gpu" is the sum of
the durations of all device slices, the root of "operators" the sum of the self times of the training threads' slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.device.device_time import EARLY, NO_LAUNCH, NO_STACKS, REPLAYED
from stepscope.analyze.pictures.flame_tree import Limits, Paths, PlannedTree, flame_tree, summed, together
from stepscope.analyze.pictures.operator_leaves import OperatorLeaves, split
from stepscope.analyze.pictures.trace_paths import BUILTIN, KERNEL, TraceFrame, TraceNames, trace_paths
from stepscope.analyze.views.kernels import short_names
from stepscope.engine.call_tree import CallTree
from stepscope.engine.device_work import BEFORE_RECORDING, GRAPH, in_state, links_of, work
from stepscope.engine.spans import Span
from stepscope.model.sampled import FlameFrame, FlameTree
from stepscope.tables import categories
from stepscope.tables.arrays import NONE, Bools, Floats, Int64, Numbers

GPU, OPERATORS = "gpu", "operators"
NOT_LINKED = "(not linked)"
NO_CODE = "launched outside all functions and operators"
NO_TRACE = "no trace was recorded"
MAX_RANK_TREES = 64
_STEP = "ProfilerStep#"
_ROUNDED = 0.01  # of a step: a recording that begins or ends within it of a step holds it whole
_DEFINITIONS = "lines are those of definitions where the line of the call is not known"


class _Part(Struct, frozen=True):
    """What one trace adds to a tree: distinct paths with ns; `steps` it holds, 0 where the trace names none."""

    rank: int
    steps: float
    paths: Paths


class TraceWindows:
    """The traces of a run that hold Python stacks, ready to be drawn."""

    def __init__(self, context: Context) -> None:
        self._spans = [span for span in context.base.spans if span.has_stacks]
        self._all = len(context.base.spans)
        self._names = TraceNames(context)
        self._code = context.code

    @property
    def absent(self) -> str | None:
        """Why there are no trees, None where there are some."""
        if self._spans:
            return None
        return NO_STACKS if self._all else NO_TRACE

    def trees(self, frames: Numbers[FlameFrame], limits: Limits) -> tuple[FlameTree, ...]:
        """Device time, if there is any, and host time; of several ranks their mean, then device time of each.

        Keys "gpu", "gpu:rank:N", "operators"; none where no trace holds Python stacks.
        """
        device = f"device time of {self.named}; {_DEFINITIONS}"
        host = f"self times on the training thread in {self.named}, where recording slows Python; {_DEFINITIONS}"
        ranks = sorted({part.rank for part in self._device})
        planned = [(self._device, GPU, "device time by line", device)]
        for rank in ranks[:MAX_RANK_TREES] if len(ranks) > 1 else ():
            own = [part for part in self._device if part.rank == rank]
            planned.append((own, f"{GPU}:rank:{rank}", f"device time, rank {rank}", device))
        planned.append((self._host, OPERATORS, "host time by operator", host))
        return tuple(self._tree(*each, frames, limits) for each in planned if each[0])

    def operator_leaves(self, tree: CallTree, own: Floats) -> OperatorLeaves:
        """The operators that the samples of each path stand in, as far as the traces tell.

        Args:
            tree: the sampled paths.
            own: by node, what was sampled with the node's frame innermost: of main threads of ranks only.
        """
        return split(tree, own, _together(self._host), list(self._names.numbers), self._code)

    def _tree(
        self, parts: Sequence[_Part], key: str, label: str, source: str, frames: Numbers[FlameFrame], limits: Limits
    ) -> FlameTree:
        """A tree of whole ns, brought to ms per step; of a trace without steps to µs of all of it."""
        paths = _together(parts)
        used = np.unique(paths.frame)
        drawn = self._names.drawn()
        numbers = np.zeros(len(drawn), np.int32)
        numbers[used] = [frames[drawn[number]] for number in used.tolist()]
        steps = sum(part.steps for part in parts) if all(part.steps for part in parts) else 0
        per = f"mean of {steps:.3g} step" + "s" * (steps != 1) if steps else "no steps are marked"
        unit, ns = ("ms per step", 1e6 * steps) if steps else ("us", 1e3)
        planned = PlannedTree(key, label, replace(paths, frame=numbers[paths.frame]), unit, f"{source}; {per}")
        tree = flame_tree(planned, frames, limits)
        return replace(tree, value=tuple(value / ns for value in tree.value), hidden=tree.hidden / ns)

    @property
    def named(self) -> str:
        """The traces, for people."""
        first = self._spans[0].ref.trace if self._spans else ""
        return first if len(self._spans) < 2 else f"{first} and {len(self._spans) - 1} more"

    @cached_property
    def _device(self) -> list[_Part]:
        found = [(span, work(span)) for span in self._spans]
        kernels = sorted(
            {span.names.values[code] for span, own in found for code in np.unique(span.names.codes[own.rows])}
        )
        short = dict(zip(kernels, short_names(kernels), strict=True))
        return [_device_part(span, self._names, short) for span, own in found if len(own)]

    @cached_property
    def _host(self) -> list[_Part]:
        parts = [_host_part(span, self._names) for span in self._spans]
        return [part for part in parts if len(part.paths)]


def _device_part(span: Span, names: TraceNames, short: dict[str, str]) -> _Part:
    found = work(span)
    paths = trace_paths(span, names)
    frame = links_of(span, found, "frame").to_series().fill_null(NONE).to_numpy()
    start = np.where(found.operator >= 0, found.operator, np.where(found.launch >= 0, found.launch, frame))
    early, replayed = (in_state(span, found, state) for state in (BEFORE_RECORDING, GRAPH))
    node = np.where(start >= 0, paths.node[start], NONE).astype(np.int64)
    lost = np.flatnonzero(node < 0)
    reasons = [EARLY, REPLAYED, NO_LAUNCH, NO_CODE]
    why = np.select([start >= 0, early, replayed], [3, 0, 1], 2)[lost]
    used = np.unique(why)
    first = len(paths.parent)
    node[lost] = first + 1 + np.searchsorted(used, why)
    extra = [NOT_LINKED, *(reasons[number] for number in used.tolist())] if len(lost) else []
    extra_frames = [names.numbers[TraceFrame(BUILTIN, name)] for name in extra]
    extra_parents = [first if number else NONE for number in range(len(extra))]
    codes = span.names.codes[found.rows]
    kernel = np.zeros(len(span.names.values), np.int64)
    for code in np.unique(codes).tolist():
        kernel[code] = names.numbers[TraceFrame(KERNEL, short[span.names.values[code]])]
    base = len(names.numbers)
    pairs, which = np.unique(node * base + kernel[codes], return_inverse=True)
    above, leaf = np.divmod(pairs, base)
    count = first + len(extra)
    ns = (found.end_ns - found.start_ns).astype(np.float64)
    frame_of = np.concatenate([paths.frame, np.asarray(extra_frames, np.int64), leaf]).astype(np.int32)
    return _Part(
        rank=span.ref.rank,
        steps=_steps(span, start[start >= 0]),
        paths=Paths(
            np.concatenate([paths.parent, np.asarray(extra_parents, np.int64), above]).astype(np.int32),
            frame_of,
            frame_of,
            np.concatenate([np.zeros(count), summed(which.astype(np.int32), ns, len(pairs))]),
        ),
    )


def _host_part(span: Span, names: TraceNames) -> _Part:
    own = _training_thread(span)
    paths = trace_paths(span, names, own)
    ranges = span.categories.where([categories.ANNOTATION, *categories.OPERATORS])
    counted = own & (span.is_function | (span.is_runtime & ~span.on_device) | ranges) & ~paths.ours & (paths.node >= 0)
    rows = np.flatnonzero(counted)
    ns = np.maximum(span.series("self_ns").fill_null(0).to_numpy()[rows], 0).astype(np.float64)
    sums = summed(paths.node[rows], ns, len(paths.parent))
    return _Part(span.ref.rank, _steps(span, rows), Paths(paths.parent, paths.frame, paths.frame, sums))


def _training_thread(span: Span) -> Bools:
    """Rows of the host thread whose steps the trace marks, else of the one with most time in operators with stacks."""
    host = ~span.on_device & (span.tracks.codes >= 0)
    count = len(span.tracks.values)
    marks = span.names.starting(_STEP)
    marks &= host & span.categories.where([categories.ANNOTATION, *categories.OPERATORS])
    framed = span.is_function | span.series("call_stack").is_not_null().to_numpy()
    tracks = np.bincount(span.tracks.codes[framed & host], minlength=count) > 0
    for chosen in (marks, host & span.is_operator, host & span.is_function):
        sums = np.bincount(span.tracks.codes[chosen], weights=span.duration_ns[chosen] + 1, minlength=count) * tracks
        if sums.any():
            thread: Bools = host & (span.tracks.codes == int(sums.argmax()))
            return thread
    return np.zeros(len(span), bool)


def _steps(span: Span, rows: Int64) -> float:
    """How many steps the recording holds of those that the rows lie in; one that it holds in part counts in part."""
    seen = np.unique(span.column("step", rows))
    seen = seen[seen >= 0]
    of_window = (pl.col("process") == span.ref.process) & pl.col("in_window").fill_null(False) & (pl.col("wall_ns") > 0)
    steps = span.tables.steps.filter(of_window & pl.col("step").is_in(seen) & pl.col("start_ns").is_not_null())
    ranges = span.categories.where([categories.ANNOTATION, *categories.OPERATORS])
    host = np.flatnonzero((span.is_function | ranges) & ~span.on_device)
    if steps.is_empty() or not len(host):
        return len(seen)
    start, wall = steps["start_ns"].to_numpy(), steps["wall_ns"].to_numpy()
    first, last = int(span.start_ns[host].min()), int(span.ends(host).max())
    inside = np.clip(np.minimum(start + wall, last) - np.maximum(start, first), 0, None)
    held = float((inside / wall).sum())
    return round(held) if abs(held - round(held)) < _ROUNDED else held


def _together(parts: Sequence[_Part]) -> Paths:
    none = np.zeros(0, np.int32)
    return together([Paths(none, none, none, np.zeros(0)), *(part.paths for part in parts)])
