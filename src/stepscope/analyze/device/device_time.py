"""What the devices did in the traces: time by kind, and how much of it could be linked.

Times are unions of intervals over all streams of a trace's devices, so work that runs beside other work counts once.
Kernels and memsets are compute; kernels of collectives, told by name, are communication; the rest are copies. Waiting
for an event on a stream is no work and is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl

from stepscope.engine import attribution, intervals
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
from stepscope.engine.spans import Base, Span
from stepscope.model import DeviceLine, DeviceLines, DeviceTime, Place, ReadingFacts, TraceFacts
from stepscope.tables.arrays import NONE, Bools, decode
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
    facts = []
    for row in tables.traces.iter_rows(named=True):
        linked: Counter[str] = Counter()
        states: Counter[str] = Counter()
        span = parts.get((row["process"], row["trace"]))
        found = work(span) if span is not None else None
        if span is not None and found is not None and len(found):
            words = links_of(span, found, "state", "method")
            sums = words.with_columns(ns=pl.Series(found.end_ns - found.start_ns)).group_by("state", "method").sum()
            for state, method, ns in sums.sort("state", "method").rows():
                (linked if state == LINKED else states)[str(method) if state == LINKED else state] += int(ns)
        unlinked = states.total() - states[BEFORE_RECORDING] - states[GRAPH]
        launched = linked.total() + states[GRAPH] + unlinked
        counts = ("events", "salvaged", "lost", "unsupported", "clipped", "repaired")
        one = TraceFacts(
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
        facts.append(one)
    return tuple(facts)


def reading_facts(traces: tuple[TraceFacts, ...]) -> ReadingFacts | None:
    """All traces together, None without any."""
    if not traces:
        return None
    linked: Counter[str] = Counter()
    for trace in traces:
        linked.update(trace.linked_ns)
    names = ("events", "salvaged", "lost", "clipped", "repaired", "device_events")
    counts = {name: sum(getattr(trace, name) for trace in traces) for name in names}
    device_ns, early_ns = sum(trace.device_ns for trace in traces), sum(trace.before_recording_ns for trace in traces)
    graph_ns, unlinked_ns = sum(trace.graph_ns for trace in traces), sum(trace.unlinked_ns for trace in traces)
    launched_ns = device_ns - early_ns
    return ReadingFacts(
        traces=len(traces),
        **counts,
        link_rate=linked.total() / launched_ns if launched_ns else None,
        linked_shares={method: ns / launched_ns for method, ns in linked.most_common() if ns},
        graph_share=graph_ns / launched_ns if launched_ns else None,
        unlinked_share=unlinked_ns / launched_ns if launched_ns else None,
        before_recording_share=early_ns / device_ns if device_ns else None,
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


def device_lines(base: Base) -> DeviceLines | None:
    """None without device slices and operators."""
    on_device = any(len(work(span)) for span in base.spans)
    done = [own for span in base.spans if (own := _attributed(base, span, on_device)).height]
    if not done:
        return None
    every = pl.concat(done)
    total = int(every["ns"].sum())
    # profiled steps that launched the work; those that the recording holds whole, where that is known
    seen = every.filter(pl.col("step") >= 0).select("process", "step").unique()
    whole = base.tables.steps.filter(pl.col("in_window").fill_null(False))
    steps = seen.join(whole, on=["process", "step"], how="semi").height or seen.height or None
    left = every.filter(pl.col("place") < 0).group_by("reason").agg(pl.col("ns").sum())
    reasons = dict(left.sort("ns", "reason", descending=True).rows())
    found = tuple(_lines(base, every.filter(pl.col("place") >= 0), total, steps))
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


def _attributed(base: Base, span: Span, on_device: bool) -> pl.DataFrame:
    """(process, step, place, call, way, name, reason, ns, events): the device work of a trace summed up, or without
    any the self time of its operators on the host.

    `place` is -1 where there is none, for `reason`; `call` is the number of the call it made, and `way` says how
    its operator was found. Texts are codes until they are few.
    """
    if on_device:
        done = work(span)
        rows, ns, start = done.rows, done.end_ns - done.start_ns, np.where(done.launch >= 0, done.launch, done.operator)
        links = links_of(span, done, "forward", "frame", "forward_method")
        forward, frame = (links[name].fill_null(NONE).to_numpy() for name in ("forward", "frame"))
        found = attribution.trace_linked(base, span, start, forward, frame)
        method: pl.Series | pl.Expr = links["forward_method"].fill_null(SEQUENCE)
        early, replayed = (in_state(span, done, state) for state in (BEFORE_RECORDING, GRAPH))
    else:
        on_host = span.series("stream").is_null().to_numpy()
        rows = start = np.flatnonzero(span.is_operator & on_host & (span.column("self_ns") > 0))
        ns, found, method = span.column("self_ns", rows), attribution.trace_linked(base, span, rows), pl.lit(SEQUENCE)
        early = replayed = np.zeros(len(rows), bool)
    on_engine = (start >= 0) & span.engine_tracks[span.tracks.codes[start]]
    why = {
        EARLY: early,
        REPLAYED: replayed,
        NO_LAUNCH: start < 0,
        NO_FORWARD if base.any_frames else NO_STACKS: found.backward | (not base.any_frames),
        ENGINE: on_engine,
    }
    reason = np.select([found.place >= 0, *why.values()], range(-1, len(why)), len(why))  # the first that holds
    way = pl.when(pl.Series(found.ahead)).then(method).otherwise(pl.lit(DIRECT))
    columns = {
        "step": np.where(start >= 0, span.column("step", start), NONE),
        "place": found.place,
        "call": attribution.calls(base, span, found.called),
        "name": span.names.codes[rows],
        "reason": reason,
        "way": pl.select(way.cast(pl.Categorical)).to_series(),
    }
    sums = pl.DataFrame({**columns, "ns": ns}).group_by(*columns).agg(pl.col("ns").sum(), events=pl.len())
    texts = {"name": span.names.values, "reason": (*why, LIBRARIES)}
    decoded = [decode(values, sums[name].to_numpy()).alias(name) for name, values in texts.items()]
    return sums.with_columns(pl.col("way").cast(pl.String), *decoded, process=pl.lit(span.ref.process))


def _lines(base: Base, sums: pl.DataFrame, total_ns: int, steps: int | None) -> Iterator[DeviceLine]:
    """The lines of all attributed work, costliest first."""
    pairs = sums.select("place", "call").unique()
    resolved = [attribution.exact(base, *pair) for pair in pairs.rows()]
    # numbered by name, so that equal costs always come in the same order
    lines = sorted(set(resolved), key=lambda line: (line.file, line.line or 0, line.function, line.exact))
    keys = {line: number for number, line in enumerate(lines)}
    pairs = pairs.with_columns(pl.Series("line", [keys[line] for line in resolved], dtype=pl.Int64))
    sums = sums.join(pairs, on=["place", "call"])
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


def _nested(sums: pl.DataFrame, column: str) -> dict[int, list[tuple[str, int]]]:
    """line -> (value of `column`, ns), costliest first."""
    grouped = sums.group_by("line", column).agg(pl.col("ns").sum())
    result: dict[int, list[tuple[str, int]]] = {}
    for line, value, ns in grouped.sort(["ns", column], descending=[True, False]).rows():
        result.setdefault(line, []).append((str(value), int(ns)))
    return result
