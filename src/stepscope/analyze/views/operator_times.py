"""Calls of operators in a span: who calls whom, and the host, device and memory figures of each call.

A call whose only inner call is one of the same operator is one call with it (the dispatcher entering twice), as
`torch.profiler.key_averages` and the TensorBoard plugin count. Figures are a call's own; what goes to the calls around
it is found by walking up `caller`, once for each operator name, so that recursion counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from stepscope.engine.device_work import LINKED, in_state, work
from stepscope.engine.slice_tree import nearest_around, upward
from stepscope.engine.spans import Span, Texts, texts
from stepscope.tables.arrays import NONE, Bools, Int32, Int64, climb

_OLD_RUNTIME = "Runtime"  # of 2021: times in whole microseconds, and an External id on every call


class Device(Struct, frozen=True):
    """Device slices that could be linked to an operator: their row, times, and the call that launched each."""

    rows: Int64
    start_ns: Int64
    end_ns: Int64
    call: Int64


class Allocations(Struct, frozen=True):
    """Allocations and releases of memory while an operator ran: bytes, the innermost call, and where the block is."""

    bytes: Int64
    call: Int64
    on_host: Bools


class Calls:
    """All calls of operators of a span. `rows` are rows of the span; all else goes by position in `rows`."""

    def __init__(self, span: Span) -> None:
        self.span = span
        operators = np.flatnonzero(span.is_operator)
        number = np.full(len(span) + 1, NONE, np.int32)  # the last stands for no row
        number[operators] = np.arange(len(operators), dtype=np.int32)
        around = nearest_around(span.parent, span.is_operator)
        caller = number[around[operators]]
        repeated = _repeated(caller, span.names.codes[operators])
        root = np.arange(len(operators), dtype=np.int32)
        root[repeated] = caller[repeated]
        root = _last(root)
        counted = (np.cumsum(~repeated) - 1).astype(np.int32)
        self.rows: Int64 = operators[~repeated]
        outer = caller[~repeated]
        self.caller: Int64 = np.where(outer >= 0, counted[root[outer]], NONE).astype(np.int64)
        around[operators] = operators
        at = number[around]
        self._call: Int32 = np.where(at >= 0, counted[root[at]], NONE).astype(np.int32) if len(root) else at

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, rows: Int64) -> Int64:
        """The innermost call that each row of the span is or lies in, `NONE` without one."""
        return np.where(rows >= 0, self._call[np.maximum(rows, 0)], NONE).astype(np.int64)

    def summed(self, calls: Int64, values: Int64) -> Int64:
        """Values added up by call; those of no call are left out. Exact up to 2**53."""
        known = calls >= 0
        return np.bincount(calls[known], weights=values[known], minlength=len(self)).astype(np.int64)

    @cached_property
    def duration_ns(self) -> Int64:
        return self.span.duration_ns[self.rows]

    @cached_property
    def runtime_ns(self) -> Int64:
        """Calls of the device's runtime and driver that each call makes itself."""
        span = self.span
        rows = np.flatnonzero(span.is_runtime & ~span.on_device)
        old = span.categories.where([_OLD_RUNTIME])[rows]
        parent = span.parent[rows]
        inside = (parent >= 0) & span.is_runtime[parent]  # a driver call within a runtime call
        calls = np.where(inside, NONE, self.of(rows))
        if old.any():
            calls[old] = self._by_external_id(rows[old])
        return self.summed(calls, span.duration_ns[rows])

    @cached_property
    def host_self_ns(self) -> Int64:
        """Duration without the calls made by it, and without its own runtime calls."""
        return self.duration_ns - self.summed(self.caller, self.duration_ns) - self.runtime_ns

    @cached_property
    def device(self) -> Device:
        """Linked device slices that are work."""
        found = work(self.span)
        call = self.of(np.where(in_state(self.span, found, LINKED), found.operator, NONE))
        known = call >= 0
        return Device(found.rows[known], found.start_ns[known], found.end_ns[known], call[known])

    @cached_property
    def beside_others(self) -> Bools:
        """Device slices that run while another of `device` does."""
        device = self.device
        order = np.argsort(device.start_ns, kind="stable")
        start, end = device.start_ns[order], device.end_ns[order]
        begins_inside = np.zeros(len(order), bool)
        begins_inside[1:] = np.maximum.accumulate(end)[:-1] > start[1:]
        result = np.zeros(len(order), bool)
        result[order] = begins_inside
        # one that others begin in ends after the next one begins
        result[order[:-1][end[:-1] > start[1:]]] = True
        return result

    @cached_property
    def has_device(self) -> bool:
        """Whether the trace holds device slices at all."""
        return bool((self.span.is_kernel | self.span.is_copy | self.span.is_fill).any())

    @cached_property
    def device_ns(self) -> Int64:
        """Plain sum of the device slices each call launched itself."""
        return self.summed(self.device.call, self.device.end_ns - self.device.start_ns)

    @cached_property
    def memory(self) -> Allocations | None:
        """Allocations and releases by innermost call on their thread; None where the trace recorded no memory."""
        memory = self.span.memory
        if memory.is_empty():
            return None
        rows = np.flatnonzero((memory["bytes"].is_not_null() & memory["track"].is_not_null()).to_numpy())
        call = self._running(texts(memory["track"][rows]), memory["time_ns"][rows].to_numpy())
        known = call >= 0
        device = texts(memory["device"][rows])
        on_host = device.where(["cpu"]) | (device.codes == NONE)
        return Allocations(memory["bytes"][rows].to_numpy()[known], call[known], on_host[known])

    def up(self, calls: Int64) -> Iterator[tuple[Int64, Int64]]:
        """(positions in `calls`, calls): first each call itself, then the one around it, and so on to the outermost."""
        return upward(self.caller, calls)

    def inner(self, groups: Int64) -> Bools:
        """Calls that lie in a call of the same group (recursion). `groups` holds the group of each call."""
        result = np.zeros(len(self), bool)
        for left, at in self.up(self.caller):
            result[left[groups[at] == groups[left]]] = True
        return result

    def _by_external_id(self, rows: Int64) -> Int64:
        """The calls that runtime calls name by their External id."""
        ids = self.span.column("external_id")
        operators = np.flatnonzero(self.span.is_operator & (ids > 0))
        if not len(operators):
            return np.full(len(rows), NONE, np.int64)
        operators = operators[np.argsort(ids[operators], kind="stable")]
        known, wanted = ids[operators], ids[rows]
        place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        return np.where(known[place] == wanted, self.of(operators[place]), NONE)

    def _running(self, tracks: Texts, times_ns: Int64) -> Int64:
        """The innermost call that ran on each track at each time."""
        span = self.span
        starts, ends = span.start_ns[self.rows], span.ends(self.rows)
        numbers = {name: code for code, name in enumerate(span.tracks.values)}
        own = span.tracks.codes[self.rows]
        result = np.full(len(times_ns), NONE, np.int64)
        for code, name in enumerate(tracks.values):
            mine = np.flatnonzero(own == numbers.get(name, NONE - 1))
            if not len(mine):
                continue
            mine = mine[np.lexsort((-ends[mine], starts[mine]))]
            wanted = np.flatnonzero(tracks.codes == code)
            last = np.searchsorted(starts[mine], times_ns[wanted], side="right") - 1
            call = np.where(last >= 0, mine[np.maximum(last, 0)], NONE)
            result[wanted] = self._lasting(call, ends, times_ns[wanted])
        return result

    def _lasting(self, calls: Int64, ends: Int64, times_ns: Int64) -> Int64:
        """Of each call the first, itself or around it, that lasts until a time."""
        return climb(self.caller, calls, lambda at, which: ends[at] >= times_ns[which])


def _repeated(caller: npt.NDArray[np.int32], codes: Int32) -> Bools:
    """Calls that are the only one in a call of the same name."""
    inside = np.flatnonzero(caller >= 0)
    only = np.bincount(caller[inside], minlength=len(caller)) == 1
    repeated = np.zeros(len(caller), bool)
    outer = caller[inside]
    repeated[inside] = only[outer] & (codes[inside] == codes[outer])
    return repeated


def _last(root: Int32) -> Int32:
    """Follow the numbers until one stands for itself."""
    for _ in range(64):
        further = root[root]
        if np.array_equal(further, root):
            break
        root = further
    return root
