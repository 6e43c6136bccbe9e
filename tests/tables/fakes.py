"""Traces made of plain rows: what a reader would yield, without any file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stepscope.read.trace import MISSING, Flows, MemoryEvents, Slices, Text, TraceChunk, TraceQuality, TraceSummary
from stepscope.tables.ingest import ingest
from stepscope.tables.schema import SCHEMAS
from stepscope.tables.trace_entry import TraceIndex

# What is known of a run and not of its trace.
RUN_COLUMNS = ("rank", "process", "trace", "step")

Row = Mapping[str, Any]


def text(values: Iterable[str | None]) -> Text:
    """A column of texts; None is missing."""
    codes: dict[str, int] = {}
    rows = [-1 if value is None else codes.setdefault(value, len(codes)) for value in values]
    return Text(list(codes), np.array(rows, np.int32))


def slices(rows: Sequence[Row]) -> Slices:
    """Slices of rows; category `cpu_op` on track `1/1` unless they say otherwise."""
    usual = {"category": "cpu_op", "name": "op", "track": "1/1", "start_ns": 0, "duration_ns": 0}
    full = [{**usual, **row} for row in rows]
    columns: dict[str, Any] = {}
    for name, kind in Slices.__annotations__.items():
        if kind == "Text":
            columns[name] = text(row.get(name) for row in full)
        else:
            missing, dtype = (np.nan, np.float64) if kind == "Float64" else (MISSING, np.int64)
            columns[name] = np.array([row.get(name, missing) for row in full], dtype)
    return Slices(**columns)


def flows(rows: Sequence[Row]) -> Flows:
    """Ends of arrows: kind, id, finish, track, time_ns."""
    return Flows(
        kind=text(row.get("kind", "ac2g") for row in rows),
        id=np.array([row["id"] for row in rows], np.int64),
        finish=np.array([row["finish"] for row in rows], bool),
        track=text(row["track"] for row in rows),
        time_ns=np.array([row["time_ns"] for row in rows], np.int64),
    )


def arrow(number: int, start: tuple[str, int], end: tuple[str, int], kind: str = "ac2g") -> list[Row]:
    """Both ends of an arrow from (track, time) to (track, time)."""
    return [
        {"kind": kind, "id": number, "finish": False, "track": start[0], "time_ns": start[1]},
        {"kind": kind, "id": number, "finish": True, "track": end[0], "time_ns": end[1]},
    ]


def memory(rows: Sequence[Row]) -> MemoryEvents:
    """Memory events; what a row does not say is missing."""
    names = ("time_ns", "address", "bytes", "device_type", "device", "allocated_bytes", "reserved_bytes")
    columns = {name: np.array([row.get(name, MISSING) for row in rows], np.int64) for name in names}
    return MemoryEvents(track=text(row.get("track", "1/1") for row in rows), **columns)


class FakeSource:
    """A trace of given rows, cut into chunks of `size` slices."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        arrows: Sequence[Row] = (),
        allocations: Sequence[Row] = (),
        size: int = 1000,
        **summary: Any,
    ) -> None:
        self._rows, self._arrows, self._allocations, self._size = rows, arrows, allocations, size
        usual: dict[str, Any] = {"base_ns": 0, "world_size": None, "threads": {}}
        self._summary = TraceSummary(**{**usual, "quality": TraceQuality(events=len(rows)), **summary})

    def chunks(self) -> Iterator[TraceChunk]:
        for first in range(0, len(self._rows), self._size):
            yield TraceChunk(slices(self._rows[first : first + self._size]), flows([]), memory([]))
        # Arrows and allocations may stand anywhere; here they come last, and one by one.
        for row in self._arrows:
            yield TraceChunk(slices([]), flows([row]), memory([]))
        yield TraceChunk(slices([]), flows([]), memory(self._allocations))

    def summary(self) -> TraceSummary:
        return self._summary


def take_in(folder: Path, source: FakeSource, name: str = "entry") -> tuple[TraceIndex, pl.DataFrame, pl.DataFrame]:
    """The index, slices and links of a trace that was taken in."""
    target = folder / name
    target.mkdir()
    index = ingest(source, target).index
    return index, slices_of(target), pl.read_parquet(target / "links.parquet")


def slices_of(entry: Path) -> pl.DataFrame:
    """The slices of an entry as one frame, with the columns that do not depend on a run."""
    tree = pl.read_parquet(entry / "tree.parquet").with_row_index("id").cast({"id": pl.Int64})
    parts = [pl.read_parquet(path) for path in sorted(entry.glob("events-*.parquet"))]
    frame = tree.hstack(pl.concat(parts)) if parts else tree
    return frame.select(
        pl.col(name) if name in frame.columns else pl.lit(None, dtype).alias(name)
        for name, dtype in SCHEMAS["events"].items()
        if name not in RUN_COLUMNS
    )
