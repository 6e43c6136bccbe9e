"""One trace to Parquet: chunks to column files, then repaired, nested and linked as a whole, then written in parts.

What is kept of a trace in memory at once is a few numbers per slice; texts and arguments stay on disk until they are
written. Ids are rows of the trace; `events` moves them when several traces become one table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.read.trace import Flows, MemoryEvents, TraceSource, TraceSummary
from stepscope.read.trace import Slices as ReadSlices
from stepscope.tables import categories, forward, links
from stepscope.tables.columns import ColumnFiles, Int32, Int64, TextCodes, decode
from stepscope.tables.nesting import Nesting, nest
from stepscope.tables.repair import repair
from stepscope.tables.schema import SCHEMAS
from stepscope.tables.trace_memory import NUMBERS, memory_frame

Bools = npt.NDArray[np.bool_]

INDEX = "trace.json"
ROWS_PER_FILE = 1 << 17
LAUNCH_ARROWS = ("ac2g", "async")  # the second is what writers of 2021 called it
FORWARD_ARROWS = ("fwdbwd",)

# column of a reader's slices -> column of the table `events`
_NUMBERS = {
    "correlation": "correlation",
    "external_id": "external_id",
    "sequence": "sequence",
    "device": "device",
    "stream": "stream",
    "bytes": "bytes",
    "forward_thread": "forward_thread",
    "python_id": "python_id",
    "python_parent": "python_parent",
    "python_module": "python_module",
    "blocks": "blocks",
    "threads": "threads",
    "registers": "registers",
    "shared_memory": "shared_memory_bytes",
    "blocks_per_sm": "blocks_per_sm",
    "warps_per_sm": "warps_per_sm",
    "occupancy": "occupancy_percent",
}
_TEXTS = ("shapes", "types", "call_stack", "collective")
_DENSE_TEXTS = ("category", "name", "track")
# What is known of a run and not of its trace.
RUN_COLUMNS = ("rank", "process", "trace", "step")
EVENT_COLUMNS = tuple(name for name in SCHEMAS["events"] if name not in RUN_COLUMNS)


class TraceIndex(msgspec.Struct, frozen=True):
    """What is known of a taken-in trace beside its slices; written last, so that a folder with it is whole."""

    schema: str
    version: str
    rank: int | None
    world_size: int | None
    events: int
    slices: int
    salvaged: int
    lost: int
    unsupported: int
    clipped: int
    repaired: int
    problems: tuple[str, ...]
    metadata: dict[str, Any]
    threads: dict[str, str]
    files: int  # of slices
    device: str | None  # the kind of device that worked, "cpu" where none did


@dataclass(frozen=True)
class _Taken:
    """All chunks of a trace, on disk."""

    slices: ColumnFiles
    flows: ColumnFiles
    memory: ColumnFiles
    texts: dict[str, TextCodes]
    summary: TraceSummary


def ingest(source: TraceSource, target: Path, *, scratch: Path, schema: str, version: str) -> TraceIndex:
    """Take in `source` and write it to the empty folder `target`; raises UnreadableInputError and OSError.

    `scratch` is where unfinished columns go: about 60 bytes per slice.
    """
    with tempfile.TemporaryDirectory(prefix="columns-", dir=scratch) as folder:
        taken = _take(source, Path(folder))
        track = _column(taken.slices.dense("track"), np.int32)
        start = _column(taken.slices.dense("start_ns"), np.int64)
        duration = _column(taken.slices.dense("duration_ns"), np.int64)
        flags = _Flags(taken)
        repaired = repair(track, start, duration, is_device=flags.device)
        nesting = nest(
            track,
            start,
            duration,
            is_function=flags.function,
            is_annotation=flags.annotation,
            precedence=flags.precedence,
        )
        forward_of = _write_links(taken, track, start, duration, flags, nesting, target)
        start += taken.summary.base_ns
        files = _write_slices(taken, start, duration, nesting, forward_of, target)
        memory = memory_frame(taken.memory, taken.texts["track"], taken.summary.base_ns)
        memory.write_parquet(target / "memory.parquet", compression="zstd")
    summary = taken.summary
    index = TraceIndex(
        schema=schema,
        version=version,
        rank=summary.rank,
        world_size=summary.world_size,
        events=summary.quality.events,
        slices=len(start),
        salvaged=summary.quality.salvaged,
        lost=summary.quality.lost,
        unsupported=summary.quality.unsupported,
        clipped=nesting.clipped,
        repaired=repaired,
        problems=summary.quality.problems,
        metadata=summary.metadata,
        threads=summary.threads,
        files=files,
        device=categories.device_kind(taken.texts["category"].values),
    )
    (target / INDEX).write_bytes(msgspec.json.encode(index))
    return index


def _take(source: TraceSource, folder: Path) -> _Taken:
    slices, flows, memory = (ColumnFiles(folder, prefix) for prefix in ("slice-", "flow-", "memory-"))
    texts = {name: TextCodes() for name in (*_DENSE_TEXTS, *_TEXTS, "flow_kind")}
    try:
        for chunk in source.chunks():
            _take_slices(chunk.slices, slices, texts)
            _take_flows(chunk.flows, flows, texts)
            _take_memory(chunk.memory, memory, texts)
    finally:
        for files in (slices, flows, memory):
            files.close()
    return _Taken(slices, flows, memory, texts, source.summary())


def _take_slices(chunk: ReadSlices, files: ColumnFiles, texts: dict[str, TextCodes]) -> None:
    if not len(chunk):
        return
    dense: dict[str, Any] = {name: texts[name].add(getattr(chunk, name)) for name in _DENSE_TEXTS}
    sparse: dict[str, Any] = {name: getattr(chunk, name) for name in _NUMBERS}
    sparse |= {name: texts[name].add(getattr(chunk, name)) for name in _TEXTS}
    files.append({**dense, "start_ns": chunk.start_ns, "duration_ns": chunk.duration_ns}, sparse)


def _take_flows(chunk: Flows, files: ColumnFiles, texts: dict[str, TextCodes]) -> None:
    if not len(chunk):
        return
    dense: dict[str, Any] = {"kind": texts["flow_kind"].add(chunk.kind), "track": texts["track"].add(chunk.track)}
    files.append({**dense, "id": chunk.id, "finish": chunk.finish, "time_ns": chunk.time_ns}, {})


def _take_memory(chunk: MemoryEvents, files: ColumnFiles, texts: dict[str, TextCodes]) -> None:
    if not len(chunk):
        return
    dense: dict[str, Any] = {name: getattr(chunk, name) for name in NUMBERS}
    files.append({**dense, "track": texts["track"].add(chunk.track)}, {})


def _column(values: npt.NDArray[np.generic], dtype: type[np.generic]) -> Any:
    return values.astype(dtype, copy=False)


class _Flags:
    """What kind each slice is, from its category and name."""

    def __init__(self, taken: _Taken) -> None:
        category = _column(taken.slices.dense("category"), np.int32)
        names = taken.texts["category"].values
        self.function = _each(category, (name == categories.FUNCTION for name in names))
        self.annotation = _each(category, (name == categories.ANNOTATION for name in names))
        self.device = _each(category, (name in categories.DEVICE for name in names))
        self.runtime = _each(category, (categories.is_runtime(name) for name in names))
        self.operator = _each(category, (name in categories.OPERATORS for name in names))
        self.precedence = np.array([*map(categories.precedence, names), 0], np.int8)[category]
        graph = (categories.is_graph_launch(name) for name in taken.texts["name"].values)
        self.graph_launch = self.runtime & _each(_column(taken.slices.dense("name"), np.int32), graph)


def _each(codes: Int32, values: Iterable[bool]) -> Bools:
    return np.array([*values, False], dtype=bool)[codes]


def _write_links(
    taken: _Taken, track: Int32, start: Int64, duration: Int64, flags: _Flags, nesting: Nesting, target: Path
) -> Int32:
    """Write the links; returns the forward operator of each slice that is one of the backward pass."""
    known = links.Slices(
        track=track,
        start_ns=start,
        duration_ns=duration,
        parent=nesting.parent,
        frame=nesting.frame,
        is_device=flags.device,
        is_runtime=flags.runtime,
        is_operator=flags.operator,
        is_graph_launch=flags.graph_launch,
        correlation=_sparse(taken, "correlation"),
        external_id=_sparse(taken, "external_id"),
    )
    found = links.link(known, _arrows(taken, LAUNCH_ARROWS))
    operators = np.flatnonzero(flags.operator)
    ends = start[operators] + duration[operators]
    by_operator, how = forward.forwards(
        len(start),
        _numbered(taken, track, start, operators),
        _arrows(taken, FORWARD_ARROWS),
        links.Moments(operators, track[operators], start[operators], ends),
    )
    onward, holder = forward.nearest(nesting.parent, by_operator, found.operator)
    onward_method = np.where(holder >= 0, how[holder] if len(how) else 0, links.NONE)
    frame = pl.DataFrame(
        {
            "event": found.event,
            "launch": ids(found.launch),
            "operator": ids(found.operator),
            "frame": ids(found.frame),
            "method": _words(links.METHODS, found.method),
            "state": _words(links.STATES, found.state),
            "forward": ids(onward),
            "forward_method": _words(forward.METHODS, onward_method),
        }
    )
    frame.write_parquet(target / "links.parquet", compression="zstd")
    return by_operator


def _sparse(taken: _Taken, name: str) -> tuple[Int64, Int64]:
    rows, values = taken.slices.sparse(name)
    return rows, _column(values, np.int64)


def _arrows(taken: _Taken, kinds: tuple[str, ...]) -> links.Arrows:
    """Pairs of ends with the same id; where one came several times, the last."""
    codes = [code for code, kind in enumerate(taken.texts["flow_kind"].values) if kind in kinds]
    files = taken.flows
    mine = np.isin(files.dense("kind"), codes)
    ids_, finish = files.dense("id")[mine], _column(files.dense("finish"), np.bool_)[mine]
    track, time = _column(files.dense("track"), np.int32)[mine], _column(files.dense("time_ns"), np.int64)[mine]
    heads, tails = np.flatnonzero(finish), np.flatnonzero(~finish)
    tails = tails[np.argsort(ids_[tails], kind="stable")]
    place = np.searchsorted(ids_[tails], ids_[heads], side="right") - 1
    known = place >= 0
    known[known] = ids_[tails[place[known]]] == ids_[heads[known]]
    start, end = tails[place[known]], heads[known]
    return links.Arrows(track[start], time[start], track[end], time[end])


def _numbered(taken: _Taken, track: Int32, start: Int64, operators: Int64) -> forward.Numbered:
    rows, sequence = _sparse(taken, "sequence")
    is_operator = np.isin(rows, operators, assume_unique=True)
    rows, sequence = rows[is_operator], sequence[is_operator]
    thread = np.zeros(len(rows), np.int64)
    known, values = _sparse(taken, "forward_thread")
    if len(known):
        place = np.minimum(np.searchsorted(known, rows), len(known) - 1)
        thread = np.where(known[place] == rows, values[place], 0)
    names = taken.texts["track"].values
    numbers: dict[str, int] = {}
    process = np.array([*(numbers.setdefault(name.rpartition("/")[0], len(numbers)) for name in names), 0], np.int64)
    return forward.Numbered(rows, process[track[rows]], track[rows], start[rows], sequence, thread)


def _write_slices(
    taken: _Taken, start: Int64, duration: Int64, nesting: Nesting, forward_of: Int32, target: Path
) -> int:
    decoders = {name: taken.texts[name].series() for name in (*_DENSE_TEXTS, *_TEXTS)}
    sparse = {name: taken.slices.sparse(name) for name in taken.slices.names()}
    count = len(start)
    for number, first in enumerate(range(0, max(count, 1), ROWS_PER_FILE)):
        last = min(first + ROWS_PER_FILE, count)
        part = slice(first, last)
        columns: dict[str, Any] = {
            "id": np.arange(first, last),
            "start_ns": start[part],
            "duration_ns": duration[part],
            "self_ns": nesting.self_ns[part],
            "depth": nesting.depth[part],
            "parent": ids(nesting.parent[part]),
            "frame": ids(nesting.frame[part]),
            "forward": ids(forward_of[part]),
        }
        for name in _DENSE_TEXTS:
            codes = _column(taken.slices.dense(name, first, last - first), np.int32)
            columns[name] = decode(decoders[name], codes)
        for name, (rows, values) in sparse.items():
            low, high = np.searchsorted(rows, (first, last))
            columns[_NUMBERS.get(name, name)] = _spread(
                rows[low:high] - first, values[low:high], last - first, decoders.get(name)
            )
        _frame(columns, last - first).write_parquet(target / f"events-{number:05d}.parquet", compression="zstd")
    return number + 1


def _spread(rows: Int64, values: npt.NDArray[np.generic], count: int, decoder: pl.Series | None) -> pl.Series:
    """A sparse column's values among `count` rows, null elsewhere."""
    place = np.full(count, -1, np.int32)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    known = pl.Series(values) if decoder is None else decode(decoder, _column(values, np.int32))
    if decoder is not None:
        return decode(known, place)
    index = pl.Series(place)
    return known.gather(index.set(index < 0, None)) if len(known) else pl.repeat(None, count, eager=True)


def _frame(columns: dict[str, Any], count: int) -> pl.DataFrame:
    schema = SCHEMAS["events"]
    series = []
    for name in EVENT_COLUMNS:
        values = columns.get(name)
        column = pl.repeat(None, count, dtype=schema[name], eager=True) if values is None else pl.Series(values)
        series.append(column.cast(schema[name], strict=False).alias(name))
    return pl.DataFrame(series)


def ids(values: npt.NDArray[np.integer]) -> pl.Series:
    """Row numbers as a column; `NONE` is null."""
    series = pl.Series(values.astype(np.int64))
    return series.set(series < 0, None)


def _words(words: tuple[str, ...], codes: npt.NDArray[np.integer]) -> pl.Series:
    return decode(pl.Series(words, dtype=pl.String), codes.astype(np.int32))
