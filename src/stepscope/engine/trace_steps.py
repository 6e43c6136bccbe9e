"""The steps of a trace with their device work, as the TensorBoard plugin cut them.

A step begins where its host range begins, but not before the work of the step before has ended on the device; it ends
with its host range, or with the last device work that was launched inside it. Steps at the end whose device work was
not recorded, or a good part of it, are dropped. A trace that names no step counts as one step, "0".
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.engine.device_work import Work, work
from stepscope.engine.spans import Span
from stepscope.tables import categories
from stepscope.tables.arrays import Bools, Int64

MIN_SHARE_OF_LAST = 0.8  # a last step with fewer device slices than this share of the one before is incomplete


class TraceSteps(Struct, frozen=True):
    """Steps in order of time; they do not overlap, but time may lie between them. `dropped` ones are left out."""

    names: tuple[str, ...]
    start_ns: Int64
    end_ns: Int64
    dropped: int
    has_steps: bool

    def __len__(self) -> int:
        return len(self.names)

    def only(self, chosen: Bools) -> TraceSteps:
        names = tuple(name for name, keep in zip(self.names, chosen.tolist(), strict=True) if keep)
        return replace(self, names=names, start_ns=self.start_ns[chosen], end_ns=self.end_ns[chosen])


def trace_steps(span: Span, found: Work) -> TraceSteps:
    """The steps of the span; none where it holds neither host slices nor device work."""
    names, starts, ends = host_steps(span, found)
    has_steps = span.steps.height > 0
    step = launched_in(span, found, starts, ends)
    if not (step >= 0).any():
        return TraceSteps(names, starts, np.maximum(ends, starts), 0, has_steps)
    count = len(names)
    first = np.full(count, np.iinfo(np.int64).max)
    last = np.full(count, np.iinfo(np.int64).min)
    inside = step >= 0
    np.minimum.at(first, step[inside], found.start_ns[inside])
    np.maximum.at(last, step[inside], found.end_ns[inside])
    previous = int(starts[0])
    if (step == 0).any():  # the first step begins when what no step launched, and is over before it, has ended
        earlier = found.end_ns[(step < 0) & (found.end_ns < first[0])]
        previous = max(previous, int(earlier.max(initial=previous)))
    cut_ends = np.maximum.accumulate(np.maximum.reduce([starts, ends, last, np.full(count, previous)]))
    cut_starts = np.maximum(starts, np.append(previous, cut_ends[:-1]))
    # without those at the end that were not recorded whole
    counts = np.bincount(step[inside], minlength=count)
    kept = int(np.flatnonzero(counts)[-1]) + 1 if count > 1 else 1
    if kept > 1 and counts[kept - 1] < MIN_SHARE_OF_LAST * counts[kept - 2]:
        kept -= 1
    return TraceSteps(names[:kept], cut_starts[:kept], cut_ends[:kept], count - kept, has_steps)


def cut(spans: Iterable[Span], *, recorded: bool) -> pl.DataFrame:
    """(process, start_ns in table `steps`, cut_ns, end_ns) of every step that traces name; no start of one dropped.

    Args:
        recorded: there is a journal, which knows its steps better than any trace: only those of the script's own
            profiler are taken, to tell which of its steps it recorded whole.
    """
    found: list[tuple[str, int, int | None, int | None]] = []
    for span in spans:
        if recorded:
            found += [(span.ref.process, begin, begin, None) for begin in span.marked["begin"].drop_nulls().to_list()]
            continue
        on_host = span.steps["start_ns"].to_list()
        if not on_host:
            continue
        windows = trace_steps(span, work(span))
        kept = dict(zip(on_host, zip(windows.start_ns.tolist(), windows.end_ns.tolist(), strict=True), strict=False))
        found += [(span.ref.process, start, *kept.get(start, (None, None))) for start in on_host]
    schema = {"process": pl.String, "start_ns": pl.Int64, "cut_ns": pl.Int64, "end_ns": pl.Int64}
    return pl.DataFrame(found, schema=schema, orient="row").unique(["process", "start_ns"], keep="first")


def walls_ns(spans: Iterable[Span]) -> Int64:
    """How long each step that traces name takes, as the views cut them."""
    windows = (trace_steps(span, work(span)) for span in spans)
    return np.concatenate([np.empty(0, np.int64), *(one.end_ns - one.start_ns for one in windows if one.has_steps)])


def host_steps(span: Span, found: Work) -> tuple[tuple[str, ...], Int64, Int64]:
    steps = span.steps
    if steps.height:
        names = tuple(str(step) for step in steps["step"].to_list())
        return names, steps["start_ns"].to_numpy().copy(), steps["end_ns"].to_numpy().copy()
    ranges = span.categories.where([categories.ANNOTATION, *categories.OPERATORS])
    host = ranges | span.is_function | (span.is_runtime & ~span.on_device)
    if host.any():
        start, end = int(span.start_ns[host].min()), int(span.ends(host).max())
    elif len(found):
        start, end = int(found.start_ns.min()), int(found.end_ns.max())
    else:
        return (), np.empty(0, np.int64), np.empty(0, np.int64)
    return ("0",), np.asarray([start], np.int64), np.asarray([end], np.int64)


def launched_in(span: Span, found: Work, starts: Int64, ends: Int64) -> Int64:
    step = np.full(len(found), -1, np.int64)
    if not len(starts):
        return step
    launched = np.flatnonzero(found.launch >= 0)
    call = found.launch[launched]
    at = np.searchsorted(starts, span.start_ns[call], side="right") - 1
    inside = (at >= 0) & (span.ends(call) <= ends[np.maximum(at, 0)])
    step[launched[inside]] = at[inside]
    return step
