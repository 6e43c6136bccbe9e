"""What the devices did in the traces: time by kind, and how much of it could be linked.

Times are unions of intervals over all streams of a trace's devices, so work that runs beside other work counts once.
Kernels and memsets are compute; kernels of collectives, told by name, are communication; the rest are copies. Waiting
for an event on a stream is no work and is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.engine import attribution, intervals
from stepscope.engine.attribution import Found
from stepscope.engine.device_work import (
    BEFORE_RECORDING,
    COMMUNICATION,
    COPY,
    FILL,
    GRAPH,
    KERNEL,
    LINKED,
    Work,
    in_state,
    links_of,
    work,
)
from stepscope.engine.origins import Origin
from stepscope.engine.slice_names import called_by_name
from stepscope.engine.source_lines import Lines
from stepscope.engine.spans import Base, Span
from stepscope.model import DeviceLine, DeviceLines, DeviceTime, Place, ReadingFacts, TraceFacts
from stepscope.tables.arrays import NONE, Bools, Int64
from stepscope.tables.schema import Tables

LAUNCHED, ALL = "launched", "all"


def device_times(spans: Sequence[Span]) -> tuple[DeviceTime, ...]:
    """Two per trace with device work, one for each scope, in order of the tables."""
    worked = ((span, work(span)) for span in sorted(spans, key=lambda span: span.first))
    return tuple(
        device_time(span, found, scope, found.launch >= (0 if scope == LAUNCHED else NONE))
        for span, found in worked
        if len(found)
        for scope in (LAUNCHED, ALL)
    )


def device_time(span: Span, found: Work, scope: str, wanted: Bools) -> DeviceTime:
    """The times of the `wanted` work of a trace."""

    def covered(*kinds: int) -> int:
        chosen = wanted & np.isin(found.kind, kinds)
        return intervals.total(intervals.union(found.start_ns[chosen], found.end_ns[chosen]))

    count = int(wanted.sum())
    total_ns = int(found.end_ns[wanted].max() - found.start_ns[wanted].min()) if count else 0
    compute_ns, busy_ns = covered(KERNEL, FILL), covered(KERNEL, FILL, COMMUNICATION, COPY)
    without_copies_ns = covered(KERNEL, FILL, COMMUNICATION)
    lengths = found.end_ns - found.start_ns
    sums = np.bincount(span.categories.codes[found.rows][wanted], lengths[wanted]).astype(np.int64)
    by_category = [(span.categories.values[code], int(sums[code])) for code in np.flatnonzero(sums).tolist()]
    return DeviceTime(
        rank=span.series("rank")[0],
        trace=span.ref.trace,
        scope=scope,
        total_ns=total_ns,
        busy_ns=busy_ns,
        compute_ns=compute_ns,
        communication_ns=covered(COMMUNICATION),
        memcpy_ns=covered(COPY),
        exposed_communication_ns=without_copies_ns - compute_ns,
        exposed_memcpy_ns=busy_ns - without_copies_ns,
        idle_ns=total_ns - busy_ns,
        busy_share=busy_ns / total_ns if total_ns else None,
        events=count,
        kind_ns=dict(sorted(by_category, key=lambda pair: (-pair[1], pair[0]))),
    )


def trace_facts(tables: Tables, spans: Sequence[Span]) -> tuple[TraceFacts, ...]:
    """What reading each trace cost and how its device time is linked, in order of the table."""
    parts = {(span.ref.process, span.ref.trace): span for span in spans}
    return tuple(_trace(row, parts.get((row["process"], row["trace"]))) for row in tables.traces.iter_rows(named=True))


def reading_facts(traces: tuple[TraceFacts, ...]) -> ReadingFacts | None:
    """All traces together, None without any."""
    if not traces:
        return None
    linked: Counter[str] = Counter()
    for trace in traces:
        linked.update(trace.linked_ns)
    device_ns = sum(trace.device_ns for trace in traces)
    early_ns = sum(trace.before_recording_ns for trace in traces)
    launched_ns = device_ns - early_ns

    def of_launched(ns: int) -> float | None:
        return ns / launched_ns if launched_ns else None

    return ReadingFacts(
        traces=len(traces),
        events=sum(trace.events for trace in traces),
        salvaged=sum(trace.salvaged for trace in traces),
        lost=sum(trace.lost for trace in traces),
        clipped=sum(trace.clipped for trace in traces),
        repaired=sum(trace.repaired for trace in traces),
        device_events=sum(trace.device_events for trace in traces),
        link_rate=of_launched(linked.total()),
        linked_shares={method: ns / launched_ns for method, ns in linked.most_common() if ns},
        graph_share=of_launched(sum(trace.graph_ns for trace in traces)),
        unlinked_share=of_launched(sum(trace.unlinked_ns for trace in traces)),
        before_recording_share=early_ns / device_ns if device_ns else None,
    )


def _trace(row: dict[str, Any], span: Span | None) -> TraceFacts:
    """The facts of one trace from its row of the table and its device work."""
    linked: Counter[str] = Counter()
    states: Counter[str] = Counter()
    found = work(span) if span is not None else None
    if span is not None and found is not None and len(found):
        words = links_of(span, found, "state", "method")
        sums = words.with_columns(ns=pl.Series(found.end_ns - found.start_ns)).group_by("state", "method").sum()
        for state, method, ns in sums.sort("state", "method").rows():
            if state == LINKED:
                linked[str(method)] += int(ns)
            else:
                states[state] += int(ns)
    unlinked = states.total() - states[BEFORE_RECORDING] - states[GRAPH]
    launched = linked.total() + states[GRAPH] + unlinked
    counts = ("events", "salvaged", "lost", "unsupported", "clipped", "repaired")
    return TraceFacts(
        trace=row["trace"],
        rank=row["rank"] or 0,
        owner=row["owner"] or "user",
        **{name: row[name] or 0 for name in counts},
        problems=tuple(row["problems"] or ()),
        device_events=len(found) if found is not None else 0,
        device_ns=launched + states[BEFORE_RECORDING],
        linked_ns=dict(linked),
        before_recording_ns=states[BEFORE_RECORDING],
        graph_ns=states[GRAPH],
        unlinked_ns=unlinked,
        link_rate=linked.total() / launched if launched else None,
    )


DIRECT, SEQUENCE = "direct", "sequence"
DEVICE, HOST = "device", "cpu_op"
TOP = 3  # kernels named for each line
EARLY = "launched before the recording began"
REPLAYED = "replayed by a CUDA graph, which keeps no link to operators"
NO_LAUNCH = "neither launch nor operator found"
NO_STACKS = "the trace holds no Python stacks (record it with with_stack=True)"
NO_FORWARD = "operators of the backward pass whose forward operator is not in the trace"
ENGINE = "the autograd engine's own work on its thread, such as sums of gradients"
LIBRARIES = "only library code around the launch"


class _Part(Struct, frozen=True):
    """What is to be attributed of one trace, each field with one value for each piece of work, and where it belongs.

    `rows` are those of the slices, `start` those where the walk started. `way` is how forward operators were found.
    `early` was launched before the recording, `replayed` by a graph.
    """

    span: Span
    rows: Int64
    start: Int64
    duration_ns: Int64
    found: Found
    way: pl.Series
    early: Bools
    replayed: Bools


def device_lines(base: Base) -> DeviceLines | None:
    """None without device slices and operators."""
    on_device = any(len(work(span)) for span in base.spans)
    parts = [(_device_part if on_device else _host_part)(base, span) for span in base.spans]
    parts = [part for part in parts if len(part.rows)]
    if not parts:
        return None
    total = sum(int(part.duration_ns.sum()) for part in parts)
    steps = _steps(base, parts)
    reasons = _reasons(parts, stacks=base.origins.any_frames)
    found = tuple(_lines(base, parts, total, steps))
    return DeviceLines(
        basis=DEVICE if on_device else HOST,
        total_ns=total,
        lines=found,
        unattributed=reasons,
        unattributed_shares={why: ns / total for why, ns in reasons.items()} if total else {},
        attributed_share=sum(line.ns for line in found) / total if total else None,
        guessed_share=sum(line.ns for line in found if line.guess) / total if total else None,
        steps=steps,
    )


def _steps(base: Base, parts: Sequence[_Part]) -> int | None:
    """Profiled steps that launched the work; those that the recording holds whole, where that is known."""
    seen = [
        (part.span.ref.process, step)
        for part in parts
        for step in np.unique(part.span.column("step", part.start[part.start >= 0])).tolist()
        if step >= 0
    ]
    recorded = base.tables.steps.filter(pl.col("in_window").fill_null(False))
    whole = set(recorded.select("process", "step").iter_rows())
    return sum(one in whole for one in seen) or len(seen) or None


def _device_part(base: Base, span: Span) -> _Part:
    done = work(span)
    links = links_of(span, done, "forward", "frame", "forward_method")
    start = np.where(done.launch >= 0, done.launch, done.operator)
    forward, frame = (links[name].fill_null(NONE).to_numpy() for name in ("forward", "frame"))
    return _Part(
        span=span,
        rows=done.rows,
        start=start,
        duration_ns=done.end_ns - done.start_ns,
        found=attribution.trace_linked(base, span, start, forward, frame),
        way=links["forward_method"].fill_null(SEQUENCE),
        early=in_state(span, done, BEFORE_RECORDING),
        replayed=in_state(span, done, GRAPH),
    )


def _host_part(base: Base, span: Span) -> _Part:
    """Operators of the host with their self time."""
    on_host = span.series("stream").is_null().to_numpy()
    rows = np.flatnonzero(span.is_operator & on_host & (span.column("self_ns") > 0))
    nothing = np.zeros(len(rows), bool)
    return _Part(
        span=span,
        rows=rows,
        start=rows,
        duration_ns=span.column("self_ns", rows),
        found=attribution.trace_linked(base, span, rows),
        way=pl.Series([SEQUENCE]).new_from_index(0, len(rows)),
        early=nothing,
        replayed=nothing,
    )


def _reasons(parts: Sequence[_Part], *, stacks: bool) -> dict[str, int]:
    """Nanoseconds without a line by the reason, the costliest first. Without `stacks` no slice has Python frames."""
    result: dict[str, int] = {}
    for part in parts:
        on_engine = (part.start >= 0) & part.span.engine_tracks[part.span.tracks.codes[part.start]]
        left = part.found.place < 0
        for reason, mine in (
            (EARLY, part.early),
            (REPLAYED, part.replayed),
            (NO_LAUNCH, part.start < 0),
            (NO_FORWARD if stacks else NO_STACKS, part.found.backward | (not stacks)),
            (ENGINE, on_engine),
            (LIBRARIES, left),
        ):
            own = left & mine
            if own.any():
                result[reason] = result.get(reason, 0) + int(part.duration_ns[own].sum())
            left = left & ~own
    return dict(sorted(result.items(), key=lambda pair: (pair[1], pair[0]), reverse=True))


def _lines(base: Base, parts: Sequence[_Part], total_ns: int, steps: int | None) -> Iterator[DeviceLine]:
    """The lines of all attributed work, costliest first."""
    places = base.origins.places
    sums = pl.concat([_sums(part) for part in parts])
    pairs = sums.select("place", "callee").unique()
    resolved = [_resolved(places[place], callee, base.lines) for place, callee in pairs.rows()]
    # numbered by name, so that equal costs always come in the same order
    lines = sorted(set(resolved), key=lambda line: (line.file, line.line or 0, line.function, line.exact))
    keys = {line: number for number, line in enumerate(lines)}
    pairs = pairs.with_columns(pl.Series("line", [keys[line] for line in resolved], dtype=pl.Int64))
    sums = sums.join(pairs, on=["place", "callee"], nulls_equal=True)
    ways, tops = _nested(sums, "way"), _nested(sums, "name")
    by_line = sums.group_by("line").agg(pl.col("ns", "events").sum())
    for number, ns, events in by_line.sort(["ns", "line"], descending=[True, False]).rows():
        origin = lines[number]
        yield DeviceLine(
            place=Place(origin.file, origin.line, origin.function),
            ns=int(ns),
            share=ns / total_ns if total_ns else 0.0,
            ms_per_step=ns / 1e6 / steps if steps else None,
            events=events,
            via=dict(ways[number]),
            top=tuple(tops[number][:TOP]),
            exact_line=origin.exact,
            guess=origin.guess,
        )


def _sums(part: _Part) -> pl.DataFrame:
    """(place, callee, way, name, ns, events): attributed work summed up; `callee` is the name of what the place called.

    Texts are codes until they are few.
    """
    known = np.flatnonzero(part.found.place >= 0)
    names, called = part.span.names, part.found.called[known]
    way = pl.when(pl.Series(part.found.ahead[known])).then(part.way[known]).otherwise(pl.lit(DIRECT))
    rows = pl.DataFrame(
        {
            "place": part.found.place[known],
            "callee": np.where(called >= 0, names.codes[called], NONE),
            "way": pl.select(way.cast(pl.Categorical)).to_series(),
            "name": names.codes[part.rows[known]],
            "ns": part.duration_ns[known],
        }
    )
    grouped = rows.group_by("place", "callee", "way", "name").agg(pl.col("ns").sum(), events=pl.len())
    texts = [
        pl.Series(column, [names.values[code] if code >= 0 else None for code in grouped[column].to_list()], pl.String)
        for column in ("callee", "name")
    ]
    return grouped.with_columns(pl.col("way").cast(pl.String), *texts)


def _nested(sums: pl.DataFrame, column: str) -> dict[int, list[tuple[str, int]]]:
    """line -> (value of `column`, ns), costliest first."""
    grouped = sums.group_by("line", column).agg(pl.col("ns").sum())
    result: dict[int, list[tuple[str, int]]] = {}
    for line, value, ns in grouped.sort(["ns", column], descending=[True, False]).rows():
        result.setdefault(line, []).append((str(value), int(ns)))
    return result


def _resolved(origin: Origin, callee: str | None, lines: Lines) -> Origin:
    """The line in the function that makes the call, where its source tells which; else the definition's."""
    called = called_by_name(callee)
    if origin.exact or origin.guess or called is None:
        return origin
    line = lines.only_line(origin.file, origin.function, origin.line, called)
    return origin._replace(line=line, exact=True) if line is not None else origin
