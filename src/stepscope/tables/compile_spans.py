"""Compile spans in profiler traces as rows of the table `compiles`: the union of them, never the sum of nested ones.

While it compiles, PyTorch records a span for each phase, most of them twice (`X` and `X (dynamo_timed)`), one inside
the other: their sum is ten times the time that passed. Only the spans of a whole frame or a whole backward pass count
here, of those only the outermost, and what one of them overlaps with an earlier one on another thread is cut off; so
the durations of a trace's rows add up to the time in which it compiled.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.tables.arrays import own_starts
from stepscope.tables.categories import ANNOTATION
from stepscope.tables.schema import SCHEMAS, empty

# names since torch 2.1, without the " (dynamo_timed)" that many end with
_FRAME = (
    "entire_frame_compile",
    "_compile.compile_inner",
    "_compile.<locals>.compile_inner",
    "compile_inner",
)
_BACKWARD = ("entire_backward_compile", "backward._backward_impl", "compile_fx.<locals>.bw_compiler")
_XLA = "XLAGraphExecutor::Compile"
_TIMED = " (dynamo_timed)"
# an annotation inside a span that names the graph: "entire_frame_compile_data: fn_name=..., compile_id=0/1"
_DATA = tuple(f"{name}_data: " for name in ("entire_frame_compile", "entire_backward_compile"))
_COMPILE_ID = r"compile_id=(!?[0-9/_]{1,40})"
_NAMES = [name + end for name in (*_FRAME, *_BACKWARD) for end in ("", _TIMED)]
_BACKWARD_NAMES = [name + end for name in _BACKWARD for end in ("", _TIMED)]


def span_rows(events: pl.DataFrame) -> pl.DataFrame:
    """One row per outermost compile span of the table `events`, in order of process, trace and time.

    `duration_ns` is the part that no earlier span of the trace covers; `step` the step it starts in; `graph` the
    compiler's id where the writer names it (torch 2.10 and newer).
    """
    if events.is_empty():
        return empty("compiles")
    wanted = pl.col("name").is_in([*_NAMES, _XLA]) & (pl.col("duration_ns") > 0)
    columns = ["rank", "process", "trace", "track", "name", "start_ns", "duration_ns", "step"]
    spans = events.lazy().filter(wanted).select(columns).collect()
    if spans.is_empty():
        return empty("compiles")
    spans = _outermost(spans.sort("process", "trace", "start_ns", -pl.col("duration_ns")))
    xla = pl.col("name") == _XLA
    rows = _with_graphs(spans, events).with_columns(
        step_source=pl.when(pl.col("step").is_not_null()).then(pl.lit("trace")),
        time_ns=pl.col("start_ns"),
        kind=pl.lit("compile"),
        backend=pl.when(xla).then(pl.lit("torch_xla")).otherwise(pl.lit("torch.compile")),
        count=pl.lit(1, pl.Int64),
        direction=pl.when(pl.col("name").is_in(_BACKWARD_NAMES))
        .then(pl.lit("backward"))
        .when(~xla)
        .then(pl.lit("forward")),
        source=pl.lit("trace: ") + pl.col("name"),
    )
    return as_rows(rows)


def as_rows(frame: pl.DataFrame) -> pl.DataFrame:
    """`frame` with the columns of `compiles`; what it lacks is null."""
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in SCHEMAS["compiles"].items()
    )


def _outermost(spans: pl.DataFrame) -> pl.DataFrame:
    """Spans that begin before every earlier one of the same trace has ended are inside it, or lose what overlaps.

    `spans` are in order of trace and start, the longer first.
    """
    trace = spans.select(pl.struct("process", "trace").rle_id()).to_series().to_numpy()
    starts, durations = spans["start_ns"].to_numpy(), spans["duration_ns"].to_numpy()
    ends = starts + durations
    left = np.empty_like(ends)
    for number in range(int(trace[-1]) + 1):  # one per trace
        mine = slice(*np.searchsorted(trace, (number, number + 1)))
        left[mine] = own_starts(starts[mine], ends[mine])
    return spans.with_columns(pl.Series("start_ns", left), pl.Series("duration_ns", ends - left)).filter(
        pl.Series(ends > left)
    )


def _with_graphs(spans: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """`spans` with `graph`: the id in the first annotation inside each that speaks of one."""
    speaks = pl.any_horizontal(pl.col("name").str.starts_with(text) for text in _DATA)
    data = (
        events.lazy()
        .filter((pl.col("category") == ANNOTATION) & speaks)
        .select("process", "trace", "track", at="start_ns", graph=pl.col("name").str.extract(_COMPILE_ID))
        .drop_nulls("graph")
        .sort("at")
        .collect()
    )
    where = ["process", "trace", "track"]
    spans = spans.with_row_index("span")
    inside = (
        data.join_asof(
            spans.select(*where, "span", "duration_ns", start="start_ns").sort("start"),
            left_on="at",
            right_on="start",
            by=where,
            strategy="backward",
            check_sortedness=False,
        )
        .filter(pl.col("at") < pl.col("start") + pl.col("duration_ns"))
        .group_by("span")
        .agg(pl.col("graph").first())
    )
    return spans.join(inside, on="span", how="left", maintain_order="left")
