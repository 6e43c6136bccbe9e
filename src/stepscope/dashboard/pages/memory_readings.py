"""What the run's readings of memory say: peaks beside limits, growth from step to step, retries of the allocator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import traced

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext
    from stepscope.model.memory import MemoryGrowth, MemoryLosses, MemoryPeak, RetryFacts

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


def known(context: PageContext) -> bool:
    """Whether there is anything to show."""
    losses = context.run.analysis.memory_losses
    return losses is not None and bool(losses.peaks or losses.growth or losses.retries)


def made(context: PageContext) -> Iterator[Block]:
    """The blocks; none without readings."""
    losses = context.run.analysis.memory_losses
    if losses is None or not known(context):
        return
    if losses.peaks:
        rows = [_peak(row) for row in losses.peaks]
        yield _table(context, "memory-limits", "Most memory held, and its limit", "MemoryPeak", _PEAKS, rows)
    if losses.growth:
        yield from _growth(context, losses)
    if losses.retries is not None:
        yield _retries(losses.retries)


def _peak(row: MemoryPeak) -> dict[str, Any]:
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
                traced.heading(label),
                unit,
                help=blocks.meaning("MemoryLimit", "bytes") if key == "limit_bytes" else blocks.meaning(record, key),
            )
            for label, key, unit in shown
        ],
        rows,
        limit=context.limit,
    )
