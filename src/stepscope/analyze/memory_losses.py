"""What memory may cost a run: steady growth and its lines, peaks below the limit that holds, retries.

`memory_readings` are the journal's, between two steps; `traced_growth` is what traces with allocations say. Where both
speak of a process, the readings decide whether something grows, because they see the whole run, and the trace tells the
lines.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.step_times import theil_sen
from stepscope.analyze.views import allocated_memory
from stepscope.analyze.views.allocated_memory import DeviceMemory
from stepscope.engine.journal import event_data, mean, place_of
from stepscope.engine.spans import Base, Span
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import Place
from stepscope.model.memory import (
    GrowthLine,
    MemoryGrowth,
    MemoryLimit,
    MemoryLosses,
    MemoryPeak,
    MemoryView,
    RetryFacts,
)
from stepscope.read.text import integer
from stepscope.tables.arrays import NONE, unique
from stepscope.tables.schema import Tables

_Key = tuple[str, str]  # process, device
_Fractions = dict[str, tuple[float, Place | None]]  # of the device, that each process set, and where


def facts(context: Context, view: MemoryView | None) -> MemoryLosses | None:
    """None where neither the journal nor a trace tells of memory.

    Args:
        view: the memory of the same traces and recordings, whose peaks are taken from it.
    """
    tables, labelled = context.tables, context.labelled
    logs, set_fractions = memory_readings(tables, labelled), fractions(tables)
    trends = {(own.process, device): trend(own, device) for own in logs for device in (HOST, *own.devices())}
    known = {key: found for key, found in trends.items() if found is not None}
    traces = tuple(traced_growth(context.base, {key for key, (_, rising) in known.items() if rising}))
    peaks = tuple(_peaks(logs, set_fractions, view))
    if not (logs or traces or peaks):
        return None
    lines = {key: one for key, one, _ in traces if one.lines}
    growing = [*_growth_by_journal(tables, logs, known, set_fractions, lines)]
    # what grows in traces of processes whose journal tells too little to judge
    growing += [one for key, one, rising in traces if rising and one.lines and key not in known]
    return MemoryLosses(
        logged=bool(known),
        traced=bool(traces),
        device_readings=any(own.devices() for own in logs),
        growth=tuple(sorted(growing, key=lambda one: (one.device, -one.bytes_per_step, one.rank or 0))),
        peaks=peaks,
        retries=retries(logs, labelled),
    )


def _growth_by_journal(
    tables: Tables,
    logs: tuple[MemoryReadings, ...],
    trends: dict[_Key, tuple[MemoryGrowth, bool]],
    set_fractions: _Fractions,
    lines: dict[_Key, MemoryGrowth],
) -> Iterator[MemoryGrowth]:
    """What grows by the journal; its `lines` are told by traces."""
    hosts = {rank.process: rank.host for rank in tables.ranks}
    own_of = {own.process: own for own in logs}
    for (process, device), (found, rising) in trends.items():
        if not rising:
            continue
        own, host = own_of[process], hosts.get(process)
        if device == HOST:
            limit, beside = host_limit(tables, host), [log for log in logs if hosts.get(log.process) == host]
        else:
            limit, beside = device_limit(own, device, set_fractions), [own]
        held = sum(float(rows["bytes"][-1]) for log in beside if (rows := log.of(device)).height)
        together = [trends[log.process, device] for log in beside if (log.process, device) in trends]
        speed = sum((one.late_bytes - one.early_bytes) / one.seconds for one, up in together if up and one.seconds > 0)
        room = max(0.0, limit.bytes - held) if limit is not None else None
        seconds = room / speed if room is not None and speed > 0 else None
        told = lines.get((process, device))
        yield replace(
            found,
            limit=limit,
            room_bytes=room,
            steps_left=seconds * found.steps / found.seconds if seconds is not None and found.seconds > 0 else None,
            seconds_left=seconds,
            lines=told.lines if told is not None else (),
            lines_source=told.source if told is not None else "",
        )


def _peaks(
    logs: tuple[MemoryReadings, ...], set_fractions: _Fractions, view: MemoryView | None
) -> Iterator[MemoryPeak]:
    """Of each device of each process, by the allocator's own account; and of each trace or recording that tells one."""
    for own in logs:
        for device in own.devices():
            rows = own.all_rows.filter(pl.col("device") == device)
            names = ("peak_allocated_bytes", "peak_reserved_bytes", "retries", "out_of_memory")
            allocated, reserved, retried, failed = (max(rows[name].drop_nulls(), default=None) for name in names)
            if allocated is not None:
                limit = device_limit(own, device, set_fractions)
                source = f"{own.process}/events.jsonl"
                yield MemoryPeak(own.rank, device, allocated, reserved, limit, retried, failed, source)
    for curve in view.curves if view is not None else ():
        if curve.device != HOST and curve.peak_allocated_bytes is not None:
            size = curve.capacity_bytes
            limit = MemoryLimit(size, "device", size) if size is not None else None
            source = f"{curve.worker}, span {curve.span}" if curve.source == "trace" else curve.worker
            peaks = curve.peak_allocated_bytes, curve.peak_reserved_bytes
            yield MemoryPeak(None, curve.device, *peaks, limit, None, None, source)


PARTS = 5
MIN_READINGS = 10  # two in each part
POINTS = 240  # of the line; its pairs fit into memory at any length
FAIR_SHARE = 1 / 3  # of the mean rise from part to part: what each must rise by; a jump alone leaves the others flat


def trend(own: MemoryReadings, device: str) -> tuple[MemoryGrowth, bool] | None:
    """The straight line through readings of a device, as levels at the first and the last of them, and whether they
    rise; None with too few readings."""
    rows = own.of(device)
    if rows.height < MIN_READINGS:
        return None
    steps, values, times = (rows[name].to_numpy() for name in ("step", "bytes", "time_ns"))
    kept = unique(np.linspace(0, rows.height - 1, min(POINTS, rows.height)).astype(np.int64))
    early, late = theil_sen(steps[kept].astype(np.float64), values[kept].astype(np.float64))
    # every part, of equally many steps, lies above the one before by a fair share of the mean rise
    part = np.searchsorted(np.linspace(steps[0], steps[-1] + 1, PARTS + 1), steps, side="right") - 1
    rises = np.diff([np.median(values[part == number]) for number in unique(part)])
    rising = len(rises) == PARTS - 1 and rises.sum() > 0 and (rises >= FAIR_SHARE * rises.mean()).all()
    between = int(steps[-1] - steps[0])
    growth = MemoryGrowth(
        rank=own.rank,
        device=device,
        points=rows.height,
        steps=between,
        seconds=float(times[-1] - times[0]) / 1e9,
        early_bytes=early,
        late_bytes=late,
        bytes_per_step=(late - early) / max(1, between),
        limit=None,
        room_bytes=None,
        steps_left=None,
        seconds_left=None,
        lines=(),
        source=f"{own.process}/events.jsonl",
        lines_source="",
        traced=False,
    )
    return growth, bool(rising)


HOST = "cpu"
_BYTES = (
    *("private_bytes", "shared_bytes", "allocated_bytes", "peak_allocated_bytes", "reserved_bytes"),
    *("peak_reserved_bytes", "free_bytes", "total_bytes", "retries", "out_of_memory"),
)
_SCHEMA: dict[str, Any] = {
    "rank": pl.Int64,
    "process": pl.String,
    "time_ns": pl.Int64,
    "step": pl.Int64,
    "device": pl.String,
    "device_name": pl.String,
    "fraction": pl.Float64,
    **dict.fromkeys(_BYTES, pl.Int64),
}


class MemoryReadings(Struct, frozen=True):
    """Readings of one process, in order of time. `all_rows` holds those before the steps are steady too.

    `steady` has a row for each reading after a steady step, the first and the last of the run's among them.
    """

    rank: int | None
    process: str
    all_rows: pl.DataFrame
    steady: pl.DataFrame

    def devices(self) -> list[str]:
        """Devices that were read."""
        return sorted(self.all_rows["device"].drop_nulls().unique().to_list())

    def of(self, device: str) -> pl.DataFrame:
        """(time_ns, step, bytes) of the steady readings; `device` may be the host."""
        if device == HOST:
            rows, value = self.steady, pl.col("private_bytes") + pl.col("shared_bytes").fill_null(0)
        else:
            rows, value = self.steady.filter(pl.col("device") == device), pl.col("allocated_bytes")
        return rows.select("time_ns", "step", bytes=value).drop_nulls().unique("step", keep="last").sort("step")


def memory_readings(tables: Tables, labelled: LabelledSteps) -> tuple[MemoryReadings, ...]:
    """One for each process that has any, by its folder's name; broken ones are passed over."""
    rows = [
        [_value({**data, **row}.get(name), kind) for name, kind in _SCHEMA.items()]
        for row, data in event_data(tables, "memory")
    ]
    frame = pl.DataFrame(rows, schema=_SCHEMA, orient="row").drop_nulls("time_ns")
    found = []
    for own in frame.sort("process", maintain_order=True).partition_by("process", maintain_order=True):
        process = str(own["process"][0])
        steps = labelled.steady().filter((pl.col("process") == process) & pl.col("start_ns").is_not_null())
        # where no step is steady, no reading is: there is no first one
        steady = own.filter(pl.col("step").is_between(steps["step"].min(), steps["step"].max()).fill_null(False))
        found.append(MemoryReadings(own["rank"][0], process, own, steady))
    return tuple(found)


def _value(value: object, kind: Any) -> Any:
    """The value where it is of that kind, and no negative number."""
    if kind == pl.String:
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**62:
        return None
    return float(value) if kind == pl.Float64 else int(value)


MIN_STEPS = 3  # two of them tell what survives their next; fewer tell nothing
MAX_LINES = 5


def traced_growth(base: Base, growing: Container[_Key]) -> Iterator[tuple[_Key, MemoryGrowth, bool]]:
    """One for each device of each trace with allocations and steps enough, and whether it rises: at the end of each
    step more stands than at the end of the step before. Lines are told where it does, or is known to be `growing`."""
    for span in base.spans:
        ends = span.steps["end_ns"].to_numpy()
        if not span.memory.height or len(ends) < MIN_STEPS:
            continue
        for device in allocated_memory.allocations(base, span):
            positions = np.searchsorted(np.maximum.accumulate(device.times_ns), ends, side="right")
            if not positions[-1]:
                continue
            levels = device.levels[positions]
            per_step = float(np.median(np.diff(levels)))
            rising = bool((np.diff(levels) > 0).all())
            gpu = span.gpus.get(allocated_memory.number(device.device)) if device.device != HOST else None
            capacity, seconds = device.capacity_bytes, float(ends[-1] - ends[0]) / 1e9
            limit = room = None
            if capacity is not None:
                limit = MemoryLimit(capacity, device_reason(gpu.name if gpu is not None else None), capacity)
                # the trace may not say what stood when it began
                room = None if device.relative else max(0.0, capacity - float(levels[-1]))
            left = room / per_step if room is not None and rising else None
            key = span.ref.process, device.device
            growth = MemoryGrowth(
                rank=span.ref.rank,
                device=device.device,
                points=len(ends),
                steps=len(ends),
                seconds=seconds,
                early_bytes=0.0 if device.relative else float(levels[0]),
                late_bytes=per_step * (len(ends) - 1) if device.relative else float(levels[-1]),
                bytes_per_step=per_step,
                limit=limit,
                room_bytes=room,
                steps_left=left,
                seconds_left=left * (seconds / (len(ends) - 1)) if left is not None else None,
                lines=_lines(span, device) if rising or key in growing else (),
                source=span.ref.trace,
                lines_source=span.ref.trace,
                traced=True,
            )
            yield key, growth, rising


def _lines(span: Span, device: DeviceMemory) -> tuple[GrowthLine, ...]:
    """Lines that leave blocks in every step but the last, the most bytes first."""
    pairs, causes = device.pairs, device.causes
    if pairs is None or not causes.places:
        return ()
    starts, ends = (span.steps[name].to_numpy() for name in ("start_ns", "end_ns"))
    event = pairs.allocation
    times = device.times_ns[event]
    step = np.searchsorted(starts, times, side="right") - 1
    inside = (step >= 0) & (step < len(starts) - 1) & (times <= ends[np.maximum(step, 0)]) & (causes.line[event] >= 0)
    released = np.append(device.times_ns, np.iinfo(np.int64).max)[np.minimum(pairs.release, len(device.times_ns))]
    survives = inside & (released > ends[np.minimum(step + 1, len(ends) - 1)])
    event, step, rows = event[survives], step[survives], causes.operator[event[survives]]
    code = np.where(rows >= 0, span.names.codes[rows], NONE)
    columns = {"line": causes.line[event], "step": step, "code": code, "bytes": device.sizes[event]}
    blocks = pl.DataFrame(columns)
    of_operators = blocks.filter(pl.col("code") >= 0).group_by("line", "code").agg(pl.col("bytes").sum())
    most = dict(of_operators.sort("bytes", -pl.col("code")).select("line", "code").rows())  # the last of each line
    steps = blocks.group_by("line", "step").agg(pl.col("bytes").sum(), blocks=pl.len()).group_by("line")
    always = steps.agg(pl.len(), pl.col("bytes", "blocks").median()).filter(pl.col("len") == len(starts) - 1)
    lines = [
        GrowthLine(causes.places[line][0], span.names.values[most[line]] if line in most else None, size, count)
        for line, _, size, count in always.rows()
    ]
    lines.sort(key=lambda line: (-line.bytes_per_step, line.place.file, line.place.line or 0))
    return tuple(lines[:MAX_LINES])


# The driver takes some hundred MiB for each process, which no allocator gets. More than that, and more than this share
# of the device, belongs to others.
DRIVER_BYTES = 1 << 30
DRIVER_SHARE = 0.05


def device_limit(own: MemoryReadings, device: str, set_fractions: _Fractions) -> MemoryLimit | None:
    """None where the driver was not asked."""
    rows = own.all_rows.filter(pl.col("device") == device)
    asked = rows.drop_nulls(["free_bytes", "total_bytes", "reserved_bytes"])
    if asked.is_empty():
        return None
    total = int(asked["total_bytes"][-1])
    held = int(min(asked["free_bytes"] + asked["reserved_bytes"]))
    others = max(0, total - held)
    fraction, place = set_fractions.get(own.process, (None, None))
    fraction = next(iter(rows["fraction"].drop_nulls().reverse()), fraction)
    reason = device_reason(next(iter(rows["device_name"].drop_nulls().reverse()), None))
    if fraction is not None and fraction < 1 and int(fraction * total) <= held:
        held, reason = int(fraction * total), "fraction"
    elif others > max(DRIVER_BYTES, DRIVER_SHARE * total):
        reason = "others"
    return MemoryLimit(held, reason, total, others, fraction, place)


def device_reason(name: str | None) -> str:
    """`slice` of a GPU that is partitioned, as the driver names it ("NVIDIA A100-SXM4-40GB MIG 1g.5gb")."""
    return "slice" if name is not None and re.search(r"\bMIG\b", name) else "device"


def fractions(tables: Tables) -> _Fractions:
    """By process what the script's last `set_per_process_memory_fraction` set, of whatever device, with the line."""
    found = {}
    for row, data in event_data(tables, "site"):
        arguments = data.get("arguments")
        if data.get("what") == "set_per_process_memory_fraction" and isinstance(arguments, dict):
            text = str(arguments.get("fraction", ""))
            if re.fullmatch(r"0?\.\d{1,17}|[01](\.\d{1,17})?", text):
                found[str(row["process"])] = (float(text), place_of(data))
    return found


def host_limit(tables: Tables, host: str | None) -> MemoryLimit | None:
    """What all processes of the run on a host may hold together; None where the manifest does not tell."""
    manifest = next((one for one in tables.manifests if host is None or one.get("host") == host), {})
    hardware = manifest.get("hardware")
    if not isinstance(hardware, dict):
        return None
    sizes = (integer(hardware.get(name)) for name in ("memory_bytes", "cgroup_memory_limit_bytes"))
    machine, cgroup = (size if size is not None and size > 0 else None for size in sizes)
    if cgroup is not None and (machine is None or cgroup < machine):
        return MemoryLimit(cgroup, "cgroup", machine)
    return MemoryLimit(machine, "machine", machine) if machine is not None else None


MIN_STRETCHES = 3  # with a retry, and as many without: fewer are chance


def retries(processes: Iterable[MemoryReadings], labelled: LabelledSteps) -> RetryFacts | None:
    """Of the process that lost most; None where no retry was counted between steady steps."""
    found = []
    for own, device in ((one, device) for one in processes for device in one.devices()):
        rows = own.steady.filter(pl.col("device") == device).drop_nulls(["retries", "step"]).sort("step")
        counts = rows.select("step", more=pl.col("retries").diff()).drop_nulls()
        total = int(counts["more"].clip(lower_bound=0).sum()) if counts.height else 0
        if not total:
            continue
        steady = labelled.steady().filter(pl.col("process") == own.process)
        # a reading is taken after its step: the steps up to it, from the reading before, are those its count speaks of
        steps = steady.filter(pl.col("step").is_between(rows["step"][0] + 1, rows["step"][-1])).sort("step")
        counts = counts.with_columns(stretch=pl.int_range(pl.len()))
        joined = steps.select("step", "wall_ns").join_asof(counts, on="step", strategy="forward")
        struck, usual = joined.filter(pl.col("more") > 0), joined.filter(pl.col("more") <= 0)
        stretches = struck["stretch"].n_unique()
        usual_ms = struck_ms = lost = None
        if min(stretches, usual["stretch"].n_unique()) >= MIN_STRETCHES:
            usual_ms, struck_ms = float(np.median(usual["wall_ns"].to_numpy())) / 1e6, mean(struck["wall_ns"]) / 1e6
            # single slow steps come without retries too: what the others' mean is above their median is none of theirs
            noise_ms = max(0.0, mean(usual["wall_ns"]) / 1e6 - usual_ms)
            lost = max(0.0, struck_ms - usual_ms - noise_ms) * struck.height / joined.height
        fact = RetryFacts(
            rank=own.rank,
            device=device,
            retries=total,
            steps=joined.height,
            steps_struck=struck.height,
            stretches=stretches,
            usual_ms=usual_ms,
            struck_ms=struck_ms,
            lost_ms_per_step=lost,
            total_ms_per_step=mean(joined["wall_ns"]) / 1e6,
        )
        found.append(fact)
    return max(found, key=lambda facts: (facts.lost_ms_per_step or 0.0, facts.retries), default=None)
