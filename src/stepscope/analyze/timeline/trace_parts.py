"""The slices of traces for the timeline: which track each lies on, what kind it is, what its track is called."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze.timeline.parts import KIND, MAX_DEPTH, Collection, Part
from stepscope.engine.device_work import COMMUNICATION, work
from stepscope.engine.spans import Base, Span
from stepscope.tables import categories
from stepscope.tables.arrays import Bools, Int8, Int32

_SYNCHRONIZES = re.compile(r"^(cuda|cu|hip|xpu|mtia)?\w*Synchronize")
# Ranges that PyTorch itself writes around parts of a step.
_RANGES = {"data_wait": ("enumerate(DataLoader)", "enumerate(DataPipe)"), "optimizer": ("Optimizer.step",)}
_BUSY = ("user_function", "library_function", "operator")  # the thread with most of these comes first


def add_traces(base: Base, collection: Collection) -> None:
    """Add the slices of all traces. Ids are positions in `events`."""
    left_out = 0
    for span in base.spans:
        if len(span):
            left_out += _add(base, span, collection)
    if left_out:
        collection.notes.append(f"{left_out:,} slices deeper than {MAX_DEPTH} levels are not drawn")


def _add(base: Base, span: Span, collection: Collection) -> int:
    kind = kinds(base, span)
    track = _tracks(span, kind, collection)[span.tracks.codes]
    depth = span.series("depth").fill_null(0).to_numpy()
    rows = np.flatnonzero((track >= 0) & (depth < MAX_DEPTH))
    name = collection.names.numbers(span.names.values)[span.names.codes]
    whole = len(rows) == len(span)
    chosen = slice(None) if whole else rows
    start, end = span.start_ns[chosen], span.end_ns[chosen]
    collection.add(
        Part(
            id=(rows + span.first).astype(np.int32),
            track=track[chosen],
            depth=depth[chosen].astype(np.int32),
            start=start,
            end=end,
            name=name[chosen],
            kind=kind[chosen],
        )
    )
    return int((depth >= MAX_DEPTH).sum())


def kinds(base: Base, span: Span) -> Int8:
    """The kind of every slice of a span, as a number of `KINDS`."""
    kind = np.full(len(span), KIND["other"], np.int8)
    names = span.categories
    kind[names.pick([name.endswith("annotation") for name in names.values])] = KIND["annotation"]
    kind[span.is_runtime] = KIND["runtime"]
    synchronizes = span.names.pick([bool(_SYNCHRONIZES.match(name)) for name in span.names.values])
    kind[span.is_runtime & synchronizes] = KIND["sync"]
    kind[names.where(categories.OPERATORS)] = KIND["annotation"]
    host_ranges = kind == KIND["annotation"]
    kind[span.is_operator] = KIND["operator"]
    for name, begins in _RANGES.items():
        kind[host_ranges & span.names.pick([text.startswith(begins) for text in span.names.values])] = KIND[name]
    functions = span.is_function
    kind[functions] = KIND["library_function"]
    kind[functions & (base.origins.user[span.first : span.first + len(span)] >= 0)] = KIND["user_function"]
    kind[span.is_kernel] = KIND["kernel"]
    kind[span.is_copy] = KIND["copy"]
    kind[span.is_fill] = KIND["fill"]
    found = work(span)
    kind[found.rows[found.kind == COMMUNICATION]] = KIND["communication"]
    return kind


def _tracks(span: Span, kind: Int8, collection: Collection) -> Int32:
    """The number of the collection's track for each of the span's, and -1 at the end for none."""
    codes = span.tracks.codes
    count = len(span.tracks.values)
    known = codes >= 0
    slices = np.bincount(codes[known], minlength=count)
    busy = np.isin(kind, [KIND[name] for name in _BUSY]) & known
    work_done = np.bincount(codes[busy], minlength=count)
    on_stream = span.series("stream").is_not_null().to_numpy() & known
    streams = np.bincount(codes[on_stream], minlength=count) > 0
    device, stream = _numbers(span, on_stream)
    names = _thread_names(span)
    found = np.full(count + 1, -1, np.int32)
    main = int(work_done.argmax()) if count and work_done.max() > 0 else -1
    group = span.ref.worker
    for code in np.flatnonzero(slices).tolist():
        track = span.tracks.values[code]
        if streams[code]:
            label = f"GPU {device[code]} stream {stream[code]}" if device[code] >= 0 else f"stream {stream[code]}"
            place = (float(device[code]), float(stream[code]))
            found[code] = collection.tracks.number(group, "stream", track, label, place)
        else:
            label = _thread_label(track, names.get(track))
            rank = (0.0 if code == main else 1.0, -float(work_done[code]), -float(slices[code]))
            found[code] = collection.tracks.number(group, "thread", track, label, rank)
    return found


def _numbers(span: Span, on_stream: Bools) -> tuple[dict[int, int], dict[int, int]]:
    """Device and stream of each track of a device, by the track's code; a device of -1 is not told."""
    rows = np.flatnonzero(on_stream)
    codes, first = np.unique(span.tracks.codes[rows], return_index=True)
    device, stream = (span.column(name, rows[first]) for name in ("device", "stream"))
    return dict(zip(codes.tolist(), device.tolist(), strict=True)), dict(
        zip(codes.tolist(), stream.tolist(), strict=True)
    )


def _thread_names(span: Span) -> dict[str, str]:
    ref = span.ref
    own = span.tables.traces.filter((pl.col("process") == ref.process) & (pl.col("trace") == ref.trace))
    try:
        found: Any = json.loads(own["threads"][0] or "{}") if own.height else {}
    except ValueError:
        return {}
    return {key: str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _thread_label(track: str, name: str | None) -> str:
    thread = track.rpartition("/")[2]
    if name and thread in name:
        return name
    if name:
        return f"{name} ({thread})"
    return f"thread {thread}" if thread.isdigit() else thread
