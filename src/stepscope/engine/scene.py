"""One trace under analysis: its steps, what its devices and its training thread do in them, and its modules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from msgspec import Struct

from stepscope.engine import intervals
from stepscope.engine.device_work import COMMUNICATION, COPY, FILL, KERNEL, Work, work
from stepscope.engine.host_activity import HostActivity, host_activity
from stepscope.engine.intervals import Intervals
from stepscope.engine.module_calls import ModuleCalls
from stepscope.engine.slice_tree import self_or_ancestor
from stepscope.engine.spans import Base, Span
from stepscope.engine.trace_steps import TraceSteps, trace_steps
from stepscope.tables.arrays import Bools, Int32, Int64, flags, window_at


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
