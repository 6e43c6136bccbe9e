"""What is asked of the timeline: a window of it, one slice in full, and slices by name.

A window is thinned to the pixels it is drawn on: what is thinner than one is merged with its neighbours. Slices that
can be seen stay as they are, however many there are between them; a gap that can be seen stays a gap. Where a window
would still hold more than can be sent, its bins become wider than a pixel.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze.pictures.timeline import KIND, PHASES_NOTE, Timeline, thinned
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
from stepscope.tables.arrays import MAX_DEPTH, NONE, Bools, Int64, climb

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
    position, track = found.position, timeline.track_of(found.lane)
    # the names that the window needs, and which of them each item has; a step by itself is called by its number
    codes, name = np.unique(timeline.name[position], return_inverse=True)
    names = [timeline.names[code] for code in codes.tolist()]
    for at in np.flatnonzero((found.count == 1) & np.isin(timeline.kind[position], _STEPS)).tolist():
        name[at] = len(names)
        names.append(f"step {_step_of(timeline, int(timeline.id[position[at]]))}")
    columns = {
        "start": found.start - from_ns,
        "duration": found.end - found.start,
        "depth": found.lane - timeline.first_lane[track],
        "name": name,
        "kind": timeline.kind[position],
        "id": np.where(found.count == 1, timeline.id[position], -1),
        "count": found.count,
    }
    numbers, first_of = np.unique(track, return_index=True)
    bounds = [*first_of.tolist(), len(found)]
    tracks = tuple(
        TrackSlices(
            key=timeline.tracks[number].key,
            **{key: tuple(values[begin:end].tolist()) for key, values in columns.items()},
        )
        for number, begin, end in zip(numbers.tolist(), bounds, bounds[1:], strict=False)
    )
    short = tuple(text if len(text) <= MAX_NAME else text[: MAX_NAME - 1] + "…" for text in names)
    return TimelineWindow(from_ns, to_ns, short, KINDS, tracks, total)


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
        return _of_trace(timeline, span, identifier - span.first, track)
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


def _of_trace(timeline: Timeline, span: Span, row: int, track: str) -> SliceDetail:
    """One slice of a span, by its row there."""
    base, links, notes = timeline.context.base, span.links, []
    values: dict[str, Any] = span.events.slice(row, 1).row(0, named=True)
    of_device = bool(span.on_device[row])
    at = np.flatnonzero(links["event"].to_numpy() == row)
    link = links.row(int(at[0]), named=True) if len(at) else {}  # of a device slice, ids as rows of the span
    launch, operator, frame = (link.get(name, NONE) for name in ("launch", "operator", "frame"))
    if link and launch < 0 and link["state"] in _STATES:
        notes.append(_STATES[link["state"]])
    facts, launched, begin = _trace_facts(span, row, values), np.zeros(0, np.int64), row
    if of_device:
        begin = next((each for each in (launch, operator, frame) if each >= 0), NONE)
    else:
        operator = int(climb(span.parent, span.parent[[row]], span.is_operator)[0])
        launched = _launched(span, row)
    if launch >= 0:
        waited = int(span.start_ns[row] - span.start_ns[launch])
        facts += [SliceFact("launched by", _name(span, launch)), SliceFact("from launch to start", waited, "ns")]
    elif len(launched):
        facts.append(SliceFact("launched slices of devices", len(launched), "count"))
        facts.append(SliceFact("their time together", int(span.duration_ns[launched].sum()), "ns"))
    if len(launched) > MAX_LAUNCHED:
        notes.append(f"Launched {len(launched):,} slices of devices; the first {MAX_LAUNCHED} are listed.")
    place = None
    found = attribution.trace_back(base, span, np.asarray([begin], np.int64))
    if (index := int(found.place[0])) >= 0:
        guess = base.places[index].guess
        where, _ = attribution.place(base, index, int(attribution.calls(base, span, found.called)[0]))
        place = StackPlace(where, guess, None if guess else base.lines.text(where.file, where.line))
        notes += [_GUESS_NOTE] if guess else []
    # Python functions around a row, innermost first, or the call stack that its operator holds as text
    names = _functions(span, begin)
    if not names and begin >= 0 and (names := _functions(span, _forward(span, begin))):
        notes.append(_FORWARD_NOTE)
    stack = tuple(
        _frame(timeline, frame) if frame is not None else StackPlace(Place("", None, name[:MAX_TEXT]))
        for name, frame in zip(names, map(python_frame, names), strict=True)
    )
    refs = [
        SliceRef(
            span.first + each,
            _name(span, each),
            int(span.start_ns[each]) - timeline.origin_ns,
            int(span.duration_ns[each]),
        )
        for each in (operator, *launched[:MAX_LAUNCHED].tolist())
    ]
    return SliceDetail(
        id=span.first + row,
        name=values["name"] or "",
        category=values["category"] or "",
        track=track,
        start_ns=values["start_ns"] - timeline.origin_ns,
        duration_ns=values["duration_ns"] or 0,
        self_ns=values["self_ns"],
        step=values["step"],
        facts=tuple(facts),
        operator=refs[0] if operator >= 0 else None,
        launched=tuple(refs[1:]),
        place=place,
        stack=stack,
        notes=tuple(notes),
    )


def _trace_facts(span: Span, row: int, values: dict[str, Any]) -> list[SliceFact]:
    found = []
    for label, key, unit in _FACTS:
        value = values[key]
        if value is not None:
            found.append(SliceFact(label, value[:MAX_TEXT] if isinstance(value, str) else value, unit))
    if values["bytes"] and values["duration_ns"] and span.is_copy[row]:
        found.append(SliceFact("bytes per second", values["bytes"] * 1e9 / values["duration_ns"], "bytes_per_s"))
    arguments = json_object(values["collective"])
    found += [SliceFact(str(key), str(value)[:MAX_TEXT]) for key, value in list(arguments.items())[:12]]
    if (forward := _forward(span, row)) >= 0:
        found.append(SliceFact("forward operator", _name(span, forward)))
    return found


def _launched(span: Span, row: int) -> Int64:
    """Slices of devices whose launch lies in a slice of the host, on its thread, in order of time."""
    if "launches" not in span.kept:  # in order of time: a page has hundreds of slices' details
        known = span.links.select("launch", "event").filter(pl.col("launch") >= 0)
        launch, event = known["launch"].to_numpy(), known["event"].to_numpy()
        order = np.argsort(span.start_ns[launch], kind="stable")
        span.kept["launches"] = launch[order], event[order], span.start_ns[launch[order]]
    launch, event, start = span.kept["launches"]
    begin = span.start_ns[row]
    inside = slice(*np.searchsorted(start, [begin, begin + max(int(span.duration_ns[row]), 1)]).tolist())
    rows: Int64 = event[inside][span.tracks.codes[launch[inside]] == span.tracks.codes[row]]
    return rows[np.argsort(span.start_ns[rows], kind="stable")]


def _forward(span: Span, row: int) -> int:
    """The forward operator of the nearest operator of the backward pass around a slice, itself included."""
    around: list[int] = []
    while row >= 0 and len(around) < MAX_DEPTH:
        around.append(row)
        row = int(span.parent[row])
    forward = span.rows_of(span.series("forward").gather(np.asarray(around)))  # a column may be large
    return next((each for each in forward.tolist() if each >= 0), NONE)


def _functions(span: Span, row: int) -> list[str]:
    found: list[str] = []
    recorded = span.series("call_stack")
    for _ in range(MAX_FRAMES * 4):
        if row < 0 or len(found) >= MAX_FRAMES:
            break
        if span.is_function[row]:
            found.append(_name(span, row))
        elif not found and recorded[row]:
            return [part.strip() for part in str(recorded[row]).split(";")[:MAX_FRAMES] if part.strip()]
        row = int(span.parent[row])
    return found


def _name(span: Span, row: int) -> str:
    code = int(span.names.codes[row])
    return span.names.values[code] if code >= 0 else ""
