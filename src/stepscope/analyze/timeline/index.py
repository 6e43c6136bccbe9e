"""All slices of a run by track, depth and start: what windows, details and searches of the timeline are answered from.

Made once per run. The slices stand in one order, that of lanes (a depth of a track) and of their start in it; every
other column is in that order too, and a coarser copy refers to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from stepscope.analyze.context import Context
from stepscope.analyze.timeline import run_parts, trace_parts
from stepscope.analyze.timeline.levels import Level, pyramid
from stepscope.analyze.timeline.parts import Collection, Part
from stepscope.model import PHASES
from stepscope.model.timeline import TimelineStep, TimelineTrack
from stepscope.tables.arrays import Int8, Int32, Int64

_RADIX = 1 << 16  # numbers below it sort in time proportional to their count


class Ids(Struct, frozen=True):
    """Where the ids of each source begin: slices of traces at 0, then these in this order; `end` is behind them all."""

    steps: int
    phases: int
    stretches: int
    functions: int  # the user's functions of sampled processes, by their first stretch
    end: int


class Timeline(Struct, frozen=True, dict=True):
    """The index. Times are ns since `origin_ns`, the run's first instant; `length_ns` is the last one.

    `first_lane[i]` is the lane of depth 0 of track i, with one more entry behind the last track. `id`, `name` and
    `kind` are by position: by lane and start, as `levels[0]`.
    """

    context: Context
    ids: Ids
    origin_ns: int
    length_ns: int
    tracks: tuple[TimelineTrack, ...]
    first_lane: Int64
    names: list[str]
    id: Int32
    name: Int32
    kind: Int8
    levels: tuple[Level, ...]
    notes: tuple[str, ...] = ()
    workers: dict[str, str] = field(default_factory=dict)  # process -> worker

    def __len__(self) -> int:
        return len(self.id)

    @property
    def start(self) -> Int64:
        """By position."""
        return self.levels[0].start

    @property
    def end(self) -> Int64:
        """By position."""
        return self.levels[0].end

    @cached_property
    def lower_names(self) -> list[str]:
        """Names as they are searched."""
        return [name.lower() for name in self.names]

    def groups(self) -> list[str]:
        """The workers that have a track, in order."""
        return list(dict.fromkeys(track.group for track in self.tracks))

    def track_range(self, worker: str | None) -> tuple[int, int]:
        """First track of a worker and the one behind its last; all of them for None, none for one without a track."""
        if worker is None:
            return 0, len(self.tracks)
        found = [number for number, track in enumerate(self.tracks) if track.group == worker]
        return (found[0], found[-1] + 1) if found else (0, 0)

    def track_of(self, lane: Int32 | Int64) -> Int64:
        """The track of each lane."""
        found: Int64 = np.searchsorted(self.first_lane, lane, side="right") - 1
        return found

    def lanes_of(self, positions: Int64) -> Int64:
        """The lane of each position."""
        found: Int64 = np.searchsorted(self.levels[0].bounds, positions, side="right") - 1
        return found

    def position_of(self, identifier: int) -> int | None:
        """Where the slice with an id stands, None where it is not drawn."""
        found = np.flatnonzero(self.id == identifier)
        return int(found[0]) if len(found) else None

    @cached_property
    def steps(self) -> tuple[TimelineStep, ...]:
        """All steps in order of time."""
        table = self.context.tables.steps.sort("start_ns", maintain_order=True)
        return tuple(
            TimelineStep(number, process or "", start - self.origin_ns, start - self.origin_ns + wall, kind or "train")
            for number, process, start, wall, kind in table.select(
                "step", "process", "start_ns", "wall_ns", "kind"
            ).iter_rows()
        )


def timeline(context: Context) -> Timeline:
    """The index of a run; empty where it has neither steps nor slices nor samples with times."""
    collection = Collection()
    base, tables = context.base, context.tables
    workers = {span.ref.process: span.ref.worker for span in base.spans}
    ids = _ids(tables.events.height, tables.steps.height, tables.stretches.height)
    trace_parts.add_traces(base, collection)
    run_parts.add_steps(tables, collection, workers, ids.steps)
    run_parts.add_samples(tables, context.calls, context.code, collection, workers, ids.stretches)
    order = collection.tracks.ordered(list(dict.fromkeys(workers.values())))
    depths = [collection.tracks.all[number].depth for number in order]
    first_lane = np.concatenate(([0], np.cumsum(np.asarray(depths, np.int64)))).astype(np.int64)
    columns = _Columns(collection.parts, order, first_lane)
    return Timeline(
        context=context,
        ids=ids,
        origin_ns=columns.origin_ns,
        length_ns=int(columns.end.max(initial=0)),
        tracks=collection.tracks.shown(order),
        first_lane=first_lane,
        names=collection.names.all(),
        id=columns.id,
        name=columns.name,
        kind=columns.kind,
        levels=pyramid(int(first_lane[-1]), columns.lane, columns.start, columns.end),
        notes=tuple(collection.notes),
        workers=workers,
    )


def _ids(events: int, steps: int, stretches: int) -> Ids:
    phases = events + steps
    sampled = phases + steps * len(PHASES)
    return Ids(events, phases, sampled, sampled + stretches, sampled + 2 * stretches)


class _Columns:
    """The columns of all parts, by lane and start."""

    def __init__(self, parts: Sequence[Part], order: Sequence[int], first_lane: Int64) -> None:
        lane_of_track = np.zeros(max(len(order), 1), np.int32)
        lane_of_track[list(order)] = first_lane[:-1]
        start = _joined([part.start for part in parts], np.int64)
        lane = _joined([lane_of_track[part.track] + part.depth for part in parts], np.int32)
        self.origin_ns = int(start.min()) if len(start) else 0
        at = _order(lane, start, int(first_lane[-1]))
        self.lane: Int32 = lane[at]
        del lane
        self.start: Int64 = start[at] - self.origin_ns
        del start
        self.end: Int64 = _joined([part.end for part in parts], np.int64)[at] - self.origin_ns
        self.id: Int32 = _joined([part.id for part in parts], np.int32)[at]
        self.name: Int32 = _joined([part.name for part in parts], np.int32)[at]
        self.kind: Int8 = _joined([part.kind for part in parts], np.int8)[at]


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _order(lane: Int32, start: Int64, lanes: int) -> Int64:
    """By lane, then by start, then as they came."""
    by_start = np.argsort(start, kind="stable")
    keys = lane[by_start]
    found: Int64 = by_start[np.argsort(keys.astype(np.uint16) if lanes < _RADIX else keys, kind="stable")]
    return found
