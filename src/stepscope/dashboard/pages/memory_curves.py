"""Pictures of one recording of memory: its curve, its figures, and what stood at its peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block, Help
from stepscope.dashboard.pages import traced
from stepscope.report.escape import plain

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext
    from stepscope.model.memory import MemoryBlock, MemoryCurve, MemoryLine, MemoryOperator

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
