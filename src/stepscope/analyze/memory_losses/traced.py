"""What a trace with allocations says of growth: levels at the ends of its steps, and the lines whose blocks survive.

A block survives when it stands at the end of the step after the one that allocated it: gradients and prefetched batches
may live that long. A line leaks when it leaves such blocks in every step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from stepscope.analyze.views import trace_memory
from stepscope.analyze.views.memory_blocks import DeviceMemory, Spots
from stepscope.engine.spans import Base, Span
from stepscope.model.memory import GrowthLine
from stepscope.tables.arrays import Int64

MIN_STEPS = 3  # two of them tell what survives their next; fewer tell nothing
MAX_LINES = 5


class TracedGrowth(Struct, frozen=True):
    """One device in one trace. `rising`: at the end of each step more stood than at the end of the step before."""

    process: str
    rank: int
    trace: str
    device: str
    steps: int
    seconds: float
    early_bytes: float | None  # None where the trace does not say what stood when it began
    late_bytes: float | None
    bytes_per_step: float  # the median rise
    rising: bool
    lines: tuple[GrowthLine, ...]
    capacity_bytes: int | None
    device_name: str | None


def traced(base: Base) -> Iterator[TracedGrowth]:
    """One for each device of each trace with allocations and steps enough."""
    for span in base.spans:
        if span.memory.height and span.steps.height >= MIN_STEPS:
            yield from _span(base, span)


def _span(base: Base, span: Span) -> Iterator[TracedGrowth]:
    ends = span.steps["end_ns"].to_numpy()
    for found in trace_memory.allocations(base, span):
        device = found.device
        positions = np.searchsorted(np.maximum.accumulate(device.times_ns), ends, side="right")
        if not positions[-1]:
            continue
        levels = device.levels[positions]
        rises = np.diff(levels)
        gpu = span.gpus.get(trace_memory.number(device.device)) if device.device != "cpu" else None
        yield TracedGrowth(
            process=span.ref.process,
            rank=span.ref.rank,
            trace=span.ref.trace,
            device=device.device,
            steps=len(ends),
            seconds=float(ends[-1] - ends[0]) / 1e9,
            early_bytes=None if device.relative else float(levels[0]),
            late_bytes=None if device.relative else float(levels[-1]),
            bytes_per_step=float(np.median(rises)),
            rising=bool((rises > 0).all()),
            lines=_lines(span, device, found.spots, found.operator),
            capacity_bytes=device.capacity_bytes,
            device_name=gpu.name if gpu is not None else None,
        )


def _lines(span: Span, device: DeviceMemory, found: Spots, operator: Int64) -> tuple[GrowthLine, ...]:
    """Lines that leave blocks in every step but the last, the most bytes first."""
    pairs = device.pairs
    if pairs is None or not found.places:
        return ()
    starts, ends = (span.steps[name].to_numpy() for name in ("start_ns", "end_ns"))
    event = pairs.allocation
    times = device.times_ns[event]
    step = np.searchsorted(starts, times, side="right") - 1
    inside = (step >= 0) & (step < len(starts) - 1) & (times <= ends[np.maximum(step, 0)]) & (found.numbers[event] >= 0)
    released = np.append(device.times_ns, np.iinfo(np.int64).max)[np.minimum(pairs.release, len(device.times_ns))]
    survives = inside & (released > ends[np.minimum(step + 1, len(ends) - 1)])
    event, step = event[survives], step[survives]
    lines = []
    for number in np.unique(found.numbers[event]).tolist():
        own = found.numbers[event] == number
        sizes = np.bincount(step[own], weights=device.sizes[event[own]], minlength=len(starts) - 1)
        if not (sizes > 0).all():
            continue
        blocks = np.bincount(step[own], minlength=len(starts) - 1)
        lines.append(
            GrowthLine(
                place=found.places[number][0],
                operator=_name(span, operator[event[own]], device.sizes[event[own]]),
                bytes_per_step=float(np.median(sizes)),
                blocks_per_step=float(np.median(blocks)),
            )
        )
    lines.sort(key=lambda line: (-line.bytes_per_step, line.place.file, line.place.line or 0))
    return tuple(lines[:MAX_LINES])


def _name(span: Span, rows: Int64, sizes: Int64) -> str | None:
    """The operator that allocated most; None where none did."""
    known = rows >= 0
    if not known.any():
        return None
    codes = span.names.codes[rows[known]]
    weights = np.bincount(codes, weights=sizes[known])
    return span.names.values[int(weights.argmax())]
