"""The tables that come from traces: `events`, `links`, `memory` and `traces`, all traces of all ranks in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
from msgspec import Struct, field

from stepscope.errors import UnreadableInputError
from stepscope.read.raw import RawRank, TraceRef
from stepscope.tables import cache
from stepscope.tables.cache import BuildOptions, Entry
from stepscope.tables.schema import empty
from stepscope.tables.step_range import Steps
from stepscope.tables.trace_entry import TraceIndex, TraceTables, load

_TABLES = ("events", "links", "memory", "traces")
# name in the counts of the quality report -> field of a trace's index
_COUNTED = {
    "trace_events": "slices",
    "trace_events_lost": "lost",
    "trace_events_salvaged": "salvaged",
    "clipped_overlaps": "clipped",
    "repaired_durations": "repaired",
}
_DAMAGED = (OSError, UnreadableInputError, pl.exceptions.PolarsError)


class ReadTrace(Struct, frozen=True):
    """A trace that was read, with the rank it belongs to."""

    rank: RawRank
    name: str
    index: TraceIndex


class EventsTable(Struct, frozen=True):
    """What the traces of a run hold.

    `counts` has what the quality report says of events; `offsets` is "process/trace" -> ns its clock was moved by,
    `unreadable` "process/trace" -> why; `steps` are rows of ranks without a journal, by process.
    """

    events: pl.DataFrame
    links: pl.DataFrame
    memory: pl.DataFrame
    traces: pl.DataFrame
    read: tuple[ReadTrace, ...] = ()
    steps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    offsets: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


def events_table(ranks: Sequence[RawRank], options: BuildOptions) -> EventsTable:
    """All slices of all traces; ids count on from one trace to the next. A trace that cannot be read is named."""
    wanted = [(rank, ref) for rank in ranks for ref in rank.traces]
    frames: dict[str, list[pl.DataFrame]] = {name: [] for name in _TABLES}
    read: list[ReadTrace] = []
    steps: dict[str, list[dict[str, Any]]] = {}
    counts: Counter[str] = Counter()
    offsets: dict[str, int] = {}
    unreadable: dict[str, str] = {}
    rows = 0
    with cache.cache_folder(options) as root:
        found = cache.collect([(ref.path, _own_steps(rank, options)) for rank, ref in wanted], root, options)
        for (rank, ref), entry in zip(wanted, found, strict=True):
            source = f"{rank.name}/{ref.name}"
            trace = entry if isinstance(entry, str) else _loaded(entry, rank, ref, rows, root, options)
            if isinstance(trace, str):
                unreadable[source] = trace
                continue
            for name, parts in trace.frames.items():
                frames[name] += parts
            rows += trace.rows
            read.append(ReadTrace(rank, ref.name, trace.index))
            if trace.steps:
                steps.setdefault(rank.name, []).extend(trace.steps)
            if trace.offset:
                offsets[source] = trace.offset
            counts.update(trace.counts)
            counts.update({name: getattr(trace.index, known) for name, known in _COUNTED.items()})
    counts["unreadable_traces"] = len(unreadable)
    tables = {name: pl.concat(parts, rechunk=False) if parts else empty(name) for name, parts in frames.items()}
    return EventsTable(**tables, read=tuple(read), steps=steps, counts=counts, offsets=offsets, unreadable=unreadable)


def _own_steps(rank: RawRank, options: BuildOptions) -> Steps | None:
    """The steps that are wanted, where they are those of the trace and not of a journal."""
    return None if rank.steps else options.steps


def _loaded(
    entry: Entry, rank: RawRank, ref: TraceRef, first_id: int, root: Path, options: BuildOptions
) -> TraceTables | str:
    """The rows of a trace, or why there are none. An entry that turns out damaged is made once more."""
    try:
        return load(entry.read(), rank, ref, first_id, options.steps)
    except _DAMAGED:
        if entry.content is None:  # else nothing was read from a folder
            cache.drop(entry.folder)
    try:
        entry = Entry(cache.fetch(ref.path, root, options.limits, steps=_own_steps(rank, options)))
        return load(entry.read(), rank, ref, first_id, options.steps)
    except _DAMAGED as error:
        return str(error)
