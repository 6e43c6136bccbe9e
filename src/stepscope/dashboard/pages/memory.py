"""Memory of one device in one recording: its curve, what stood at the peak, by line, by operator and block by block.

A recording is a trace with allocations, a snapshot of torch's allocator or a memory timeline. What the run's own
readings say of growth, of how near the limit memory came, and of retries stands below, whatever was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import memory_curves, memory_readings, traced
from stepscope.report.table_columns import SHOWN

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext
    from stepscope.dashboard.pages.memory_curves import Recording
    from stepscope.model.memory import MemoryBlock, MemoryLine, MemoryOperator, MemoryView, OutOfMemory

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
    return (views is None or views.memory is None) and not memory_readings.known(context)


def build(context: PageContext) -> list[Block]:
    """The page; raises `UsageError` for a scope that names no span."""
    views = context.run.analysis.views
    view = views.memory if views is not None else None
    if view is None:
        from stepscope.analyze.views.select import NO_TRACE

        why = NO_TRACE if views is None else views.absent.get("memory", NO_ALLOCATIONS)
        return [traced.absent(context, "memory", "Allocations", why), *memory_readings.made(context)]
    recordings = memory_curves.ordered(_of_scope(context, (*view.curves, *view.lines, *view.blocks)))
    if not recordings and not _of_scope(context, view.states):
        why = "nothing was recorded of the memory of this worker: choose another, or all"
        return [traced.absent(context, "memory", "Allocations", why), *memory_readings.made(context)]
    return [*_recorded(context, view, recordings), *memory_readings.made(context)]


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
    curve = next((each for each in view.curves if memory_curves.recording(each) == one), None)
    lines = [row for row in view.lines if memory_curves.recording(row) == one]
    operators = [row for row in view.operators if memory_curves.recording(row) == one]
    largest = [row for row in view.blocks if memory_curves.recording(row) == one]
    if curve is not None:
        yield memory_curves.figures(curve, label)
        yield from memory_curves.charts(curve, label)
        yield from memory_curves.peak_charts(context, curve, lines, operators)
    if lines:
        rows, bars = [_placed(row) for row in lines], ("at_peak_bytes", "allocated_bytes")
        table = traced.block(context, "memory-lines", rows, columns=_LINES, bars=bars, sort=_by_size(lines))
        for row in table["rows"]:
            row.setdefault("place", memory_curves.NO_LINE)
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

    return {**flatten(row), "name": row.name or memory_curves.NO_OPERATOR, "link": row.name}


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
