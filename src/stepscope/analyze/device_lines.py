"""Device time by line of the user's code, exclusively: every device slice counts for one line or one reason.

A slice goes to the innermost user line around its launch; one of the backward pass goes to the line of its forward
operator. Where traces hold no device slices, the self time of operators is attributed the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.engine import attribution
from stepscope.engine.attribution import Found
from stepscope.engine.device_work import BEFORE_RECORDING, GRAPH, in_state, links_of, work
from stepscope.engine.origins import Origin
from stepscope.engine.slice_names import called_by_name
from stepscope.engine.source_lines import Lines
from stepscope.engine.spans import Base, Span
from stepscope.model import DeviceLine, DeviceLines, Place
from stepscope.tables.arrays import NONE, Bools, Int64

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


def facts(base: Base) -> DeviceLines | None:
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
    keys = {
        key: number
        for number, key in enumerate(
            sorted(set(resolved), key=lambda key: (key.file, key.line or 0, key.function, key.exact))
        )
    }
    pairs = pairs.with_columns(pl.Series("line", [keys[key] for key in resolved], dtype=pl.Int64))
    sums = sums.join(pairs, on=["place", "callee"], nulls_equal=True)
    ways = _nested(sums, "way")
    tops = _nested(sums, "name")
    by_line = sums.group_by("line").agg(pl.col("ns", "events").sum())
    by_number = list(keys)
    for number, ns, events in by_line.sort(["ns", "line"], descending=[True, False]).rows():
        origin = by_number[number]
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
