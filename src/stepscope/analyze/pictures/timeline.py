"""All slices of a run by track, depth and start: what windows, details and searches of the timeline are answered from.

Made once per run. The slices stand in one order, that of lanes (a depth of a track, whose slices follow each other) and
of their start in it; every other column is in that order too, and a coarser copy refers to it. In such a copy `merge`
makes one item of neighbours that are shorter than a bin and begin in the same bin; what is longer stays as it is, and
so does a gap of a bin or more. An item knows how many slices it holds and which is the longest, packed into one number
so that one maximum finds both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct, field

from stepscope.analyze.context import Context
from stepscope.engine.attribution import origins
from stepscope.engine.device_work import COMMUNICATION, work
from stepscope.engine.journal import json_object
from stepscope.engine.spans import Base, Span
from stepscope.model import PHASES
from stepscope.model.timeline import KINDS, TimelineStep, TimelineTrack, TrackKind
from stepscope.tables import categories
from stepscope.tables.arrays import NONE, Bools, Int8, Int32, Int64, Numbers, expanded, return_freed_memory, unique
from stepscope.tables.schema import Tables

_RADIX = 1 << 16  # numbers below it sort in time proportional to their count


class Ids(Struct, frozen=True):
    """Where the ids of each source begin: slices of traces at 0, then these in this order."""

    steps: int
    phases: int
    stretches: int
    functions: int  # the user's functions of sampled processes, by their first stretch


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
        return self.levels[0].start

    @property
    def end(self) -> Int64:
        return self.levels[0].end

    @cached_property
    def lower_names(self) -> list[str]:
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
        found: Int64 = np.searchsorted(self.first_lane, lane, side="right") - 1
        return found

    def lanes_of(self, positions: Int64) -> Int64:
        found: Int64 = np.searchsorted(self.levels[0].bounds, positions, side="right") - 1
        return found

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
    base, tables = context.base, context.tables
    return_freed_memory(tables.events.height)
    workers = {span.ref.process: span.ref.worker for span in base.spans}
    phases = tables.events.height + tables.steps.height
    sampled = phases + tables.steps.height * len(PHASES)
    ids = Ids(tables.events.height, phases, sampled, sampled + tables.stretches.height)
    found = _Collection()
    _add_traces(base, found)
    _add_steps(tables, found, workers, ids)
    _add_samples(context, found, workers, ids)
    # Of a large trace each column is tens of megabytes: none is kept twice for longer than it must.
    of = {name: np.concatenate([np.zeros(0, dtype), *found.columns.pop(name)]) for name, dtype in _COLUMNS.items()}
    track, depth, start = of.pop("track"), of.pop("depth"), of["start"]
    depths = np.ones(len(found.tracks), np.int64)
    np.maximum.at(depths, track, depth + 1)
    place = {group: at for at, group in enumerate(dict.fromkeys(workers.values()))}
    tracks = sorted(  # those of a group together
        found.tracks.values(),
        key=lambda one: (place.get(one.group, len(place)), one.group, _ORDER[one.kind], one.rank, one.number),
    )
    order = [one.number for one in tracks]
    first_lane = np.append(0, np.cumsum(depths[order]))
    lane_of_track = np.zeros(max(len(tracks), 1), np.int32)
    lane_of_track[order] = first_lane[:-1]
    lane = lane_of_track[track] + depth
    del track, depth
    origin_ns = int(start.min()) if len(start) else 0
    # by lane, then by start, then as they came
    at = np.argsort(start, kind="stable")
    keys = lane[at].astype(np.uint16) if first_lane[-1] < _RADIX else lane[at]
    at = at[np.argsort(keys, kind="stable")]
    del start, keys
    lane = lane[at]
    of = {name: of.pop(name)[at] for name in list(of)}
    del at
    start, end = of.pop("start"), of.pop("end")
    start -= origin_ns
    end -= origin_ns
    levels = pyramid(int(first_lane[-1]), lane, start, end)
    del lane
    return_freed_memory(tables.events.height)
    return Timeline(
        context=context,
        ids=ids,
        origin_ns=origin_ns,
        length_ns=int(end.max(initial=0)),
        tracks=tuple(TimelineTrack(one.key, one.label, one.group, one.kind, int(depths[one.number])) for one in tracks),
        first_lane=first_lane,
        names=list(found.names),
        **of,
        levels=levels,
        notes=tuple(found.notes),
        workers=workers,
    )


MAX_DEPTH = 128  # slices above each other on one track; what is deeper is not drawn
KIND = {name: number for number, name in enumerate(KINDS)}
# Tracks of a worker in this order: stacks of Python functions are deep, so that streams below them were out of sight.
_ORDER: dict[TrackKind, int] = {"steps": 0, "phases": 1, "stream": 2, "thread": 3, "worker": 4}


class _Track(NamedTuple):
    """Tracks of a worker stand by kind, then by `rank`, ascending."""

    number: int
    key: str
    label: str
    group: str
    kind: TrackKind
    rank: tuple[float, ...]


# Columns of slices; `track` and `name` count in `_Collection`, `kind` in `KINDS`, times are absolute.
_COLUMNS = {
    **dict.fromkeys(("id", "track", "depth", "name"), np.int32),
    **dict.fromkeys(("start", "end"), np.int64),
    "kind": np.int8,
}


class _Collection(Struct):
    tracks: dict[str, _Track] = field(default_factory=dict)
    names: Numbers[str] = field(default_factory=Numbers)
    columns: dict[str, list[npt.NDArray[Any]]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    notes: list[str] = field(default_factory=list)

    def track(self, group: str, kind: TrackKind, name: str, label: str, rank: tuple[float, ...] = ()) -> int:
        """The number of a track, which is made where it is new."""
        key = f"{group}/{kind}" + (f":{name}" if name else "")
        return self.tracks.setdefault(key, _Track(len(self.tracks), key, label, group, kind, rank)).number

    def add(self, **columns: npt.ArrayLike) -> None:
        """The slices of one source; a value without length is that of all of them."""
        for name, values in columns.items():
            column = np.asarray(values).astype(_COLUMNS[name], copy=False)
            self.columns[name].append(np.broadcast_to(column, np.shape(columns["id"])))

    def numbers(self, names: Sequence[str]) -> Int32:
        """Numbers of `names`; one more entry at the end stands for a name that is missing."""
        return np.asarray([self.names[name] for name in (*names, "")], np.int32)


PHASES_NOTE = "of phases only lengths are measured: they are drawn in their usual order within each step"
_PHASE_COLUMNS = [f"{name}_ns" for name in PHASES]
_ROLES = {"loader_worker": "loader worker", "rank": "sampled main thread"}


def _add_steps(tables: Tables, found: _Collection, workers: Mapping[str, str], ids: Ids) -> None:
    """Add a track of steps for every process, and one of phases where they are known.

    Phase k of step i has the id `ids.phases` + number of phases * i + k.
    """
    steps = tables.steps
    if steps.is_empty():
        return
    track, of_phases = (np.full(steps.height, NONE, np.int32) for _ in range(2))
    process = steps["process"].fill_null("")
    for name in process.unique(maintain_order=True).to_list():
        own = process == name
        rows, group = own.to_numpy(), workers.get(name, name)
        track[rows] = found.track(group, "steps", "", "steps")
        if steps.filter(own).select(pl.any_horizontal(pl.col(_PHASE_COLUMNS).count() > 0)).item():
            of_phases[rows] = found.track(group, "phases", "", "phases")
    start, wall = steps["start_ns"].to_numpy(), steps["wall_ns"].to_numpy()
    evaluates = (steps["kind"] == "eval").fill_null(False).to_numpy().astype(np.int8)
    found.add(
        id=np.arange(ids.steps, ids.phases),
        track=track,
        depth=0,
        start=start,
        end=start + wall,
        name=found.numbers(["training step", "evaluation step"])[evaluates],
        kind=np.where(evaluates, KIND["eval_step"], KIND["step"]),
    )
    if not (of_phases >= 0).any():
        return
    lengths = steps.select(pl.col(_PHASE_COLUMNS).fill_null(0)).to_numpy().astype(np.int64)
    ends = start[:, None] + np.cumsum(lengths, axis=1)
    keep = (lengths > 0) & (of_phases >= 0)[:, None]
    row, phase = np.nonzero(keep)
    found.add(
        id=ids.phases + row * len(PHASES) + phase,
        track=of_phases[row],
        depth=0,
        start=(ends - lengths)[keep],
        end=ends[keep],
        name=found.numbers([name.replace("_", " ") for name in PHASES])[phase],
        kind=np.asarray([KIND[name] for name in PHASES])[phase],
    )
    found.notes.append(PHASES_NOTE)


def _add_samples(context: Context, found: _Collection, workers: Mapping[str, str], ids: Ids) -> None:
    """Add a track for every main thread that was sampled with times: of ranks, and of the workers of their loaders.

    Below is the user's innermost function (-1: none), above it the innermost of all, unless the process stood in the
    user's function itself: that says it all.
    """
    drawn = (
        pl.col("main_thread").fill_null(False)
        & pl.col("role").is_in(list(_ROLES))
        & pl.col("node").is_not_null()
        & (pl.col("end_ns") > pl.col("start_ns"))
    )
    chosen = context.tables.stretches.with_row_index("row").filter(drawn)
    if chosen.is_empty():
        return
    keys = chosen.select(pl.col("host", "process").fill_null(""), pl.col("pid").fill_null(NONE), "role")
    numbers = {}
    for key in keys.unique(maintain_order=True).iter_rows():
        host, process, pid, role = key
        group = workers.get(process, process) or host or "sampled"
        label = f"{_ROLES[role]} {pid}" if pid >= 0 else _ROLES[role]
        rank = (0.0 if role == "rank" else 1.0, float(pid))
        numbers[key] = found.track(group, "worker", f"{host}/{pid}/{role}", label, rank)
    track = np.asarray([numbers[key] for key in keys.iter_rows()], np.int32)
    calls, node, row = context.calls, chosen["node"].to_numpy(), chosen["row"].to_numpy().astype(np.int32)
    short = [(frame.file.rpartition("/")[2], frame) for frame in calls.frames]
    places = [f" ({file}:{frame.line})" if frame.line is not None else f" ({file})" for file, frame in short]
    named = zip(places, short, strict=True)
    labels = found.numbers([f"{frame.function}{place if file else ''}" for place, (file, frame) in named])
    users = np.asarray([context.code.resolve(frame.file) is not None for frame in calls.frames], bool)
    user = calls.innermost(calls.by_node(users))[node]
    leaf, outer = labels[calls.frame[node]], labels[calls.frame[np.maximum(user, 0)]]
    kind = np.where(chosen["waiting"].fill_null(False), KIND["waiting"], KIND["sampled"])
    start, end = chosen["start_ns"].to_numpy(), chosen["end_ns"].to_numpy()
    inner = user != node
    found.add(
        id=ids.stretches + row[inner],
        track=track[inner],
        depth=user[inner] >= 0,
        start=start[inner],
        end=end[inner],
        name=leaf[inner],
        kind=kind[inner],
    )
    # stretches that follow each other in one function of the user's are one slice, with the first one's id
    known = np.flatnonzero(user >= 0)
    if not len(known):
        return
    known = known[np.lexsort((start[known], track[known]))]
    row, track, start, end, outer = row[known], track[known], start[known], end[known], outer[known]
    same: Bools = (track[1:] == track[:-1]) & (outer[1:] == outer[:-1]) & (start[1:] <= end[:-1])
    first = np.flatnonzero(np.append(True, ~same))
    found.add(
        id=ids.functions + row[first],
        track=track[first],
        depth=0,
        start=start[first],
        end=np.maximum.reduceat(end, first),
        name=outer[first],
        kind=KIND["user_function"],
    )


_SYNCHRONIZES = re.compile(r"^(cuda|cu|hip|xpu|mtia)?\w*Synchronize")
# Ranges that PyTorch itself writes around parts of a step.
_RANGES = {"data_wait": ("enumerate(DataLoader)", "enumerate(DataPipe)"), "optimizer": ("Optimizer.step",)}
_BUSY = ("user_function", "library_function", "operator")  # the thread with most of these comes first


def _add_traces(base: Base, found: _Collection) -> None:
    """Add the slices of all traces. Ids are positions in `events`."""
    left_out = 0
    for span in base.spans:
        if not len(span):
            continue
        kind = kinds(base, span)
        track = _tracks(span, kind, found)[span.tracks.codes]
        depth = span.series("depth").fill_null(0).to_numpy()
        name = found.numbers(span.names.values)[span.names.codes]
        rows = np.flatnonzero((track >= 0) & (depth < MAX_DEPTH))
        chosen = slice(None) if len(rows) == len(span) else rows
        found.add(
            id=rows + span.first,
            track=track[chosen],
            depth=depth[chosen],
            start=span.start_ns[chosen],
            end=span.end_ns[chosen],
            name=name[chosen],
            kind=kind[chosen],
        )
        left_out += int((depth >= MAX_DEPTH).sum())
    if left_out:
        found.notes.append(f"{left_out:,} slices deeper than {MAX_DEPTH} levels are not drawn")


def kinds(base: Base, span: Span) -> Int8:
    """The kind of every slice of a span, as a number of `KINDS`."""
    kind, names, found = np.full(len(span), KIND["other"], np.int8), span.categories, work(span)
    annotations = names.pick([name.endswith("annotation") for name in names.values])
    ranges = (annotations & ~span.is_runtime) | names.where(categories.OPERATORS)
    sorts: dict[str, Bools | Int64] = {  # the last that a slice is of
        "runtime": span.is_runtime,
        "sync": span.is_runtime & span.names.matching(_SYNCHRONIZES.match),
        "annotation": ranges,
        "operator": span.is_operator,
        **{name: ranges & span.names.starting(*begins) for name, begins in _RANGES.items()},
        "library_function": span.is_function,
        "user_function": span.is_function & (origins(base, span).user >= 0),
        "kernel": span.is_kernel,
        "copy": span.is_copy,
        "fill": span.is_fill,
        "communication": found.rows[found.kind == COMMUNICATION],
    }
    for name, rows in sorts.items():
        kind[rows] = KIND[name]
    return kind


def _tracks(span: Span, kind: Int8, found: _Collection) -> Int32:
    """The number of the collection's track for each of the span's, and -1 at the end for none."""
    codes = span.tracks.codes
    count = len(span.tracks.values)
    known = codes >= 0
    slices = np.bincount(codes[known], minlength=count)
    busy = np.isin(kind, [KIND[name] for name in _BUSY]) & known
    work_done = np.bincount(codes[busy], minlength=count)
    on_stream = np.flatnonzero(span.series("stream").is_not_null().to_numpy() & known)
    streams, first = np.unique(codes[on_stream], return_index=True)
    device, stream = (span.column(name, on_stream[first]) for name in ("device", "stream"))
    places = dict(zip(streams.tolist(), zip(device.tolist(), stream.tolist(), strict=True), strict=True))
    own = span.own(span.tables.traces)
    names = json_object(own["threads"][0]) if own.height else {}
    numbers = np.full(count + 1, NONE, np.int32)
    main = int(work_done.argmax()) if count and work_done.max() > 0 else NONE
    for code in np.flatnonzero(slices).tolist():
        track = span.tracks.values[code]
        if code in places:
            place = places[code]  # a device of -1 is not told
            label = f"GPU {place[0]} stream {place[1]}" if place[0] >= 0 else f"stream {place[1]}"
            numbers[code] = found.track(span.ref.worker, "stream", track, label, place)
        else:
            thread, name = track.rpartition("/")[2], str(names.get(track, ""))
            unnamed = f"thread {thread}" if thread.isdigit() else thread
            label = (name if thread in name else f"{name} ({thread})") if name else unnamed
            rank = (float(code != main), -float(work_done[code]), -float(slices[code]))
            numbers[code] = found.track(span.ref.worker, "thread", track, label, rank)
    return numbers


_FINEST_NS = 4_096  # bins of the first level: most kernels and operators are this long or longer
_FEW = 50_000  # items that are thinned quickly enough as they are
_BINS = 64  # a window is never drawn in fewer
_STRETCH = 1 << 19  # slices that are merged at a time: what that takes is gone before the next ones
_MOST_LEFT = 0.75  # a level that does not leave out a quarter is not worth its memory
_LONGEST = np.int64(2**31 - 1)
_POSITION = np.int64(2**32 - 1)


class Items(Struct, frozen=True):
    """Slices, or groups of them, by lane and start. `best` packs the longest slice's length and position."""

    lane: Int32
    start: Int64
    end: Int64
    count: Int32
    best: Int64

    def __len__(self) -> int:
        return len(self.start)

    @property
    def position(self) -> Int64:
        """The position, in the index, of the longest slice of each."""
        found: Int64 = self.best & _POSITION
        return found

    def grouped(self, cut: Bools) -> Items:
        """One item for each stretch that begins where `cut` is set."""
        first = np.flatnonzero(cut)
        if len(first) == len(self):
            return self
        return Items(
            self.lane[first],
            self.start[first],
            np.maximum.reduceat(self.end, first),
            np.add.reduceat(self.count, first),
            np.maximum.reduceat(self.best, first),
        )


def packed(start: Int64, end: Int64, position: Int64) -> Int64:
    """`best` of single slices."""
    found: Int64 = (np.minimum(end - start, _LONGEST) << 32) | position
    return found


def merge(items: Items, bin_ns: int) -> Items:
    """Thin neighbours that begin in the same bin become one."""
    if len(items) < 2:
        return items
    thin = items.end - items.start < bin_ns
    place = items.start // bin_ns
    cut = np.ones(len(items), bool)
    cut[1:] = ~(thin[1:] & thin[:-1] & (place[1:] == place[:-1]) & (items.lane[1:] == items.lane[:-1]))
    return items.grouped(cut)


def join(items: Items, bin_ns: int, kind: Int8) -> Items:
    """Neighbours of one kind without a gap that could be seen become one, except slices that can be seen themselves.

    `kind` is by position of the index.
    """
    if len(items) < 2:
        return items
    alone = (items.count == 1) & (items.end - items.start >= bin_ns)
    kinds = kind[items.position]
    together = (items.lane[1:] == items.lane[:-1]) & (kinds[1:] == kinds[:-1]) & ~alone[1:] & ~alone[:-1]
    together &= items.start[1:] - items.end[:-1] < bin_ns
    return items.grouped(np.append(True, ~together))


def thinned(items: Items, bin_ns: int, kind: Int8, limit: int) -> Items:
    """At most `limit` items: as many as bins of `bin_ns` leave, else of wider ones."""
    found = join(merge(items, bin_ns), bin_ns, kind)
    while len(found) > limit:
        fewer = join(merge(found, bin_ns * 2), bin_ns * 2, kind)
        bin_ns *= 2
        if len(fewer) == len(found) and bin_ns > int(found.end.max()) + 1:
            break  # one item a lane, and more lanes than asked for
        found = fewer
    return found


class Level(Struct, frozen=True):
    """All slices of a run merged to bins of `bin_ns`; at 0 every slice is an item of its own.

    Lane i lies between `bounds[i]` and `bounds[i + 1]`. `count` and `best` are None at 0.
    """

    bin_ns: int
    bounds: Int64
    start: Int64
    end: Int64
    count: Int32 | None
    best: Int64 | None

    def between(self, lanes: Int64, from_ns: int, to_ns: int) -> Items:
        """The items of `lanes` that lie, with any part of them, between two moments."""
        low, high = self.bounds[lanes], self.bounds[lanes + 1]
        first = _first_from(self.start, low, high, from_ns)
        before = first - 1
        reaches = (before >= low) & (self.end[np.maximum(before, 0)] > from_ns) if len(self.end) else before >= low
        first = np.where(reaches, before, first)
        last = _first_from(self.start, first, high, to_ns)
        rows, _ = expanded(first, last - first)
        start, end = self.start[rows], self.end[rows]
        return Items(
            np.repeat(lanes, last - first).astype(np.int32),
            start,
            end,
            self.count[rows] if self.count is not None else np.ones(len(rows), np.int32),
            self.best[rows] if self.best is not None else packed(start, end, rows),
        )


def pyramid(lanes: int, lane: Int32, start: Int64, end: Int64) -> tuple[Level, ...]:
    """Levels of slices that are given by lane and start, each a quarter as fine as the one before it."""
    every = np.arange(lanes + 1)
    levels = [Level(0, np.searchsorted(lane, every), start, end, None, None)]
    count, span = len(start), int(end.max(initial=0))
    bins = [_FINEST_NS]
    while bins[-1] * 4 * _BINS < span:
        bins.append(bins[-1] * 4)
    if count <= _FEW or bins[-1] * _BINS >= span:
        return tuple(levels)
    parts = _parts(lane, start, end, bins[-1])
    for bin_ns in bins:
        pieces = [merge(piece, bin_ns) for piece in parts]
        before, count = count, sum(map(len, pieces))
        if count < before * _MOST_LEFT:
            all_of = _joined(pieces)
            bounds = np.searchsorted(all_of.lane, every)
            levels.append(Level(bin_ns, bounds, all_of.start, all_of.end, all_of.count, all_of.best))
        if count <= _FEW:
            break
        parts = _each(pieces)
    return tuple(levels)


def _parts(lane: Int32, start: Int64, end: Int64, widest_ns: int) -> Iterator[Items]:
    """Slices in stretches over whose edges nothing merges: where a lane or a bin of the widest level begins."""
    place = start // widest_ns
    begins = np.flatnonzero((place[1:] != place[:-1]) | (lane[1:] != lane[:-1])) + 1
    del place
    edges = np.concatenate([[0], begins, [len(start)]])
    edges = edges[np.searchsorted(edges, np.arange(0, len(start) + _STRETCH, _STRETCH).clip(max=len(start)))]
    for first, last in pairwise(unique(edges).tolist()):
        own = slice(first, last)
        best = packed(start[own], end[own], np.arange(first, last))
        yield Items(lane[own], start[own], end[own], np.ones(last - first, np.int32), best)


def _joined(pieces: list[Items]) -> Items:
    """All of them as one, of which they are parts from then on."""
    edges = np.cumsum([len(piece) for piece in pieces])[:-1]
    names = Items.__struct_fields__
    columns = {name: [getattr(piece, name) for piece in pieces] for name in names}
    pieces.clear()
    whole = Items(*(np.concatenate(columns.pop(name)) for name in names))
    pieces += map(Items, *(np.split(getattr(whole, name), edges) for name in names))
    return whole


def _each(pieces: list[Items]) -> Iterator[Items]:
    """One after the other, held by nobody else from then on."""
    while pieces:
        yield pieces.pop(0)


def _first_from(start: Int64, low: Int64, high: Int64, moment: int) -> Int64:
    """For every range of positions the first whose start is not before `moment`, or the range's end."""
    low, high = low.copy(), high.copy()
    while True:
        searched = np.flatnonzero(low < high)
        if not len(searched):
            return low
        middle = (low[searched] + high[searched]) // 2
        before = start[middle] < moment
        low[searched[before]] = middle[before] + 1
        high[searched[~before]] = middle[~before]
