"""Profiled steps played again without one of their losses: what could be gained at most, and not by subtraction.

`graph` says what depends on what, `waits` what the host waits for, `play` is the replay, `what_ifs` leave losses out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from stepscope.analyze.device_losses.lost import Lost
from stepscope.analyze.replay.graph import Graph, slices_of, steps_of
from stepscope.analyze.replay.play import Change, play, step_lengths
from stepscope.analyze.replay.waits import waits_of
from stepscope.analyze.replay.what_ifs import WhatIfs
from stepscope.engine import intervals
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL
from stepscope.engine.scene import Scene
from stepscope.engine.spans import Span
from stepscope.model.device_losses import Replay, WhatIf
from stepscope.tables.arrays import Int64

__all__ = ["facts", "graph_of"]

MAX_RESIDUAL = 0.05  # of the recorded steps: a replay that is further off does not know the trace
# Of a trace: more take two seconds and more, and then its first steps stand for it. Of all traces: what is beyond that
# is left out, as of many ranks that do the same.
MAX_SLICES = 100_000
MAX_SLICES_OF_ALL = 400_000


class _Trace:
    """One trace that can be replayed. Lengths are ns of its interior steps; a replay is made when it is asked for."""

    def __init__(self, lost: Lost, graph: Graph) -> None:
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


def facts(traces: Sequence[Lost]) -> tuple[Replay, ...]:
    """One for each run of which a trace can be replayed, by the runs' names."""
    runs: dict[str, list[Lost]] = {}
    fitting: set[Span] = set()
    slices = 0
    for one in traces:
        runs.setdefault(one.scene.span.ref.run, []).append(one)
        slices += min(len(one.scene.found), MAX_SLICES)
        if slices <= MAX_SLICES_OF_ALL:
            fitting.add(one.scene.span)
    found = (_of_run(run, runs[run], fitting) for run in sorted(runs))
    return tuple(one for one in found if one is not None)


def graph_of(lost: Lost) -> Graph | None:
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


def _of_run(run: str, traces: list[Lost], fitting: set[Span]) -> Replay | None:
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


def _replayed(lost: Lost) -> _Trace | None:
    graph = graph_of(lost)
    if graph is None:
        return None
    trace = _Trace(lost, graph)
    known = trace.recorded.sum() > 0 and _residual(trace.recorded, trace.unchanged) <= MAX_RESIDUAL
    return trace if known else None
