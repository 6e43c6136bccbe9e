"""One trace under analysis: its steps, what its devices and its training thread do in them, and its modules.

Steps are cut with their device work as the TensorBoard plugin cut them. A step begins where its host range begins, but
not before the work of the step before has ended on the device; it ends with its host range, or with the last device
work that was launched inside it. Steps at the end whose device work was not recorded, or a good part of it, are
dropped. A trace that names no step counts as one step, "0".

What the training thread of a trace was doing, and when: waiting for data, synchronising, compiling, and so on.

The training thread is the one whose steps the trace marks, else the one that updates parameters, else the one with
most time in operators. While it runs the backward pass, threads of autograd work for it, so what these do counts as
its own. Activities overlap (a synchronisation below a compilation); which of them a moment counts for is decided by the
order in which a partition asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.engine import intervals
from stepscope.engine.collective_names import is_collective_call
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL, Work, work
from stepscope.engine.intervals import Intervals
from stepscope.engine.module_calls import ModuleCalls
from stepscope.engine.spans import Base, Span, matches
from stepscope.tables import arrays, categories
from stepscope.tables.arrays import Bools, Int32, Int64, by_code, flags, self_or_ancestor, unique, window_at


class _Names(Struct):
    """host_activity.json: patterns of names of host slices, `operators` by kind, of traces whose work is the host's."""

    loader_range: str  # fetches the next batch, as `loader_function` does
    loader_function: str
    sync: str  # a call of a runtime or driver (CUDA and HIP) that returns when the device is done
    allocator: str  # gets or gives memory
    freeing: str  # of these, what gives memory of the device back
    compile_call: str  # builds code, as the two below
    compile_range: str
    compile_function: str  # of torch.compile what compiles alone: its wrappers around ready code run in every step
    io_function: str  # reads and writes files
    operators: dict[str, str]


_NAMES = msgspec.json.decode(Path(__file__).with_name("host_activity.json").read_bytes(), type=_Names)
LOADER_RANGE, OPERATOR_KINDS = _NAMES.loader_range, _NAMES.operators
_ASYNC = r"(?i)async"
FREEING_NS = 50_000  # from a wait of the allocator to the first block it frees; it does nothing but walk its lists
_ITEM = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
_OPTIMIZER_RANGE = r"^Optimizer\.(step|zero_grad)#"
_ENGINE = r"^autograd::engine::"
_STEP = r"^ProfilerStep#"


def _times_of(**patterns: str) -> cached_property[Intervals]:
    """When slices of these sorts ran whose name is like that, or any of a sort where the pattern is empty."""

    def times(activity: HostActivity) -> Intervals:
        sorts = activity.sorts
        chosen = [
            activity.named(pattern, sorts[sort]) if pattern else sorts[sort] for sort, pattern in patterns.items()
        ]
        return activity.span.times(activity.rows[np.logical_or.reduce(chosen)])

    return cached_property(times)


class HostActivity(Struct, frozen=True, dict=True):
    """Sets of times, each made when first asked for.

    `rows` are the slices of the training thread and of those that work for it; `sorts` says which of them are "calls",
    "functions", "operators" (not the ranges that old writers called so), and "ranges": neither calls nor functions.
    """

    span: Span
    rows: Int64
    sorts: dict[str, Bools]
    found: Work

    data = _times_of(ranges=LOADER_RANGE, functions=_NAMES.loader_function)  # waiting for, or making, the next batch
    compiling = _times_of(calls=_NAMES.compile_call, ranges=_NAMES.compile_range, functions=_NAMES.compile_function)
    launching = _times_of(calls="")  # launches, and every other call of the device's runtime or driver
    io = _times_of(functions=_NAMES.io_function)
    operators = _times_of(operators="")
    python = _times_of(functions="")

    def named(self, pattern: str, among: Bools) -> Bools:
        """Which of the `among` rows have a name like that; each distinct name is looked at once."""
        names, codes = self.span.names, self.span.names.codes[self.rows]
        used = np.flatnonzero(np.bincount(codes[among] + 1)[1:])
        flags = np.zeros(len(names.values) + 1, bool)
        flags[used] = matches(pattern, [names.values[code] for code in used.tolist()])
        return among & by_code(flags, codes)

    @cached_property
    def freeing(self) -> Bools:
        """Of `rows` the calls that give memory of the device back."""
        return self.named(_NAMES.freeing, self.sorts["calls"])

    @cached_property
    def _syncs(self) -> tuple[Bools, Bools]:
        """Of `rows` the calls that return when the device is done; which of them the allocator makes before it frees.

        The allocator frees right behind its wait; nobody else does.
        """
        calls = self.sorts["calls"]
        syncs = self.named(_NAMES.sync, calls)
        syncs &= ~self.named(_ASYNC, syncs)
        order = np.flatnonzero(calls)
        order = order[np.lexsort((self.span.start_ns[self.rows[order]], self.span.tracks.codes[self.rows[order]]))]
        before, after = order[:-1], order[1:]
        gap_ns = self.span.start_ns[self.rows[after]] - self.span.ends(self.rows[before])
        own = np.zeros(len(calls), bool)
        own[before] = syncs[before] & self.freeing[after] & (np.abs(gap_ns) <= FREEING_NS)
        return syncs & ~own, own

    @cached_property
    def allocating(self) -> Intervals:
        """Calls that get or give memory, and the allocator's waits for the device before it gives memory back."""
        return self.span.times(self.rows[self.named(_NAMES.allocator, self.sorts["calls"]) | self._syncs[1]])

    @cached_property
    def synchronizing(self) -> Intervals:
        """Calls that return when the device is done, copies to or from pageable memory, and `.item()` around them."""
        span, found = self.span, self.found
        calls = self._syncs[0].copy()
        # what launched a copy with pageable memory on one side waits for it
        copies = np.flatnonzero((found.kind == COPY) & (found.launch >= 0))
        if len(copies):
            copies = copies[span.names.containing("Pageable")[found.rows[copies]]]
        calls |= self.sorts["calls"] & np.isin(self.rows, found.launch[copies])
        chosen = arrays.ancestors(span.parent, self.rows[calls], span.names.where(_ITEM))
        return span.times(self.rows[calls | chosen[self.rows]])

    @cached_property
    def optimizer(self) -> Intervals:
        ranges = self.span.times(self.rows[self.named(_OPTIMIZER_RANGE, self.sorts["ranges"])])
        return intervals.merge(intervals.intersect(ranges, self.operators), self.kind("optimizer"))

    def kind(self, name: str) -> Intervals:
        """Operators of one of OPERATOR_KINDS, with all below them."""
        return self.span.times(self.rows[self.named(OPERATOR_KINDS[name], self.sorts["operators"])])

    @cached_property
    def computing(self) -> Intervals:
        names = self.span.names
        collective = names.pick([is_collective_call(name) for name in names.values])[self.rows]
        return self.span.times(self.rows[self.sorts["operators"] & ~collective])


def host_activity(span: Span, found: Work) -> HostActivity:
    """The activity of the training thread of the trace; empty sets where its host did nothing."""
    names = span.names
    operators = span.categories.where(categories.OPERATORS)
    operators &= ~names.like(rf"{_STEP}|{LOADER_RANGE}|{_OPTIMIZER_RANGE}")
    host = ~span.on_device & (span.tracks.codes >= 0)
    main = _main_track(span, host & operators & (names.codes >= 0))
    # threads of the autograd engine run operators of the backward pass
    backward = names.like(_ENGINE) | (span.is_operator & (span.column("forward_thread") > 0))
    helping = np.zeros(len(span.tracks.values) + 1, bool)
    helping[[*unique(span.tracks.codes[backward & host]), main]] = True
    helping[-1] = False
    wanted = span.is_runtime | span.is_function
    wanted |= span.categories.where([categories.ANNOTATION, *categories.OPERATORS])
    rows = np.flatnonzero(host & wanted & helping[span.tracks.codes])
    calls, functions = span.is_runtime[rows], span.is_function[rows]
    own = operators[rows] & (names.codes[rows] >= 0)
    sorts = {"calls": calls, "functions": functions, "operators": own, "ranges": ~(calls | functions)}
    return HostActivity(span, rows, sorts, found)


def _main_track(span: Span, operators: Bools) -> int:
    """Code of the track whose steps are marked, else that updates parameters, else with most time in operators; -1
    without any. A thread of autograd may spend more time in operators than the one that trains.
    """
    for pattern in (_STEP, _OPTIMIZER_RANGE):
        marks = np.flatnonzero(span.names.like(pattern) & ~span.on_device)
        marks = marks[~span.categories.where(["gpu_user_annotation"])[marks] & (span.tracks.codes[marks] >= 0)]
        if len(marks):
            return int(np.bincount(span.tracks.codes[marks], minlength=len(span.tracks.values)).argmax())
    rows = np.flatnonzero(operators)
    rows = rows if len(rows) else np.flatnonzero(~span.on_device & span.is_function)
    if not len(rows):
        return -1
    tracks, lengths = intervals.union_by(span.tracks.codes[rows].astype(np.int64), span.start_ns[rows], span.ends(rows))
    return int(tracks[lengths.argmax()])


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
