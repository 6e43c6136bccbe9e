"""The tables that come from traces: `events`, `links`, `memory` and `traces`, all traces of all ranks in one."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import polars as pl
from msgspec import Struct

from stepscope.errors import UnreadableInputError
from stepscope.read.raw import RawRank, TraceRef
from stepscope.tables import cache
from stepscope.tables.cache import BuildOptions, Entry
from stepscope.tables.schema import empty
from stepscope.tables.step_range import Steps
from stepscope.tables.trace_entry import ReadTrace, load

_DAMAGED = (OSError, UnreadableInputError, pl.exceptions.PolarsError)


class EventsTable(Struct, frozen=True):
    """What the traces of a run hold. `counts` are those of all `read` ones, `unreadable` is "process/trace" -> why."""

    events: pl.DataFrame
    links: pl.DataFrame
    memory: pl.DataFrame
    traces: pl.DataFrame
    read: tuple[ReadTrace, ...]
    counts: Counter[str]
    unreadable: dict[str, str]


def events_table(ranks: Sequence[RawRank], options: BuildOptions) -> EventsTable:
    """All slices of all traces; ids count on from one trace to the next. A trace that cannot be read is named."""
    frames: dict[str, list[pl.DataFrame]] = {name: [] for name in ("events", "links", "memory", "traces")}
    read, unreadable = _read(ranks, options, frames)
    counts = sum((trace.counts for trace in read), Counter({"unreadable_traces": len(unreadable)}))
    # what the traces were read into is gone by now, or it would stand beside what is made of it
    made = {name: _joined(parts) if parts else empty(name) for name, parts in frames.items()}
    return EventsTable(**made, read=read, counts=counts, unreadable=unreadable)


def _read(
    ranks: Sequence[RawRank], options: BuildOptions, frames: dict[str, list[pl.DataFrame]]
) -> tuple[tuple[ReadTrace, ...], dict[str, str]]:
    # steps of a journal are no steps of the trace
    wanted = [(rank, ref, None if rank.steps else options.steps) for rank in ranks for ref in rank.traces]
    read: list[ReadTrace] = []
    unreadable: dict[str, str] = {}
    rows = 0
    with cache.cache_folder(options) as root:
        found = cache.collect([(ref.path, steps) for _, ref, steps in wanted], root, options)
        for (rank, ref, steps), entry in zip(wanted, found, strict=True):
            try:
                if isinstance(entry, str):
                    raise UnreadableInputError(entry)
                trace, loaded = _loaded(entry, rank, ref, rows, root, steps, options)
            except _DAMAGED as error:
                unreadable[f"{rank.name}/{ref.name}"] = str(error)
                continue
            read.append(trace)
            for name, parts in loaded.items():
                frames[name] += parts
            rows += sum(part.height for part in loaded["events"])
    return tuple(read), unreadable


def _joined(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """All rows, each column in one piece; empties `parts`. Else whatever looks at one makes a copy."""
    whole = pl.concat(parts, rechunk=False)  # keeps a value that stands for all rows as one
    parts.clear()
    names = whole.columns
    pieces = dict(zip(names, whole.n_chunks("all"), strict=True))
    joined = [whole.drop_in_place(name).rechunk() for name in names if pieces[name] > 1]
    return whole.hstack(joined).select(names) if joined else whole


def _loaded(
    entry: Entry, rank: RawRank, ref: TraceRef, first_id: int, root: Path, steps: Steps | None, options: BuildOptions
) -> tuple[ReadTrace, dict[str, list[pl.DataFrame]]]:
    """The rows of a trace; an entry that turns out damaged is made once more, and raises what it raises then."""
    try:
        return load(entry.read(), rank, ref, first_id, options.steps)
    except _DAMAGED:
        if entry.content is None:  # else nothing was read from a folder
            shutil.rmtree(entry.folder, ignore_errors=True)
    made = Entry(cache.fetch(ref.path, root, steps=steps))
    return load(made.read(), rank, ref, first_id, options.steps)
