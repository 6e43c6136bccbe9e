"""All that is known of one slice: its figures, the operator and line it comes from, what it launched, its stack."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from stepscope.analyze.pictures.timeline import PHASES_NOTE, Timeline
from stepscope.engine import attribution
from stepscope.engine.journal import json_object
from stepscope.engine.spans import Span
from stepscope.engine.user_code import python_frame
from stepscope.errors import UsageError
from stepscope.model import PHASES
from stepscope.model.findings import Place
from stepscope.model.timeline import SliceDetail, SliceFact, SliceRef, StackPlace
from stepscope.read.raw import Frame
from stepscope.tables.arrays import NONE, Int64, climb

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
