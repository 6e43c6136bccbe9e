"""Memory over time, by operator and by user line, and what stood in it at the peak.

From the allocations and releases that traces recorded with profile_memory=True hold, and from recordings beside them.
Nothing is taken for 0 that is not known: without addresses there are no blocks, without totals the curve is relative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.views.memory_blocks import (
    DeviceMemory,
    Seen,
    Spots,
    blocks,
    lines,
    pair,
    seen,
    spots,
)
from stepscope.engine.slice_tree import self_and_ancestors
from stepscope.engine.spans import Base, Span
from stepscope.engine.user_code import NO_OPTIONS, UserCode, user_code
from stepscope.model.memory import (
    MemoryOperator,
    MemoryRecording,
    MemoryView,
)
from stepscope.tables.arrays import NONE, Int64, climb

NO_ADDRESSES = "allocations carry no addresses (PyTorch before 1.10), so that no block can be followed"
NO_TOTALS = "the trace does not say what was allocated when it began: its curve shows the change since then"
LOST = "releases are missing: at the peak more of the recorded blocks seem to stand than were allocated"


def view(base: Base, recordings: Sequence[MemoryRecording] = (), code: UserCode | None = None) -> MemoryView | None:
    """The memory of all traces and recordings; None where nothing tells of memory.

    Args:
        recordings: snapshots and timelines.
        code: whose code is in the stacks of recordings; by default what the tables tell.
    """
    traced = [span for span in base.spans if span.memory.height]
    if not traced and not recordings:
        return None
    code = code or user_code(base.tables, {}, NO_OPTIONS)
    found = [one for span in traced for one in _of_span(base, span)]
    found += [seen(recording, code) for recording in recordings]
    pairs, unpaired_allocations, unpaired_releases = np.sum(
        [(0, 0, 0), *(one.counts for one in found)], axis=0
    ).tolist()
    return MemoryView(
        curves=tuple(one.curve for one in found if one.curve is not None),
        operators=tuple(row for one in found for row in one.operators),
        lines=tuple(row for one in found for row in one.lines),
        blocks=tuple(row for one in found for row in one.blocks),
        pairs=pairs,
        unpaired_allocations=unpaired_allocations,
        unpaired_releases=unpaired_releases,
        notes=tuple(dict.fromkeys(note for one in found for note in one.notes)),
        states=tuple(one.state for one in found if one.state is not None),
        out_of_memory=tuple(row for one in found for row in one.out_of_memory),
    )


class Allocations(Struct, frozen=True):
    """The events of one device in a trace, and for each of them its line and the operator it runs in."""

    device: DeviceMemory
    spots: Spots
    operator: Int64


def allocations(base: Base, span: Span) -> list[Allocations]:
    """One for each device. Kept for the second who asks, of two who do, and then let go."""
    found: list[Allocations] | None = span.kept.pop("allocations", None)
    if found is None:
        near = around(span)
        where = spots(base, span, near.slice)
        found = [
            Allocations(device, Spots(where.numbers[rows], where.places), near.operator[rows])
            for device, rows in _devices(span)
        ]
        span.kept["allocations"] = found
    return found


def _of_span(base: Base, span: Span) -> Iterator[Seen]:
    """What is to be told of each device in a trace."""
    for found in allocations(base, span):
        device, rows = found.device, found.operator

        def name(event: int, rows: Int64 = rows) -> str | None:
            return span.names.values[span.names.codes[rows[event]]] if rows[event] >= 0 else None

        recorded, notes = device.recorded_bytes, []
        if device.pairs is None:
            notes.append(NO_ADDRESSES)
        if device.relative:
            notes.append(NO_TOTALS)
        elif recorded is not None and recorded > device.levels[device.peak]:
            notes.append(LOST)
        yield Seen(
            curve=device.curve(),
            operators=tuple(by_operator(span, device, rows)),
            lines=tuple(lines(device, found.spots)),
            blocks=tuple(blocks(device, found.spots, name)),
            counts=device.pairs.counts if device.pairs is not None else (0, 0, 0),
            notes=tuple(f"{span.ref.label}, {device.device}: {note}" for note in notes),
        )


def _devices(span: Span) -> Iterator[tuple[DeviceMemory, Int64]]:
    """The devices that a span has events of, with the rows of `span.memory` that are theirs."""
    memory = span.memory.with_row_index("row").filter(
        pl.col("device").is_not_null() & pl.col("bytes").is_not_null() & (pl.col("bytes") != 0)
    )
    for (name,), events in sorted(memory.group_by("device", maintain_order=True), key=lambda group: str(group[0][0])):
        sizes, device = events["bytes"].to_numpy(), str(name)
        known = events["allocated_bytes"].null_count() == 0
        levels = np.append(0, np.cumsum(sizes))
        if known:
            totals = events["allocated_bytes"].to_numpy()
            levels = np.append(totals[0] - sizes[0], totals)
        reserved = None  # also where it is always 0: the allocator of the host reserves nothing
        if not events["reserved_bytes"].null_count() and (events["reserved_bytes"] != 0).any():
            reserved = events["reserved_bytes"].to_numpy()
            reserved = np.append(reserved[:1], reserved)
        followed = events["address"].null_count() == 0
        gpu = span.gpus.get(number(device)) if device != "cpu" else None
        yield (
            DeviceMemory(
                source="trace",
                worker=span.ref.worker,
                span=span.ref.span,
                device=device,
                clock="epoch",
                times_ns=events["time_ns"].to_numpy(),
                sizes=sizes,
                levels=levels,
                reserved=reserved,
                pairs=pair(events["address"].to_numpy(), sizes > 0) if followed else None,
                relative=not known,
                capacity_bytes=gpu.memory_bytes if gpu is not None else None,
            ),
            events["row"].cast(pl.Int64).to_numpy(),
        )


def number(device: str) -> int:
    number = device.rpartition(":")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


class Around(Struct, frozen=True):
    """For each row of `span.memory` the row of the innermost operator or function around it, and of the innermost
    operator; `NONE` where there is none.
    """

    slice: Int64
    operator: Int64


def around(span: Span, *, until_end: bool = False) -> Around:
    """What runs on the thread of each row of `span.memory` at its time; its end is inside of a slice if `until_end`."""
    memory = span.memory
    innermost = np.full(memory.height, NONE, np.int64)
    codes = {track: code for code, track in enumerate(span.tracks.values)}
    tracks = memory["track"].replace_strict(codes, default=NONE, return_dtype=pl.Int64).fill_null(NONE).to_numpy()
    times = memory["time_ns"].to_numpy()
    relevant = (span.is_operator | span.is_function) & ~span.on_device
    for code in np.unique(tracks[tracks >= 0]).tolist():
        rows = np.flatnonzero((span.tracks.codes == code) & relevant)
        own = np.flatnonzero(tracks == code)
        innermost[own] = _innermost(span, rows, times[own], until_end)
    operator = climb(span.parent, innermost, span.is_operator)
    return Around(innermost, operator)


def _innermost(span: Span, rows: Int64, times: Int64, until_end: bool) -> Int64:
    """The innermost of `rows`, all of one track, around each time."""
    if not len(rows):
        return np.full(len(times), NONE, np.int64)
    starts = span.start_ns[rows]
    if not (np.diff(starts) > 0).all():
        depths = span.series("depth").gather(rows).fill_null(0).to_numpy()
        order = np.lexsort((depths, starts))
        rows, starts = rows[order], starts[order]
    place = np.searchsorted(starts, times, side="right") - 1
    # the last to begin is innermost, unless it has ended: then one around it is
    node = np.where(place >= 0, rows[np.maximum(place, 0)], NONE)
    relevant = np.zeros(len(span), bool)
    relevant[rows] = True
    last = times - until_end
    return climb(span.parent, node, lambda at, which: relevant[at] & (span.ends(at) > last[which]))


def by_operator(span: Span, device: DeviceMemory, operator: Int64) -> Iterator[MemoryOperator]:
    """What each operator did to the memory of a device, the most allocated first.

    Args:
        operator: the row of the innermost operator around each event of the device, `NONE` outside all.
    """
    stands = np.zeros(len(operator), bool)
    if device.pairs is not None:
        stands[device.pairs.allocation[device.at_peak]] = True
    rows, group = np.unique(operator, return_inverse=True)
    names = span.names
    figures = {
        "allocated": np.maximum(device.sizes, 0),
        "increase": device.sizes,
        "allocations": (device.sizes > 0).astype(np.int64),
        "at_peak": np.where(stands, device.sizes, 0),
    }
    sums_of = pl.DataFrame({"row": group, **figures}).group_by("row").sum().sort("row")
    self_of = sums_of.with_columns(code=pl.Series(np.where(rows >= 0, names.codes[rows], NONE), dtype=pl.Int64))
    # once for every name among an operator and those around it; what lies outside of all has a name of its own
    around_of = [pl.DataFrame({"row": np.flatnonzero(rows < 0), "code": np.full(int((rows < 0).sum()), NONE)})]
    for which, at in self_and_ancestors(span.parent, rows):
        operators = span.is_operator[at]
        around_of.append(pl.DataFrame({"row": which[operators], "code": names.codes[at[operators]].astype(np.int64)}))
    total_of = pl.concat(around_of).unique().join(sums_of, on="row")
    own, total = (one.drop("row").group_by("code").sum() for one in (self_of, total_of))
    joined = total.join(own, on="code", how="left", suffix="_self").fill_null(0)
    calls = np.bincount(names.codes[span.is_operator] + 1, minlength=len(names.values) + 1)
    found = [
        MemoryOperator(
            name=names.values[row["code"]] if row["code"] >= 0 else None,
            device=device.device,
            calls=int(calls[row["code"] + 1]) if row["code"] >= 0 else 0,
            allocations=row["allocations_self"],
            self_allocated_bytes=row["allocated_self"],
            total_allocated_bytes=row["allocated"],
            self_increase_bytes=row["increase_self"],
            total_increase_bytes=row["increase"],
            total_allocations=row["allocations"],
            at_peak_bytes=row["at_peak_self"] if device.pairs is not None else None,
            source=device.source,
            worker=device.worker,
            span=device.span,
        )
        for row in joined.sort("code").iter_rows(named=True)
        if any(row[name] for name in (*figures, "allocated_self", "increase_self"))
    ]
    yield from sorted(found, key=lambda row: (-row.self_allocated_bytes, -row.total_allocated_bytes, row.name or ""))
