"""What all views of profiler traces start from: the slices of each trace as columns, its steps, its devices, its code.

A `Span` is one trace file. The rows of a trace lie side by side in `events`, so its columns are parts of the table, not
copies. Rows are counted from 0 within the span; `NONE` (-1) stands for no row. Columns are made when first asked for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct, field

from stepscope.engine.intervals import Intervals, union
from stepscope.engine.journal import json_object
from stepscope.engine.source_lines import Call, Lines
from stepscope.engine.user_code import Origin, UserCode, is_annotation
from stepscope.model.trace import GpuProperties, SpanRef
from stepscope.read.streams import natural
from stepscope.read.text import integer
from stepscope.tables import categories
from stepscope.tables.arrays import NONE, Bools, Int32, Int64, by_code, window_at
from stepscope.tables.categories import COPIES, FILLS, FUNCTION, KERNELS
from stepscope.tables.categories import STEP as MARK
from stepscope.tables.journal import MARK_COLUMNS, trace_steps
from stepscope.tables.schema import Tables

FEW_NAMES = 1_000  # up to here asking one by one is quicker than a column
_STEPS = {"step": pl.Int64, "start_ns": pl.Int64, "end_ns": pl.Int64}
_TIME_IN_NAME = re.compile(r"\.(\d{6,})\.")
_WORKER_END = re.compile(r"(?:\.\d{6,})?(?:\.pt\.trace)?\.json$")


class Texts(Struct, frozen=True):
    """A text column as numbers: `codes` into `values`, `NONE` where the column is null."""

    codes: Int32
    values: list[str]

    def where(self, names: Sequence[str] | frozenset[str]) -> Bools:
        return self.pick([value in names for value in self.values])

    def pick(self, flags: Sequence[bool] | Bools) -> Bools:
        return by_code(np.append(np.asarray(flags, bool), False), self.codes)

    def matching(self, wanted: Callable[[str], object]) -> Bools:
        """Rows whose text `wanted`, the search of a pattern, finds something in; each distinct text is asked once."""
        return self.pick([wanted(value) is not None for value in self.values])

    def like(self, pattern: str) -> Bools:
        return self.pick(matches(pattern, self.values))

    def starting(self, *prefixes: str) -> Bools:
        return self.pick([value.startswith(prefixes) for value in self.values])

    def containing(self, *parts: str) -> Bools:
        return self.pick(np.logical_or.reduce([[part in value for value in self.values] for part in parts]))


def matches(pattern: str, values: Sequence[str]) -> Bools:
    if not values:
        return np.zeros(0, bool)  # compiling a pattern may take a millisecond
    if len(values) < FEW_NAMES:
        search = re.compile(pattern).search
        return np.asarray([search(value) is not None for value in values], bool)
    return pl.Series(values, dtype=pl.String).str.contains(pattern).to_numpy()


def _texts_of(column: str) -> cached_property[Texts]:
    return cached_property(lambda span: texts(span.series(column)))


def _of_category(*names: str) -> cached_property[Bools]:
    return cached_property(lambda span: span.categories.where(names))


class Span:
    """One trace of one worker."""

    def __init__(self, ref: SpanRef, first: int, events: pl.DataFrame, tables: Tables) -> None:
        self.ref = ref
        self.first = first  # position in `tables.events` of row 0
        self.events = events
        self.tables = tables
        self.kept: dict[str, Any] = {}  # what views make of the span once and share

    def __len__(self) -> int:
        return self.events.height

    def column(self, name: str, rows: Int64 | None = None) -> Int64:
        """A whole-number column, or `rows` of it, -1 where null. Not for columns that can be below 0."""
        series = self.series(name) if rows is None else self.series(name).gather(rows)
        values: Int64 = series.cast(pl.Int64).fill_null(NONE).to_numpy()
        return values

    def series(self, name: str) -> pl.Series:
        """A column of `events`. Asking the frame itself would write out, for good, one that is null throughout."""
        return self.events.select(name).to_series()

    def rows_of(self, ids: pl.Series) -> Int64:
        """Rows of the span from ids of `events` (parent, frame, forward, and those of `links`)."""
        rows = ids.cast(pl.Int64).fill_null(NONE).to_numpy()
        return np.where(rows >= 0, rows - self._first_id, NONE)

    @cached_property
    def _first_id(self) -> int:
        return int(self.series("id")[0]) if len(self) else 0

    @cached_property
    def start_ns(self) -> Int64:
        return self.series("start_ns").to_numpy()

    @cached_property
    def duration_ns(self) -> Int64:
        """0 where an instant has none."""
        return self.series("duration_ns").fill_null(0).to_numpy()

    @property
    def end_ns(self) -> Int64:
        """Not kept: it is quickly made, and of a large trace as large as each of the two it is made of."""
        return self.start_ns + self.duration_ns

    def ends(self, rows: Int64 | Bools) -> Int64:
        return self.start_ns[rows] + self.duration_ns[rows]

    def times(self, rows: Int64 | Bools) -> Intervals:
        return union(self.start_ns[rows], self.ends(rows))

    @cached_property
    def parent(self) -> Int64:
        """Row of the innermost slice around each on its track."""
        return self.rows_of(self.series("parent"))

    @property
    def forward(self) -> Int64:
        """Of an operator that runs an autograd node the row of its forward operator. Not kept, as `end_ns`."""
        return self.rows_of(self.series("forward"))

    names, categories, tracks = _texts_of("name"), _texts_of("category"), _texts_of("track")
    is_function, is_kernel = _of_category(FUNCTION), _of_category(*KERNELS)
    is_copy, is_fill = _of_category(*COPIES), _of_category(*FILLS)

    @cached_property
    def is_operator(self) -> Bools:
        """Operators, without the annotations that traces of 2021 called so."""
        annotations = self.names.pick([is_annotation(name) for name in self.names.values])
        modern = self.categories.where(["cpu_op"])
        return self.categories.where(categories.OPERATORS) & (modern | ~annotations) & ~self.on_device

    @cached_property
    def is_runtime(self) -> Bools:
        return self.categories.pick([categories.is_runtime(name) for name in self.categories.values])

    @cached_property
    def has_stacks(self) -> bool:
        """Whether the trace holds Python functions, or operators with call stacks."""
        return bool(self.is_function.any()) or bool(self.series("call_stack").count())

    @cached_property
    def on_device(self) -> Bools:
        """Slices of a device's stream, without the ranges of the host that are copied there."""
        return self.series("stream").is_not_null().to_numpy() & ~self.categories.pick(
            [name in categories.OPERATORS or name.endswith("annotation") for name in self.categories.values]
        )

    def own(self, table: pl.DataFrame) -> pl.DataFrame:
        own = (pl.col("process") == self.ref.process) & (pl.col("trace") == self.ref.trace)
        # of a single trace the table itself: no second one of the same rows
        return table if table.select(own.fill_null(False).all()).item() else table.filter(own)

    @cached_property
    def links(self) -> pl.DataFrame:
        """Rows of `links` of this trace, with `event`, `launch`, `operator`, `frame`, `forward` as rows of the span."""
        own = self.own(self.tables.links)
        ids = ("event", "launch", "operator", "frame", "forward")
        return own.drop("process", "trace").with_columns(pl.Series(name, self.rows_of(own[name])) for name in ids)

    @cached_property
    def steps(self) -> pl.DataFrame:
        """(step, start_ns, end_ns) of the train and eval steps that lie in the trace, in order of time."""
        if not self.marked.is_empty():
            return self.marked.drop("begin")
        steps = self.tables.steps
        if not len(self) or steps.is_empty():
            return pl.DataFrame(schema={**_STEPS, "begin": pl.Int64})
        host = self.series("stream").is_null().to_numpy()
        starts = self.start_ns[host] if host.any() else self.start_ns
        ends = self.end_ns[host] if host.any() else self.end_ns
        middle = pl.col("start_ns") + pl.col("wall_ns") // 2
        return (
            steps.filter(
                (pl.col("process") == self.ref.process)
                & pl.col("in_window").fill_null(False)
                & middle.is_between(int(starts.min()), int(ends.max()))
            )
            .select("step", "start_ns", end_ns=pl.col("start_ns") + pl.col("wall_ns"))
            .sort("start_ns")
        )

    @cached_property
    def marked(self) -> pl.DataFrame:
        """`steps` as the trace of the script's own profiler marks them, of a recorded run; empty of other traces.

        Such a profiler starts and stops inside a step of the journal: one that it touches it did not record whole, and
        the last one holds what stopping and exporting took. While it records stacks nothing is journaled at all. A step
        has the number of the journal's that holds its middle, where there is one, else the mark's. `begin` is where
        that one begins.
        """
        own = self.own(self.tables.traces)
        steps = self.tables.steps
        known = steps.filter((pl.col("process") == self.ref.process) & pl.col("start_ns").is_not_null())
        if not own.height or own["owner"][0] != "user" or known.is_empty():
            return pl.DataFrame(schema={**_STEPS, "begin": pl.Int64})
        of_steps = pl.col("name").str.starts_with(MARK) & (pl.col("duration_ns") > 0)
        rows = trace_steps(self.events.lazy().filter(of_steps).select(MARK_COLUMNS).collect())
        start, wall, mark = (
            pl.Series([row[name] for row in rows], dtype=pl.Int64) for name in ("start_ns", "wall_ns", "step")
        )
        marks = pl.LazyFrame({"start_ns": start, "end_ns": start + wall, "middle": start + wall // 2, "mark": mark})
        journal = known.lazy().select("step", "wall_ns", begin="start_ns").sort("begin")
        inside = pl.col("middle") < pl.col("begin") + pl.col("wall_ns")
        found = (
            marks.sort("middle")
            .join_asof(journal, left_on="middle", right_on="begin")
            .with_columns(step=pl.when(inside).then("step"))
            .collect()
        )
        number = "mark" if found["step"].null_count() else "step"
        begin = pl.col("begin") if number == "step" else pl.lit(None, pl.Int64).alias("begin")
        return found.select(pl.col(number).alias("step"), "start_ns", "end_ns", begin).sort("start_ns")

    @property
    def step_numbers(self) -> Int64:
        """Of each row the number of the step it lies in, as in `steps`; `NONE` outside. Not kept, as `end_ns`."""
        if self.marked.is_empty():
            return self.column("step")
        starts, ends = (self.marked[name].to_numpy() for name in ("start_ns", "end_ns"))
        return np.append(self.marked["step"].to_numpy(), NONE)[window_at(starts, ends, self.start_ns)]

    @cached_property
    def engine_tracks(self) -> Bools:
        """By code of a track (the last for none), whether it is a thread of the autograd engine.

        Such a thread runs operators of the backward pass and holds neither Python functions nor call stacks.
        """
        count = len(self.tracks.values) + 1
        backward = (self.series("forward_thread") > 0).fill_null(False).to_numpy() & self.is_operator
        framed = self.is_function | self.series("call_stack").is_not_null().to_numpy()
        flags = [np.bincount(self.tracks.codes[rows] % count, minlength=count) > 0 for rows in (backward, framed)]
        return flags[0] & ~flags[1]

    @cached_property
    def metadata(self) -> dict[str, Any]:
        own = self.own(self.tables.traces)
        return json_object(own["metadata"][0]) if own.height else {}

    @cached_property
    def gpus(self) -> dict[int, GpuProperties]:
        listed = self.metadata.get("deviceProperties")
        found = [_gpu(item) for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        return {gpu.device: gpu for gpu in found}

    @cached_property
    def memory(self) -> pl.DataFrame:
        """In order of time; whose the rows are is the same for all."""
        own = self.own(self.tables.memory).drop("rank", "process", "trace", "owner")
        return own if own["time_ns"].is_sorted() else own.sort("time_ns", maintain_order=True)


class Base(Struct, frozen=True):
    """All spans, and what names the user's lines. `places` and `calls` are what was met so far: origins, and calls
    that their lines are of.
    """

    tables: Tables
    spans: tuple[Span, ...]
    code: UserCode
    lines: Lines
    places: list[Origin] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def any_frames(self) -> bool:
        return any(span.has_stacks for span in self.spans)

    def chosen(self, ref: SpanRef | None) -> list[Span]:
        """The span of that reference; all of them for None."""
        return [span for span in self.spans if ref in (None, span.ref)]


def spans(tables: Tables) -> tuple[Span, ...]:
    """The spans of all traces, in order of worker and number."""
    traces = (  # a lazy query leaves columns of one value as they are; their rows lie side by side
        tables.events.lazy()
        .group_by("process", "trace")
        .agg(pl.col("id").min().alias("first"), rows=pl.len())
        .sort("first")
        .collect()
    )
    refs = _refs(tables)
    found = []
    row = 0
    for process, trace, _, rows in traces.rows():
        if (process, trace) in refs:
            found.append(Span(refs[process, trace], row, tables.events.slice(row, rows), tables))
        row += rows
    return tuple(sorted(found, key=lambda span: (natural(span.ref.worker), span.ref.span)))


def texts(column: pl.Series) -> Texts:
    encoded = column.cast(pl.Categorical)
    codes = encoded.to_physical()
    # Polars' numbers are shared by all columns of the process and follow its history; ours follow the column alone.
    distinct = pl.DataFrame({"code": codes, "value": encoded}).unique("code", maintain_order=True).drop_nulls()
    known = distinct["code"].to_numpy()
    order = np.argsort(known).astype(np.int32)
    if len(order):
        found = order[np.searchsorted(known[order], codes.fill_null(known[0]).to_numpy())]
    else:
        found = np.zeros(len(codes), np.int32)
    found[codes.is_null().to_numpy()] = NONE
    return Texts(found, distinct["value"].cast(pl.String).to_list())


def _refs(tables: Tables) -> dict[tuple[str, str], SpanRef]:
    recorded = bool(tables.manifests) or tables.journal.height > 0
    rows = list(tables.traces.iter_rows(named=True))
    runs = {row["folder"] or "" for row in rows}
    workers: dict[str, list[dict[str, Any]]] = {}
    names = {row["process"]: row["process"] for row in rows} if recorded else _workers(rows)
    for row in rows:
        workers.setdefault(names[row["process"]], []).append(row)
    refs = {}
    for worker, traces in workers.items():
        traces.sort(key=lambda row: (int((_TIME_IN_NAME.search(row["trace"]) or ["", "0"])[1]), row["trace"]))
        for number, row in enumerate(traces, start=1):
            claimed = row["claimed_rank"] if row["claimed_rank"] is not None else row["rank"] or 0
            run = (row["folder"] or ".") if len(runs) > 1 and not recorded else ""
            refs[row["process"], row["trace"]] = SpanRef(worker, number, claimed, row["process"], row["trace"], run)
    return refs


def _workers(rows: list[dict[str, Any]]) -> dict[str, str]:
    """By process the shortest name that no other process has: of the file, of its whole worker, with its folder."""
    files = {row["process"]: row for row in reversed(rows)}
    folders = {process: row["folder"] or "" for process, row in files.items()}
    whole = {process: row["trace"].rsplit("/", 1)[-1] for process, row in files.items()}
    named = {process: name.split(".", 1)[0] for process, name in whole.items()}
    for process in _repeated({process: (folders[process], name) for process, name in named.items()}):
        named[process] = _WORKER_END.sub("", whole[process])
    for process in _repeated(named):
        named[process] = "/".join(part for part in (folders[process], named[process]) if part)
    for process in _repeated(named):
        named[process] = f"{process}/{named[process]}"
    return named


def _repeated(names: Mapping[str, object]) -> list[str]:
    """The keys whose value another key has as well."""
    counts = Counter(names.values())
    return [key for key, name in names.items() if counts[name] > 1]


def _gpu(item: dict[str, Any]) -> GpuProperties:
    major, minor = item.get("computeMajor"), item.get("computeMinor")
    return GpuProperties(
        device=integer(item.get("id")) or 0,
        name=item["name"] if isinstance(item.get("name"), str) and item["name"] else None,
        memory_bytes=integer(item.get("totalGlobalMem")),
        capability=f"{major}.{minor}" if integer(major) is not None and integer(minor) is not None else None,
        multiprocessors=integer(item.get("numSms")) or integer(item.get("multiProcessorCount")),
        max_threads_per_multiprocessor=integer(
            item.get("maxThreadsPerMultiprocessor") or item.get("maxThreadsPerMultiProcessor")
        ),
        warp_size=integer(item.get("warpSize")),
    )
