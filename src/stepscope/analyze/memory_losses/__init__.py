"""What memory may cost a run: steady growth and its lines, peaks below the limit that holds, retries.

`readings` are the journal's, between two steps; `traced` is what traces with allocations say. Where both speak of a
process, the readings decide whether something grows, because they see the whole run, and the trace tells the lines.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.memory_losses import limits
from stepscope.analyze.memory_losses.growth import Trend, trend
from stepscope.analyze.memory_losses.readings import HOST, Readings, readings
from stepscope.analyze.memory_losses.retries import retries
from stepscope.analyze.memory_losses.traced import TracedGrowth, traced
from stepscope.model.memory import MemoryGrowth, MemoryLimit, MemoryLosses, MemoryPeak, MemoryView
from stepscope.tables.schema import Tables

__all__ = ["facts"]

_Key = tuple[str, str]  # process, device


def facts(context: Context, view: MemoryView | None) -> MemoryLosses | None:
    """None where neither the journal nor a trace tells of memory.

    Args:
        view: the memory of the same traces and recordings, whose peaks are taken from it.
    """
    tables, labelled = context.tables, context.labelled
    logs = readings(tables, labelled)
    traces = tuple(traced(context.base))
    peaks = (*_logged_peaks(tables, logs), *_traced_peaks(view))
    if not (logs or traces or peaks):
        return None
    trends = {
        (own.process, device): found
        for own in logs
        for device in (HOST, *own.devices())
        if (found := trend(own.of(device))) is not None
    }
    growing = [*_logged(tables, logs, trends, traces), *_traced(traces, trends)]
    return MemoryLosses(
        logged=bool(trends),
        traced=bool(traces),
        device_readings=any(own.devices() for own in logs),
        growth=tuple(sorted(growing, key=lambda one: (one.device, -one.bytes_per_step, one.rank or 0))),
        peaks=peaks,
        retries=retries(logs, labelled),
    )


def _logged(
    tables: Tables, logs: tuple[Readings, ...], trends: dict[_Key, Trend], traces: tuple[TracedGrowth, ...]
) -> Iterator[MemoryGrowth]:
    """What grows by the journal."""
    lines = {(one.process, one.device): one for one in traces if one.lines}
    fractions = limits.fractions(tables)
    hosts = {rank.process: rank.host for rank in tables.ranks}
    for own in logs:
        for device in (HOST, *own.devices()):
            found = trends.get((own.process, device))
            if found is None or not found.rising:
                continue
            if device == HOST:
                limit = limits.of_host(tables, hosts.get(own.process))
                beside = [log for log in logs if hosts.get(log.process) == hosts.get(own.process)]
            else:
                limit = limits.of_device(own, device, fractions.get(own.process))
                beside = [own]
            held = sum(_last(log, device) for log in beside)
            speed = sum(_speed(trends.get((log.process, device))) for log in beside)
            room = max(0.0, limit.bytes - held) if limit is not None else None
            seconds = room / speed if room is not None and speed > 0 else None
            per_second = (found.last_step - found.first_step) / found.seconds if found.seconds > 0 else None
            told = lines.get((own.process, device))
            yield MemoryGrowth(
                rank=own.rank,
                device=device,
                points=found.readings,
                steps=found.last_step - found.first_step,
                seconds=found.seconds,
                early_bytes=found.early_bytes,
                late_bytes=found.late_bytes,
                bytes_per_step=found.bytes_per_step,
                limit=limit,
                room_bytes=room,
                steps_left=seconds * per_second if seconds is not None and per_second is not None else None,
                seconds_left=seconds,
                lines=told.lines if told is not None else (),
                source=f"{own.process}/events.jsonl",
                lines_source=told.trace if told is not None else "",
                traced=False,
            )


def _last(own: Readings, device: str) -> float:
    rows = own.of(device)
    return float(rows["bytes"][-1]) if rows.height else 0.0


def _speed(found: Trend | None) -> float:
    """Growth per second of what grows steadily."""
    if found is None or not found.rising or found.seconds <= 0:
        return 0.0
    return (found.late_bytes - found.early_bytes) / found.seconds


def _traced(traces: tuple[TracedGrowth, ...], trends: dict[_Key, Trend]) -> Iterator[MemoryGrowth]:
    """What grows in traces of processes whose journal tells too little to judge."""
    for one in traces:
        if not one.rising or not one.lines or (one.process, one.device) in trends:
            continue
        limit, room = None, None
        if one.capacity_bytes is not None:
            limit = MemoryLimit(one.capacity_bytes, limits.device_reason(one.device_name), one.capacity_bytes)
            room = max(0.0, one.capacity_bytes - one.late_bytes) if one.late_bytes is not None else None
        steps_left = room / one.bytes_per_step if room is not None else None
        per_step = one.seconds / (one.steps - 1)
        yield MemoryGrowth(
            rank=one.rank,
            device=one.device,
            points=one.steps,
            steps=one.steps,
            seconds=one.seconds,
            early_bytes=one.early_bytes if one.early_bytes is not None else 0.0,
            late_bytes=one.late_bytes if one.late_bytes is not None else one.bytes_per_step * (one.steps - 1),
            bytes_per_step=one.bytes_per_step,
            limit=limit,
            room_bytes=room,
            steps_left=steps_left,
            seconds_left=steps_left * per_step if steps_left is not None else None,
            lines=one.lines,
            source=one.trace,
            lines_source=one.trace,
            traced=True,
        )


def _logged_peaks(tables: Tables, logs: tuple[Readings, ...]) -> Iterator[MemoryPeak]:
    """Of each device of each process, by the allocator's own account of its peaks."""
    fractions = limits.fractions(tables)
    for own in logs:
        for device in own.devices():
            rows = own.all_rows.filter(pl.col("device") == device)
            allocated = rows["peak_allocated_bytes"].drop_nulls().sort()
            reserved = rows["peak_reserved_bytes"].drop_nulls().sort()
            if not len(allocated):
                continue
            yield MemoryPeak(
                rank=own.rank,
                device=device,
                allocated_bytes=int(allocated[-1]),
                reserved_bytes=int(reserved[-1]) if len(reserved) else None,
                limit=limits.of_device(own, device, fractions.get(own.process)),
                retries=_count(rows["retries"]),
                out_of_memory=_count(rows["out_of_memory"]),
                source=f"{own.process}/events.jsonl",
            )


def _count(column: pl.Series) -> int | None:
    values = column.drop_nulls().sort()
    return int(values[-1]) if len(values) else None


def _traced_peaks(view: MemoryView | None) -> Iterator[MemoryPeak]:
    """Of each device of each trace or recording that tells its peak."""
    for curve in view.curves if view is not None else ():
        if curve.device == HOST or curve.peak_allocated_bytes is None:
            continue
        size = curve.capacity_bytes
        yield MemoryPeak(
            rank=None,
            device=curve.device,
            allocated_bytes=curve.peak_allocated_bytes,
            reserved_bytes=curve.peak_reserved_bytes,
            limit=MemoryLimit(size, "device", size) if size is not None else None,
            retries=None,
            out_of_memory=None,
            source=f"{curve.worker}, span {curve.span}" if curve.source == "trace" else curve.worker,
        )
