"""Memory of one device in one recording: its curve, what stood at the peak, by line, by operator and block by block.

A recording is a trace with allocations, a snapshot of torch's allocator or a memory timeline. What the run's own
readings say of growth, of how near the limit memory came, and of retries stands below, whatever was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import asdict

from stepscope.analyze.views.select import NO_TRACE
from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, traced
from stepscope.model.counted import things
from stepscope.model.memory import MemoryBlock, MemoryCurve, MemoryLine, MemoryOperator, MemoryView
from stepscope.report import words
from stepscope.report.escape import plain
from stepscope.report.table import SHOWN, flatten


def readings(context: PageContext) -> Iterator[Block]:
    """The blocks; none without readings."""
    losses = context.run.analysis.memory_losses
    if losses is None:
        return
    peaks = [
        {**asdict(row), "limit_bytes": row.limit and row.limit.bytes, "limit_reason": row.limit and row.limit.reason}
        for row in losses.peaks
    ]
    growth = [asdict(row) for row in losses.growth]
    lines = [
        {**asdict(line), "place": asdict(line.place), "trace": row.lines_source}
        for row in losses.growth
        for line in row.lines
    ]
    for name, rows in (("memory-limits", peaks), ("memory-growth", growth), ("memory-growth-lines", lines)):
        yield from blocks.rows_table(context, name, rows)
    facts = losses.retries
    if facts is not None:
        of = f", rank {facts.rank}" if facts.rank is not None else ""
        yield blocks.figures(blocks.measures(facts, "retries"), f"Retries of the allocator on {facts.device}{of}")


HOST, UNKNOWN = "cpu", "unknown"
ORDER = "order"  # the clock of recordings without times
UNKNOWN_START = "the recording does not say what stood in memory when it began"
NO_LINE = "no line of yours"
NO_OPERATOR = "outside operators"
BEFORE = "before the recording"


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
    return Recording(row.source, row.worker, row.span, row.device)


def _charts(curve: MemoryCurve, label: str) -> Iterator[Block]:
    if not curve.times_ns:
        return
    # time since the first event, or numbers of events
    along = [at - (0 if curve.clock == ORDER else curve.times_ns[0]) for at in curve.times_ns]
    axis = {"x": ("event", "count")} if curve.clock == ORDER else {}
    level = "change since the start" if curve.relative else "allocated"
    parts = [(level, curve.allocated_bytes, "allocated"), ("reserved", curve.reserved_bytes, "reserved")]
    # the point of the peak, where the curve has one: thinned curves keep it
    peaks = [moment for time, moment in zip(curve.times_ns, along, strict=True) if time == curve.peak_time_ns][:1]
    notes = [f"The level is the change since the start: {UNKNOWN_START}."] if curve.relative else []
    if curve.clock == ORDER:
        notes.append("The events carry no times: they stand in their order.")
    yield blocks.drawn(
        "memory-curve",
        _sentence(curve),
        along,
        [part for part in parts if part[2] == "allocated" or any(value is not None for value in part[1])],
        title=f"Memory over time, {label}",
        y_min=None if curve.relative else 0,
        marks=[blocks.mark(at, at, "peak") for at in peaks],
        notes=notes,
        **axis,
    )
    if curve.by_category:
        named = {_words(name): (name.lower(), values) for name, values in curve.by_category.items()}
        yield blocks.drawn(
            "memory-categories",
            f"What is allocated, split into {', '.join(named)}.",
            along,
            [(name, values, role) for name, (role, values) in named.items()],
            title=f"Memory by category, {label}",
            **axis,
        )


def _sentence(curve: MemoryCurve) -> str:
    of = "" if curve.device == UNKNOWN else f" of {curve.device}"
    if curve.relative or curve.peak_allocated_bytes is None:
        return f"How allocated memory{of} changed over {things(curve.events, 'event')}."
    said = f"Allocated memory{of} peaks at {words.size(curve.peak_allocated_bytes)}"
    if curve.start_allocated_bytes is not None and curve.end_allocated_bytes is not None:
        ends = words.size(curve.start_allocated_bytes), words.size(curve.end_allocated_bytes)
        said += f", {ends[0]} at the start and {ends[1]} at the end"
    return f"{said}."


def _peak_charts(
    context: PageContext, curve: MemoryCurve, lines: Sequence[MemoryLine], operators: Sequence[MemoryOperator]
) -> Iterator[Block]:
    categories = [(_words(name), size) for name, size in (curve.peak_by_category or {}).items()]
    places = [
        (context.shorten(row.place.file, row.place.line) if row.place else NO_LINE, row.at_peak_bytes)
        for row in lines
        if row.at_peak_bytes
    ]
    named = [(row.name or NO_OPERATOR, row.at_peak_bytes) for row in operators if row.at_peak_bytes]
    for by, parts, record, key in (
        ("category", categories, "MemoryCurve", "peak_by_category"),
        ("line", places, "MemoryLine", "at_peak_bytes"),
        ("operator", named, "MemoryOperator", "at_peak_bytes"),
    ):
        if not parts:
            continue
        if by != "category" and curve.peak_before_bytes:
            parts.append((BEFORE, curve.peak_before_bytes))
        parts.sort(key=lambda part: -(part[1] or 0))
        top = parts[: traced.TOP]
        name, most = top[0]
        held = "was allocated before the recording" if name == BEFORE else f"is that of {name}"
        yield blocks.drawn(
            "memory-peak",
            f"The largest part of the peak, {words.size(most)}, {held}.",
            [part for part, _ in top],
            [("at the peak", [value for _, value in top], None)],
            id=f"memory-peak-{by}",
            title=f"What stood at the peak, by {by}",
            x=(by, "text"),
            of=(record, key),
            notes=[f"The {len(top)} largest of {len(parts)}."] if len(top) < len(parts) else [],
        )


def _words(name: str) -> str:
    return name.replace("_", " ").lower()


NO_ALLOCATIONS = "no trace holds allocations: record with profile_memory=True"
_FAILED = (*SHOWN["out-of-memory"].columns, ("stack", "stack"))


def empty(context: PageContext) -> bool:
    views, losses = context.run.analysis.views, context.run.analysis.memory_losses
    told = losses is not None and bool(losses.peaks or losses.growth or losses.retries)
    return (views is None or views.memory is None) and not told


def build(context: PageContext) -> list[Block]:
    """The page; raises `UsageError` for a scope that names no span."""
    views = context.run.analysis.views
    if views is not None and views.memory is not None:
        made = list(_recorded(context, views.memory))
        why = "nothing was recorded of the memory of this worker: choose another, or all"
    else:
        made, why = [], NO_TRACE if views is None else views.absent.get("memory", NO_ALLOCATIONS)
    return [*(made or [traced.absent(context, "memory", "Allocations", why)]), *readings(context)]


def _of_scope(context: PageContext, rows: Sequence[Any]) -> list[Any]:
    """Rows of the worker and span that are asked for. Files without worker count as workers of their own."""
    wanted = context.selection()
    return [
        row
        for row in rows
        if wanted.worker in (None, row.worker) and wanted.span in (None, getattr(row, "span", wanted.span))
    ]


def _recorded(context: PageContext, view: MemoryView) -> Iterator[Block]:
    found = dict.fromkeys(recording(row) for row in _of_scope(context, (*view.curves, *view.lines, *view.blocks)))
    recordings = sorted(found, key=lambda each: each.device == HOST)  # devices first, where memory is short
    states = _of_scope(context, view.states)
    if not recordings and not states:
        return
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
        yield traced.block(context, "memory", curves)
    # what the allocator held when snapshots were taken, and what failed
    if states:
        yield traced.block(context, "memory-states", states)
    failed = []
    for row in _of_scope(context, view.out_of_memory):
        stack = " < ".join(context.shorten(frame.file, frame.line) for frame in row.frames)
        failed.append({**flatten(row), "stack": stack or None})
    if failed:
        yield traced.block(context, "out-of-memory", failed, columns=_FAILED)
    # what must be known of the chosen recording, and of all of them
    others = tuple(each.prefix for each in recordings if each != one)
    yield from traced.paragraphs(note for note in view.notes if not note.startswith(others))


def _of_one(context: PageContext, view: MemoryView, one: Recording, label: str) -> Iterator[Block]:
    curve = next((each for each in view.curves if recording(each) == one), None)
    lines = [row for row in view.lines if recording(row) == one]
    operators = [row for row in view.operators if recording(row) == one]
    largest = [row for row in view.blocks if recording(row) == one]
    if curve is not None:
        peak = blocks.measures(curve, "memory-peak")
        known = ({**item, "missing": UNKNOWN_START} for item in blocks.measures(curve, "memory"))
        yield blocks.figures([*peak, *known], label)
        yield from _charts(curve, label)
        yield from _peak_charts(context, curve, lines, operators)
    if lines:
        rows = [{**flatten(row), "place_exact": row.exact} for row in lines]
        sizes = ("at_peak_bytes", "standing_bytes")  # the first that says anything
        by = next((key for key in sizes if any(row[key] for row in rows)), "allocated_bytes")
        table = traced.block(context, "memory-lines", rows, sort=by)
        for row in table["rows"]:
            row.setdefault("place", NO_LINE)
        yield table
    if operators:
        # what was allocated outside operators has no link
        rows = [{**flatten(row), "name": row.name or NO_OPERATOR, "link": row.name} for row in operators]
        yield traced.block(context, "memory-operators", rows)
    if largest:
        start = curve.times_ns[0] if curve is not None and curve.times_ns else None
        rows = [flatten(row) for row in largest]
        for row in rows:  # as people read them beside the curve
            for key in ("allocated_ns", "released_ns"):
                row[key] = None if row[key] is None or start is None else row[key] - start
        timed = any(row["allocated_ns"] is not None or row["released_ns"] is not None for row in rows)
        notes = ["Times count from the beginning of the curve."] if timed else []
        yield traced.block(context, "memory-blocks", rows, notes=notes)
