"""Slices by their name: every one whose name holds a text, in order of time."""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from stepscope.analyze.timeline.index import Timeline
from stepscope.model.timeline import SearchHit, SearchResult
from stepscope.tables.arrays import Bools, Int64

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
    hit = _with_steps(timeline, hit, begin, end, wanted)
    places = np.flatnonzero(hit) + begin
    shown = _earliest(timeline, places, min(max(limit, 0), MAX_HITS))
    return SearchResult(len(places), _hits(timeline, shown))


def _with_steps(timeline: Timeline, hit: Bools, begin: int, end: int, wanted: str) -> Bools:
    """`hit` with the steps of the number that was asked for."""
    match = _STEP.fullmatch(wanted)
    if match is None:
        return hit
    rows = np.flatnonzero((timeline.context.tables.steps["step"] == int(match[1])).fill_null(False).to_numpy())
    return hit | np.isin(timeline.id[begin:end], rows + timeline.ids.steps)


def _earliest(timeline: Timeline, places: Int64, limit: int) -> Int64:
    start = timeline.start[places]
    if len(places) > limit:
        kept = np.argpartition(start, limit)[:limit] if limit else np.zeros(0, np.int64)
        places, start = places[kept], start[kept]
    found: Int64 = places[np.argsort(start, kind="stable")]
    return found


def _hits(timeline: Timeline, places: Int64) -> tuple[SearchHit, ...]:
    lanes = timeline.lanes_of(places)
    tracks = timeline.track_of(lanes)
    steps = steps_of(timeline, timeline.id[places].astype(np.int64))
    return tuple(
        SearchHit(
            id=int(timeline.id[place]),
            name=timeline.names[timeline.name[place]],
            track=timeline.tracks[track].key,
            depth=int(lane - timeline.first_lane[track]),
            start_ns=int(timeline.start[place]),
            duration_ns=int(timeline.end[place] - timeline.start[place]),
            step=step,
        )
        for place, lane, track, step in zip(places.tolist(), lanes.tolist(), tracks.tolist(), steps, strict=True)
    )


def steps_of(timeline: Timeline, ids: Int64) -> list[int | None]:
    """The step each slice belongs to: of slices of traces, steps and phases; None for others."""
    found: list[int | None] = [None] * len(ids)
    tables, begins = timeline.context.tables, timeline.ids
    for at, identifier in enumerate(ids.tolist()):
        if identifier < begins.steps:
            found[at] = _of_event(timeline, identifier)
        elif identifier < begins.stretches:
            row = identifier - begins.steps
            if identifier >= begins.phases:
                row = (identifier - begins.phases) * tables.steps.height // max(begins.stretches - begins.phases, 1)
            found[at] = tables.steps.item(row, "step")
    return found


def _of_event(timeline: Timeline, row: int) -> int | None:
    found: int | None = timeline.context.tables.events.slice(row, 1).select(pl.col("step")).item()
    return found
