"""The figures of `torch.profiler`'s own `key_averages()`, recomputed from a trace, in its convention.

Its rows are not the operators of `operators.table`: every host slice is a row's call (annotations, runtime calls and,
with stacks, each Python function), so self time leaves those out too; a recursive call counts in the totals again at
each level; memory belongs to whatever is open at that moment on any thread; steps are one row, `ProfilerStep*`, and
memory outside everything is `[memory]`. A few helper operators are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from stepscope.analyze.origins import NONE
from stepscope.analyze.views.base import Base, Bools, Int64, Span
from stepscope.analyze.views.operator_times import Calls
from stepscope.model.views.spans import SpanRef
from stepscope.tables import categories

MEMORY = "[memory]"
_STEP = "ProfilerStep#"
_LEFT_OUT = frozenset(
    (
        *("profiler::_record_function_enter", "profiler::_record_function_enter_new"),
        *("profiler::_record_function_exit", "aten::is_leaf", "aten::output_nr", "aten::_version"),
    )
)


@dataclass(frozen=True)
class KeyAverage:
    """A row of `key_averages()`. Times are of the host; bytes are allocated minus released, None without memory."""

    key: str
    shapes: str | None  # JSON text, only when grouped by shapes
    is_annotation: bool
    count: int
    self_cpu_ns: int
    cpu_total_ns: int
    self_cpu_memory_bytes: int | None
    cpu_memory_bytes: int | None


def rows(base: Base, span: SpanRef | None = None, *, by_shapes: bool = False) -> tuple[KeyAverage, ...]:
    """The rows of the host of one span, the first by default, the most self time first; empty without a trace.

    Args:
        by_shapes: by name and input shapes, as `group_by_input_shape`.
    """
    found = next((item for item in base.spans if span is None or item.ref == span), None)
    if found is None:
        return ()
    events = _events(found)
    calls = Calls(found, events, _around(found, events))
    duration, nothing = calls.duration_ns, pl.lit(None, pl.Int64)
    columns: list[pl.Series | pl.Expr] = [
        pl.Series("is_annotation", found.categories.where([categories.ANNOTATION])[calls.rows]),
        pl.Series("self_cpu_ns", duration - calls.summed(calls.caller, duration)),
        pl.Series("cpu_total_ns", duration),
        nothing.alias("shapes").cast(pl.String),
        nothing.alias("self_cpu_memory_bytes"),
        nothing.alias("cpu_memory_bytes"),
    ]
    if by_shapes:
        columns[3] = calls.span.series("shapes")[calls.rows].fill_null("[]").alias("shapes")
    memory = _memory(found)
    if memory is not None:
        bytes_ = _between(memory, calls)
        columns[4] = pl.Series("self_cpu_memory_bytes", bytes_ - _inner(calls, bytes_))
        columns[5] = pl.Series("cpu_memory_bytes", bytes_)
    frame = pl.DataFrame({"key": _keys(calls)}).with_columns(columns)
    if memory is not None:
        frame = pl.concat([frame, _outside(memory, calls, "[]" if by_shapes else None)], how="diagonal_relaxed")
    sums = ["self_cpu_ns", "cpu_total_ns"]
    bytes_columns = ["self_cpu_memory_bytes", "cpu_memory_bytes"]
    grouped = frame.group_by("key", "shapes", "is_annotation").agg(
        pl.len().alias("count"),
        pl.col(sums).sum(),
        *(pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name) for name in bytes_columns),
    )
    grouped = grouped.sort("self_cpu_ns", "key", "shapes", descending=[True, False, False])
    fields = ["key", "shapes", "is_annotation", "count", *sums, *bytes_columns]
    return tuple(KeyAverage(*row) for row in grouped.select(fields).iter_rows())


def _events(span: Span) -> Bools:
    """Host slices that become rows."""
    kinds = {*categories.OPERATORS, categories.ANNOTATION, categories.FUNCTION}
    wanted = span.categories.where(frozenset(kinds)) | span.is_runtime
    return wanted & ~span.on_device & ~span.names.where(_LEFT_OUT)


def _around(span: Span, wanted: Bools) -> Int64:
    """For each wanted row the row around it: of those that began before on its track, the last that ends no sooner.

    Where slices overlap without nesting this is not the tree of the trace, which cuts them.
    """
    rows = np.flatnonzero(wanted)
    rows = rows[np.lexsort((-span.ends(rows), span.start_ns[rows], span.tracks.codes[rows]))]
    end, track = span.ends(rows), span.tracks.codes[rows]
    # an empty slice at the end of another lies behind it
    needed = end + (span.duration_ns[rows] == 0)
    before = np.arange(len(rows)) - 1
    # All that lies between a slice and the one before it that is looked at ends sooner, so its way can be taken over.
    left = np.flatnonzero(before >= 0)
    while len(left):
        at = before[left]
        left = left[(track[at] == track[left]) & (end[at] < needed[left])]
        before[left] = before[before[left]]
        left = left[before[left] >= 0]
    known = before >= 0
    known[known] = track[before[known]] == track[known]
    around = np.full(len(span), NONE, np.int64)
    around[rows[known]] = rows[before[known]]
    return around


def _keys(calls: Calls) -> pl.Series:
    names = calls.span.names
    keys = [f"{_STEP[:-1]}*" if name.startswith(_STEP) else name for name in names.values]
    return pl.Series([*keys, ""], dtype=pl.String).gather(names.codes[calls.rows])


def _memory(span: Span) -> tuple[Int64, Int64] | None:
    """Times, ascending, and bytes of what was allocated and released on the host; None where nothing was recorded."""
    if span.memory.is_empty():
        return None
    own = span.memory.filter((pl.col("device") == "cpu") & pl.col("bytes").is_not_null())
    return own["time_ns"].to_numpy(), own["bytes"].to_numpy()


def _between(memory: tuple[Int64, Int64], calls: Calls) -> Int64:
    """Bytes from each call's start to its end, both included."""
    times, sizes = memory
    start, end = calls.span.start_ns[calls.rows], calls.span.ends(calls.rows)
    before = np.concatenate(([0], np.cumsum(sizes)))
    return before[np.searchsorted(times, end, side="right")] - before[np.searchsorted(times, start, side="left")]


def _inner(calls: Calls, values: Int64) -> Int64:
    """Of each call the values of the calls right below it. Bytes may be below 0 and large, so no sums of floats."""
    result = np.zeros(len(calls), np.int64)
    known = calls.caller >= 0
    np.add.at(result, calls.caller[known], values[known])
    return result


def _outside(memory: tuple[Int64, Int64], calls: Calls, shapes: str | None) -> pl.DataFrame:
    """A row for each allocation and release while no call was open."""
    times, sizes = memory
    start = np.sort(calls.span.start_ns[calls.rows])
    end = np.sort(calls.span.ends(calls.rows))
    running = np.searchsorted(start, times, side="right") - np.searchsorted(end, times, side="left")
    free = sizes[running == 0]
    return pl.DataFrame(
        {
            "key": pl.Series([MEMORY] * len(free), dtype=pl.String),
            "shapes": pl.Series([shapes] * len(free), dtype=pl.String),
            "is_annotation": pl.Series([False] * len(free), dtype=pl.Boolean),
            "self_cpu_ns": np.zeros(len(free), np.int64),
            "cpu_total_ns": np.zeros(len(free), np.int64),
            "self_cpu_memory_bytes": free,
            "cpu_memory_bytes": free,
        }
    )
