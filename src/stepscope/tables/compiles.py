"""Compilations, graph breaks, fallbacks and transfers: events of the journal and spans of traces, one row each.

The agent and the readers of reports write raw facts; here they become causes, by `compile_reasons`. What one event
does not say is taken from others of the same process: the step from the time, the function at its limit from the
versions before, the value that a version was compiled for from the message about it that comes later.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import polars as pl

from stepscope.read.raw import RawRank, Row
from stepscope.read.text import INT64_MAX, boolean, integer, length_ns, moment_ns, string, within
from stepscope.tables import compile_reasons
from stepscope.tables.arrays import NONE
from stepscope.tables.compile_spans import span_rows, transfer_rows
from stepscope.tables.events import EventsTable
from stepscope.tables.journal import step_at
from stepscope.tables.schema import SCHEMAS

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
