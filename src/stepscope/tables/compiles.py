"""Compilations, graph breaks, fallbacks and transfers: events of the journal and spans of traces, one row each.

The agent and the readers of reports write raw facts; here they become causes, by `compile_reasons`. What one event does
not say is taken from others of the same process: the step from the time, the function at its limit from the versions
before, the value that a version was compiled for from the message about it that comes later.

Of traces: while it compiles, PyTorch records nested spans, most of them twice: their sum is ten times the time that
passed. Only the outermost spans of a whole frame or backward pass count, and what one overlaps with an earlier one is
cut off. What a copy to the host costs is how long the host waits for it: `duration_ns` is that of the runtime call that
starts it and of every synchronising runtime call of the same operator. Waits the script asks for itself are not in it.
No loop runs over slices: all work is joins and walks, level by level, over the few rows that launch such copies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import numpy as np
import polars as pl

from stepscope.read.raw import RawRank, Row
from stepscope.read.text import INT64_MAX, boolean, integer, length_ns, moment_ns, string, within
from stepscope.tables import compile_reasons
from stepscope.tables.arrays import NONE, Rows, climb, flags, own_starts, positions, unique
from stepscope.tables.cache import EventsTable
from stepscope.tables.categories import ANNOTATION, COPIES, OPERATORS
from stepscope.tables.compile_reasons import is_library, is_torch, operator_cause
from stepscope.tables.journal import step_at
from stepscope.tables.schema import SCHEMAS, empty

TORCH, XLA = "torch.compile", "torch_xla"
COMPILES = ("compile", "recompile", "limit_hit", "failure")
KINDS = frozenset({"compile", "graph_break", "transfer", "fallback"})
_STEP_SOURCES = frozenset({"context", "time", "poll", "file", "trace"})
_DIRECTIONS = frozenset({"forward", "backward", "device_to_host", "host_to_device"})
_TEXT = 4_000  # characters of a message that a row keeps
_NAME = 1_000  # of a path or a name
# A moment is right to about a millisecond, so a step number that is off by less than this is taken as it is.
_CLOCK_NS = 2_000_000


def compiles_table(ranks: Iterable[RawRank], steps: pl.DataFrame, traces: EventsTable) -> pl.DataFrame:
    """One row per event of the journal, and per compile span of traces whose process has no such event.

    Transfers come from journals (torch_xla) and from the device slices of traces. Rows stand in the order of processes
    and of their journals, those of traces last.
    """
    rows = [row for rank in ranks for row in _journal_rows(rank)]
    table = _with_steps(pl.DataFrame(rows, schema=SCHEMAS["compiles"]), steps)
    told = table.filter(pl.col("kind").is_in(COMPILES)).select("process", "backend").unique()
    spans = span_rows(traces.events).join(told, on=["process", "backend"], how="anti", maintain_order="left")
    return pl.concat([table, spans, transfer_rows(traces.events, traces.links)])


def unknown_messages(compiles: pl.DataFrame, ranks: Iterable[RawRank]) -> int:
    """Messages of compilers whose wording is not known, and what the agent itself met and could not read."""
    met = (event for rank in ranks for event in rank.journal if event["kind"] == "compile_unknown")
    unknown = int((compiles["cause"] == compile_reasons.UNKNOWN).sum())
    return unknown + sum(max(integer(event.get("count")) or 1, 1) for event in met)


def _journal_rows(rank: RawRank) -> list[Row]:
    events = [event for event in rank.journal if event["kind"] in KINDS]
    if not events:
        return []
    # full paths of the user's files, to complete shortened ones
    named = (string(event.get(name)) for event in events for name in ("def_file", "call_file", "file", "fail_file"))
    files = tuple(dict.fromkeys(name for name in named if name and len(name) <= _NAME))
    rows = [{**_row(event, files), "rank": rank.rank, "process": rank.name} for event in events]
    _fill_frames(rows)
    _fill_new(rows)
    _fill_reads(rows)
    return rows


def _row(event: Row, files: tuple[str, ...]) -> Row:
    """The row of one event; `version` beside its columns is the compiled version that did not fit."""
    row = _common(event)
    kind, text = event["kind"], string(event.get("cause_text"))
    if kind == "compile" and row["backend"] != XLA:
        return row | _compile(event, files)
    if kind == "graph_break":
        return row | _graph_break(event)
    row["reason"] = _text(event, "cause_text", _TEXT) or _text(event, "reason", _TEXT)
    row["file"], row["line"] = _text(event, "file"), _count(event, "line") or None
    if kind == "fallback":
        row["cause"] = compile_reasons.operator_cause(row["operator"], "unlowered")
    else:
        row["cause"] = compile_reasons.xla_cause(text)
    if kind == "transfer":
        row["cause"] = row["cause"] or compile_reasons.operator_cause(row["operator"], None)
        row["direction"] = row["direction"] or "device_to_host"
    return row


def _compile(event: Row, files: tuple[str, ...]) -> Row:
    reason, failure = string(event.get("recompile_reason")), string(event.get("fail_reason"))
    row: Row = {"direction": _direction(event), "kind": _kind(event)}
    if row["kind"] == "failure":
        by_construct = "Unsupported" in (_text(event, "fail_type") or "")
        row["cause"] = compile_reasons.failure_cause(failure) if failure and by_construct else None
        row["reason"] = _text(event, "fail_reason", _TEXT) or _text(event, "fail_type")
        row["file"], row["line"] = _place(event, "fail_file", "fail_line")
        return row
    if row["kind"] == "limit_hit":
        row["limit"] = compile_reasons.stated_limit(event) or _count(event, "limit")
    if reason:
        own = (_text(event, name) for name in ("def_file", "call_file", "fail_file"))  # the event's own files first
        row |= compile_reasons.parse_recompile(reason, dict.fromkeys([*(name for name in own if name), *files]))
        row["reason"] = _text(event, "recompile_reason", _TEXT)
    return row


def _common(event: Row) -> Row:
    source = string(event.get("step_source"))
    step = integer(event.get("step"))
    if source not in _STEP_SOURCES:
        source = None if step is None else "poll"  # counters that are read between steps name no source
    direction = string(event.get("direction"))
    return dict.fromkeys(SCHEMAS["compiles"]) | {
        "backend": _text(event, "backend") or TORCH,
        "step": step,
        "step_source": source if step is not None else None,
        "time_ns": moment_ns(event.get("time_ns")),
        "duration_ns": length_ns(event.get("duration_ns")),
        "kind": event["kind"],
        "count": _count(event, "count") or (None if event["kind"] == "fallback" else 1),
        "direction": direction if direction in _DIRECTIONS else None,
        **{name: _text(event, name) for name in ("graph", "operator", "function", "def_file", "call_file", "source")},
        **{name: _count(event, name) or None for name in ("def_line", "call_line")},
        **{name: _count(event, name) for name in ("bytes", "cache_entries", "limit")},
    }


def _graph_break(event: Row) -> Row:
    text = string(event.get("reason")) or ""
    row = {name: found for name, found in compile_reasons.parse_graph_break(text).items() if found is not None}
    row.setdefault("reason", text[:_TEXT] or None)
    if "file" not in row:
        row["file"], row["line"] = _place(event, "file", "line")
    return row


def _direction(event: Row) -> str | None:
    direction = string(event.get("direction"))
    if direction in ("forward", "backward"):
        return direction
    return {True: "forward", False: "backward"}.get(boolean(event.get("is_forward")))  # type: ignore[arg-type]


def _kind(event: Row) -> str:
    if compile_reasons.is_limit_hit(event):
        return "limit_hit"
    if string(event.get("fail_type")) is not None and boolean(event.get("guarded")) is not True:
        return "failure"
    if _direction(event) == "backward":
        return "compile"
    if string(event.get("recompile_reason")) is not None:
        return "recompile"
    entries = integer(event.get("cache_entries"))
    if entries is not None:
        return "recompile" if entries > 0 else "compile"
    # ids count the attempts of a frame, which is all that an entry without the size of its cache tells
    version = (string(event.get("graph")) or "")[:50].rpartition("/")[2]
    return "recompile" if version.isdecimal() and int(version) > 0 else "compile"


def _fill_frames(rows: list[Row]) -> None:
    """The function of entries that lack it: of a later backward pass, and of one that has reached its limit."""
    latest: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["kind"] not in COMPILES or row["graph"] is None:
            continue
        frame = (row["backend"], row["graph"].rpartition("/")[0] or row["graph"])
        if row["function"] is None and frame in latest:
            for name in ("function", "def_file", "def_line"):
                row[name] = latest[frame][name]
        if row["function"] is not None and row["direction"] != "backward":
            latest[frame] = row


def _fill_new(rows: list[Row]) -> None:
    """The value a version was compiled for, from the first later reason that speaks of that version."""
    waiting: dict[str, Row] = {}
    for row in rows:
        if row["kind"] not in COMPILES or row["direction"] == "backward":
            continue
        told = waiting.pop(row.get("version") or "", None)
        if (
            told is not None
            and row["old"] is not None
            and (row["cause"], row["subject"]) == (told["cause"], told["subject"])
        ):
            told["new"] = row["old"]
        if row["kind"] == "recompile" and row["graph"] and row["old"] is not None and row["new"] is None:
            waiting[row["graph"]] = row


def _fill_reads(rows: list[Row]) -> None:
    """A value that came back from a call is a tensor's only where the call read one: the graph break there tells."""
    breaks = {(row["file"], row["line"]): row for row in rows if row["kind"] == "graph_break" and row["file"]}
    for row in rows:
        if row["cause"] != "tensor_read" or row["kind"] not in COMPILES:
            continue
        if row["file"] is None:  # torch named a line of its own: the function goes on where the value came back
            row["file"], row["line"] = row["def_file"], row["def_line"]
        broken = breaks.get((row["file"], row["line"]))
        if broken is not None and broken["cause"] in ("unsupported_call", "print"):
            row["cause"] = "constant"
            row["subject"] = f"{broken['operator']}()" if broken["operator"] else None


def _with_steps(table: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Steps by time where the event has none, or has one that its time lies well outside of."""
    if table.is_empty() or steps.is_empty():
        return table
    numbered = table.with_row_index("row")
    step = table["step"].fill_null(NONE).to_numpy().copy()
    by_time = np.zeros(len(step), dtype=bool)
    for (process,), own in numbered.drop_nulls("time_ns").partition_by("process", as_dict=True).items():
        mine = steps.filter(pl.col("process") == process).drop_nulls(["start_ns", "wall_ns", "step"]).sort("start_ns")
        rows, times = own["row"].to_numpy(), own["time_ns"].to_numpy()
        starts, walls, numbers = (mine[name].to_numpy() for name in ("start_ns", "wall_ns", "step"))
        found = step_at(times, starts, walls, numbers)
        near = np.zeros(len(rows), dtype=bool)
        for shift in (-_CLOCK_NS, 0, _CLOCK_NS):
            near |= step_at(times + shift, starts, walls, numbers) == step[rows]
        trusted = own["step_source"].is_in(["context", "time"]).fill_null(False).to_numpy()
        use = (found != NONE) & ((step[rows] == NONE) | (trusted & ~near))
        step[rows[use]] = found[use]
        by_time[rows[use]] = True
    return numbered.with_columns(
        pl.Series("step", step).replace(NONE, None),
        pl.when(pl.Series(by_time)).then(pl.lit("time")).otherwise("step_source").alias("step_source"),
    ).drop("row")


def _count(event: Row, name: str) -> int | None:
    return within(event.get(name), INT64_MAX)


def _text(event: Row, name: str, most: int = _NAME) -> str | None:
    return (string(event.get(name)) or "")[:most] or None


def _place(event: Row, file: str, line: str) -> tuple[str | None, int | None]:
    """A file and its line, unless it is torch's own."""
    name = _text(event, file)
    return (
        (name, _count(event, line) or None) if name is not None and not compile_reasons.is_torch(name) else (None, None)
    )


# names since torch 2.1, without the " (dynamo_timed)" that many end with
_FRAME_SPANS = ("entire_frame_compile", "_compile.compile_inner", "_compile.<locals>.compile_inner", "compile_inner")
_BACKWARD_SPANS = ("entire_backward_compile", "backward._backward_impl", "compile_fx.<locals>.bw_compiler")
_XLA_SPAN = "XLAGraphExecutor::Compile"
_TIMED = " (dynamo_timed)"
# an annotation inside a span that names the graph: "entire_frame_compile_data: fn_name=..., compile_id=0/1"
_DATA = tuple(f"{name}_data: " for name in ("entire_frame_compile", "entire_backward_compile"))
_COMPILE_ID = r"compile_id=(!?[0-9/_]{1,40})"
_NAMES = [name + end for name in (*_FRAME_SPANS, *_BACKWARD_SPANS) for end in ("", _TIMED)]
SPANS = frozenset([*_NAMES, _XLA_SPAN])  # names of the spans; `_DATA` annotations name the graph alone
_BACKWARD_NAMES = [name + end for name in _BACKWARD_SPANS for end in ("", _TIMED)]


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
    xla = pl.col("name") == _XLA_SPAN
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
_FRAMES = 400  # of a call stack
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


def _ways(events: pl.DataFrame, column: str, launches: Rows) -> tuple[Rows, Rows, Rows]:
    """By row the one around it, then the one around each launch, and all rows on the ways up from there."""
    above = positions(events["id"], events.select(column).to_series())
    start = np.append(above, np.int32(NONE))[launches]
    met, rows = np.zeros(len(above), bool), unique(start[start >= 0])
    while len(rows):
        met[rows] = True
        rows = unique(above[rows])
        rows = rows[(rows >= 0) & ~met[rows]]
    return above, start, np.flatnonzero(met)


def _operators(events: pl.DataFrame, launches: Rows) -> pl.DataFrame:
    above, start, rows = _ways(events, "parent", launches)
    names = _take(events, rows, "name")["name"]
    others = flags(len(above), rows[~names.str.starts_with(_ATEN).to_numpy()])
    outer = np.full(len(start), NONE, np.int64)
    climb(above, start, others, outer)
    causes = _by_value(names, lambda name: operator_cause(name, None))
    caused = {}
    for cause in ("item", "data_dependent_shape"):
        by_cause = flags(len(above) + 1, rows[(causes == cause).fill_null(False).to_numpy()])
        caused[cause] = by_cause[climb(above, start, by_cause[:-1] | others)]
    return pl.DataFrame({"operator": _take(events, outer, "name")["name"], **caused}).select(
        operator=pl.when("item").then(pl.lit(_READ)).otherwise("operator"),
        cause=pl.when("data_dependent_shape")
        .then(pl.lit("data_dependent_shape"))
        .when("item")
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
    above, start, rows = _ways(events, "frame", launches)
    owners = _by_value(_take(events, rows, "name")["name"], _owner_of)
    own, library = (
        climb(above, start, flags(len(above), rows[(owners == owner).fill_null(False).to_numpy()]))
        for owner in (_OWN, _LIBRARY)
    )
    return _split(_take(events, np.where(own >= 0, own, library), "name")["name"], called=False)


def _split(frames: pl.Series, *, called: bool) -> pl.DataFrame:
    file, line, function = (pl.col("name").str.extract(_PYTHON_FRAME, group) for group in (1, 2, 3))
    line, unknown = line.cast(pl.Int64), pl.lit(None, pl.Int64)
    lines = {"line": line, "def_line": unknown} if called else {"line": unknown, "def_line": line}
    return frames.to_frame("name").select(file=file, **lines, function=function)


def _innermost(stack: str) -> str | None:
    frames = [frame.strip() for frame in stack.split(";", _FRAMES)[:_FRAMES]]
    for wanted in (_OWN, _LIBRARY):
        for frame in frames:
            if _owner_of(frame) == wanted:
                return frame
    return None


def _owner_of(name: str) -> str | None:
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
