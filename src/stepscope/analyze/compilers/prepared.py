"""The rows of the table `compiles` made ready for questions: in order, with the step each lies in; and the causes.

Three things are settled here once. `at`: the row of the steps table an event lies in, by its time where that agrees
with its step number, else by the number. `owner`: a backward pass compiled later belongs to the latest forward
compilation of the same graph id, so that it counts as time, not as a compilation of its own. And a limit hit without
a line gets what the recompilations before it say.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from msgspec.structs import replace

from stepscope.engine import intervals
from stepscope.engine.step_labels import LabelledSteps
from stepscope.engine.user_code import UserCode
from stepscope.model import Place
from stepscope.model.compilers import Change, CompilerCause
from stepscope.tables.arrays import NONE, Int64, Numbers
from stepscope.tables.schema import Tables

STEPS_SHOWN = 64  # of a cause; as many as a line of text or a small chart can hold
CHANGES_SHOWN = 64

TORCH_COMPILE = "torch.compile"
TORCH_XLA = "torch_xla"
COMPILERS = (TORCH_COMPILE, TORCH_XLA)  # other backends are devices whose copies a trace shows
TRACE = "trace"  # how sources begin that are profiler traces
COMPILATIONS = ("compile", "recompile")  # kinds that end in a compiled version
TIMED = (*COMPILATIONS, "limit_hit", "failure")  # kinds whose durations are time spent on compiling


_OF_FRAME = ("function", "def_file", "def_line", "call_file", "call_line")
_FILLED = ("file", "line", "subject", *_OF_FRAME)
Row = Mapping[str, Any]


def prepare(tables: Tables, labelled: LabelledSteps) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows of `compiles` in order of process, step and time, and the steps they lie in.

    Rows have the columns of `compiles`, and `pos` (its row number here), `at` (row of the steps or null), `owner` (the
    `pos` that it belongs to, usually its own), `step_kind`. Steps are the labelled ones, with `row`, `index` (its
    number within process and kind, from 0), and `traced` (a trace has slices of it).
    """
    events = tables.events.lazy()  # looked through only where events come from traces
    if not tables.compiles["source"].str.starts_with(TRACE).any():
        events = events.clear()
    traced = events.select("process", "step").drop_nulls().unique().with_columns(traced=pl.lit(True)).collect()
    columns = ("rank", "process", "step", "kind", "start_ns", "wall_ns", "first_batch", "in_window", "reason")
    steps = (
        labelled.frame.select(columns)
        .join(traced, on=["process", "step"], how="left", maintain_order="left")
        .with_row_index("row")
        .with_columns(
            pl.col("kind").fill_null("train"),
            pl.col("first_batch", "in_window", "traced").fill_null(False),
            pl.col("row").cast(pl.Int64),
        )
        .with_columns(index=pl.int_range(pl.len()).over("process", "kind"))
    )
    rows = tables.compiles.with_columns(
        pl.col("process").fill_null(""), pl.col("count").fill_null(1), counted=pl.col("count").is_not_null()
    )
    rows = _located(rows, steps)
    kinds = steps["kind"].gather(rows["at"]) if steps.height else pl.Series([None] * rows.height, dtype=pl.String)
    compiled = pl.col("kind").is_in(COMPILATIONS) & pl.col("graph").is_not_null()
    later = compiled & (pl.col("direction") == "backward").fill_null(False)
    forward = pl.when(compiled & ~later).then("pos").forward_fill().over("process", "backend", "graph")
    owner = pl.when(later).then(pl.coalesce(forward, "pos")).otherwise("pos")
    return _with_limits(rows.with_columns(kinds.alias("step_kind"), owner=owner)), steps


def counted(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows that are compilations of their own: compiles and recompiles, later backward passes left out."""
    return rows.filter(pl.col("kind").is_in(COMPILATIONS) & (pl.col("owner") == pl.col("pos")))


def _located(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """`rows` in order, with `pos` and `at`, the row of the step they are in."""
    numbered = steps.unique(["process", "step"], keep="first", maintain_order=True)
    end_ns = pl.col("start_ns") + pl.col("wall_ns")
    timed = steps.drop_nulls("start_ns").sort("start_ns")
    timed = timed.select("process", "start_ns", by_time="row", named="step", end_ns=end_ns)
    found = (
        rows.with_row_index("input")
        .with_columns(moment=pl.col("time_ns").fill_null(NONE))
        .join(numbered.select("process", "step", by_number="row"), on=["process", "step"], how="left")
        .sort("moment")
        .join_asof(timed, left_on="moment", right_on="start_ns", by="process", check_sortedness=False)
    )
    number = pl.col("step")
    agrees = number.is_null() | (pl.col("named") == number) | pl.col("by_number").is_null()
    inside = (pl.col("moment") < pl.col("end_ns")) & agrees
    return (
        found.with_columns(
            at=pl.when(inside).then("by_time").otherwise("by_number"), order=pl.coalesce(number, "named")
        )
        .sort("process", "order", "time_ns", "input", nulls_last=True)
        .select(*rows.columns, "at", pos=pl.int_range(pl.len()))
    )


def _with_limits(rows: pl.DataFrame) -> pl.DataFrame:
    """Limit hits that lack a line, a subject or the function take them from the compilations before them: all from one
    of the same cause, of another cause what is of the frame."""
    lacking = pl.any_horizontal(pl.col(name).is_null() for name in _FILLED)
    if rows.filter((pl.col("kind") == "limit_hit") & lacking).is_empty():
        return rows
    latest: dict[tuple[Any, ...], Row] = {}  # by a frame, and a cause or None for any
    filled: dict[int, dict[str, Any]] = {}
    columns = ("pos", "process", "backend", "kind", "direction", "graph", "cause", *_FILLED)
    for row in rows.select(columns).iter_rows(named=True):
        # the compiled frame is named by the first number of its graph id, or by its function
        prefix, slash, _ = (row["graph"] or "").partition("/")
        names = [("graph", prefix)] if slash else []
        names += [("function", row["function"])] if row["function"] is not None else []
        frames = [(row["process"], row["backend"] or "", *name) for name in names]
        if row["kind"] in COMPILATIONS and row["direction"] != "backward":
            latest.update({(*frame, cause): row for frame in frames for cause in (None, row["cause"])})
        if row["kind"] != "limit_hit" or not frames:
            continue
        cause = None if row["cause"] == "unknown" else row["cause"]
        found = latest.get((*frames[0], cause)) or latest.get((*frames[0], None)) or {}
        for name in _FILLED if cause in (None, found.get("cause")) else _OF_FRAME:
            # a line of one row is never put beside the file of another
            partner = name.replace("line", "file")
            if row[name] is None and found.get(name) is not None and (partner == name or row[partner] is None):
                filled.setdefault(row["pos"], {})[name] = found[name]
    return rows.with_columns(
        pl.Series(name, [filled.get(at, {}).get(name, old) for at, old in enumerate(rows[name])], rows.schema[name])
        for name in _FILLED
    )


def durations(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows that say how long compiling took."""
    return rows.filter(pl.col("kind").is_in(TIMED) & (pl.col("duration_ns") >= 0))


def total_ns(rows: pl.DataFrame) -> int | None:
    """Time spent on compiling in all processes; None where no row has a duration."""
    spans, lengths = _split(rows)
    if spans.is_empty() and lengths.is_empty():
        return None
    busy = sum(intervals.total(intervals.union(*_edges(own))) for own in spans.partition_by("process"))
    return busy + int(lengths["duration_ns"].sum())


def per_step_ns(rows: pl.DataFrame, steps: pl.DataFrame) -> Int64:
    """For each step the time compiling took of it, between 0 and its wall time."""
    walls: Int64 = steps["wall_ns"].to_numpy()
    found = np.zeros(steps.height, np.int64)
    spans, lengths = _split(rows)
    timed = steps.drop_nulls("start_ns")
    for (process,), own in spans.partition_by("process", as_dict=True).items():
        mine = timed.filter(pl.col("process") == process)
        starts = mine["start_ns"].to_numpy()
        busy = intervals.union(*_edges(own))
        found[mine["row"].to_numpy()] += intervals.covered(busy, starts, starts + mine["wall_ns"].to_numpy())
    untimed = steps.filter(pl.col("start_ns").is_null())["row"]
    loose = pl.concat([lengths, spans.filter(pl.col("at").is_in(untimed.implode()))]).drop_nulls("at")
    np.add.at(found, loose["at"].to_numpy(), loose["duration_ns"].to_numpy())
    return np.minimum(found, walls)


def by_group(rows: pl.DataFrame, groups: Int64, steps: pl.DataFrame) -> tuple[Counter[int], Counter[int]]:
    """Of each group of rows (`groups` is one number per row) the time in all, and the time inside steps, ns.

    Spans of a group and process that overlap count once. Groups without any duration are missing. Where a process has
    no measured steps, what names its step counts as inside, and of the rest nothing is known.
    """
    spans, lengths = _split(rows.with_columns(pl.Series("group", groups, dtype=pl.Int64)))
    measured = steps["process"].unique().to_list()
    known = pl.col("process").is_in(measured)
    told = lengths.filter(known | pl.col("step").is_not_null())
    counts = pl.when(~known | pl.col("at").is_not_null()).then("duration_ns").otherwise(0)
    whole = Counter(dict(lengths.group_by("group").agg(pl.col("duration_ns").sum()).rows()))
    inside = Counter(dict(told.group_by("group").agg(counts.sum()).rows()))
    for (process,), own in spans.partition_by("process", as_dict=True).items():
        starts, ends = _edges(own)
        timed = steps.filter(pl.col("process") == process).drop_nulls("start_ns")
        ran = intervals.union(*_edges(timed.select(time_ns="start_ns", duration_ns="wall_ns")))
        # on an axis that holds the time in steps alone, what a span covers is what it has inside steps
        axes = [(whole, starts, ends)]
        if process in measured:
            axes.append((inside, intervals.covered_before(ran, starts), intervals.covered_before(ran, ends)))
        for sums, begins, finishes in axes:
            for key, length in zip(*intervals.union_by(own["group"].to_numpy(), begins, finishes), strict=True):
                sums[int(key)] += int(length)
    return whole, inside


def _split(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Those of `durations` that are spans, and those that are lengths only."""
    told, spans = durations(rows), pl.col("time_ns").is_not_null() & (pl.col("count") == 1)
    return told.filter(spans), told.filter(~spans)


def _edges(spans: pl.DataFrame) -> tuple[Int64, Int64]:
    starts = spans["time_ns"].to_numpy()
    return starts, starts + spans["duration_ns"].to_numpy()


_KEY = ("backend", "kind", "function", "def_file", "def_line", "file", "line", "cause", "operator")


def groups(rows: pl.DataFrame, steps: pl.DataFrame, code: UserCode) -> list[tuple[CompilerCause, list[Row]]]:
    """All causes, most expensive first, those without time behind, by count; with the rows that each is made of, later
    backward passes left out."""
    numbers: Numbers[tuple[Any, ...]] = Numbers()
    members: dict[int, list[Row]] = {}
    assigned: list[int] = []
    for row in rows.iter_rows(named=True):  # owners come before what belongs to them
        if row["owner"] != row["pos"]:
            assigned.append(assigned[row["owner"]])
        else:
            assigned.append(numbers[tuple(row[name] for name in _KEY)])
            members.setdefault(assigned[-1], []).append(row)
    whole, inside = by_group(rows, np.array(assigned, np.int64), steps)
    ranked = [(_cause(own, code, whole.get(number), inside.get(number)), own) for number, own in members.items()]
    ranked.sort(key=lambda one: (one[0].total_ms is None, -(one[0].total_ms or 0.0), -one[0].count, one[0].id))
    seen: Counter[str] = Counter()
    for number, (cause, own) in enumerate(ranked):  # two causes whose files differ by folder alone would share an id
        seen[cause.id] += 1
        if seen[cause.id] > 1:
            ranked[number] = replace(cause, id=f"{cause.id}-{seen[cause.id]}"), own
    return ranked


def _cause(rows: Sequence[Row], code: UserCode, total_ns: int | None, inside_ns: int | None) -> CompilerCause:
    first = rows[0]
    in_order = sorted(rows, key=lambda row: (row["step"] is None, row["step"] or 0))
    steps = list(dict.fromkeys(_told(in_order, "step")))
    subject = next((name for name, _ in Counter(_told(rows, "subject")).most_common(1)), None)
    if total_ns is None:  # durations that are no compiling: of transfers
        plain = _told(rows, "duration_ns")
        placed = _told((row for row in rows if row["at"] is not None), "duration_ns")
        total_ns, inside_ns = sum(plain) if plain else None, sum(placed) if placed else None
    place, definition, call = _places(first, code)
    # ten hex digits that stay the same from run to run, and from machine to machine
    at = next((at for at in ("", "def_", "call_") if first[f"{at}file"]), None)
    where = "" if at is None else f"{posixpath.basename(first[f'{at}file'])}:{first[f'{at}line']}"
    parts = (first["kind"], first["function"], where, first["cause"], subject, first["operator"])
    # what changed, step by step; ranks that saw the same are one
    changed = (row for row in in_order if row["old"] is not None or row["new"] is not None)
    changes = dict.fromkeys(Change(row["step"], row["old"], row["new"], row["subject"]) for row in changed)
    return CompilerCause(
        id=hashlib.sha256("\x00".join(str(part or "") for part in parts).encode()).hexdigest()[:10],
        backend=first["backend"] or "",
        kind=first["kind"],
        cause=first["cause"] or "",
        text=_reason(next(reversed(_told(rows, "reason")), None)),
        function=first["function"],
        place=place,
        definition=definition,
        call=call,
        hint=next(reversed(_told(rows, "hint")), None),
        operator=first["operator"],
        subject=subject,
        count=sum(row["count"] for row in rows),
        total_ms=_ms(total_ns),
        longest_ms=_ms(max(_told((row for row in rows if row["count"] == 1), "duration_ns"), default=None)),
        steps=tuple(steps[:STEPS_SHOWN]),
        step_count=len(steps),
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if steps else None,
        changes=tuple(changes)[:CHANGES_SHOWN],
        cache_entries=max(_told(rows, "cache_entries"), default=None),
        limit=next(reversed(_told(rows, "limit")), None),
        ranks=tuple(sorted(set(_told(rows, "rank")))),
        kinds=tuple(sorted(set(_told(rows, "step_kind")), key=lambda kind: (kind != "train", kind))),
        in_main_steps_ms=_ms(inside_ns),
        source="; ".join(dict.fromkeys(_told((first, rows[-1]), "source"))),
        counted=all(row["counted"] for row in rows),
    )


def _told(rows: Iterable[Row], name: str) -> list[Any]:
    return [row[name] for row in rows if row[name] is not None]


def _places(row: Row, code: UserCode) -> tuple[Place | None, Place | None, Place | None]:
    """The user's line to blame, where the compiled function begins, and the user's line that called it.

    To blame is the line the compiler named, where it is the user's; else the call, else the definition.
    """

    def users(file: str | None, line: int | None, function: str | None) -> Place | None:
        resolved = code.resolve(file)
        return Place(resolved, line, function) if resolved else None

    # torch.compile names the compiled function, and a cause may lie in one that it calls
    cause = users(row["file"], row["line"], None if row["backend"] == TORCH_COMPILE else row["function"])
    call = users(row["call_file"], row["call_line"], None)
    begins = users(row["def_file"], row["def_line"], row["function"])
    definition = begins or (Place(row["def_file"], row["def_line"], row["function"]) if row["def_file"] else None)
    return cause or call or begins, definition, call


def _reason(text: str | None) -> str:
    """The first line without the graph id before it ("2/7: "), the source quoted behind it and the advice."""
    line = next((line.strip() for line in (text or "").splitlines() if line.strip()), "")
    head, colon, tail = line.partition(": ")
    if colon and "/" in head and head.replace("/", "").isdigit():
        line = tail
    return line.partition("(HINT")[0].partition("  # ")[0].strip()


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6
