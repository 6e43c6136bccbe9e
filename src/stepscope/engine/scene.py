"""One trace under analysis: its steps, what its devices and its training thread do in them, and its modules.

Steps are cut with their device work as the TensorBoard plugin cut them. A step begins where its host range begins, but
not before the work of the step before has ended on the device; it ends with its host range, or with the last device
work that was launched inside it. Steps at the end whose device work was not recorded, or a good part of it, are
dropped. A trace that names no step counts as one step, "0".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.engine import intervals
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL, Work, work
from stepscope.engine.host_activity import HostActivity, host_activity
from stepscope.engine.intervals import Intervals
from stepscope.engine.module_calls import ModuleCalls
from stepscope.engine.slice_tree import self_or_ancestor
from stepscope.engine.spans import Base, Span
from stepscope.tables import categories
from stepscope.tables.arrays import Bools, Int32, Int64, flags, window_at

MIN_SHARE_OF_LAUNCHED = 0.9  # of launched kernels; with fewer in the trace the device seems idle where it was not
_KERNEL_LAUNCH = ("LaunchKernel", "LaunchCooperativeKernel", "KernelLaunch")
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


class Scene(Struct, frozen=True, eq=False, dict=True):
    """A trace, its device work, its complete steps and its modules. All else is made when first asked for."""

    base: Base
    span: Span
    found: Work
    windows: TraceSteps
    calls: ModuleCalls

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def starts(self) -> Int64:
        """Of the steps, ns."""
        return self.windows.start_ns

    @property
    def ends(self) -> Int64:
        return self.windows.end_ns

    @property
    def inside(self) -> Intervals:
        return intervals.union(self.starts, self.ends)

    @cached_property
    def host(self) -> HostActivity:
        return host_activity(self.span, self.found)

    @cached_property
    def idle(self) -> Intervals:
        """Between the slices of all devices, from the first step's start to the last one's end."""
        busy = self.found.covered(KERNEL, FILL, COMMUNICATION, COPY)
        return intervals.complement(busy, int(self.starts[0]), int(self.ends[-1]))

    def step_of(self, times: Int64) -> Int64:
        """The number of the step each time lies in, -1 for none."""
        return window_at(self.starts, self.ends, times)

    def step_around(self, rows: Int64) -> Int64:
        """The number of the step that the middle of each slice lies in, -1 for none.

        Journal and trace agree to some hundred microseconds: what begins with a step may seem to begin before it.
        """
        return self.step_of(self.span.start_ns[rows] + self.span.duration_ns[rows] // 2)

    @property
    def whole(self) -> bool:
        """Whether the kernels that were launched in the steps are in the trace, as far as it tells launches."""
        launched = self.found.launch[self.found.launch >= 0]
        calls = np.flatnonzero(self.span.is_runtime & self.span.names.containing(*_KERNEL_LAUNCH))
        calls = calls[self.step_of(self.span.start_ns[calls]) >= 0]
        return not len(calls) or not len(launched) or np.isin(calls, launched).mean() >= MIN_SHARE_OF_LAUNCHED

    def has(self, column: str) -> bool:
        return bool(self.span.series(column).is_not_null().any())

    @property
    def trains(self) -> Bools:
        order = np.sort(self.span.start_ns[np.flatnonzero(self.calls.is_backward)])
        return np.searchsorted(order, self.ends) > np.searchsorted(order, self.starts)

    @cached_property
    def mine(self) -> Bools:
        """Slices of the training thread, and of those that run the backward pass for it, inside the steps."""
        rows = self.host.rows
        return flags(len(self.span), rows[self.step_around(rows) >= 0])

    @cached_property
    def operators(self) -> Bools:
        return np.logical_and(self.span.is_operator, self.mine)

    @cached_property
    def in_backward(self) -> Int32:
        """For each row the innermost operator of the backward pass around it, or itself; -1 for none."""
        return self_or_ancestor(self.span.parent, self.calls.is_backward)

    def times(self, rows: Int64) -> Intervals:
        return self.span.times(rows)

    def launched_during(self, times: Intervals) -> Bools:
        """Device work whose launch began in these times."""
        launch = self.found.launch
        return intervals.inside(times, self.span.start_ns[np.maximum(launch, 0)]) & (launch >= 0)

    def launched_below(self, rows: Int64) -> Bools:
        """Device work launched inside these host slices."""
        found = self.found
        if not len(found) or not len(rows):
            return np.zeros(len(found), bool)
        origin = np.where(found.launch >= 0, found.launch, found.operator)
        below = self_or_ancestor(self.span.parent, flags(len(self.span), rows))
        return (origin >= 0) & (below[origin] >= 0)

    def exclusive(self, chosen: Bools) -> Intervals:
        """When the chosen device work ran and no other did."""
        found = self.found
        rest = ~chosen & np.isin(found.kind, (KERNEL, FILL, COMMUNICATION, COPY))
        return intervals.subtract(
            intervals.union(found.start_ns[chosen], found.end_ns[chosen]),
            intervals.union(found.start_ns[rest], found.end_ns[rest]),
        )


def scenes(base: Base) -> Iterator[Scene]:
    """One for each trace, those without any step too."""
    for span in base.spans:
        found = work(span)
        yield Scene(base, span, found, trace_steps(span, found), ModuleCalls(span))
