"""All that is known of one slice: its figures, the operator and line it comes from, what it launched, its stack."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from stepscope.analyze.timeline.index import Timeline
from stepscope.analyze.timeline.run_parts import PHASES_NOTE
from stepscope.analyze.timeline.trace_detail import TraceDetail
from stepscope.errors import UsageError
from stepscope.model import PHASES
from stepscope.model.findings import Place
from stepscope.model.timeline import SliceDetail, SliceFact, StackPlace
from stepscope.tables.arrays import NONE

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
    position = timeline.position_of(identifier) if 0 <= identifier < begins.end else None
    if position is None:
        raise UsageError(f"{identifier}: no such slice in this timeline; reload the page if the run has changed")
    track = timeline.tracks[int(timeline.track_of(timeline.lanes_of(np.asarray([position], np.int64)))[0])].key
    if identifier < begins.steps:
        return _of_trace(timeline, identifier, track)
    start, end = int(timeline.start[position]), int(timeline.end[position])
    name = timeline.names[timeline.name[position]]
    if identifier < begins.phases:
        return _of_step(timeline, identifier, track, start, end)
    if identifier < begins.stretches:
        return _of_phase(timeline, identifier, track, start, end, name)
    return _of_sample(timeline, identifier, track, start, end, name)


def _of_trace(timeline: Timeline, row: int, track: str) -> SliceDetail:
    base = timeline.context.base
    spans = sorted((span for span in base.spans if len(span)), key=lambda span: span.first)
    span = spans[bisect_right([each.first for each in spans], row) - 1]
    return TraceDetail(timeline, span, row - span.first, track).document()


def _of_step(timeline: Timeline, identifier: int, track: str, start: int, end: int) -> SliceDetail:
    row = timeline.context.tables.steps.row(identifier - timeline.ids.steps, named=True)
    known = [SliceFact(label, row[key], unit) for label, key, unit in _STEP_FACTS if row[key] is not None]
    marks = [word for key, word in (("first_batch", "first batch of an epoch"), ("in_window", "traced")) if row[key]]
    return SliceDetail(
        id=identifier,
        name=f"step {row['step']}",
        category="step",
        track=track,
        start_ns=start,
        duration_ns=end - start,
        self_ns=None,
        step=row["step"],
        facts=(*known, *(SliceFact("mark", word) for word in marks)),
    )


def _of_phase(timeline: Timeline, identifier: int, track: str, start: int, end: int, name: str) -> SliceDetail:
    row = timeline.context.tables.steps.row((identifier - timeline.ids.phases) // len(PHASES), named=True)
    wall = row["wall_ns"]
    facts = (SliceFact("share of the step", (end - start) / wall, "share"),) if wall else ()
    note = PHASES_NOTE[0].upper() + PHASES_NOTE[1:] + "."
    return SliceDetail(
        identifier, name, "phase of a step", track, start, end - start, None, row["step"], facts, notes=(note,)
    )


def _of_sample(timeline: Timeline, identifier: int, track: str, start: int, end: int, name: str) -> SliceDetail:
    context, begins = timeline.context, timeline.ids
    of_function = identifier >= begins.functions
    row = context.tables.stretches.row(identifier - (begins.functions if of_function else begins.stretches), named=True)
    frames = context.calls.path(int(row["node"]) if row["node"] is not None else NONE)[::-1][:MAX_FRAMES]
    stack = []
    for frame in frames:
        file = context.code.resolve(frame.file)
        place = Place(file or frame.file, frame.line, frame.function)
        stack.append((file is not None, StackPlace(place, code=context.lines.text(file, frame.line) if file else None)))
    user = next((place for own, place in stack if own), None)
    facts = [SliceFact("process", int(row["pid"]), "") for _ in (0,) if row["pid"] is not None]
    facts += [SliceFact(key, row[key]) for key in ("role", "phase", "stage") if row[key] is not None]
    if not of_function:
        facts.append(SliceFact("state", "waiting" if row["waiting"] else "working"))
    return SliceDetail(
        id=identifier,
        name=name,
        category="sampled stack",
        track=track,
        start_ns=start,
        duration_ns=end - start,
        self_ns=None,
        step=None,
        facts=tuple(facts),
        place=user,
        stack=tuple(place for _, place in stack),
        notes=("Sampled: it begins and ends to within the time between two samples.",),
    )
