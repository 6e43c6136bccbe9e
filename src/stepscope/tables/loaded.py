"""One taken-in trace as rows of the run's tables: the run's row numbers, the journal's clock, the step of each slice.

What must be known of the whole trace (starts, parents) is read column by column; the rows themselves come file by
file, so that no second copy of them is ever made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.errors import UnreadableInputError
from stepscope.read.raw import RawRank, TraceRef
from stepscope.tables import cache
from stepscope.tables.clocks import offset_ns
from stepscope.tables.ingest import TraceIndex, ids
from stepscope.tables.schema import SCHEMAS
from stepscope.tables.steps import NONE, step_at
from stepscope.tables.trace_steps import missing_steps, trace_steps

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_EVENT_IDS = ("id", "parent", "frame", "forward")
_LINK_IDS = ("event", "launch", "operator", "frame", "forward")


@dataclass(frozen=True)
class TraceTables:
    """The rows of one trace, by table; `steps` where the rank has no journal, `offset` what its clock was moved by."""

    frames: dict[str, list[pl.DataFrame]]
    index: TraceIndex
    steps: list[dict[str, Any]]
    offset: int
    counts: Counter[str]
    rows: int


def load(entry: Path, rank: RawRank, ref: TraceRef, first_id: int, steps: tuple[int, int] | None) -> TraceTables:
    """The rows of a trace, slices numbered from `first_id` on.

    Raises UnreadableInputError, OSError or PolarsError where the entry is damaged.
    """
    index = cache.index_of(entry)
    if index is None:
        raise UnreadableInputError(f"{entry}: tables of a trace that are not whole; delete the folder")
    files = cache.slice_files(entry, index)
    lazy = pl.scan_parquet(files)
    offset = offset_ns(lazy, rank)
    counts: Counter[str] = Counter()
    own: list[dict[str, Any]] = []
    known: list[dict[str, Any]] = list(rank.steps)
    if not known:
        known = trace_steps(lazy)
        own = _chosen(known, steps)
        counts["missing_steps"] = missing_steps(known)
    linked = pl.read_parquet(entry / "links.parquet")
    step = _steps_of(_column(lazy, "start_ns") + offset, known)
    _step_of_launch(step, linked)
    counts.update(_link_counts(_column(lazy, "duration_ns"), linked))
    memory = pl.read_parquet(entry / "memory.parquet").with_columns(pl.col("time_ns") + offset)
    kept: Bools | None = None
    if steps is not None:
        kept = _kept(step, _column(lazy, "parent"), linked, steps)
        linked = linked.filter(pl.Series(kept).gather(linked["event"]))
        memory = memory.filter(pl.Series(_steps_of(memory["time_ns"].to_numpy(), own or _chosen(known, steps)) != NONE))
    numbers = _numbers(kept, first_id, index.slices)
    whose = {"rank": rank.rank, "process": rank.name, "trace": ref.name}
    events = [_full("events", part, whose) for part in _parts(files, offset, step, kept, numbers)]
    frames = {
        "events": events,
        "links": [_full("links", _renumbered(linked, _LINK_IDS, numbers), whose)],
        "memory": [_full("memory", memory, whose)],
        "traces": [_full("traces", _trace_row(ref, index), whose)],
    }
    return TraceTables(frames, index, own, offset, counts, sum(frame.height for frame in events))


def _column(lazy: pl.LazyFrame, name: str) -> Int64:
    column: Int64 = lazy.select(pl.col(name).fill_null(NONE)).collect().to_series().to_numpy()
    return column


def _parts(
    files: list[Path], offset: int, step: Int64, kept: Bools | None, numbers: Int64 | int
) -> Iterable[pl.DataFrame]:
    first = 0
    for file in files:
        frame = pl.read_parquet(file)
        mine = slice(first, first + frame.height)
        first += frame.height
        frame = frame.with_columns(pl.col("start_ns") + offset, ids(step[mine]).alias("step"))
        if kept is not None:
            frame = frame.filter(pl.Series(kept[mine]))
        yield _renumbered(frame, _EVENT_IDS, numbers)


def _full(name: str, frame: pl.DataFrame, whose: dict[str, Any]) -> pl.DataFrame:
    """All columns of a table, with those that say whose the rows are; what is absent is null."""
    schema = SCHEMAS[name]
    constant: dict[str, Any] = {column: whose.get(column) for column in schema if column not in frame.columns}
    frame = frame.with_columns(pl.lit(value, schema[column]).alias(column) for column, value in constant.items())
    return frame.select(pl.col(column).cast(dtype) for column, dtype in schema.items())


def _steps_of(times_ns: Int64, steps: Iterable[dict[str, Any]]) -> Int64:
    rows = sorted(steps, key=lambda row: int(row["start_ns"]))
    columns = (np.array([row[name] for row in rows], np.int64) for name in ("start_ns", "wall_ns", "step"))
    return step_at(times_ns, *columns)


def _step_of_launch(step: Int64, linked: pl.DataFrame) -> None:
    """A device slice belongs to the step that launched it, wherever the host was by then."""
    known = linked.filter(pl.col("launch").is_not_null())
    step[known["event"].to_numpy()] = step[known["launch"].to_numpy()]


def _chosen(steps: list[dict[str, Any]], wanted: tuple[int, int] | None) -> list[dict[str, Any]]:
    return steps if wanted is None else [row for row in steps if wanted[0] <= row["step"] <= wanted[1]]


def _kept(step: Int64, parents: Int64, linked: pl.DataFrame, wanted: tuple[int, int]) -> Bools:
    """The slices of the wanted steps, what encloses them, and where they come from."""
    kept = (step >= max(wanted[0], 0)) & (step <= wanted[1])
    mine = linked.filter(pl.Series(kept).gather(linked["event"]))
    for name in _LINK_IDS[1:]:
        kept[mine[name].drop_nulls().to_numpy()] = True
    inner = np.flatnonzero(kept)
    while len(inner):
        outer = np.unique(parents[inner])
        outer = outer[outer >= 0]
        inner = outer[~kept[outer]]
        kept[inner] = True
    return kept


def _numbers(kept: Bools | None, first_id: int, count: int) -> Int64 | int:
    """The run's number of each row of the trace, or what to add to its own where all rows are kept."""
    if kept is None:
        return first_id
    numbers = np.full(count, NONE, np.int64)
    numbers[kept] = np.arange(first_id, first_id + int(kept.sum()))
    return numbers


def _renumbered(frame: pl.DataFrame, columns: Iterable[str], numbers: Int64 | int) -> pl.DataFrame:
    if isinstance(numbers, int):
        return frame.with_columns(pl.col(name) + numbers for name in columns) if numbers else frame
    new = []
    for name in columns:
        old = frame[name].fill_null(NONE).to_numpy()
        new.append(ids(np.where(old >= 0, numbers[old], NONE)).alias(name))
    return frame.with_columns(new)


def _link_counts(duration_ns: Int64, linked: pl.DataFrame) -> dict[str, int]:
    """Device time by what became of it, in ns, and the number of device slices."""
    timed = linked.select("state", "method", pl.Series("ns", duration_ns[linked["event"].to_numpy()]))
    counts = {"device_slices": timed.height, "device_ns": int(timed["ns"].sum())}
    for state, method, ns in timed.group_by("state", "method").agg(pl.col("ns").sum()).iter_rows():
        name = f"linked_by_{method}_ns" if state == "linked" else f"{state}_ns"
        counts[name] = counts.get(name, 0) + ns
    return counts


def _trace_row(ref: TraceRef, index: TraceIndex) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "owner": ref.owner,
            "events": index.events,
            "salvaged": index.salvaged,
            "lost": index.lost,
            "unsupported": index.unsupported,
            "clipped": index.clipped,
            "repaired": index.repaired,
            "problems": [list(index.problems)],
            "metadata": msgspec.json.encode(index.metadata).decode(),
            "threads": msgspec.json.encode(index.threads).decode(),
        },
        schema_overrides={"problems": SCHEMAS["traces"]["problems"]},
    )
