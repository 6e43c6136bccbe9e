"""Profiled steps played again without one of their losses: what could be gained at most, and not by subtraction.

`graph` says what depends on what, `waits` what the host waits for, `play` is the replay, `what_ifs` leave losses out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.device.device_losses import TraceLosses
from stepscope.analyze.device.idle_time import IN, OUT, RETURN_NS, Idle
from stepscope.analyze.device.replay_graph import Change, Graph, play, slices_of, step_lengths, steps_of, waits_of
from stepscope.analyze.device.trace_loss import TraceLoss
from stepscope.engine import intervals
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL
from stepscope.engine.host_activity import HostActivity
from stepscope.engine.intervals import EMPTY, Intervals
from stepscope.engine.scene import Scene
from stepscope.engine.spans import Span
from stepscope.model.device_losses import (
    ALLOCATOR,
    ATTENTION,
    COLLECTIVES,
    COMPILE,
    COMPILED,
    COPY_IN,
    DATA_PARALLEL,
    DEVICE_COPY,
    HOST,
    LAUNCH,
    LAYOUT,
    LINALG,
    LOADER,
    MATRIX,
    OPTIMIZER,
    POINTWISE,
    SYNC,
    ZERO_GRAD,
    Replay,
    WhatIf,
    matrix,
)
from stepscope.tables.arrays import Bools, Int64

MAX_RESIDUAL = 0.05  # of the recorded steps: a replay that is further off does not know the trace
# Of a trace: more take two seconds and more, and then its first steps stand for it. Of all traces: what is beyond that
# is left out, as of many ranks that do the same.
MAX_SLICES = 100_000
MAX_SLICES_OF_ALL = 400_000


class _Trace:
    """One trace that can be replayed. Lengths are ns of its interior steps; a replay is made when it is asked for."""

    def __init__(self, lost: TraceLosses, graph: Graph) -> None:
        count = len(graph.steps.start_ns)
        windows = lost.scene.windows
        self._graph = graph
        self._interior = slice(1, -1) if count >= 3 else slice(None)
        self._starts = windows.start_ns[:count][self._interior]
        self._ends = windows.end_ns[:count][self._interior]
        self._lost = lost
        self.what_ifs = WhatIfs(lost, graph)
        self.recorded: Int64 = self._ends - self._starts
        self.unchanged = self._played(Change())

    @property
    def label(self) -> str:
        return self._lost.scene.span.ref.label

    @cached_property
    def unexplained_ns(self) -> int:
        """While no device does anything although slices had all they need."""
        busy = self._lost.scene.found.covered(KERNEL, FILL, COMMUNICATION, COPY)
        idle = intervals.complement(busy, int(self._starts[0]), int(self._ends[-1]))
        held = intervals.intersect(idle, self._graph.slices.held)
        return int(intervals.covered(held, self._starts, self._ends).sum())

    @cached_property
    def never_late(self) -> Int64:
        """With a host that is never late."""
        return self._played(self.what_ifs.never_late)

    def without(self, kind: str) -> Int64:
        """Without a loss; as recorded where the trace holds nothing of it."""
        case = self.what_ifs.cases.get(kind)
        return self.unchanged if case is None else self._played(case.change)

    def never_late_without(self, kind: str) -> Int64:
        """The same with a host that is never late, of a loss that is work."""
        case = self.what_ifs.cases.get(kind)
        if case is None or not case.work:
            return self.never_late
        return self._played(self.what_ifs.never_late_and(case.change))

    def is_work(self, kind: str) -> bool:
        case = self.what_ifs.cases.get(kind)
        return case is not None and case.work

    def _played(self, change: Change) -> Int64:
        return step_lengths(self._graph, play(self._graph, change))[self._interior]


class Played(Replay):
    """The replay of a run's traces: each what-if is played when it is first asked for."""

    def __init__(self, found: Sequence[_Trace] = (), **known: Any) -> None:
        self.__dict__.update(known, _found=found, _of={})  # what it inherits from is frozen

    _found: Sequence[_Trace]
    _of: dict[str, WhatIf | None]

    @cached_property
    def _never_late(self) -> Int64:
        return np.concatenate([one.never_late for one in self._found])

    @cached_property
    def never_late_mean_ns(self) -> float:
        return float(self._never_late.mean())

    @cached_property
    def never_late_median_ns(self) -> float:
        return float(np.median(self._never_late))

    @cached_property
    def what_ifs(self) -> tuple[WhatIf, ...]:
        kinds = dict.fromkeys(kind for one in self._found for kind in one.what_ifs.cases)
        return tuple(found for kind in kinds if (found := self.of(kind)) is not None)

    def of(self, kind: str) -> WhatIf | None:
        if not self._found:  # all that there is was given
            return super().of(kind)
        if kind not in self._of:
            known = any(kind in one.what_ifs.cases for one in self._found)
            self._of[kind] = self._without(kind) if known else None
        return self._of[kind]

    def _without(self, kind: str) -> WhatIf:
        lengths = np.concatenate([one.without(kind) for one in self._found])
        work = any(one.is_work(kind) for one in self._found)
        rest = np.concatenate([one.never_late_without(kind) for one in self._found]) if work else None
        return WhatIf(
            kind=kind,
            mean_ns=float(lengths.mean()),
            median_ns=float(np.median(lengths)),
            never_late_mean_ns=float(rest.mean()) if rest is not None else None,
            never_late_median_ns=float(np.median(rest)) if rest is not None else None,
        )


def replays(traces: Sequence[TraceLosses]) -> tuple[Replay, ...]:
    """One for each run of which a trace can be replayed, by the runs' names."""
    runs: dict[str, list[TraceLosses]] = {}
    fitting: set[Span] = set()
    slices = 0
    for one in traces:
        runs.setdefault(one.scene.span.ref.run, []).append(one)
        slices += min(len(one.scene.found), MAX_SLICES)
        if slices <= MAX_SLICES_OF_ALL:
            fitting.add(one.scene.span)
    found = (_of_run(run, runs[run], fitting) for run in sorted(runs))
    return tuple(one for one in found if one is not None)


def graph_of(lost: TraceLosses) -> Graph | None:
    """The graph of a trace, or of as many of its first steps as `MAX_SLICES` allows; None where one is too many."""
    scene = lost.scene
    count = _count(scene)
    if not count:
        return None
    whole = count == len(scene.windows)
    slices = slices_of(scene, np.iinfo(np.int64).max if whole else int(scene.windows.end_ns[count - 1]))
    return Graph(slices, waits_of(scene, slices, lost.idle.calls), steps_of(scene, slices, count))


def _count(scene: Scene) -> int:
    """How many steps fit."""
    ahead = np.searchsorted(np.sort(scene.found.start_ns), scene.windows.end_ns)
    return int((ahead <= MAX_SLICES).sum())


def _of_run(run: str, traces: list[TraceLosses], fitting: set[Span]) -> Replay | None:
    tried = [(one.scene, _replayed(one) if one.scene.span in fitting else None) for one in traces]
    found = [one for _, one in tried if one is not None]
    if not found:
        return None
    recorded = np.concatenate([one.recorded for one in found])
    unchanged = np.concatenate([one.unchanged for one in found])
    return Played(
        found,
        run=run,
        traces=tuple(one.label for one in found),
        left_out=tuple(scene.span.ref.label for scene, one in tried if one is None),
        steps=len(recorded),
        recorded_mean_ns=float(recorded.mean()),
        recorded_median_ns=float(np.median(recorded)),
        unchanged_mean_ns=float(unchanged.mean()),
        unchanged_median_ns=float(np.median(unchanged)),
        residual=_residual(recorded, unchanged),
        unexplained_ns=sum(one.unexplained_ns for one in found) / len(recorded),
    )


def _residual(recorded: Int64, unchanged: Int64) -> float:
    return float(np.abs(unchanged - recorded).sum() / recorded.sum())


def _replayed(lost: TraceLosses) -> _Trace | None:
    graph = graph_of(lost)
    if graph is None:
        return None
    trace = _Trace(lost, graph)
    known = trace.recorded.sum() > 0 and _residual(trace.recorded, trace.unchanged) <= MAX_RESIDUAL
    return trace if known else None


# Tensor cores by ordinary cores in 32 bits: data sheets of V100 and T4, of A100 and H100.
TENSOR_CORE_RATES = (8, 16)
HALVED = 2  # kernels that move data, in 16 bits in place of 32


class Case(Struct, frozen=True):
    """A change, and whether it makes device work shorter: then a host that is late hides a part of what it gives."""

    kind: str
    change: Change
    work: bool = False


class WhatIfs(Struct, frozen=True, dict=True):
    """The changes of one trace."""

    lost: TraceLosses
    graph: Graph

    @property
    def scene(self) -> Scene:
        return self.lost.scene

    @property
    def host(self) -> HostActivity:
        return self.scene.host

    @cached_property
    def cases(self) -> dict[str, Case]:
        """Each what-if of which the trace holds something, by its kind."""
        return {case.kind: case for case in self._cases()}

    def _cases(self) -> Iterator[Case]:
        lost, idle = self.lost, self.lost.idle
        for kind, times in (
            (LOADER, self.host.data),
            (COMPILE, self.host.compiling),
            (ALLOCATOR, self.host.allocating),
        ):
            if len(times.starts):
                yield Case(kind, Change(times))
        yield from self._syncs(idle)
        yield from self._copies_in(idle)
        for kind, piece in lost.launching.items():
            if len(piece.times.starts):
                yield from self._launching(kind, piece)
        for kind, piece in (
            (LINALG, lost.linear_algebra),
            (DATA_PARALLEL, lost.data_parallel),
        ):
            if len(piece.rows):
                yield self._owned(kind, piece)
        yield from self._work(lost.working, lost.copied)

    @cached_property
    def never_late(self) -> Change:
        """A host that prepares launches in no time. It still waits, loads, compiles and gets memory."""
        slices = self.graph.slices
        if not len(slices):
            return Change()
        first = int(min(slices.launch_ns.min(), slices.start_ns.min()))
        return Change(
            intervals.complement(self._otherwise, first, int(slices.end_ns.max())),
            at_once=np.ones(len(slices), bool),
        )

    def never_late_and(self, change: Change) -> Change:
        """Both changes."""
        late = self.never_late
        return replace(change, cut=intervals.merge(change.cut, late.cut), at_once=late.at_once)

    # ------------------------------------------------------------------------------------------ waits and copies

    def _syncs(self, idle: Idle) -> Iterator[Case]:
        """The host waits for nothing at these calls, and what it copies to itself takes no time."""
        waits = idle.waits.times
        if not len(waits.starts):
            return
        wide = intervals.union(waits.starts, waits.ends + RETURN_NS)
        slices = self.graph.slices
        copied = self._chosen(self.scene.found.rows[idle.copies(OUT)])
        copied &= intervals.inside(wide, slices.end_ns)
        yield Case(SYNC, Change(waits, np.where(copied, 0, slices.duration_ns)))

    def _copies_in(self, idle: Idle) -> Iterator[Case]:
        """Copies from the host take no time, nor do the calls that ask for them and wait for them, nor pinning."""
        slices, found, span = idle.copies(IN), self.scene.found, self.scene.span
        if not len(slices):
            return
        calls = np.concatenate([found.launch[slices], idle.pin_rows])
        calls = calls[calls >= 0]
        cut = intervals.merge(span.times(calls), idle.waits_in.times)
        yield Case(COPY_IN, self._shortened(self._chosen(found.rows[slices]), cut), work=True)

    # ------------------------------------------------------------------------------------------------- launching

    def _launching(self, kind: str, piece: TraceLoss) -> Iterator[Case]:
        """Preparing what ended these gaps takes no time; nor do kernels that an optimizer could do without."""
        cut = self._prepared(piece.times)
        slices = self.graph.slices
        if kind in (LAUNCH, COMPILED, HOST):
            first = np.isin(slices.start_ns, piece.times.ends) if kind != HOST else None
            yield Case(kind, Change(cut, at_once=first))
        elif kind in (OPTIMIZER, ZERO_GRAD):
            yield Case(kind, replace(self._exposed(piece.times), cut=cut))

    def _prepared(self, gaps: Intervals) -> Intervals:
        """Gaps, and the host's time before them from its last launch on."""
        starts, ends = self._launches
        begin = gaps.starts
        if len(starts):
            at = np.searchsorted(starts, begin) - 1
            begin = np.where(at >= 0, np.minimum(ends[np.maximum(at, 0)], begin), begin)
        return intervals.subtract(intervals.union(begin, gaps.ends), self._otherwise)

    @cached_property
    def _launches(self) -> tuple[Int64, Int64]:
        """When launches began, in order, and when the last of those up to each was over."""
        span, launch = self.scene.span, self.graph.slices.launch
        starts, ends = span.start_ns[launch[launch >= 0]], span.ends(launch[launch >= 0])
        order = np.argsort(starts, kind="stable")
        return starts[order], np.maximum.accumulate(ends[order])

    @cached_property
    def _otherwise(self) -> Intervals:
        """Host time that is not the preparation of a launch."""
        host, waits = self.host, self.graph.waits
        waiting = intervals.union(waits.begin_ns, waits.finish_ns)
        return intervals.merge(host.synchronizing, waiting, host.data, host.compiling, host.allocating, host.io)

    def _owned(self, kind: str, piece: TraceLoss) -> Case:
        """Operations of the host take no time, nor does what they launch."""
        span, slices = self.scene.span, self.graph.slices
        calls = span.times(piece.rows)
        mine = (intervals.inside(calls, slices.launch_ns)) & (slices.launch >= 0)
        return Case(kind, self._shortened(mine, intervals.merge(calls, self._prepared(piece.times))))

    # ------------------------------------------------------------------------------------------------------ work

    def _work(self, pieces: dict[str, TraceLoss], copied: TraceLoss) -> Iterator[Case]:
        kind = self.graph.slices.kind
        for name in (ATTENTION, LAYOUT, POINTWISE):
            yield from self._without(name, self._chosen(pieces[name].named))
        yield from self._without(COLLECTIVES, kind == COMMUNICATION)
        if len(copied.times.starts):
            yield Case(DEVICE_COPY, self._exposed(copied.times), work=True)
        products = self._chosen(pieces[MATRIX].named)
        if products.any():
            duration = self.graph.slices.duration_ns
            others = np.where((kind == KERNEL) | (kind == FILL), duration // HALVED, duration)
            for rate in TENSOR_CORE_RATES:
                change = Change(duration_ns=np.where(products, duration // rate, others))
                yield Case(matrix(rate), change, work=True)

    def _without(self, kind: str, chosen: Bools) -> Iterator[Case]:
        if chosen.any():
            yield Case(kind, self._shortened(chosen), work=True)

    def _shortened(self, chosen: Bools, cut: Intervals = EMPTY) -> Change:
        return Change(cut, np.where(chosen, 0, self.graph.slices.duration_ns))

    def _exposed(self, times: Intervals) -> Change:
        """Slices without what of them lies in these times."""
        slices = self.graph.slices
        return Change(
            duration_ns=slices.duration_ns - intervals.covered(times, slices.start_ns, slices.end_ns),
            at_once=np.isin(slices.start_ns, times.ends),
        )

    def _chosen(self, rows: Int64) -> Bools:
        """Slices by their rows in the span."""
        flags: Bools = np.zeros(len(self.scene.span) + 1, bool)
        flags[rows] = True
        return flags[self.graph.slices.row]
