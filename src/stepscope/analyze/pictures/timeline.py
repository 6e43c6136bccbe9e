"""All slices of a run by track, depth and start: what windows, details and searches of the timeline are answered from.

Made once per run. The slices stand in one order, that of lanes (a depth of a track) and of their start in it; every
other column is in that order too, and a coarser copy refers to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct, field

from stepscope.analyze.context import Context
from stepscope.analyze.pictures.timeline_levels import Level, pyramid
from stepscope.engine.call_tree import CallTree
from stepscope.engine.device_work import COMMUNICATION, work
from stepscope.engine.journal import json_object
from stepscope.engine.spans import Base, Span
from stepscope.engine.user_code import UserCode
from stepscope.model import PHASES
from stepscope.model.timeline import KINDS, TimelineStep, TimelineTrack, TrackKind
from stepscope.tables import categories
from stepscope.tables.arrays import NONE, Bools, Int8, Int32, Int64
from stepscope.tables.schema import Tables

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
    collection = TimelineColumns()
    base, tables = context.base, context.tables
    workers = {span.ref.process: span.ref.worker for span in base.spans}
    ids = _ids(tables.events.height, tables.steps.height, tables.stretches.height)
    add_traces(base, collection)
    add_steps(tables, collection, workers, ids.steps)
    add_samples(tables, context.calls, context.code, collection, workers, ids.stretches)
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

    def __init__(self, parts: Sequence[SliceColumns], order: Sequence[int], first_lane: Int64) -> None:
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


MAX_DEPTH = 128  # slices above each other on one track; what is deeper is not drawn
KIND = {name: number for number, name in enumerate(KINDS)}
# Tracks of a worker in this order: stacks of Python functions are deep, so that streams below them were out of sight.
_ORDER: dict[TrackKind, int] = {"steps": 0, "phases": 1, "stream": 2, "thread": 3, "worker": 4}


class Track(Struct):
    """A track while it is collected. Those of a worker stand by kind, then by `rank`, ascending."""

    key: str
    label: str
    group: str
    kind: TrackKind
    rank: tuple[float, ...] = ()
    depth: int = 1


class Tracks:
    """All tracks, in the order in which they were first named."""

    def __init__(self) -> None:
        self.all: list[Track] = []
        self._numbers: dict[str, int] = {}

    def number(self, group: str, kind: TrackKind, name: str, label: str, rank: tuple[float, ...] = ()) -> int:
        """The number of a track, which is made where it is new."""
        key = f"{group}/{kind}" + (f":{name}" if name else "")
        if key not in self._numbers:
            self._numbers[key] = len(self.all)
            self.all.append(Track(key, label, group, kind, rank))
        return self._numbers[key]

    def ordered(self, groups: Sequence[str]) -> list[int]:
        """Numbers of the tracks as they are shown, those of a group together."""
        place = {group: at for at, group in enumerate(groups)}
        return sorted(
            range(len(self.all)),
            key=lambda number: (
                place.get(self.all[number].group, len(place)),
                self.all[number].group,
                _ORDER[self.all[number].kind],
                self.all[number].rank,
                number,
            ),
        )

    def shown(self, order: Sequence[int]) -> tuple[TimelineTrack, ...]:
        """The tracks in `order`."""
        return tuple(
            TimelineTrack(track.key, track.label, track.group, track.kind, track.depth)
            for track in (self.all[number] for number in order)
        )


class Names:
    """Distinct names by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def numbers(self, names: Sequence[str]) -> Int32:
        """Numbers of `names`; one more entry at the end stands for a name that is missing."""
        return np.asarray([*(self.number(name) for name in names), self.number("")], np.int32)

    def all(self) -> list[str]:
        return list(self._numbers)


class SliceColumns(Struct, frozen=True):
    """Slices of one source. `track` counts in `Tracks`, `name` in `Names`, `kind` in `KINDS`; times are absolute."""

    id: Int32
    track: Int32
    depth: Int32
    start: Int64
    end: Int64
    name: Int32
    kind: Int8


class TimelineColumns(Struct):
    """All parts of a run, with what the reader must know of them."""

    tracks: Tracks = field(default_factory=Tracks)
    names: Names = field(default_factory=Names)
    parts: list[SliceColumns] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, part: SliceColumns) -> None:
        """Add slices and make their tracks deep enough."""
        if not len(part.id):
            return
        depths = np.zeros(len(self.tracks.all), np.int32)
        np.maximum.at(depths, part.track, part.depth + 1)
        for number in np.flatnonzero(depths):
            track = self.tracks.all[number]
            track.depth = max(track.depth, int(depths[number]))
        self.parts.append(part)


PHASES_NOTE = "of phases only lengths are measured: they are drawn in their usual order within each step"
_PHASE_COLUMNS = tuple(f"{name}_ns" for name in PHASES)
_ROLES = {"loader_worker": "loader worker", "rank": "sampled main thread"}


def add_steps(tables: Tables, collection: TimelineColumns, workers: Mapping[str, str], first_id: int) -> None:
    """Add a track of steps for every process, and one of phases where they are known."""
    steps = tables.steps
    if steps.is_empty():
        return
    track = np.zeros(steps.height, np.int32)
    phases = np.zeros(steps.height, np.int32)
    process = steps["process"].fill_null("")
    for name in process.unique(maintain_order=True).to_list():
        rows = (process == name).to_numpy()
        group = workers.get(name, name)
        track[rows] = collection.tracks.number(group, "steps", "", "steps")
        known = steps.filter(pl.Series(rows)).select(pl.col(_PHASE_COLUMNS).count().sum()).sum_horizontal()[0]
        phases[rows] = collection.tracks.number(group, "phases", "", "phases") if known else NONE
    start, wall = steps["start_ns"].to_numpy(), steps["wall_ns"].to_numpy()
    evaluates = (steps["kind"] == "eval").fill_null(False).to_numpy()
    depth = np.zeros(steps.height, np.int32)
    kind = np.where(evaluates, KIND["eval_step"], KIND["step"]).astype(np.int8)
    names = collection.names.numbers(["training step", "evaluation step"])
    ids = np.arange(first_id, first_id + steps.height, dtype=np.int32)
    collection.add(SliceColumns(ids, track, depth, start, start + wall, names[evaluates.astype(np.int8)], kind))
    if (phases >= 0).any():
        _add_phases(steps, collection, phases, first_id + steps.height)


def _add_phases(steps: pl.DataFrame, collection: TimelineColumns, track: Int32, first_id: int) -> None:
    """Phase k of step i has the id `first_id` + number of phases * i + k."""
    count = len(PHASES)
    lengths = np.column_stack([steps[name].fill_null(0).to_numpy() for name in _PHASE_COLUMNS]).astype(np.int64)
    ends = steps["start_ns"].to_numpy()[:, None] + np.cumsum(lengths, axis=1)
    keep = (lengths > 0) & (track >= 0)[:, None]
    row, phase = np.nonzero(keep)
    names = collection.names.numbers([name.replace("_", " ") for name in PHASES])
    kinds = np.asarray([KIND[name] for name in PHASES], np.int8)
    collection.add(
        SliceColumns(
            id=(first_id + row * count + phase).astype(np.int32),
            track=track[row],
            depth=np.zeros(len(row), np.int32),
            start=(ends - lengths)[keep],
            end=ends[keep],
            name=names[phase],
            kind=kinds[phase],
        )
    )
    collection.notes.append(PHASES_NOTE)


def add_samples(
    tables: Tables,
    calls: CallTree,
    code: UserCode,
    collection: TimelineColumns,
    workers: Mapping[str, str],
    first_id: int,
) -> None:
    """Add a track for every main thread that was sampled with times: of ranks, and of the workers of their loaders."""
    stretches = tables.stretches
    if stretches.is_empty():
        return
    drawn = (
        stretches["main_thread"].fill_null(False)
        & stretches["role"].is_in(list(_ROLES))
        & stretches["node"].is_not_null()
        & (stretches["end_ns"] > stretches["start_ns"])
    )
    rows = np.flatnonzero(drawn.fill_null(False).to_numpy())
    if not len(rows):
        return
    chosen = stretches[rows]
    track = _sampled_tracks(chosen, collection, workers)
    node = chosen["node"].to_numpy()
    user, leaf, itself = _names_of_nodes(calls, code, collection)
    waiting = chosen["waiting"].fill_null(False).to_numpy()
    kind = np.where(waiting, KIND["waiting"], KIND["sampled"]).astype(np.int8)
    start, end = chosen["start_ns"].to_numpy(), chosen["end_ns"].to_numpy()
    outer = user[node]
    known = np.flatnonzero(outer >= 0)
    inner = np.flatnonzero(~itself[node])  # where the process stood in the user's function itself, that says it all
    depth = (outer >= 0).astype(np.int32)[inner]
    ids = (first_id + rows[inner]).astype(np.int32)
    collection.add(SliceColumns(ids, track[inner], depth, start[inner], end[inner], leaf[node[inner]], kind[inner]))
    of_user = (first_id + stretches.height + rows[known]).astype(np.int32)
    _add_stretched(collection, of_user, track[known], start[known], end[known], outer[known])


def _add_stretched(
    collection: TimelineColumns, ids: Int32, track: Int32, start: Int64, end: Int64, name: Int32
) -> None:
    """The user's functions: stretches that follow each other in one function are one slice, with the first one's id.

    Their ids follow those of the stretches.
    """
    order = np.lexsort((start, track))
    ids, track, name = ids[order], track[order], name[order]
    start, end = start[order], end[order]
    if not len(ids):
        return
    same: Bools = (track[1:] == track[:-1]) & (name[1:] == name[:-1]) & (start[1:] <= end[:-1])
    first = np.flatnonzero(np.append(True, ~same))
    kind = np.full(len(first), KIND["user_function"], np.int8)
    depth = np.zeros(len(first), np.int32)
    collection.add(
        SliceColumns(ids[first], track[first], depth, start[first], np.maximum.reduceat(end, first), name[first], kind)
    )


def _sampled_tracks(chosen: pl.DataFrame, collection: TimelineColumns, workers: Mapping[str, str]) -> Int32:
    """The track of each stretch: one for every process that was sampled."""
    keys = chosen.select(
        pl.col("host").fill_null(""), pl.col("process").fill_null(""), pl.col("pid").fill_null(NONE), pl.col("role")
    )
    distinct = keys.unique(maintain_order=True).with_row_index("number")
    numbers = []
    for _, host, process, pid, role in distinct.iter_rows():
        group = workers.get(process, process) or host or "sampled"
        label = f"{_ROLES[role]} {pid}" if pid >= 0 else _ROLES[role]
        rank = (0.0 if role == "rank" else 1.0, float(pid))
        numbers.append(collection.tracks.number(group, "worker", f"{host}/{pid}/{role}", label, rank))
    at = keys.join(distinct, on=keys.columns, how="left", maintain_order="left")["number"].to_numpy()
    found: Int32 = np.asarray(numbers, np.int32)[at]
    return found


def _names_of_nodes(calls: CallTree, code: UserCode, collection: TimelineColumns) -> tuple[Int32, Int32, Bools]:
    """By node the name of the user's innermost function (-1: none) and of the innermost, and whether they are one."""
    labels = collection.names.numbers([_label(frame.function, frame.file, frame.line) for frame in calls.frames])
    users = np.asarray([code.resolve(frame.file) is not None for frame in calls.frames], bool)
    innermost = calls.innermost(calls.by_node(users))
    leaf = labels[calls.frame]
    user = np.where(innermost >= 0, leaf[np.maximum(innermost, 0)], NONE).astype(np.int32)
    return user, leaf, innermost == np.arange(len(calls))


def _label(function: str, file: str, line: int | None) -> str:
    name = file.rpartition("/")[2]
    if not name:
        return function
    return f"{function} ({name}:{line})" if line is not None else f"{function} ({name})"


_SYNCHRONIZES = re.compile(r"^(cuda|cu|hip|xpu|mtia)?\w*Synchronize")
# Ranges that PyTorch itself writes around parts of a step.
_RANGES = {"data_wait": ("enumerate(DataLoader)", "enumerate(DataPipe)"), "optimizer": ("Optimizer.step",)}
_BUSY = ("user_function", "library_function", "operator")  # the thread with most of these comes first


def add_traces(base: Base, collection: TimelineColumns) -> None:
    """Add the slices of all traces. Ids are positions in `events`."""
    left_out = 0
    for span in base.spans:
        if len(span):
            left_out += _add(base, span, collection)
    if left_out:
        collection.notes.append(f"{left_out:,} slices deeper than {MAX_DEPTH} levels are not drawn")


def _add(base: Base, span: Span, collection: TimelineColumns) -> int:
    kind = kinds(base, span)
    track = _tracks(span, kind, collection)[span.tracks.codes]
    depth = span.series("depth").fill_null(0).to_numpy()
    rows = np.flatnonzero((track >= 0) & (depth < MAX_DEPTH))
    name = collection.names.numbers(span.names.values)[span.names.codes]
    whole = len(rows) == len(span)
    chosen = slice(None) if whole else rows
    start, end = span.start_ns[chosen], span.end_ns[chosen]
    collection.add(
        SliceColumns(
            id=(rows + span.first).astype(np.int32),
            track=track[chosen],
            depth=depth[chosen].astype(np.int32),
            start=start,
            end=end,
            name=name[chosen],
            kind=kind[chosen],
        )
    )
    return int((depth >= MAX_DEPTH).sum())


def kinds(base: Base, span: Span) -> Int8:
    """The kind of every slice of a span, as a number of `KINDS`."""
    kind = np.full(len(span), KIND["other"], np.int8)
    names = span.categories
    kind[names.pick([name.endswith("annotation") for name in names.values])] = KIND["annotation"]
    kind[span.is_runtime] = KIND["runtime"]
    synchronizes = span.names.matching(_SYNCHRONIZES.match)
    kind[span.is_runtime & synchronizes] = KIND["sync"]
    kind[names.where(categories.OPERATORS)] = KIND["annotation"]
    host_ranges = kind == KIND["annotation"]
    kind[span.is_operator] = KIND["operator"]
    for name, begins in _RANGES.items():
        kind[host_ranges & span.names.starting(*begins)] = KIND[name]
    functions = span.is_function
    kind[functions] = KIND["library_function"]
    kind[functions & (base.origins.user[span.first : span.first + len(span)] >= 0)] = KIND["user_function"]
    kind[span.is_kernel] = KIND["kernel"]
    kind[span.is_copy] = KIND["copy"]
    kind[span.is_fill] = KIND["fill"]
    found = work(span)
    kind[found.rows[found.kind == COMMUNICATION]] = KIND["communication"]
    return kind


def _tracks(span: Span, kind: Int8, collection: TimelineColumns) -> Int32:
    """The number of the collection's track for each of the span's, and -1 at the end for none."""
    codes = span.tracks.codes
    count = len(span.tracks.values)
    known = codes >= 0
    slices = np.bincount(codes[known], minlength=count)
    busy = np.isin(kind, [KIND[name] for name in _BUSY]) & known
    work_done = np.bincount(codes[busy], minlength=count)
    on_stream = span.series("stream").is_not_null().to_numpy() & known
    streams = np.bincount(codes[on_stream], minlength=count) > 0
    device, stream = _numbers(span, on_stream)
    names = _thread_names(span)
    found = np.full(count + 1, -1, np.int32)
    main = int(work_done.argmax()) if count and work_done.max() > 0 else -1
    group = span.ref.worker
    for code in np.flatnonzero(slices).tolist():
        track = span.tracks.values[code]
        if streams[code]:
            label = f"GPU {device[code]} stream {stream[code]}" if device[code] >= 0 else f"stream {stream[code]}"
            place = (float(device[code]), float(stream[code]))
            found[code] = collection.tracks.number(group, "stream", track, label, place)
        else:
            label = _thread_label(track, names.get(track))
            rank = (0.0 if code == main else 1.0, -float(work_done[code]), -float(slices[code]))
            found[code] = collection.tracks.number(group, "thread", track, label, rank)
    return found


def _numbers(span: Span, on_stream: Bools) -> tuple[dict[int, int], dict[int, int]]:
    """Device and stream of each track of a device, by the track's code; a device of -1 is not told."""
    rows = np.flatnonzero(on_stream)
    codes, first = np.unique(span.tracks.codes[rows], return_index=True)
    device, stream = (span.column(name, rows[first]) for name in ("device", "stream"))
    return dict(zip(codes.tolist(), device.tolist(), strict=True)), dict(
        zip(codes.tolist(), stream.tolist(), strict=True)
    )


def _thread_names(span: Span) -> dict[str, str]:
    ref = span.ref
    own = span.tables.traces.filter((pl.col("process") == ref.process) & (pl.col("trace") == ref.trace))
    return {key: str(value) for key, value in json_object(own["threads"][0]).items()} if own.height else {}


def _thread_label(track: str, name: str | None) -> str:
    thread = track.rpartition("/")[2]
    if name and thread in name:
        return name
    if name:
        return f"{name} ({thread})"
    return f"thread {thread}" if thread.isdigit() else thread
