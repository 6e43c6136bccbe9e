"""Operators: calls, host and device time, memory, tensor cores and the user's line behind them, by name or by shapes.

A call whose only inner call is one of the same operator is one call with it (the dispatcher entering twice), as
`torch.profiler.key_averages` and the TensorBoard plugin count. Recursion: a call within a call of the same row adds to
the row's calls and self figures, and nothing to its totals. `plugin_operators` gives the rows of the TensorBoard
plugin's table; its totals are plain sums.

`stacks`: newer traces hold Python functions around the call; the stack is those of the user's, innermost first. Traces
of 2021 hold a call stack with each operator that Python called.

Time by nn.Module, as a tree: forward and backward, on the host and on the device.

Every slice of the host and every slice of the device counts for one module at most, the innermost whose code caused it,
so that self times and what no module caused sum to all there is. Totals are sums over the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.views.allocated_memory import around
from stepscope.analyze.views.kernels import eligible, judged, known_sum, uses_tensor_cores
from stepscope.engine import attribution, intervals
from stepscope.engine.device_work import LINKED, Work, in_state, work
from stepscope.engine.module_calls import ModuleCalls, Paths, module_class
from stepscope.engine.spans import Base, Span, texts
from stepscope.engine.user_code import UserCode, python_frame, user_code
from stepscope.model.findings import Place
from stepscope.model.trace import SpanRef
from stepscope.model.views import CallStack, ModuleNode, ModuleTree, OperatorRow
from stepscope.tables import arrays
from stepscope.tables.arrays import (
    NONE,
    Bools,
    Floats,
    Int32,
    Int64,
    Rows,
    climb,
    nearest_ancestor,
    self_and_ancestors,
    unique,
    window_at,
)

NAME, SHAPES = "name", "shapes"
_KEYS = ["name", "shapes"]
_SUMS = (
    *("calls", "host_self_ns", "host_total_ns", "runtime_ns", "weighed_ns"),
    *("steps_calls", "steps_self_ns", "steps_total_ns"),  # of calls that begin in a step
)
_DEVICE = (
    *("device_self_ns", "device_total_ns", "device_self_sum_ns", "device_total_sum_ns"),
    *("cores_self", "cores_total"),
)
_MEMORY = ("self_memory_bytes", "total_memory_bytes", "self_device_memory_bytes", "total_device_memory_bytes")
_SHOWN = (*_KEYS, *_SUMS[:4], *_DEVICE[:4], *_MEMORY, "has_call_stack")  # of a row, as they are


def table(
    base: Base, *, span: SpanRef | None = None, by: str = NAME, step: int | None = None
) -> tuple[OperatorRow, ...]:
    """Rows of one span, or of all together, the most device self time first (without a device: host self time).

    Args:
        by: "name", or "shapes" for name and input shapes.
        step: only calls that begin in this step.
    """
    found = [(item, *_part(base, item, by, step)) for item in base.chosen(span)]
    found = [(item, figures, places) for item, figures, places in found if figures.height]
    if not found:
        return ()
    every = (*_SUMS, *_DEVICE, *_MEMORY)
    figures = (
        pl.concat([figures for _, figures, _ in found])
        .group_by(_KEYS)
        .agg(*(known_sum(name) for name in every), pl.col("eligible", "has_call_stack").any())
    )
    places = attribution.heaviest(pl.concat([places for *_, places in found]), _KEYS)
    joined = figures.join(places, on=_KEYS, how="left", nulls_equal=True)
    first = pl.col("device_self_sum_ns").fill_null(0)
    joined = joined.sort(first, "host_self_ns", "name", "shapes", descending=[True, True, False, False])
    steps = sum(len(item.steps) if step is None else 1 for item, *_ in found)
    return tuple(_row(row, steps) for row in joined.iter_rows(named=True))


def plugin_operators(rows: Sequence[OperatorRow]) -> list[dict[str, Any]]:
    """The rows under the names, in the units (µs) and with the rounding of the plugin's operator table."""
    figures = []
    for row in rows:
        device = {"device_self_duration": row.device_self_sum_ns, "device_total_duration": row.device_total_sum_ns}
        host = {"host_self_duration": row.host_self_ns, "host_total_duration": row.host_total_ns}
        figures.append(
            {
                "name": row.name,
                "calls": row.calls,
                **{name: round(ns / 1000) for name, ns in (device | host).items() if ns is not None},
                "tc_eligible": "Yes" if row.tensor_core_eligible else "No",
                "tc_self_ratio": round(row.tensor_core_self_pct or 0.0, 2),
                "tc_total_ratio": round(row.tensor_core_total_pct or 0.0, 2),
                "has_call_stack": row.has_call_stack,
            }
        )
    return figures


def _row(row: dict[str, Any], steps: int) -> OperatorRow:
    place, exact = None, False
    if row["file"] is not None:  # the place has its share of the time it was chosen by
        place, exact = attribution.place_of_row(row)
        share = row["weight"] / row["weighed_ns"] if row["weighed_ns"] > 0 else None
        place = msgspec.structs.replace(place, share=share)
    return OperatorRow(
        **{name: row[name] for name in _SHOWN},
        calls_per_step=row["steps_calls"] / steps if steps else None,
        host_self_ns_per_step=row["steps_self_ns"] / steps if steps else None,
        host_total_ns_per_step=row["steps_total_ns"] / steps if steps else None,
        tensor_core_eligible=row["eligible"],
        tensor_core_self_pct=_percent(row["cores_self"], row["device_self_sum_ns"]),
        tensor_core_total_pct=_percent(row["cores_total"], row["device_total_sum_ns"]),
        place=place,
        place_exact=exact,
    )


def _percent(part: int | None, whole: int | None) -> float | None:
    return 100 * part / whole if whole and part is not None else None


def _part(base: Base, span: Span, by: str, step: int | None) -> tuple[pl.DataFrame, pl.DataFrame]:
    # they are asked for alone and together with others
    known: dict[tuple[str, int | None], tuple[pl.DataFrame, pl.DataFrame]] = span.kept.setdefault("operators", {})
    if (by, step) in known:
        return known[by, step]
    calls = Calls(span)
    steps = span.step_numbers[calls.rows]
    chosen = np.ones(len(calls), bool) if step is None else steps == step
    in_steps = chosen & (np.isin(steps, span.steps["step"].to_numpy()) if step is None else True)
    del steps
    groups, keys = _groups(calls, by)
    grouped = _Grouped(calls, groups, keys.height, chosen)
    further = {**grouped.device(), **grouped.memory()}  # need most memory for themselves, so first
    weights = np.where(grouped.any_of(calls.device_ns > 0)[groups], calls.device_ns, calls.host_self_ns)
    able = judged(span.names, calls.rows, eligible)
    able[calls.device.call[judged(span.names, calls.device.rows, uses_tensor_cores)]] = True
    stacked = span.series("frame").is_not_null() | (span.series("call_stack") != "").fill_null(False)
    ones, outer = np.ones(len(calls), np.int8), ~grouped.inner
    figures = keys.with_columns(
        pl.Series(name, grouped.sum(groups, np.where(wanted, values, 0.0)))
        for name, values, wanted in (
            ("calls", ones, chosen),
            ("host_self_ns", calls.host_self_ns, chosen),
            ("host_total_ns", calls.duration_ns, chosen & outer),
            ("runtime_ns", calls.runtime_ns, chosen),
            ("weighed_ns", weights, chosen),
            ("steps_calls", ones, in_steps),
            ("steps_self_ns", calls.host_self_ns, in_steps),
            ("steps_total_ns", calls.duration_ns, in_steps & outer),
        )
    ).with_columns(
        *(pl.Series(name, values, pl.Int64) for name, values in further.items()),
        pl.Series("eligible", grouped.any_of(able | arrays.ancestors(calls.caller, np.flatnonzero(able)))),
        pl.Series("has_call_stack", grouped.any_of(stacked.gather(calls.rows).to_numpy())),
    )
    places = attribution.place_sums(base, span, groups[chosen], calls.rows[chosen], weights[chosen])
    keyed = places.join(keys.with_columns(group=pl.int_range(pl.len(), dtype=pl.Int32)), on="group").drop("group")
    known[by, step] = figures.filter(pl.col("calls") > 0), keyed
    return known[by, step]


def _groups(calls: Calls, by: str) -> tuple[Int32, pl.DataFrame]:
    span = calls.span
    names = span.names
    code = names.codes[calls.rows].astype(np.int64)
    shapes: list[str | None] = [None]
    if by == SHAPES:
        found = texts(span.series("shapes")[calls.rows])
        shapes = [*found.values, None]  # the last for NONE
        code = code * len(shapes) + np.where(found.codes >= 0, found.codes, len(shapes) - 1)
    distinct, groups = np.unique(code, return_inverse=True)
    keys = pl.DataFrame(
        {
            "name": [names.values[number // len(shapes)] if number >= 0 else "" for number in distinct.tolist()],
            "shapes": [shapes[number % len(shapes)] for number in distinct.tolist()],
        },
        schema={"name": pl.String, "shapes": pl.String},
    )
    return groups.astype(np.int32), keys


_AT_ONCE = 1 << 18  # device slices whose unions are made together: what that takes is gone before the next ones


class _Grouped:
    """Figures of calls added up by group. `inner`: calls within one of the same group."""

    def __init__(self, calls: Calls, groups: Int32, count: int, chosen: Bools) -> None:
        self._calls, self._groups, self._count, self._chosen = calls, groups, count, chosen
        self.inner = calls.inner(groups)

    def any_of(self, flags: Bools) -> Bools:
        return np.bincount(self._groups[flags & self._chosen], minlength=self._count) > 0

    def device(self) -> dict[str, Int64 | list[None]]:
        """`_DEVICE`; null without any device slice in the trace."""
        calls = self._calls
        if not calls.has_device:
            return dict.fromkeys(_DEVICE, [None] * self._count)
        device = calls.device
        duration = device.end_ns - device.start_ns
        cores = np.where(judged(calls.span.names, device.rows, uses_tensor_cores), duration, 0)
        own = np.flatnonzero(self._chosen[device.call])
        slices, groups = self._everywhere(device.call)
        self_groups = self._groups[device.call[own]]
        figures = (
            self._union(self_groups, own),
            self._union(groups, slices),
            self.sum(self_groups, duration[own]),
            self.sum(groups, duration[slices]),
            self.sum(self_groups, cores[own]),
            self.sum(groups, cores[slices]),
        )
        return dict(zip(_DEVICE, figures, strict=True))

    def memory(self) -> dict[str, Int64 | list[None]]:
        """`_MEMORY`; null where the trace recorded none, or none on a device."""
        calls = self._calls
        memory = calls.span.memory
        result: dict[str, Int64 | list[None]] = dict.fromkeys(_MEMORY, [None] * self._count)
        if memory.is_empty():
            return result
        kept = np.flatnonzero((memory["bytes"].is_not_null() & memory["track"].is_not_null()).to_numpy())
        innermost = calls.of(around(calls.span, until_end=True)[kept])
        kept, call = kept[innermost >= 0], innermost[innermost >= 0]
        size, device = memory["bytes"][kept].to_numpy(), texts(memory["device"][kept])
        on_host = device.where(["cpu"]) | (device.codes == NONE)
        at = unique(call)
        own = self._chosen[at]
        rows, groups = self._everywhere(at)
        for (self_name, total_name), here in ((_MEMORY[:2], on_host), (_MEMORY[2:], ~on_host)):
            if here.any():
                of_call = calls.summed(call[here], size[here])[at]
                result[self_name] = self.sum(self._groups[at[own]], of_call[own])
                result[total_name] = self.sum(groups, of_call[rows])
        return result

    def sum(self, groups: Int32, values: Int64 | Floats) -> Int64:
        return np.rint(np.bincount(groups, weights=values, minlength=self._count)).astype(np.int64)

    def _everywhere(self, calls: Int64) -> tuple[Int32, Int32]:
        """(positions in `calls`, groups) of every group that a call or a call around it belongs to, each once."""
        positions, groups = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        for left, at in self_and_ancestors(self._calls.caller, calls):
            counts = ~self.inner[at] & self._chosen[at]
            positions.append(left[counts].astype(np.int32))
            groups.append(self._groups[at[counts]])
        return np.concatenate(positions), np.concatenate(groups)

    def _union(self, groups: Int32, slices: Rows) -> Int64:
        device, lengths = self._calls.device, np.zeros(self._count, np.int64)
        batches = np.cumsum(np.bincount(groups, minlength=self._count)) // _AT_ONCE
        for number in unique(batches).tolist():
            rows = np.flatnonzero(batches[groups] == number)
            own = slices[rows]
            keys, lengths_of = intervals.union_by(groups[rows], device.start_ns[own], device.end_ns[own])
            lengths[keys] = lengths_of
        return lengths


_OLD_RUNTIME = "Runtime"  # of 2021: times in whole microseconds, and an External id on every call


class Device(Struct, frozen=True):
    """Device slices that could be linked to an operator: their row, times, and the call that launched each."""

    rows: Int64
    start_ns: Int64
    end_ns: Int64
    call: Int64


class Calls:
    """All calls of operators of a span. `rows` are rows of the span; all else goes by position in `rows`."""

    def __init__(self, span: Span) -> None:
        self.span = span
        operators = np.flatnonzero(span.is_operator)
        number = np.full(len(span) + 1, NONE, np.int32)  # the last stands for no row
        number[operators] = np.arange(len(operators), dtype=np.int32)
        around = nearest_ancestor(span.parent, span.is_operator)
        caller = number[around[operators]]
        codes = span.names.codes[operators]
        inside = np.flatnonzero(caller >= 0)  # of these calls, those that are the only one in a call of the same name
        only = np.bincount(caller[inside], minlength=len(caller)) == 1
        repeated = np.zeros(len(caller), bool)
        repeated[inside] = only[caller[inside]] & (codes[inside] == codes[caller[inside]])
        root = np.arange(len(operators), dtype=np.int32)
        root[repeated] = caller[repeated]
        root = settled(root).astype(np.int32)
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
        sums = np.bincount(calls + 1, weights=values, minlength=len(self) + 1)  # `NONE` first
        return sums[1:].astype(np.int64)

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
            ids = span.column("external_id")
            operators = np.flatnonzero(span.is_operator & (ids > 0))[::-1]  # of one id the first counts
            of_id = dict(zip(ids[operators].tolist(), self.of(operators).tolist(), strict=True))
            calls[old] = [of_id.get(*told) for told in zip(ids[rows[old]].tolist(), calls[old].tolist(), strict=True)]
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
    def has_device(self) -> bool:
        return bool((self.span.is_kernel | self.span.is_copy | self.span.is_fill).any())

    @cached_property
    def device_ns(self) -> Int64:
        """Plain sum of the device slices each call launched itself."""
        return self.summed(self.device.call, self.device.end_ns - self.device.start_ns)

    def inner(self, groups: Int32) -> Bools:
        """Calls that lie in a call of the same group (recursion). `groups` holds the group of each call."""
        result = np.zeros(len(self), bool)
        for left, at in self_and_ancestors(self.caller, self.caller):
            result[left[groups[at] == groups[left]]] = True
        return result


def settled(number: Rows) -> Int64:
    """The numbers followed until one stands for itself."""
    found = number.astype(np.int64)
    while not np.array_equal(further := found[found], found):
        found = further
    return found


MAX_FRAMES = 64
_Frames = tuple[Place, ...]
_KEPT = "operator calls"


def stacks(
    base: Base, name: str, *, span: SpanRef | None = None, code: UserCode | None = None
) -> tuple[CallStack, ...]:
    """The stacks behind calls of operator `name`, costliest first; calls without any frame are left out.

    `code` tells whose the frames of traces of 2021 are; None: as found without what the user says of it.
    """
    sums: dict[_Frames, list[int]] = {}
    code = code or user_code(base.tables, {})
    for item in base.chosen(span):
        if _KEPT not in item.kept:  # of a large trace they take a second, and whoever looks at one looks at the next
            item.kept[_KEPT] = Calls(item)
        calls: Calls = item.kept[_KEPT]
        chosen = np.flatnonzero(item.names.where([name])[calls.rows])
        if not len(chosen):
            continue
        rows = calls.rows[chosen]
        text = texts(item.series("call_stack")[rows])
        frames, numbers = [_parsed(stack, code) for stack in text.values], text.codes.astype(np.int64)
        if not any(text.values):
            frames, numbers = _functions(base, item, rows)
        known = numbers >= 0
        figures = (np.ones(len(chosen), np.int64), calls.host_self_ns[chosen], calls.device_ns[chosen])
        totals = [np.bincount(numbers[known], weights=values[known], minlength=len(frames)) for values in figures]
        for number, stack in enumerate(frames):
            if stack:
                entry = sums.setdefault(stack, [0, 0, 0])
                for place, total in enumerate(totals):
                    entry[place] += round(total[number])
    found = [CallStack(frames, *figures) for frames, figures in sums.items()]
    found.sort(key=lambda stack: (-stack.device_self_ns, -stack.host_self_ns, -stack.calls, str(stack.frames)))
    return tuple(found)


def _parsed(stack: str, code: UserCode) -> _Frames:
    """The user's frames; where there are none those of libraries outside torch, else all."""
    named = [python_frame(part.strip()) for part in stack.split(";", MAX_FRAMES)[:MAX_FRAMES]]
    frames = [Place(frame.file, frame.line, frame.function) for frame in named if frame]
    own = [(code.resolve(frame.file), frame) for frame in frames]
    users = tuple(Place(file, frame.line, frame.function) for file, frame in own if file is not None)
    return users or tuple(frame for frame in frames if code.library(frame.file)) or tuple(frames)


def _functions(base: Base, span: Span, rows: Int64) -> tuple[list[_Frames], Int64]:
    """The distinct stacks of the user's functions around rows, and which one each has; `NONE` without one."""
    tree = attribution.origins(base, span)
    number = np.zeros(len(rows), np.int64)  # of the stack so far
    at = rows
    levels: list[tuple[Int64, Int64]] = []
    for _ in range(MAX_FRAMES):
        stop, below, _ = tree.walk(at, boundary=False)
        if (stop < 0).all():
            break
        place = np.where(stop >= 0, tree.user[np.maximum(stop, 0)], NONE).astype(np.int64)
        call = attribution.calls(base, span, below)
        levels.append((place, call))
        step = (place + 1) * (len(base.calls) + 1) + call + 1
        step = np.unique(step, return_inverse=True)[1]
        number = np.unique(number * (int(step.max()) + 1) + step, return_inverse=True)[1].astype(np.int64)
        at = np.where(stop >= 0, tree.parent[np.maximum(stop, 0)], NONE)
    if not levels:
        return [], np.full(len(rows), NONE, np.int64)
    firsts = np.unique(number, return_index=True)[1]
    frames = [
        tuple(
            attribution.place(base, int(place[first]), int(call[first]))[0]
            for place, call in levels
            if place[first] >= 0
        )
        for first in firsts.tolist()
    ]
    return frames, number


# Columns of sums by path. Times are self times.
_CALLS, _IN_STEPS, _OPERATORS, _HOST, _BACK_HOST, _DEVICE_OF_MODULES, _BACK_DEVICE = range(7)
_TIMES = {"host": _HOST, "device": _DEVICE_OF_MODULES, "backward_host": _BACK_HOST, "backward_device": _BACK_DEVICE}
_TOTALLED = (_HOST, _BACK_HOST, _DEVICE_OF_MODULES, _BACK_DEVICE)


def module_tree(base: Base, span: SpanRef | None = None) -> ModuleTree | None:
    """Modules of one span, or of all spans that hold any, by path; None where none does."""
    paths, sums = Paths(), np.zeros((0, _BACK_DEVICE + 1), np.int64)
    steps = device_slices = device_ns = backward_ns = 0
    linked = False
    for one in base.chosen(span):
        calls, found = ModuleCalls(one), work(one)
        if not len(calls.rows):
            continue
        places = paths.take_in(calls.paths)  # the number among all spans of each path of this one
        sums = np.concatenate([sums, np.zeros((len(paths.name) - len(sums), _BACK_DEVICE + 1), np.int64)])
        np.add.at(sums, places, _of_span(one, calls, found))
        steps += len(one.steps)
        device_slices += len(found)
        device_ns += int((found.end_ns - found.start_ns).sum())
        linked |= bool((calls.forward >= 0).any())
        back = (calls.near >= 0) & calls.is_backward[np.maximum(calls.near, 0)] & ~one.on_device
        backward_ns += int(one.series("self_ns").fill_null(0).to_numpy()[back].sum())
    if not paths.name:
        return None
    known = (True, device_slices > 0, linked, linked and device_slices > 0)
    attributed = int(sums[:, (_DEVICE_OF_MODULES, _BACK_DEVICE)].sum())
    return ModuleTree(
        nodes=tuple(_nodes(paths, sums, steps, known)),
        device_ns=device_ns if device_slices else None,
        unattributed_device_ns=device_ns - attributed if device_slices else None,
        backward_linked_share=int(sums[:, _BACK_HOST].sum()) / backward_ns if linked and backward_ns else None,
        steps=steps or None,
    )


def _of_span(span: Span, calls: ModuleCalls, found: Work) -> Int64:
    """The columns of sums, by path of the span."""
    count, owners = len(calls.paths.name), calls.owners
    starts, ends = (span.steps[name].to_numpy() for name in ("start_ns", "end_ns"))
    inside = window_at(starts, ends, span.start_ns[calls.rows]) >= 0
    mine = (owners.path >= 0) & ~span.on_device
    direct = np.flatnonzero(mine & ~owners.backward & span.is_operator)
    above = climb(span.parent, span.parent[direct], calls.is_call | span.is_operator)
    direct = direct[(above >= 0) & calls.is_call[np.maximum(above, 0)]]
    ns = span.series("self_ns").fill_null(0).to_numpy()
    forward, backward = mine & ~owners.backward, mine & owners.backward
    sums = [
        np.bincount(calls.path, minlength=count),
        np.bincount(calls.path[inside], minlength=count),
        np.bincount(owners.path[direct], minlength=count),
        # sums of nanoseconds in floats are exact up to 104 days
        np.bincount(owners.path[forward], weights=ns[forward], minlength=count),
        np.bincount(owners.path[backward], weights=ns[backward], minlength=count),
    ]
    duration = np.zeros(len(span), np.int64)
    duration[found.rows] = found.end_ns - found.start_ns
    launched, ns = calls.owners_of(span.links), duration[span.links["event"].to_numpy()]
    for back in (False, True):
        rows = (launched.path >= 0) & (launched.backward == back)
        sums.append(np.bincount(launched.path[rows], weights=ns[rows], minlength=count))
    return np.stack(sums, axis=1).astype(np.int64)


def _nodes(paths: Paths, sums: Int64, steps: int, known: tuple[bool, ...]) -> Iterator[ModuleNode]:
    """In depth-first order; `known` are those of `_TIMES` that the traces tell."""
    totals = sums.copy()
    inside: dict[int, list[int]] = {}
    for number in range(len(paths.name) - 1, -1, -1):  # children stand behind their parents
        if paths.parent[number] >= 0:
            totals[paths.parent[number], _TOTALLED] += totals[number, _TOTALLED]
    for number, above in enumerate(paths.parent):
        inside.setdefault(above, []).append(number)

    def rank(number: int) -> tuple[int, int, str]:
        ns = totals[number]
        return -int(ns[_DEVICE_OF_MODULES] + ns[_BACK_DEVICE]), -int(ns[_HOST] + ns[_BACK_HOST]), paths.name[number]

    waiting = [(number, 0, "") for number in sorted(inside.get(NONE, []), key=rank, reverse=True)]
    while waiting:
        number, depth, outer = waiting.pop()
        name = paths.name[number]
        path = f"{outer}/{name}" if outer else name
        own, total = sums[number].tolist(), totals[number].tolist()
        times: dict[str, Any] = {}
        for (figure, column), told in zip(_TIMES.items(), known, strict=True):
            times[f"{figure}_self_ns"] = own[column] if told else None
            times[f"{figure}_total_ns"] = total[column] if told else None
        yield ModuleNode(
            path=path,
            name=name,
            module=module_class(name),
            depth=depth,
            calls=own[_CALLS],
            calls_per_step=own[_IN_STEPS] / steps if steps else None,
            operators=own[_OPERATORS],
            **times,
        )
        waiting += [(child, depth + 1, path) for child in sorted(inside.get(number, []), key=rank, reverse=True)]
