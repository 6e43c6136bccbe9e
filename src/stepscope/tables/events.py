"""The table of trace slices: every trace of every rank, nested per track, joined with the journal's steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.read.kineto import RawTrace
from stepscope.read.raw import RawRank
from stepscope.tables.clocks import offset_ns
from stepscope.tables.nesting import nest
from stepscope.tables.schema import SCHEMAS, empty
from stepscope.tables.steps import step_at

Int64 = npt.NDArray[np.int64]

FUNCTION = "python_function"
ANNOTATIONS = ("user_annotation",)
# Of slices with the very same times, who encloses whom; anything else comes in between.
_OUTER = {"user_annotation": 0, "gpu_user_annotation": 0, FUNCTION: 1, "cpu_op": 2, "operator": 2, "Operator": 2}
_BETWEEN = 3
_INNER = {"cuda_runtime": 4, "cuda_driver": 5, "kernel": 6}
_RANKS = {**_OUTER, **_INNER}


@dataclass(frozen=True)
class EventsTable:
    """The slices, with counts for the quality report: `trace_events`, `trace_events_lost`, `clipped_overlaps`."""

    frame: pl.DataFrame
    counts: Counter[str]
    offsets: dict[str, int]  # "process/trace" -> ns its clock was moved by, where it was


def events_table(ranks: Iterable[RawRank]) -> EventsTable:
    """All slices of all traces; ids count on from one trace to the next."""
    frames: list[pl.DataFrame] = []
    counts: Counter[str] = Counter()
    offsets: dict[str, int] = {}
    first_id = 0
    for rank in ranks:
        for trace in rank.traces:
            offset = offset_ns(trace, rank)
            if offset:
                offsets[f"{rank.name}/{trace.name}"] = offset
            frame, clipped = _trace_frame(trace, rank, offset, first_id)
            first_id += frame.height
            frames.append(frame)
            counts["trace_events"] += frame.height
            counts["trace_events_lost"] += trace.quality.lost
            counts["clipped_overlaps"] += clipped
    table = pl.concat(frames) if frames else empty("events")
    return EventsTable(table, counts, offsets)


def _trace_frame(trace: RawTrace, rank: RawRank, offset: int, first_id: int) -> tuple[pl.DataFrame, int]:
    events = trace.events
    count = len(events)
    start = events.start_ns + offset
    category = events.category
    codes: dict[str, int] = {}
    track = np.fromiter((codes.setdefault(name, len(codes)) for name in events.track), np.int64, count)
    nesting = nest(
        track,
        start,
        events.duration_ns,
        is_function=np.fromiter((name == FUNCTION for name in category), bool, count),
        is_annotation=np.fromiter((name in ANNOTATIONS for name in category), bool, count),
        precedence=np.fromiter((_RANKS.get(name, _BETWEEN) for name in category), np.int64, count),
    )
    columns: dict[str, Any] = {
        "id": np.arange(first_id, first_id + count),
        "track": events.track,
        "category": category,
        "name": events.name,
        "start_ns": start,
        "duration_ns": events.duration_ns,
        "self_ns": nesting.self_ns,
        "depth": nesting.depth,
        "parent": _ids(nesting.parent, first_id),
        "frame": _ids(nesting.frame, first_id),
        "step": _nullable(_steps_of(start, rank)),
        "correlation": events.correlation,
        "external_id": events.external_id,
        "sequence": events.sequence,
        "device": events.device,
        "stream": events.stream,
        "shapes": events.shapes,
        "types": events.types,
        "bytes": events.bytes,
    }
    schema = SCHEMAS["events"]
    series = [pl.Series(name, values).cast(schema[name]) for name, values in columns.items()]
    frame = pl.DataFrame(series).with_columns(
        pl.lit(rank.rank, schema["rank"]).alias("rank"),
        pl.lit(rank.name).alias("process"),
        pl.lit(trace.name).alias("trace"),
    )
    return frame.select(list(schema)), nesting.clipped


def _steps_of(times_ns: Int64, rank: RawRank) -> Int64:
    columns = (np.array([row[name] for row in rank.steps], np.int64) for name in ("start_ns", "wall_ns", "step"))
    return step_at(times_ns, *columns)


def _ids(values: Int64, first_id: int) -> pl.Series:
    return _nullable(np.where(values < 0, -1, values + first_id))


def _nullable(values: Int64) -> pl.Series:
    series = pl.Series(values, dtype=pl.Int64)
    return series.to_frame("v").select(pl.when(pl.col("v") >= 0).then(pl.col("v"))).to_series()
