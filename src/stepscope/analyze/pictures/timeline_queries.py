"""A window of the timeline, thinned to the pixels it is drawn on: what is thinner than one is merged with its
neighbours.

Slices that can be seen stay as they are, however many there are between them; a gap that can be seen stays a gap. Where
a window would still hold more than can be sent, its bins become wider than a pixel.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Any

import numpy as np

from stepscope.analyze.pictures.timeline import KIND, PHASES_NOTE, Items, Timeline, thinned
from stepscope.engine import attribution
from stepscope.engine.journal import json_object
from stepscope.engine.spans import Span
from stepscope.engine.user_code import python_frame
from stepscope.errors import UsageError
from stepscope.model import PHASES
from stepscope.model.findings import Place
from stepscope.model.timeline import (
    KINDS,
    SearchHit,
    SearchResult,
    SliceDetail,
    SliceFact,
    SliceRef,
    StackPlace,
    TimelineWindow,
    TrackSlices,
)
from stepscope.read.raw import Frame
from stepscope.tables.arrays import NONE, Bools, Int64, climb

MAX_SLICES = 20_000  # of one window
MAX_WIDTH = 8_000  # pixels
MAX_NAME = 200  # characters; the detail of a slice has its whole name
_STEPS = (KIND["step"], KIND["eval_step"])


def viewport(
    timeline: Timeline,
    from_ns: int,
    to_ns: int,
    width: int,
    *,
    worker: str | None = None,
    limit: int = MAX_SLICES,
) -> TimelineWindow:
    """What lies between two moments (ns since the run's first instant), for `width` pixels, of one worker or of all."""
    to_ns = max(to_ns, from_ns + 1)
    bin_ns = max((to_ns - from_ns) // min(max(width, 1), MAX_WIDTH), 1)
    first, last = timeline.track_range(worker)
    lanes = np.arange(timeline.first_lane[first], timeline.first_lane[last]) if last > first else np.zeros(0, np.int64)
    coarsest = next(level for level in reversed(timeline.levels) if level.bin_ns <= bin_ns)  # that shows every bin
    items = coarsest.between(lanes, from_ns, to_ns)
    total = int(items.count.sum())
    found = thinned(items, bin_ns, timeline.kind, limit)
    names, name = _names(timeline, found)
    tracks = _by_track(timeline, found, name, from_ns)
    return TimelineWindow(from_ns, to_ns, names, KINDS, tracks, total)


def moments(
    timeline: Timeline, *, worker: str | None = None, span: int | None = None, steps: tuple[int, int] | None = None
) -> tuple[int, int]:
    """First and last instant of what a selection shows; without one of the first trace, else of everything.

    Traces of other workers count as far as they overlap the first one: some were recorded on another day.
    """
    process = {name: key for key, name in timeline.workers.items()}.get(worker, worker) if worker else None
    if steps is not None:
        chosen = [
            step for step in timeline.steps if steps[0] <= step.step <= steps[1] and process in (None, step.process)
        ]
        if chosen:
            return chosen[0].from_ns, max(step.to_ns for step in chosen)
    spans = [
        each
        for each in timeline.context.base.spans
        if len(each) and worker in (None, each.ref.worker) and each.ref.span == (span or 1)
    ]
    if not spans:
        return 0, max(timeline.length_ns, 1)
    first, last = int(spans[0].start_ns.min()), int(spans[0].end_ns.max())
    for each in spans[1:]:
        start, end = int(each.start_ns.min()), int(each.end_ns.max())
        if start < last and end > first:
            first, last = min(first, start), max(last, end)
    return first - timeline.origin_ns, last - timeline.origin_ns


def _names(timeline: Timeline, items: Items) -> tuple[tuple[str, ...], Int64]:
    """The names that a window needs, and which of them each item has. A step by itself is called by its number."""
    position = items.position
    codes, name = np.unique(timeline.name[position], return_inverse=True)
    names = [timeline.names[code] for code in codes.tolist()]
    alone = np.flatnonzero((items.count == 1) & np.isin(timeline.kind[position], _STEPS))
    for at in alone.tolist():
        name[at] = len(names)
        names.append(f"step {_step_of(timeline, int(timeline.id[position[at]]))}")
    return tuple(text if len(text) <= MAX_NAME else text[: MAX_NAME - 1] + "…" for text in names), name


def _by_track(timeline: Timeline, items: Items, name: Int64, from_ns: int) -> tuple[TrackSlices, ...]:
    position = items.position
    track = timeline.track_of(items.lane)
    depth = items.lane - timeline.first_lane[track]
    columns = {
        "start": items.start - from_ns,
        "duration": items.end - items.start,
        "depth": depth,
        "name": name,
        "kind": timeline.kind[position],
        "id": np.where(items.count == 1, timeline.id[position], -1),
        "count": items.count,
    }
    numbers, first = np.unique(track, return_index=True)
    bounds = np.append(first, len(items))
    return tuple(
        TrackSlices(
            key=timeline.tracks[number].key,
            **{key: tuple(values[begin:end].tolist()) for key, values in columns.items()},
        )
        for number, begin, end in zip(numbers.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    )


MAX_HITS = 2_000
_STEP = re.compile(r"step\s*#?\s*(\d{1,18})")


def search(timeline: Timeline, text: str, *, worker: str | None = None, limit: int = 200) -> SearchResult:
    """The first slices whose name holds `text`, whatever the case of letters; "step 12" finds that step as well."""
    wanted = text.strip().lower()
    if not wanted:
        return SearchResult(0, ())
    first, last = timeline.track_range(worker)
    bounds = timeline.levels[0].bounds
    begin, end = int(bounds[timeline.first_lane[first]]), int(bounds[timeline.first_lane[last]])
    flags = np.fromiter((wanted in name for name in timeline.lower_names), bool, len(timeline.names))
    hit: Bools = flags[timeline.name[begin:end]] if len(flags) else np.zeros(0, bool)
    number = _STEP.fullmatch(wanted)
    if number is not None:
        rows = np.flatnonzero((timeline.context.tables.steps["step"] == int(number[1])).fill_null(False).to_numpy())
        hit = hit | np.isin(timeline.id[begin:end], rows + timeline.ids.steps)
    places = np.flatnonzero(hit) + begin
    limit = min(max(limit, 0), MAX_HITS)
    shown = places[np.argpartition(timeline.start[places], limit)[:limit]] if len(places) > limit else places
    shown = shown[np.argsort(timeline.start[shown], kind="stable")]
    lanes = timeline.lanes_of(shown)
    tracks = timeline.track_of(lanes)
    hits = (
        SearchHit(
            id=int(timeline.id[place]),
            name=timeline.names[timeline.name[place]],
            track=timeline.tracks[track].key,
            depth=int(lane - timeline.first_lane[track]),
            start_ns=int(timeline.start[place]),
            duration_ns=int(timeline.end[place] - timeline.start[place]),
            step=_step_of(timeline, int(timeline.id[place])),
        )
        for place, lane, track in zip(shown.tolist(), lanes.tolist(), tracks.tolist(), strict=True)
    )
    return SearchResult(len(places), tuple(hits))


def _step_of(timeline: Timeline, identifier: int) -> int | None:
    """The step a slice belongs to: one of a trace, a step or a phase; None for others."""
    tables, begins = timeline.context.tables, timeline.ids
    step: int | None = None
    if identifier < begins.steps:
        step = tables.events.slice(identifier, 1).select("step").item()
    elif identifier < begins.phases:
        step = tables.steps.item(identifier - begins.steps, "step")
    elif identifier < begins.stretches:
        step = tables.steps.item((identifier - begins.phases) // len(PHASES), "step")
    return step


MAX_FRAMES = 64
_STEP_FACTS = (
    ("kind", "kind", ""),
    ("epoch", "epoch", "count"),
    ("samples", "samples", "count"),
    ("batches fetched", "fetches", "count"),
    ("device time", "device_ns", "ns"),
    *((name.replace("_", " "), f"{name}_ns", "ns") for name in PHASES),
    ("ended by", "signal", ""),
)


def detail(timeline: Timeline, identifier: int) -> SliceDetail:
    """The slice with an id; raises `UsageError` where there is none."""
    begins = timeline.ids
    positions = np.flatnonzero(timeline.id == identifier)
    if not len(positions):
        raise UsageError(f"{identifier}: no such slice in this timeline; reload the page if the run has changed")
    position = int(positions[0])
    track = timeline.tracks[int(timeline.track_of(timeline.lanes_of(np.asarray([position], np.int64)))[0])].key
    if identifier < begins.steps:
        spans = sorted((span for span in timeline.context.base.spans if len(span)), key=lambda span: span.first)
        span = spans[bisect_right([each.first for each in spans], identifier) - 1]
        return TraceDetail(timeline, span, identifier - span.first, track).document()
    start, end = int(timeline.start[position]), int(timeline.end[position])
    notes: tuple[str, ...] = ()
    known: dict[str, Any] = {"id": identifier, "track": track, "start_ns": start, "duration_ns": end - start}
    if identifier >= begins.stretches:
        return _of_sample(timeline, known | {"name": timeline.names[timeline.name[position]]})
    steps = timeline.context.tables.steps
    if identifier < begins.phases:
        row = steps.row(identifier - begins.steps, named=True)
        facts = [SliceFact(label, row[key], unit) for label, key, unit in _STEP_FACTS if row[key] is not None]
        marks = (("first_batch", "first batch of an epoch"), ("in_window", "traced"))
        facts += [SliceFact("mark", word) for key, word in marks if row[key]]
        name = f"step {row['step']}"
    else:
        row = steps.row((identifier - begins.phases) // len(PHASES), named=True)
        facts = [SliceFact("share of the step", (end - start) / row["wall_ns"], "share")] if row["wall_ns"] else []
        name, notes = timeline.names[timeline.name[position]], (PHASES_NOTE[0].upper() + PHASES_NOTE[1:] + ".",)
    category = "step" if identifier < begins.phases else "phase of a step"
    return SliceDetail(
        **known, name=name, category=category, self_ns=None, step=row["step"], facts=tuple(facts), notes=notes
    )


def _of_sample(timeline: Timeline, known: dict[str, Any]) -> SliceDetail:
    context, begins = timeline.context, timeline.ids
    of_function = known["id"] >= begins.functions
    row = context.tables.stretches.row(
        known["id"] - (begins.functions if of_function else begins.stretches), named=True
    )
    frames = context.calls.path(int(row["node"]) if row["node"] is not None else NONE)[::-1][:MAX_FRAMES]
    stack = [_frame(timeline, frame) for frame in frames]
    own = (place for frame, place in zip(frames, stack, strict=True) if context.code.resolve(frame.file) is not None)
    facts = [SliceFact("process", int(row["pid"]))] if row["pid"] is not None else []
    facts += [SliceFact(key, row[key]) for key in ("role", "phase", "stage") if row[key] is not None]
    if not of_function:
        facts.append(SliceFact("state", "waiting" if row["waiting"] else "working"))
    return SliceDetail(
        **known,
        category="sampled stack",
        self_ns=None,
        step=None,
        facts=tuple(facts),
        place=next(own, None),
        stack=tuple(stack),
        notes=("Sampled: it begins and ends to within the time between two samples.",),
    )


def _frame(timeline: Timeline, frame: Frame) -> StackPlace:
    file = timeline.context.code.resolve(frame.file)
    place = Place(file or frame.file, frame.line, frame.function)
    return StackPlace(place, code=timeline.context.lines.text(file, frame.line) if file is not None else None)


MAX_LAUNCHED = 50
MAX_TEXT = 1_000  # characters of shapes and the like
_FACTS = (
    ("device", "device", ""),
    ("stream", "stream", ""),
    ("input shapes", "shapes", ""),
    ("input types", "types", ""),
    ("bytes", "bytes", "bytes"),
    ("blocks in the grid", "blocks", "count"),
    ("threads per block", "threads", "count"),
    ("registers per thread", "registers", "count"),
    ("shared memory per block", "shared_memory_bytes", "bytes"),
    ("blocks per SM", "blocks_per_sm", "number"),
    ("warps per SM", "warps_per_sm", "number"),
    ("estimated achieved occupancy", "occupancy_percent", "pct"),
    ("correlation", "correlation", ""),
)
_FORWARD_NOTE = "Of the backward pass: line and stack are those of the forward operator."
_GUESS_NOTE = "No code of yours is on the stack: the line is a library's."
# How a device slice without a launch came to be one.
_STATES = {
    "before_recording": "Launched before the recording began.",
    "graph": "Part of a graph that was launched as a whole.",
    "unlinked": "The trace does not tell what launched it.",
}


class TraceDetail:
    """One slice of a span, by its row there."""

    def __init__(self, timeline: Timeline, span: Span, row: int, track: str) -> None:
        self._timeline, self._span, self._row, self._track = timeline, span, row, track
        self._base = timeline.context.base
        self._values: dict[str, Any] = span.events.slice(row, 1).row(0, named=True)
        self._notes: list[str] = []

    def document(self) -> SliceDetail:
        """All of it."""
        values, span, links = self._values, self._span, self._span.links
        of_device = bool(span.on_device[self._row])
        at = np.flatnonzero(links["event"].to_numpy() == self._row)
        link = links.row(int(at[0]), named=True) if len(at) else {}  # of a device slice, ids as rows of the span
        launch, operator, frame = (link.get(name, NONE) for name in ("launch", "operator", "frame"))
        if link and launch < 0 and link["state"] in _STATES:
            self._notes.append(_STATES[link["state"]])
        begin = self._row
        if of_device:
            begin = next((row for row in (launch, operator, frame) if row >= 0), NONE)
        else:
            operator = int(climb(span.parent, span.parent[[self._row]], span.is_operator)[0])
        facts = self._facts()
        launched = np.zeros(0, np.int64) if of_device else self._launched()
        if launch >= 0:
            waited = int(span.start_ns[self._row] - span.start_ns[launch])
            facts += [SliceFact("launched by", self._name(launch)), SliceFact("from launch to start", waited, "ns")]
        elif len(launched):
            facts.append(SliceFact("launched slices of devices", len(launched), "count"))
            facts.append(SliceFact("their time together", int(span.duration_ns[launched].sum()), "ns"))
        return SliceDetail(
            id=span.first + self._row,
            name=values["name"] or "",
            category=values["category"] or "",
            track=self._track,
            start_ns=values["start_ns"] - self._timeline.origin_ns,
            duration_ns=values["duration_ns"] or 0,
            self_ns=values["self_ns"],
            step=values["step"],
            facts=tuple(facts),
            operator=self._reference(operator) if operator >= 0 else None,
            launched=tuple(self._reference(each) for each in launched[:MAX_LAUNCHED].tolist()),
            place=self._place(begin),
            stack=self._stack(begin),
            notes=tuple(self._notes),
        )

    def _facts(self) -> list[SliceFact]:
        values = self._values
        found = []
        for label, key, unit in _FACTS:
            value = values[key]
            if value is not None:
                found.append(SliceFact(label, value[:MAX_TEXT] if isinstance(value, str) else value, unit))
        if values["bytes"] and values["duration_ns"] and self._span.is_copy[self._row]:
            found.append(SliceFact("bytes per second", values["bytes"] * 1e9 / values["duration_ns"], "bytes_per_s"))
        arguments = json_object(values["collective"])
        found += [SliceFact(str(key), str(value)[:MAX_TEXT]) for key, value in list(arguments.items())[:12]]
        forward = self._forward(self._row)
        if forward >= 0:
            found.append(SliceFact("forward operator", self._name(forward)))
        return found

    def _launched(self) -> Int64:
        span, links = self._span, self._span.links
        launch, event = links["launch"].to_numpy(), links["event"].to_numpy()
        begin = span.start_ns[self._row]
        start = span.start_ns[np.maximum(launch, 0)]
        inside = (launch >= 0) & (start >= begin) & (start < begin + max(int(span.duration_ns[self._row]), 1))
        inside &= span.tracks.codes[np.maximum(launch, 0)] == span.tracks.codes[self._row]
        rows: Int64 = event[inside]
        rows = rows[np.argsort(span.start_ns[rows], kind="stable")]
        if len(rows) > MAX_LAUNCHED:
            self._notes.append(f"Launched {len(rows):,} slices of devices; the first {MAX_LAUNCHED} are listed.")
        return rows

    def _forward(self, row: int) -> int:
        """The forward operator of the nearest operator of the backward pass around a slice, itself included."""
        forward = self._span.forward
        holder = int(climb(self._span.parent, np.asarray([row]), forward >= 0)[0])
        return int(forward[holder]) if holder >= 0 else NONE

    def _place(self, row: int) -> StackPlace | None:
        if row < 0:
            return None
        found = attribution.trace_back(self._base, self._span, np.asarray([row], np.int64))
        index, called = int(found.place[0]), int(found.called[0])
        if index < 0:
            return None
        place, _ = attribution.place(self._base, index, self._name(called) if called >= 0 else None)
        guess = self._base.places[index].guess
        if guess:
            self._notes.append(_GUESS_NOTE)
        return StackPlace(place, guess, None if guess else self._base.lines.text(place.file, place.line))

    def _stack(self, row: int) -> tuple[StackPlace, ...]:
        """Python functions around a row, innermost first, or the call stack that its operator holds as text."""
        names = self._functions(row)
        if not names and row >= 0:
            names = self._functions(self._forward(row))
            if names:
                self._notes.append(_FORWARD_NOTE)
        return tuple(
            _frame(self._timeline, frame) if frame is not None else StackPlace(Place("", None, name[:MAX_TEXT]))
            for name, frame in zip(names, map(python_frame, names), strict=True)
        )

    def _functions(self, row: int) -> list[str]:
        span = self._span
        found: list[str] = []
        recorded = span.series("call_stack")
        for _ in range(MAX_FRAMES * 4):
            if row < 0 or len(found) >= MAX_FRAMES:
                break
            if span.is_function[row]:
                found.append(self._name(row))
            elif not found and recorded[row]:
                return [part.strip() for part in str(recorded[row]).split(";")[:MAX_FRAMES] if part.strip()]
            row = int(span.parent[row])
        return found

    def _reference(self, row: int) -> SliceRef:
        span = self._span
        start = int(span.start_ns[row]) - self._timeline.origin_ns
        return SliceRef(span.first + row, self._name(row), start, int(span.duration_ns[row]))

    def _name(self, row: int) -> str:
        code = int(self._span.names.codes[row])
        return self._span.names.values[code] if code >= 0 else ""
