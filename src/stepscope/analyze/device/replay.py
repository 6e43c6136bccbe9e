"""Profiled steps played again without one of their losses: what could be gained at most, and not by subtraction.

`replay_graph` says what depends on what and plays it; here are the changes that leave losses out, and what a run's
traces gain by each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec.structs import replace

from stepscope.analyze.device.device_losses import TraceLosses, by_run
from stepscope.analyze.device.idle_time import IN, OUT, RETURN_NS
from stepscope.analyze.device.replay_graph import Change, Graph, play, slices_of, step_lengths, steps_of, waits_of
from stepscope.engine import intervals
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL
from stepscope.engine.intervals import EMPTY, Intervals
from stepscope.engine.spans import Span
from stepscope.model import device_losses as kinds
from stepscope.model.device_losses import Replay, WhatIf
from stepscope.tables.arrays import Bools, Int64

MAX_RESIDUAL = 0.05  # of the recorded steps: a replay that is further off does not know the trace
# Of a trace: more take two seconds and more, and then its first steps stand for it. Of all traces: what is beyond that
# is left out, as of many ranks that do the same.
MAX_SLICES = 100_000
MAX_SLICES_OF_ALL = 400_000
# Tensor cores by ordinary cores in 32 bits: data sheets of V100 and T4, of A100 and H100.
TENSOR_CORE_RATES = (8, 16)
HALVED = 2  # kernels that move data, in 16 bits in place of 32


class _Trace:
    """One trace that can be replayed. Lengths are ns of its interior steps; a replay is made when it is asked for."""

    def __init__(self, lost: TraceLosses, graph: Graph) -> None:
        self.lost, self.scene, self.slices, self._graph = lost, lost.scene, graph.slices, graph
        count = len(graph.steps.start_ns)
        self._interior = slice(1, -1) if count >= 3 else slice(None)
        self._starts, self._ends = (edges[:count][self._interior] for edges in (self.scene.starts, self.scene.ends))
        self.recorded: Int64 = self._ends - self._starts
        self.unchanged = self._played(Change())

    def _played(self, change: Change) -> Int64:
        return step_lengths(self._graph, play(self._graph, change))[self._interior]

    @property
    def unexplained_ns(self) -> int:
        """While no device does anything although slices had all they need."""
        busy = self.scene.found.covered(KERNEL, FILL, COMMUNICATION, COPY)
        idle = intervals.complement(busy, int(self._starts[0]), int(self._ends[-1]))
        return int(intervals.covered(intervals.intersect(idle, self.slices.held), self._starts, self._ends).sum())

    def without(self, kind: str) -> Int64:
        """Without a loss; as recorded where the trace holds nothing of it."""
        return self._played(self.changes[kind]) if kind in self.changes else self.unchanged

    @cached_property
    def never_late(self) -> Int64:
        """With a host that is never late."""
        return self._played(self._prepared_at_once)

    def never_late_without(self, kind: str) -> Int64:
        """The same with a host that is never late, of a loss that is work."""
        change, late = self.changes.get(kind), self._prepared_at_once
        if change is None or not change.work:
            return self.never_late
        return self._played(replace(change, cut=intervals.merge(change.cut, late.cut), at_once=late.at_once))

    @cached_property
    def _prepared_at_once(self) -> Change:
        """A host that prepares launches in no time. It still waits, loads, compiles and gets memory."""
        slices = self.slices
        if not len(slices):
            return Change()
        first = int(min(slices.launch_ns.min(), slices.start_ns.min()))
        cut = intervals.complement(self._otherwise, first, int(slices.end_ns.max()))
        return Change(cut, at_once=np.ones(len(slices), bool))

    # --------------------------------------------------------------------------------------------- what is left out

    @cached_property
    def changes(self) -> dict[str, Change]:
        """Each what-if of which the trace holds something, by its kind."""
        return dict((*self._of_host(), *self._of_work()))

    def _of_host(self) -> Iterator[tuple[str, Change]]:
        host, idle, losses = self.scene.host, self.lost.idle, self.lost.by_kind
        slices, found, span = self.slices, self.scene.found, self.scene.span
        causes = ((kinds.LOADER, host.data), (kinds.COMPILE, host.compiling), (kinds.ALLOCATOR, host.allocating))
        for kind, times in causes:
            if len(times.starts):
                yield kind, Change(times)
        waits = idle.waits.times
        if len(waits.starts):  # the host waits for nothing at these calls, and what it copies to itself takes no time
            copied = self._chosen(found.rows[idle.copies(OUT)])
            copied &= intervals.inside(intervals.union(waits.starts, waits.ends + RETURN_NS), slices.end_ns)
            yield kinds.SYNC, Change(waits, np.where(copied, 0, slices.duration_ns))
        copies = idle.copies(IN)
        if len(copies):  # nor do the calls take any that ask for them and wait for them, nor pinning
            calls = np.concatenate([found.launch[copies], idle.pin_rows])
            cut = intervals.merge(span.times(calls[calls >= 0]), idle.waits_in.times)
            yield kinds.COPY_IN, self._shortened(self._chosen(found.rows[copies]), cut)
        for kind in (kinds.OPTIMIZER, kinds.ZERO_GRAD):
            times = losses[kind].times
            if len(times.starts):  # nor do kernels that an optimizer could do without
                yield kind, replace(self._exposed(times), cut=self._prepared(times))
        for kind in (kinds.COMPILED, kinds.LAUNCH, kinds.HOST):
            times = losses[kind].times
            if len(times.starts):
                first = np.isin(slices.start_ns, times.ends) if kind != kinds.HOST else None
                yield kind, Change(self._prepared(times), at_once=first)
        for kind in (kinds.LINALG, kinds.DATA_PARALLEL):
            loss = losses[kind]
            if len(loss.rows):  # operations of the host take no time, nor does what they launch
                calls_of_it = span.times(loss.rows)
                mine = intervals.inside(calls_of_it, slices.launch_ns) & (slices.launch >= 0)
                cut = intervals.merge(calls_of_it, self._prepared(loss.times))
                yield kind, replace(self._shortened(mine, cut), work=False)

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
        span, launch = self.scene.span, self.slices.launch[self.slices.launch >= 0]
        order = np.argsort(span.start_ns[launch], kind="stable")
        return span.start_ns[launch][order], np.maximum.accumulate(span.ends(launch)[order])

    @cached_property
    def _otherwise(self) -> Intervals:
        """Host time that is not the preparation of a launch."""
        host, waits = self.scene.host, self._graph.waits
        waiting = intervals.union(waits.begin_ns, waits.finish_ns)
        return intervals.merge(host.synchronizing, waiting, host.data, host.compiling, host.allocating, host.io)

    def _of_work(self) -> Iterator[tuple[str, Change]]:
        losses, kind, duration = self.lost.by_kind, self.slices.kind, self.slices.duration_ns
        named = {name: self._chosen(losses[name].named) for name in (kinds.ATTENTION, kinds.LAYOUT, kinds.POINTWISE)}
        for name, chosen in {**named, kinds.COLLECTIVES: kind == COMMUNICATION}.items():
            if chosen.any():
                yield name, self._shortened(chosen)
        copied = losses[kinds.DEVICE_COPY].times
        if len(copied.starts):
            yield kinds.DEVICE_COPY, replace(self._exposed(copied), work=True)
        products = self._chosen(losses[kinds.MATRIX].named)
        if products.any():
            others = np.where((kind == KERNEL) | (kind == FILL), duration // HALVED, duration)
            for rate in TENSOR_CORE_RATES:
                lengths = np.where(products, duration // rate, others)
                yield kinds.matrix(rate), Change(duration_ns=lengths, work=True)

    def _shortened(self, chosen: Bools, cut: Intervals = EMPTY) -> Change:
        return Change(cut, np.where(chosen, 0, self.slices.duration_ns), work=True)

    def _exposed(self, times: Intervals) -> Change:
        """Slices without what of them lies in these times."""
        slices = self.slices
        lengths = slices.duration_ns - intervals.covered(times, slices.start_ns, slices.end_ns)
        return Change(duration_ns=lengths, at_once=np.isin(slices.start_ns, times.ends))

    def _chosen(self, rows: Int64) -> Bools:
        """Slices by their rows in the span."""
        flags: Bools = np.zeros(len(self.scene.span) + 1, bool)
        flags[rows] = True
        return flags[self.slices.row]


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
        known = dict.fromkeys(kind for one in self._found for kind in one.changes)
        return tuple(found for kind in known if (found := self.of(kind)) is not None)

    def of(self, kind: str) -> WhatIf | None:
        if not self._found:  # all that there is was given
            return super().of(kind)
        if kind not in self._of:
            known = any(kind in one.changes for one in self._found)
            self._of[kind] = self._without(kind) if known else None
        return self._of[kind]

    def _without(self, kind: str) -> WhatIf:
        lengths = np.concatenate([one.without(kind) for one in self._found])
        found = WhatIf(kind, float(lengths.mean()), float(np.median(lengths)), None, None)
        if not any(kind in one.changes and one.changes[kind].work for one in self._found):
            return found
        rest = np.concatenate([one.never_late_without(kind) for one in self._found])
        return replace(found, never_late_mean_ns=float(rest.mean()), never_late_median_ns=float(np.median(rest)))


def replays(traces: Sequence[TraceLosses]) -> tuple[Replay, ...]:
    """One for each run of which a trace can be replayed, by the runs' names."""
    sizes = np.cumsum([min(len(one.scene.found), MAX_SLICES) for one in traces])
    fitting = {one.scene.span for one, size in zip(traces, sizes, strict=True) if size <= MAX_SLICES_OF_ALL}
    found = (_of_run(run, own, fitting) for run, own in by_run(traces))
    return tuple(one for one in found if one is not None)


def graph_of(lost: TraceLosses) -> Graph | None:
    """The graph of a trace, or of as many of its first steps as `MAX_SLICES` allows; None where one is too many."""
    scene = lost.scene
    ahead = np.searchsorted(np.sort(scene.found.start_ns), scene.ends)
    count = int((ahead <= MAX_SLICES).sum())
    if not count:
        return None
    slices = slices_of(scene, np.iinfo(np.int64).max if count == len(scene) else int(scene.ends[count - 1]))
    return Graph(slices, waits_of(scene, slices, lost.idle.calls), steps_of(scene, slices, count))


def _of_run(run: str, traces: list[TraceLosses], fitting: set[Span]) -> Replay | None:
    found, left_out = [], []
    for one in traces:
        graph = graph_of(one) if one.scene.span in fitting else None
        trace = None if graph is None else _Trace(one, graph)
        if trace is None or trace.recorded.sum() <= 0 or _residual(trace.recorded, trace.unchanged) > MAX_RESIDUAL:
            left_out.append(one.scene.span.ref.label)
        else:
            found.append(trace)
    if not found:
        return None
    recorded = np.concatenate([one.recorded for one in found])
    unchanged = np.concatenate([one.unchanged for one in found])
    return Played(
        found,
        run=run,
        traces=tuple(one.scene.span.ref.label for one in found),
        left_out=tuple(left_out),
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
