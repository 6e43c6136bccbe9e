"""Compile spans, and copies from a device to the host, of traces as rows of the table `compiles`.

While it compiles, PyTorch records nested spans, most of them twice: their sum is ten times the time that passed. Only
the outermost spans of a whole frame or backward pass count, and what one overlaps with an earlier one is cut off.

What a copy to the host costs is how long the host waits for it: `duration_ns` is that of the runtime call that starts
it and of every synchronising runtime call of the same operator. Waits the script asks for itself are not in it.

No loop runs over slices: all work is joins and walks, level by level, over the few rows that launch such copies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import polars as pl

from stepscope.tables.arrays import NONE, Rows, own_starts, positions
from stepscope.tables.categories import ANNOTATION, COPIES, OPERATORS
from stepscope.tables.compile_reasons import is_library, is_torch, operator_cause
from stepscope.tables.schema import SCHEMAS, empty

# names since torch 2.1, without the " (dynamo_timed)" that many end with
_FRAME = ("entire_frame_compile", "_compile.compile_inner", "_compile.<locals>.compile_inner", "compile_inner")
_BACKWARD = ("entire_backward_compile", "backward._backward_impl", "compile_fx.<locals>.bw_compiler")
_XLA = "XLAGraphExecutor::Compile"
_TIMED = " (dynamo_timed)"
# an annotation inside a span that names the graph: "entire_frame_compile_data: fn_name=..., compile_id=0/1"
_DATA = tuple(f"{name}_data: " for name in ("entire_frame_compile", "entire_backward_compile"))
_COMPILE_ID = r"compile_id=(!?[0-9/_]{1,40})"
_NAMES = [name + end for name in (*_FRAME, *_BACKWARD) for end in ("", _TIMED)]
SPANS = frozenset([*_NAMES, _XLA])  # names of the spans; `_DATA` annotations name the graph alone
_BACKWARD_NAMES = [name + end for name in _BACKWARD for end in ("", _TIMED)]


def span_rows(events: pl.DataFrame) -> pl.DataFrame:
    """One row per outermost compile span of the table `events`, in order of process, trace and time.

    `duration_ns` is the part that no earlier span of the trace covers; `step` the step it starts in; `graph` the
    compiler's id where the writer names it (torch 2.10 and newer).
    """
    if events.is_empty():
        return empty("compiles")
    wanted = pl.col("name").is_in(list(SPANS)) & (pl.col("duration_ns") > 0)
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
    """Of spans in order of trace and start, the longer first, what no earlier one of the same trace covers."""
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


_TO_HOST = r"(?i)DtoH|DeviceToHost|Device -> (?:Pageable|Pinned|Host)"
_WAITS = r"(?i)Synchronize"
_ATEN = "aten::"
_READ = "aten::_local_scalar_dense"
_LEVELS = 16  # operators inside one another
_FRAMES = 400  # Python functions inside one another
_PYTHON_FRAME = r"^(.{1,1000})\(([0-9]{1,9})\): (.{1,300})$"
_COPIERS = ("aten::to", "aten::_to_copy", "aten::copy_")
_OWN, _LIBRARY = "own", "library"


def transfer_rows(events: pl.DataFrame, links: pl.DataFrame) -> pl.DataFrame:
    """One row per process, step, line and operator that copied to the host inside a step.

    `operator` is the outermost operator of PyTorch's own around the copy, and `aten::_local_scalar_dense` wherever one
    value was read. Where a trace holds Python functions, `file` and `function` are the innermost one outside torch and
    installed packages, and `def_line` its first line: such traces do not tell the line of the call. Traces of 2021 hold
    call stacks with exact lines. `bytes` is null where any copy of the row has none.
    """
    copies = _copies(events, links)
    if copies.is_empty():
        return empty("compiles")
    launches = positions(events["id"], copies["launch"])
    copies = copies.with_columns(pl.Series("duration_ns", _blocked(events, launches)))
    copies = pl.concat([copies, _operators(events, launches), _places(events, launches)], how="horizontal")
    key = ["rank", "process", "step", "file", "line", "def_line", "function", "operator", "cause", "source"]
    rows = copies.group_by(key, maintain_order=True).agg(
        count=pl.len().cast(pl.Int64),
        bytes=pl.when(pl.col("bytes").null_count() == 0).then(pl.col("bytes").sum()),
        duration_ns=pl.when(pl.col("duration_ns").null_count() == 0).then(pl.col("duration_ns").sum()),
        time_ns=pl.col("start_ns").min(),
    )
    rows = rows.sort("process", "step", "time_ns").with_columns(
        step_source=pl.lit("trace"),
        kind=pl.lit("transfer"),
        backend=pl.lit("cuda"),
        direction=pl.lit("device_to_host"),
        def_file=pl.when(pl.col("def_line").is_not_null()).then("file"),
    )
    return as_rows(rows)


def _copies(events: pl.DataFrame, links: pl.DataFrame) -> pl.DataFrame:
    if events.is_empty():
        return events.clear()
    wanted = pl.col("category").is_in(COPIES) & pl.col("step").is_not_null()
    found = (
        events.lazy()
        .filter(wanted)
        .filter(pl.col("name").str.contains(_TO_HOST))
        .select("id", "rank", "process", "step", "start_ns", "bytes", source=pl.lit("trace: ") + pl.col("name"))
        .collect()
    )
    return found.join(links.select(id="event", launch="launch"), on="id", how="left", maintain_order="left")


def _take(events: pl.DataFrame, rows: Rows, *columns: str) -> pl.DataFrame:
    index = pl.Series(rows).replace(NONE, None).cast(pl.UInt32)
    return pl.DataFrame([events[column].gather(index).alias(column) for column in columns])


def _blocked(events: pl.DataFrame, launches: Rows) -> pl.Series:
    """For each copy the host time of its launch, and of the waits in the same operator up to the next copy."""
    own = _take(events, launches, "parent", "start_ns", "duration_ns").with_row_index("copy")
    parents = positions(events["id"], own["parent"])
    in_operator = _take(events, parents, "category")["category"].is_in(OPERATORS).fill_null(False)
    inside = own.filter(in_operator).select("copy", "parent", at="start_ns").sort("at")
    waits = (
        events.lazy()
        .join(inside.lazy().select("parent").unique(), on="parent", how="semi")
        .filter(pl.col("name").str.contains(_WAITS))
        .select("parent", "start_ns", wait="duration_ns")
        .sort("start_ns")
        .collect()
    )
    charged = waits.join_asof(
        inside, left_on="start_ns", right_on="at", by="parent", strategy="backward", check_sortedness=False
    )
    sums = charged.drop_nulls("copy").group_by("copy").agg(pl.col("wait").sum())
    joined = own.join(sums, on="copy", how="left", maintain_order="left")
    return joined.select(pl.col("duration_ns") + pl.col("wait").fill_null(0)).to_series()


def _operators(events: pl.DataFrame, launches: Rows) -> pl.DataFrame:
    at = positions(events["id"], _take(events, launches, "parent")["parent"])
    names = pl.Series("operator", [None], dtype=pl.String).new_from_index(0, len(at))
    read, dependent = np.zeros(len(at), bool), np.zeros(len(at), bool)
    for _ in range(_LEVELS):
        level = _take(events, at, "name", "parent")
        own = level["name"].str.starts_with(_ATEN).fill_null(False)
        if not own.any():
            break
        names = level["name"].zip_with(own, names)
        causes = _by_value(level["name"], lambda name: operator_cause(name, None))
        read |= (causes == "item").fill_null(False).to_numpy()
        dependent |= (causes == "data_dependent_shape").fill_null(False).to_numpy()
        at = np.where(own.to_numpy(), positions(events["id"], level["parent"]), NONE)
    frame = pl.DataFrame({"operator": names, "read": read, "dependent": dependent})
    return frame.select(
        operator=pl.when("read").then(pl.lit(_READ)).otherwise("operator"),
        cause=pl.when("dependent")
        .then(pl.lit("data_dependent_shape"))
        .when("read")
        .then(pl.lit("item"))
        .when(pl.col("operator").is_in(_COPIERS))
        .then(pl.lit("copy")),
    )


def _places(events: pl.DataFrame, launches: Rows) -> pl.DataFrame:
    """file, line, def_line and function of each copy, where the trace knows them."""
    functions = _functions(events, launches)
    if events["call_stack"].null_count() == events.height:
        return functions
    # of the operator around each launch: `file(line): function;...`, innermost first
    around = positions(events["id"], _take(events, launches, "parent")["parent"])
    exact = _split(_by_value(_take(events, around, "call_stack")["call_stack"], _innermost), called=True)
    use = exact["file"].is_not_null() & functions["file"].is_null()
    return pl.DataFrame([exact[name].zip_with(use, functions[name]) for name in functions.columns])


def _functions(events: pl.DataFrame, launches: Rows) -> pl.DataFrame:
    at = positions(events["id"], _take(events, launches, "frame")["frame"])
    own = pl.Series("name", [None], dtype=pl.String).new_from_index(0, len(at))
    library = own
    for _ in range(_FRAMES):
        if not (at >= 0).any():
            break
        level = _take(events, at, "name", "frame")
        kinds = _by_value(level["name"], _kind)
        found = (kinds == _OWN).fill_null(False)
        own = level["name"].zip_with(found, own)
        library = level["name"].zip_with((kinds == _LIBRARY).fill_null(False) & library.is_null(), library)
        at = np.where(found.to_numpy(), NONE, positions(events["id"], level["frame"]))
    return _split(own.zip_with(own.is_not_null(), library), called=False)


def _split(frames: pl.Series, *, called: bool) -> pl.DataFrame:
    file, line, function = (pl.col("name").str.extract(_PYTHON_FRAME, group) for group in (1, 2, 3))
    line, unknown = line.cast(pl.Int64), pl.lit(None, pl.Int64)
    lines = {"line": line, "def_line": unknown} if called else {"line": unknown, "def_line": line}
    return frames.to_frame("name").select(file=file, **lines, function=function)


def _innermost(stack: str) -> str | None:
    frames = [frame.strip() for frame in stack.split(";", _FRAMES)[:_FRAMES]]
    for wanted in (_OWN, _LIBRARY):
        for frame in frames:
            if _kind(frame) == wanted:
                return frame
    return None


def _kind(name: str) -> str | None:
    """Whether a Python function is of the user's own files, of a library, or of torch or no file at all (None)."""
    file, found, _ = name.partition("): ")[0].rpartition("(")
    if not found or not name.partition("): ")[1] or file.startswith("<") or is_torch(file):
        return None
    first = file.replace("\\", "/").partition("/")[0].removesuffix(".py")
    return _LIBRARY if is_library(file) or first in sys.stdlib_module_names else _OWN


def _by_value(column: pl.Series, function: Callable[[str], str | None]) -> pl.Series:
    """`function` of each value, worked out once for each distinct one; null stays null."""
    distinct = column.unique().drop_nulls()
    results = pl.Series([function(value) for value in distinct], dtype=pl.String)
    replaced: pl.Series = column.replace_strict(distinct, results, default=None, return_dtype=pl.String)
    return replaced
