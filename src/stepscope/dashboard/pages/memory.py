"""Memory of one device in one recording: its curve, what stood at the peak, by line, by operator and block by block.

A recording is a trace with allocations, a snapshot of torch's allocator or a memory timeline. What the run's own
readings say of growth, of how near the limit memory came, and of retries stands below, whatever was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block, Help
from stepscope.dashboard.pages import traced
from stepscope.report.escape import plain
from stepscope.report.table import SHOWN

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext
    from stepscope.model.memory import (
        MemoryBlock,
        MemoryCurve,
        MemoryGrowth,
        MemoryLine,
        MemoryLosses,
        MemoryOperator,
        MemoryPeak,
        MemoryView,
        OutOfMemory,
        RetryFacts,
    )

_PEAKS = (
    ("rank", "rank", "count"),
    ("device", "device", "text"),
    ("allocated", "allocated_bytes", "bytes"),
    ("reserved", "reserved_bytes", "bytes"),
    ("limit", "limit_bytes", "bytes"),
    ("set by", "limit_reason", "text"),
    ("retries", "retries", "count"),
    ("failed", "out_of_memory", "count"),
    ("source", "source", "text"),
)
_GROWTH = (
    ("rank", "rank", "count"),
    ("device", "device", "text"),
    ("a step", "bytes_per_step", "bytes"),
    ("first", "early_bytes", "bytes"),
    ("last", "late_bytes", "bytes"),
    ("steps", "steps", "count"),
    ("readings", "points", "count"),
    ("room left", "room_bytes", "bytes"),
    ("steps left", "steps_left", "count"),
    ("time left", "seconds_left", "s"),
    ("source", "source", "text"),
)
_RETRIES = (
    ("Retries", "retries", "count"),
    ("Steps struck", "steps_struck", "count"),
    ("Steps", "steps", "count"),
    ("A struck step", "struck_ms", "ms"),
    ("Another", "usual_ms", "ms"),
    ("Lost a step", "lost_ms_per_step", "ms"),
)


def has_readings(context: PageContext) -> bool:
    """Whether there is anything to show."""
    losses = context.run.analysis.memory_losses
    return losses is not None and bool(losses.peaks or losses.growth or losses.retries)


def readings(context: PageContext) -> Iterator[Block]:
    """The blocks; none without readings."""
    losses = context.run.analysis.memory_losses
    if losses is None or not has_readings(context):
        return
    if losses.peaks:
        rows = [_limit_row(row) for row in losses.peaks]
        yield _table(context, "memory-limits", "Most memory held, and its limit", "MemoryPeak", _PEAKS, rows)
    if losses.growth:
        yield from _growth(context, losses)
    if losses.retries is not None:
        yield _retries(losses.retries)


def _limit_row(row: MemoryPeak) -> dict[str, Any]:
    limit = row.limit
    return {
        **_plain(row, _PEAKS),
        "limit_bytes": limit.bytes if limit is not None else None,
        "limit_reason": limit.reason if limit is not None else None,
    }


def _growth(context: PageContext, losses: MemoryLosses) -> Iterator[Block]:
    rows = [_plain(row, _GROWTH) for row in losses.growth]
    yield _table(context, "memory-growth", "Memory that grows from step to step", "MemoryGrowth", _GROWTH, rows)
    lines = [_line(context, row, number) for row in losses.growth for number in range(len(row.lines))]
    if not lines:
        return
    yield blocks.table(
        "memory-growth-lines",
        "Lines whose allocations stay",
        [
            blocks.column("place", "Line", place=True),
            blocks.column("operator", "Operator", "text"),
            *(
                blocks.column(key, label, unit, help=blocks.meaning("GrowthLine", key), bar=key == "bytes_per_step")
                for label, key, unit in (
                    ("A step", "bytes_per_step", "bytes"),
                    ("Blocks a step", "blocks_per_step", "number"),
                )
            ),
            blocks.column("trace", "Trace", "text"),
        ],
        lines,
        limit=context.limit,
        sorted_by="bytes_per_step",
    )


def _line(context: PageContext, row: MemoryGrowth, number: int) -> dict[str, Any]:
    found = row.lines[number]
    where = found.place
    return {
        "place": blocks.place(where.file, where.line, where.function, shown=context.shorten(where.file, where.line)),
        "operator": found.operator,
        "bytes_per_step": found.bytes_per_step,
        "blocks_per_step": found.blocks_per_step,
        "trace": row.lines_source,
    }


def _retries(facts: RetryFacts) -> Block:
    missing = "all or almost none of the steps are struck"
    items = [
        blocks.figure(label, getattr(facts, key), unit, help=blocks.meaning("RetryFacts", key), missing=missing)
        for label, key, unit in _RETRIES
    ]
    of = f", rank {facts.rank}" if facts.rank is not None else ""
    return blocks.figures(items, f"Retries of the allocator on {facts.device}{of}")


def _plain(row: Any, columns: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    return {key: getattr(row, key, None) for _, key, _ in columns}


def _table(
    context: PageContext,
    id: str,
    title: str,
    record: str,
    columns: Sequence[tuple[str, str, str]],
    rows: Sequence[Mapping[str, Any]],
) -> Block:
    """Columns that hold nothing are left out."""
    shown = [each for each in columns if any(row[each[1]] not in (None, "") for row in rows)]
    return blocks.table(
        id,
        title,
        [
            blocks.column(
                key,
                blocks.capital(label),
                unit,
                help=blocks.meaning("MemoryLimit", "bytes") if key == "limit_bytes" else blocks.meaning(record, key),
            )
            for label, key, unit in shown
        ],
        rows,
        limit=context.limit,
    )


HOST, UNKNOWN = "cpu", "unknown"
ORDER = "order"  # the clock of recordings without times
UNKNOWN_START = "the recording does not say what stood in memory when it began"
NO_LINE = "no line of yours"
NO_OPERATOR = "outside operators"
BEFORE = "before the recording"
SYNC = "memory"


class Recording(NamedTuple):
    """What curves, lines, operators and blocks are of: one device in one file."""

    source: str
    worker: str
    span: int
    device: str

    @property
    def key(self) -> str:
        """What names it in a link."""
        return plain(f"{self.source}:{self.worker}/span{self.span}:{self.device}")

    @property
    def prefix(self) -> str:
        """What notes on it begin with."""
        of = f"{self.worker}/span{self.span}" if self.source == "trace" else self.worker
        return f"{of}, {self.device}:"

    @property
    def label(self) -> str:
        """What names it for people."""
        of = f"{self.worker}, span {self.span}" if self.source == "trace" else self.worker
        return f"{self.device} ({of}, {self.source})"


def recording(row: MemoryCurve | MemoryLine | MemoryOperator | MemoryBlock) -> Recording:
    """What a row is of."""
    return Recording(row.source, row.worker, row.span, row.device)


def ordered(rows: Iterable[MemoryCurve | MemoryLine | MemoryBlock]) -> list[Recording]:
    """All of them, each once: devices first, where memory is short, then the host."""
    found = dict.fromkeys(recording(row) for row in rows)
    return sorted(found, key=lambda each: each.device == HOST)


def figures(curve: MemoryCurve, label: str) -> Block:
    """Peaks, limits, and what stood before and after, as far as it is known; `label` names the recording."""
    known = (
        ("Peak allocated", "peak_allocated_bytes"),
        ("Peak reserved", "peak_reserved_bytes"),
        ("Of the peak, from before the recording", "peak_before_bytes"),
        ("At the start", "start_allocated_bytes"),
        ("At the end", "end_allocated_bytes"),
        ("Memory of the device", "capacity_bytes"),
    )
    items = [
        blocks.figure(
            name, getattr(curve, field), "bytes", help=blocks.meaning("MemoryCurve", field), missing=UNKNOWN_START
        )
        for name, field in known
        if field == "peak_allocated_bytes" or getattr(curve, field) is not None
    ]
    return blocks.figures(items, label)


def charts(curve: MemoryCurve, label: str) -> Iterator[Block]:
    """Allocated and reserved bytes over time; and by category, where a timeline tells."""
    if not curve.times_ns:
        return
    along = _along(curve)
    level = "change since the start" if curve.relative else "allocated"
    parts = [blocks.series(level, "bytes", curve.allocated_bytes, role="allocated")]
    if any(value is not None for value in curve.reserved_bytes):
        parts.append(blocks.series("reserved", "bytes", curve.reserved_bytes, role="reserved"))
    marks = []
    at = _peak(curve)
    if at is not None:
        marks.append(blocks.mark(along[2][at], along[2][at], "peak"))
    notes = [f"The level is the change since the start: {UNKNOWN_START}."] if curve.relative else []
    if curve.clock == ORDER:
        notes.append("The events carry no times: they stand in their order.")
    yield blocks.chart(
        "memory-curve",
        f"Memory over time, {label}",
        "line",
        sentence=_sentence(curve),
        x=along,
        y=("memory", "bytes"),
        y_min=None if curve.relative else 0,
        series=parts,
        marks=marks,
        help=blocks.meaning("MemoryCurve", "allocated_bytes"),
        notes=notes,
        sync=SYNC,
    )
    if curve.by_category:
        yield blocks.chart(
            "memory-categories",
            f"Memory by category, {label}",
            "stacked_area",
            sentence=f"What is allocated, split into {', '.join(map(_words, curve.by_category))}.",
            x=along,
            y=("allocated", "bytes"),
            y_min=0,
            series=[
                blocks.series(_words(name), "bytes", values, role=name.lower())
                for name, values in curve.by_category.items()
            ],
            help=blocks.meaning("MemoryCurve", "by_category"),
            sync=SYNC,
        )


def _along(curve: MemoryCurve) -> tuple[str, str, list[int]]:
    """The x axis: time since the first event, or numbers of events."""
    first = curve.times_ns[0]
    if curve.clock == ORDER:
        return "event", "count", list(curve.times_ns)
    return "since the start", "ns", [at - first for at in curve.times_ns]


def _peak(curve: MemoryCurve) -> int | None:
    """The point of the peak; None where the curve has none. Thinned curves keep it."""
    if curve.peak_time_ns is None or curve.peak_time_ns not in curve.times_ns:
        return None
    return curve.times_ns.index(curve.peak_time_ns)


def _sentence(curve: MemoryCurve) -> str:
    from stepscope.report import words

    of = "" if curve.device == UNKNOWN else f" of {curve.device}"
    if curve.relative or curve.peak_allocated_bytes is None:
        return f"How allocated memory{of} changed over {words.count(curve.events)} events."
    said = f"Allocated memory{of} peaks at {words.size(curve.peak_allocated_bytes)}"
    if curve.start_allocated_bytes is not None and curve.end_allocated_bytes is not None:
        ends = words.size(curve.start_allocated_bytes), words.size(curve.end_allocated_bytes)
        said += f", {ends[0]} at the start and {ends[1]} at the end"
    return f"{said}."


# ---- the peak --------------------------------------------------------------------------------------------------------


def peak_charts(
    context: PageContext, curve: MemoryCurve, lines: Sequence[MemoryLine], operators: Sequence[MemoryOperator]
) -> Iterator[Block]:
    """What stood in memory at the peak: by category, by line, by operator, as far as the recording tells."""
    from stepscope.report import words

    if curve.peak_by_category:
        parts = sorted(((_words(name), size) for name, size in curve.peak_by_category.items()), key=_largest)
        yield _bars("category", parts, words.size, blocks.meaning("MemoryCurve", "peak_by_category"))
    earlier = [(BEFORE, curve.peak_before_bytes)] if curve.peak_before_bytes else []
    by_line = [
        (context.shorten(row.place.file, row.place.line) if row.place else NO_LINE, row.at_peak_bytes)
        for row in lines
        if row.at_peak_bytes
    ]
    if by_line:
        parts = sorted([*by_line, *earlier], key=_largest)
        yield _bars("line", parts, words.size, blocks.meaning("MemoryLine", "at_peak_bytes"))
    by_operator = [(row.name or NO_OPERATOR, row.at_peak_bytes) for row in operators if row.at_peak_bytes]
    if by_operator:
        parts = sorted([*by_operator, *earlier], key=_largest)
        yield _bars("operator", parts, words.size, blocks.meaning("MemoryOperator", "at_peak_bytes"))


def _largest(part: tuple[str, int | None]) -> int:
    return -(part[1] or 0)


def _bars(
    by: str,
    parts: Sequence[tuple[str, int | None]],
    size: Callable[[float | None], str],
    help: Help | None,
) -> Block:
    """The largest of what stood at the peak."""
    top = parts[: traced.TOP]
    name, most = top[0]
    notes = [f"The {len(top)} largest of {len(parts)}."] if len(top) < len(parts) else []
    held = "was allocated before the recording" if name == BEFORE else f"is that of {name}"
    return blocks.chart(
        f"memory-peak-{by}",
        f"What stood at the peak, by {by}",
        "bars",
        sentence=f"The largest part of the peak, {size(most)}, {held}.",
        x=(by, "text", [part for part, _ in top]),
        y=("at the peak", "bytes"),
        y_min=0,
        series=[blocks.series("at the peak", "bytes", [value for _, value in top])],
        help=help,
        notes=notes,
    )


def _words(name: str) -> str:
    return name.replace("_", " ").lower()


NO_ALLOCATIONS = "no trace holds allocations: record with profile_memory=True"
_LINES = (
    ("line", "file"),
    ("device", "device"),
    ("allocations", "allocations"),
    ("allocated", "allocated_bytes"),
    ("at the peak", "at_peak_bytes"),
    ("not released", "unreleased_bytes"),
    ("in the snapshot", "standing_bytes"),
)
_OPERATORS = (
    ("operator", "name"),
    ("device", "device"),
    ("calls", "calls"),
    ("allocations", "allocations"),
    ("allocated, self", "self_allocated_bytes"),
    ("allocated, total", "total_allocated_bytes"),
    ("increase, self", "self_increase_bytes"),
    ("increase, total", "total_increase_bytes"),
    ("at the peak", "at_peak_bytes"),
)
_BLOCKS = (
    ("size", "bytes"),
    ("device", "device"),
    ("allocated at", "allocated_ns"),
    ("released at", "released_ns"),
    ("operator", "operator"),
    ("category", "category"),
    ("at the peak", "at_peak"),
    ("line", "file"),
)
_FAILED = (*SHOWN["out-of-memory"].columns, ("stack", "stack"))


def empty(context: PageContext) -> bool:
    """Whether neither a recording nor the run's readings tell of memory."""
    views = context.run.analysis.views
    return (views is None or views.memory is None) and not has_readings(context)


def build(context: PageContext) -> list[Block]:
    """The page; raises `UsageError` for a scope that names no span."""
    views = context.run.analysis.views
    view = views.memory if views is not None else None
    if view is None:
        from stepscope.analyze.views.select import NO_TRACE

        why = NO_TRACE if views is None else views.absent.get("memory", NO_ALLOCATIONS)
        return [traced.absent(context, "memory", "Allocations", why), *readings(context)]
    recordings = ordered(_of_scope(context, (*view.curves, *view.lines, *view.blocks)))
    if not recordings and not _of_scope(context, view.states):
        why = "nothing was recorded of the memory of this worker: choose another, or all"
        return [traced.absent(context, "memory", "Allocations", why), *readings(context)]
    return [*_recorded(context, view, recordings), *readings(context)]


def _of_scope(context: PageContext, rows: Sequence[Any]) -> list[Any]:
    """Rows of the worker and span that are asked for. Files without worker count as workers of their own."""
    wanted = context.selection()
    return [
        row
        for row in rows
        if wanted.worker in (None, row.worker) and wanted.span in (None, getattr(row, "span", wanted.span))
    ]


def _recorded(context: PageContext, view: MemoryView, recordings: Sequence[Recording]) -> Iterator[Block]:
    """The chosen recording, then what is of all of them."""
    one: Recording | None = None
    if recordings:
        by_key = {each.key: each for each in recordings}
        one = by_key[context.choice("recording", list(by_key))]
        several = len({each[:-1] for each in recordings}) > 1
        options = [(each.key, each.label if several else each.device) for each in recordings]
        yield from traced.choice(context, "Recording", "recording", one.key, options)
        yield from _of_one(context, view, one, one.label if several else one.device)
    curves = _of_scope(context, view.curves)
    if len(curves) > 1:
        yield traced.block(context, "memory", curves, title="All recordings")
    yield from _snapshots(context, view)
    yield from traced.paragraphs(_notes(view, recordings, one))


def _notes(view: MemoryView, recordings: Sequence[Recording], one: Recording | None) -> list[str]:
    """What must be known of the chosen recording, and of all of them."""
    others = tuple(each.prefix for each in recordings if each != one)
    return [note for note in view.notes if not note.startswith(others)]


def _of_one(context: PageContext, view: MemoryView, one: Recording, label: str) -> Iterator[Block]:
    """The curve of one recording, what stood at its peak, and its tables."""
    curve = next((each for each in view.curves if recording(each) == one), None)
    lines = [row for row in view.lines if recording(row) == one]
    operators = [row for row in view.operators if recording(row) == one]
    largest = [row for row in view.blocks if recording(row) == one]
    if curve is not None:
        yield figures(curve, label)
        yield from charts(curve, label)
        yield from peak_charts(context, curve, lines, operators)
    if lines:
        rows, bars = [_placed(row) for row in lines], ("at_peak_bytes", "allocated_bytes")
        table = traced.block(context, "memory-lines", rows, columns=_LINES, bars=bars, sort=_by_size(lines))
        for row in table["rows"]:
            row.setdefault("place", NO_LINE)
        yield table
    if operators:
        bars = ("self_allocated_bytes", "at_peak_bytes")
        link = {"name": blocks.cell_link("operators", "operator", "link")}
        rows = [_named(row) for row in operators]
        yield traced.block(context, "memory-operators", rows, columns=_OPERATORS, bars=bars, links=link)
    if largest:
        start = curve.times_ns[0] if curve is not None and curve.times_ns else None
        rows = [_since(row, start) for row in largest]
        timed = any(row["allocated_ns"] is not None or row["released_ns"] is not None for row in rows)
        notes = ["Times count from the beginning of the curve."] if timed else []
        yield traced.block(context, "memory-blocks", rows, columns=_BLOCKS, bars=("bytes",), notes=notes)


def _by_size(lines: Sequence[MemoryLine]) -> str:
    """The first column that says anything."""
    for key in ("at_peak_bytes", "standing_bytes"):
        if any(getattr(row, key) for row in lines):
            return key
    return "allocated_bytes"


def _named(row: MemoryOperator) -> dict[str, Any]:
    """An operator's row; what was allocated outside operators has no link."""
    from stepscope.report.table import flatten

    return {**flatten(row), "name": row.name or NO_OPERATOR, "link": row.name}


def _placed(row: MemoryLine) -> dict[str, Any]:
    """A line's row with the word of the tables for how sure its line is."""
    from stepscope.report.table import flatten

    return {**flatten(row), "place_exact": row.exact}


def _since(row: MemoryBlock, start_ns: int | None) -> dict[str, Any]:
    """A block with its times as people read them beside the curve; without a curve none."""
    from stepscope.report.table import flatten

    times = {"allocated_ns": row.allocated_ns, "released_ns": row.released_ns}
    since = {key: None if ns is None or start_ns is None else ns - start_ns for key, ns in times.items()}
    return {**flatten(row), **since}


def _snapshots(context: PageContext, view: MemoryView) -> Iterator[Block]:
    """What the allocator held when snapshots were taken, and what failed."""
    states = _of_scope(context, view.states)
    if states:
        yield traced.block(context, "memory-states", states, bars=("reserved_bytes",))
    failed = _of_scope(context, view.out_of_memory)
    if failed:
        rows = [_failed(context, row) for row in failed]
        yield traced.block(context, "out-of-memory", rows, columns=_FAILED)


def _failed(context: PageContext, row: OutOfMemory) -> dict[str, Any]:
    from stepscope.report.table import flatten

    stack = " < ".join(context.shorten(frame.file, frame.line) for frame in row.frames)
    return {**flatten(row), "stack": stack or None}
