"""What each loss would be without: host time that is cut out, waits that go with it, slices that take less time.

All of a kind goes, whether the device hid it or not: a ceiling is what could be gained at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.device_losses.idle import IN, OUT, RETURN_NS, Idle
from stepscope.analyze.device_losses.lost import Lost
from stepscope.analyze.device_losses.pieces import Piece
from stepscope.analyze.replay.graph import Graph
from stepscope.analyze.replay.play import Change
from stepscope.engine import intervals
from stepscope.engine.device_work import COMMUNICATION, FILL, KERNEL
from stepscope.engine.host_activity import HostActivity
from stepscope.engine.intervals import EMPTY, Intervals
from stepscope.engine.scene import Scene
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
    matrix,
)
from stepscope.tables.arrays import Bools, Int64

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

    lost: Lost
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
        copied &= intervals.covered(wide, slices.end_ns, slices.end_ns + 1) > 0
        yield Case(SYNC, Change(waits, np.where(copied, 0, slices.duration_ns)))

    def _copies_in(self, idle: Idle) -> Iterator[Case]:
        """Copies from the host take no time, nor do the calls that ask for them and wait for them, nor pinning."""
        slices, found, span = idle.copies(IN), self.scene.found, self.scene.span
        if not len(slices):
            return
        calls = np.concatenate([found.launch[slices], idle.pin_rows])
        calls = calls[calls >= 0]
        cut = intervals.merge(intervals.union(span.start_ns[calls], span.ends(calls)), idle.waits_in.times)
        yield Case(COPY_IN, self._shortened(self._chosen(found.rows[slices]), cut), work=True)

    # ------------------------------------------------------------------------------------------------- launching

    def _launching(self, kind: str, piece: Piece) -> Iterator[Case]:
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

    def _owned(self, kind: str, piece: Piece) -> Case:
        """Operations of the host take no time, nor does what they launch."""
        span, slices = self.scene.span, self.graph.slices
        calls = intervals.union(span.start_ns[piece.rows], span.ends(piece.rows))
        mine = (intervals.covered(calls, slices.launch_ns, slices.launch_ns + 1) > 0) & (slices.launch >= 0)
        return Case(kind, self._shortened(mine, intervals.merge(calls, self._prepared(piece.times))))

    # ------------------------------------------------------------------------------------------------------ work

    def _work(self, pieces: dict[str, Piece], copied: Piece) -> Iterator[Case]:
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
