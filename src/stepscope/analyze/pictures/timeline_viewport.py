"""A window of the timeline, thinned to the pixels it is drawn on: what is thinner than one is merged with its
neighbours.

Slices that can be seen stay as they are, however many there are between them; a gap that can be seen stays a gap. Where
a window would still hold more than can be sent, its bins become wider than a pixel.
"""

from __future__ import annotations

import re

import numpy as np

from stepscope.analyze.pictures.timeline import KIND, Timeline
from stepscope.analyze.pictures.timeline_levels import Items, thinned
from stepscope.model import PHASES
from stepscope.model.timeline import KINDS, SearchHit, SearchResult, TimelineWindow, TrackSlices
from stepscope.tables.arrays import Bools, Int64

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
