"""What the training thread of a trace was doing, and when: waiting for data, synchronising, compiling, and so on.

The training thread is the one whose steps the trace marks, else the one that updates parameters, else the one with
most time in operators. While it runs the backward pass, threads of autograd work for it, so what these do counts as
its own. Activities overlap (a synchronisation below a compilation); which of them a moment counts for is decided by the
order in which a partition asks for them.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from stepscope.engine import intervals, slice_tree
from stepscope.engine.collective_names import is_collective_call
from stepscope.engine.device_work import COPY, Work
from stepscope.engine.intervals import Intervals
from stepscope.engine.spans import Span, matches
from stepscope.tables import categories
from stepscope.tables.arrays import Bools, Int64


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
        return among & flags[codes]

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
        chosen = slice_tree.ancestors(span.parent, self.rows[calls], span.names.where(_ITEM))
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
    helping[[*np.unique(span.tracks.codes[backward & host]), main]] = True
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
