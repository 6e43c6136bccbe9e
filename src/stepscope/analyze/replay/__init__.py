"""Profiled steps played again without one of their losses: what could be gained at most, and not by subtraction.

`graph` says what depends on what, `waits` what the host waits for, `play` is the replay, `what_ifs` leave losses out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stepscope.analyze import intervals
from stepscope.analyze.device_losses import scenes
from stepscope.analyze.device_losses.pieces import Scene
from stepscope.analyze.intervals import Int64
from stepscope.analyze.replay.graph import Graph, slices_of, steps_of
from stepscope.analyze.replay.play import Change, play, step_lengths
from stepscope.analyze.replay.waits import waits_of
from stepscope.analyze.replay.what_ifs import WhatIfs
from stepscope.analyze.views.base import Base, Span
from stepscope.analyze.views.host_activity import HostActivity, host_activity
from stepscope.analyze.views.work import COMMUNICATION, COPY, FILL, KERNEL
from stepscope.model.views.replay import Replay, WhatIf

__all__ = ["facts", "graph_of"]

MAX_RESIDUAL = 0.05  # of the recorded steps: a replay that is further off does not know the trace
# Of a trace: more take two seconds and more, and then its first steps stand for it. Of all traces: what is beyond that
# is left out, as of many ranks that do the same.
MAX_SLICES = 100_000
MAX_SLICES_OF_ALL = 400_000


@dataclass(frozen=True)
class _Trace:
    """One trace: ns of each interior step as recorded, replayed, and under each what-if.

    `never_late` is the replay with a host that is never late, and `work` what-ifs under which that is so as well.
    """

    label: str
    recorded: Int64
    unchanged: Int64
    never_late: Int64
    unexplained_ns: int
    without: dict[str, Int64]
    work: dict[str, Int64]


def facts(base: Base) -> tuple[Replay, ...]:
    """One for each run of which a trace can be replayed, by the runs' names."""
    runs: dict[str, list[Scene]] = {}
    fitting: set[Span] = set()
    slices = 0
    for scene in scenes(base):
        runs.setdefault(scene.span.ref.run, []).append(scene)
        slices += min(len(scene.found), MAX_SLICES)
        if slices <= MAX_SLICES_OF_ALL:
            fitting.add(scene.span)
    found = (_of_run(run, runs[run], fitting) for run in sorted(runs))
    return tuple(one for one in found if one is not None)


def graph_of(scene: Scene, host: HostActivity) -> Graph | None:
    """The graph of a trace, or of as many of its first steps as `MAX_SLICES` allows; None where one is too many."""
    count = _count(scene)
    if not count:
        return None
    whole = count == len(scene.windows)
    slices = slices_of(scene, np.iinfo(np.int64).max if whole else int(scene.windows.end_ns[count - 1]))
    calls = host.rows[scene.span.is_runtime[host.rows]]
    return Graph(slices, waits_of(scene, slices, calls), steps_of(scene, slices, count))


def _count(scene: Scene) -> int:
    """How many steps fit."""
    ahead = np.searchsorted(np.sort(scene.found.start_ns), scene.windows.end_ns)
    return int((ahead <= MAX_SLICES).sum())


def _of_run(run: str, traces: list[Scene], fitting: set[Span]) -> Replay | None:
    played = [(scene, _replayed(scene) if scene.span in fitting else None) for scene in traces]
    found = [one for _, one in played if one is not None]
    if not found:
        return None
    recorded = np.concatenate([one.recorded for one in found])
    unchanged = np.concatenate([one.unchanged for one in found])
    never_late = np.concatenate([one.never_late for one in found])
    return Replay(
        run=run,
        traces=tuple(one.label for one in found),
        left_out=tuple(scene.span.ref.label for scene, one in played if one is None),
        steps=len(recorded),
        recorded_mean_ns=float(recorded.mean()),
        recorded_median_ns=float(np.median(recorded)),
        unchanged_mean_ns=float(unchanged.mean()),
        unchanged_median_ns=float(np.median(unchanged)),
        never_late_mean_ns=float(never_late.mean()),
        never_late_median_ns=float(np.median(never_late)),
        residual=_residual(recorded, unchanged),
        unexplained_ns=sum(one.unexplained_ns for one in found) / len(recorded),
        what_ifs=tuple(_what_ifs(found)),
    )


def _what_ifs(found: list[_Trace]) -> Iterator[WhatIf]:
    for kind in dict.fromkeys(kind for one in found for kind in one.without):
        lengths = np.concatenate([one.without.get(kind, one.unchanged) for one in found])
        work = any(kind in one.work for one in found)
        rest = np.concatenate([one.work.get(kind, one.never_late) for one in found])
        yield WhatIf(
            kind=kind,
            mean_ns=float(lengths.mean()),
            median_ns=float(np.median(lengths)),
            never_late_mean_ns=float(rest.mean()) if work else None,
            never_late_median_ns=float(np.median(rest)) if work else None,
        )


def _residual(recorded: Int64, unchanged: Int64) -> float:
    return float(np.abs(unchanged - recorded).sum() / recorded.sum())


def _replayed(scene: Scene) -> _Trace | None:
    host = host_activity(scene.span, scene.found)
    graph = graph_of(scene, host)
    if graph is None:
        return None
    count = len(graph.steps.start_ns)
    interior = slice(1, -1) if count >= 3 else slice(None)
    starts, ends = scene.windows.start_ns[:count][interior], scene.windows.end_ns[:count][interior]
    recorded = ends - starts
    unchanged = step_lengths(graph, play(graph, Change()))[interior]
    if recorded.sum() <= 0 or _residual(recorded, unchanged) > MAX_RESIDUAL:
        return None
    busy = scene.found.covered(KERNEL, FILL, COMMUNICATION, COPY)
    idle = intervals.complement(busy, int(starts[0]), int(ends[-1]))
    held = intervals.intersect(idle, graph.slices.held)
    what_ifs = WhatIfs(scene, graph, host)
    without: dict[str, Int64] = {}
    work: dict[str, Int64] = {}
    for case in what_ifs:
        without[case.kind] = step_lengths(graph, play(graph, case.change))[interior]
        if case.work:
            work[case.kind] = step_lengths(graph, play(graph, what_ifs.never_late_and(case.change)))[interior]
    return _Trace(
        label=scene.span.ref.label,
        recorded=recorded,
        unchanged=unchanged,
        never_late=step_lengths(graph, play(graph, what_ifs.never_late))[interior],
        unexplained_ns=int(intervals.covered(held, starts, ends).sum()),
        without=without,
        work=work,
    )
