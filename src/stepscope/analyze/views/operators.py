"""Operators: calls, host and device time, memory, tensor cores and the user's line behind them, by name or by shapes.

Recursion: a call within a call of the same row adds to the row's calls and self figures, and nothing to its totals.
`plugin_operators` gives the rows of the TensorBoard plugin's table; its totals are plain sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from stepscope.analyze.views.call_stacks import stacks
from stepscope.analyze.views.operator_times import Calls
from stepscope.analyze.views.tensor_cores import eligible, uses_tensor_cores
from stepscope.engine import attribution, intervals, tree
from stepscope.engine.spans import Base, Span, texts
from stepscope.model.findings import Place
from stepscope.model.trace import SpanRef
from stepscope.model.views import OperatorRow
from stepscope.tables.arrays import Bools, Int64

__all__ = ["plugin_operators", "stacks", "table"]

NAME, SHAPES = "name", "shapes"
_DENSE = 4_000_000  # up to as many possible groups counting is faster than sorting
_KEYS = ["name", "shapes"]
_SUMS = (
    *("calls", "host_self_ns", "host_total_ns", "runtime_ns", "weighed_ns"),
    *("steps_calls", "steps_self_ns", "steps_total_ns"),  # of calls that begin in a step
)
_DEVICE = (
    "device_self_ns",
    "device_total_ns",
    "device_self_sum_ns",
    "device_total_sum_ns",
    "cores_self",
    "cores_total",
)
_MEMORY = ("self_memory_bytes", "total_memory_bytes", "self_device_memory_bytes", "total_device_memory_bytes")


class _Part(NamedTuple):
    """The rows of one span: figures by `_KEYS`, weights of places by `_KEYS`, and the number of its steps."""

    figures: pl.DataFrame
    places: pl.DataFrame
    steps: int


def table(
    base: Base, *, span: SpanRef | None = None, by: str = NAME, step: int | None = None
) -> tuple[OperatorRow, ...]:
    """Rows of one span, or of all together, the most device self time first (without a device: host self time).

    Args:
        by: "name", or "shapes" for name and input shapes.
        step: only calls that begin in this step.
    """
    chosen = [item for item in base.spans if span is None or item.ref == span]
    parts = [_part(base, item, by, step) for item in chosen]
    parts = [part for part in parts if part.figures.height]
    if not parts:
        return ()
    every = (*_SUMS, *_DEVICE, *_MEMORY)
    figures = (
        pl.concat([part.figures for part in parts])
        .group_by(_KEYS)
        .agg(*(_known_sum(name) for name in every), pl.col("eligible", "has_call_stack").any())
    )
    places = attribution.heaviest(pl.concat([part.places for part in parts]), _KEYS)
    joined = figures.join(places, on=_KEYS, how="left", nulls_equal=True)
    first = pl.col("device_self_sum_ns").fill_null(0)
    joined = joined.sort(first, "host_self_ns", "name", "shapes", descending=[True, True, False, False])
    steps = sum(part.steps for part in parts)
    return tuple(_row(row, steps) for row in joined.iter_rows(named=True))


def plugin_operators(rows: Sequence[OperatorRow]) -> list[dict[str, Any]]:
    """The rows under the names, in the units (µs) and with the rounding of the plugin's operator table."""
    return [
        {
            "name": row.name,
            "calls": row.calls,
            **(
                {
                    "device_self_duration": round(row.device_self_sum_ns / 1000),
                    "device_total_duration": round(row.device_total_sum_ns / 1000),
                }
                if row.device_self_sum_ns is not None and row.device_total_sum_ns is not None
                else {}
            ),
            "host_self_duration": round(row.host_self_ns / 1000),
            "host_total_duration": round(row.host_total_ns / 1000),
            "tc_eligible": "Yes" if row.tensor_core_eligible else "No",
            "tc_self_ratio": round(row.tensor_core_self_pct or 0.0, 2),
            "tc_total_ratio": round(row.tensor_core_total_pct or 0.0, 2),
            "has_call_stack": row.has_call_stack,
        }
        for row in rows
    ]


def _row(row: dict[str, Any], steps: int) -> OperatorRow:
    place, exact = _place(row) if row["file"] is not None else (None, False)
    return OperatorRow(
        name=row["name"],
        shapes=row["shapes"],
        calls=row["calls"],
        calls_per_step=row["steps_calls"] / steps if steps else None,
        host_self_ns=row["host_self_ns"],
        host_total_ns=row["host_total_ns"],
        host_self_ns_per_step=row["steps_self_ns"] / steps if steps else None,
        host_total_ns_per_step=row["steps_total_ns"] / steps if steps else None,
        runtime_ns=row["runtime_ns"],
        device_self_ns=row["device_self_ns"],
        device_total_ns=row["device_total_ns"],
        device_self_sum_ns=row["device_self_sum_ns"],
        device_total_sum_ns=row["device_total_sum_ns"],
        self_memory_bytes=row["self_memory_bytes"],
        total_memory_bytes=row["total_memory_bytes"],
        self_device_memory_bytes=row["self_device_memory_bytes"],
        total_device_memory_bytes=row["total_device_memory_bytes"],
        tensor_core_eligible=row["eligible"],
        tensor_core_self_pct=_percent(row["cores_self"], row["device_self_sum_ns"]),
        tensor_core_total_pct=_percent(row["cores_total"], row["device_total_sum_ns"]),
        has_call_stack=row["has_call_stack"],
        place=place,
        place_exact=exact,
    )


def _place(row: dict[str, Any]) -> tuple[Place, bool]:
    """The place with its share of the time it was chosen by, and whether its line is exact."""
    place, exact = attribution.place_of_row(row)
    share = row["weight"] / row["weighed_ns"] if row["weighed_ns"] > 0 else None
    return msgspec.structs.replace(place, share=share), exact


def _percent(part: int | None, whole: int | None) -> float | None:
    return 100 * part / whole if whole and part is not None else None


def _known_sum(name: str) -> pl.Expr:
    """The sum of what is known; null where nothing is."""
    return pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name)


def _part(base: Base, span: Span, by: str, step: int | None) -> _Part:
    # rows of a span are asked for alone and together with others
    known: dict[tuple[str, int | None], _Part] = span.kept.setdefault("operators", {})
    if (by, step) not in known:
        known[by, step] = _computed(base, span, by, step)
    return known[by, step]


def _computed(base: Base, span: Span, by: str, step: int | None) -> _Part:
    calls = Calls(span)
    steps = span.step_numbers[calls.rows]
    chosen = np.ones(len(calls), bool) if step is None else steps == step
    groups, keys = _groups(calls, by)
    grouped = _Grouped(calls, groups, keys.height, chosen)
    in_steps = chosen & (np.isin(steps, span.steps["step"].to_numpy()) if step is None else True)
    weights = np.where(grouped.any_of(calls.device_ns > 0)[groups], calls.device_ns, calls.host_self_ns)
    ones, outer = np.ones(len(calls), np.int64), ~grouped.inner
    figures = keys.with_columns(
        grouped.column("calls", ones, chosen),
        grouped.column("host_self_ns", calls.host_self_ns, chosen),
        grouped.column("host_total_ns", calls.duration_ns, chosen & outer),
        grouped.column("runtime_ns", calls.runtime_ns, chosen),
        grouped.column("weighed_ns", weights, chosen),
        grouped.column("steps_calls", ones, in_steps),
        grouped.column("steps_self_ns", calls.host_self_ns, in_steps),
        grouped.column("steps_total_ns", calls.duration_ns, in_steps & outer),
        *grouped.device(),
        *grouped.memory(),
        pl.Series("eligible", grouped.any_of(_eligible(calls))),
        pl.Series("has_call_stack", grouped.any_of(_has_stack(calls))),
    )
    places = attribution.place_sums(base, span, groups[chosen], calls.rows[chosen], weights[chosen])
    keyed = places.join(keys.with_row_index("group").with_columns(pl.col("group").cast(pl.Int64)), on="group")
    return _Part(figures.filter(pl.col("calls") > 0), keyed.drop("group"), span.steps.height if step is None else 1)


def _groups(calls: Calls, by: str) -> tuple[Int64, pl.DataFrame]:
    """The group of each call, and the name and shapes of each group."""
    span = calls.span
    names = span.names
    code = names.codes[calls.rows].astype(np.int64)
    shapes: list[str | None] = [None]
    if by == SHAPES:
        found = texts(span.series("shapes")[calls.rows])
        shapes = [*found.values, None]  # the last for NONE
        code = code * len(shapes) + np.where(found.codes >= 0, found.codes, len(shapes) - 1)
    distinct, groups = _numbered(code, len(names.values) * len(shapes))
    keys = pl.DataFrame(
        {
            "name": [names.values[number // len(shapes)] if number >= 0 else "" for number in distinct.tolist()],
            "shapes": [shapes[number % len(shapes)] for number in distinct.tolist()],
        },
        schema={"name": pl.String, "shapes": pl.String},
    )
    return groups, keys


def _numbered(code: Int64, count: int) -> tuple[Int64, Int64]:
    """The distinct codes, ascending, and the number of each code among them."""
    if count > _DENSE or (code < 0).any():
        distinct, groups = np.unique(code, return_inverse=True)
        return distinct, groups.astype(np.int64)
    seen = np.bincount(code, minlength=count) > 0
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[code]


class _Grouped:
    """Figures of calls added up by group. `inner`: calls within one of the same group."""

    def __init__(self, calls: Calls, groups: Int64, count: int, chosen: Bools) -> None:
        self._calls, self._groups, self._count, self._chosen = calls, groups, count, chosen
        self.inner = calls.inner(groups)

    def any_of(self, flags: Bools) -> Bools:
        """By group, whether a chosen call is flagged."""
        return np.bincount(self._groups[flags & self._chosen], minlength=self._count) > 0

    def column(self, name: str, values: Int64, wanted: Bools) -> pl.Series:
        return self._sum(name, self._groups[wanted], values[wanted])

    def device(self) -> list[pl.Series]:
        """`_DEVICE`; null without any device slice in the trace."""
        calls = self._calls
        if not calls.has_device:
            return [pl.Series(name, [None] * self._count, pl.Int64) for name in _DEVICE]
        device = calls.device
        duration = device.end_ns - device.start_ns
        cores = np.where(_on_cores(calls.span, device.rows), duration, 0)
        own = np.flatnonzero(self._chosen[device.call])
        slices, groups = self._everywhere(device.call)
        self_groups = self._groups[device.call[own]]
        return [
            self._union("device_self_ns", self_groups, own),
            self._union("device_total_ns", groups, slices),
            self._sum("device_self_sum_ns", self_groups, duration[own]),
            self._sum("device_total_sum_ns", groups, duration[slices]),
            self._sum("cores_self", self_groups, cores[own]),
            self._sum("cores_total", groups, cores[slices]),
        ]

    def memory(self) -> list[pl.Series]:
        """`_MEMORY`; null where the trace recorded none, or none on a device."""
        found = self._calls.memory
        if found is None:
            return [pl.Series(name, [None] * self._count, pl.Int64) for name in _MEMORY]
        own = self._chosen[found.call]
        rows, groups = self._everywhere(found.call)
        result = []
        for names, here in ((_MEMORY[:2], found.on_host), (_MEMORY[2:], ~found.on_host)):
            if not here.any():
                result += [pl.Series(name, [None] * self._count, pl.Int64) for name in names]
                continue
            mine, every = own & here, here[rows]
            result.append(self._sum(names[0], self._groups[found.call[mine]], found.bytes[mine]))
            result.append(self._sum(names[1], groups[every], found.bytes[rows[every]]))
        return result

    def _everywhere(self, calls: Int64) -> tuple[Int64, Int64]:
        """(positions in `calls`, groups) of every group that a call or a call around it belongs to, each once."""
        positions, groups = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for left, at in self._calls.up(calls):
            counts = ~self.inner[at] & self._chosen[at]
            positions.append(left[counts])
            groups.append(self._groups[at[counts]])
        return np.concatenate(positions), np.concatenate(groups)

    def _sum(self, name: str, groups: Int64, values: Int64) -> pl.Series:
        sums = np.bincount(groups, weights=values, minlength=self._count)
        return pl.Series(name, np.rint(sums).astype(np.int64))

    def _union(self, name: str, groups: Int64, slices: Int64) -> pl.Series:
        """Length of the union of the device slices of each group. Only those beside others can count twice."""
        device = self._calls.device
        beside = self._calls.beside_others[slices]
        alone, others = slices[~beside], slices[beside]
        duration = device.end_ns[alone] - device.start_ns[alone]
        lengths = np.rint(np.bincount(groups[~beside], weights=duration, minlength=self._count)).astype(np.int64)
        keys, covered = intervals.union_by(groups[beside], device.start_ns[others], device.end_ns[others])
        lengths[keys] += covered
        return pl.Series(name, lengths)


def _on_cores(span: Span, rows: Int64) -> Bools:
    """Which device slices use tensor cores. Only names of device slices are looked at."""
    codes = span.names.codes[rows]
    distinct = np.unique(codes[codes >= 0])
    flags = np.zeros(len(span.names.values) + 1, bool)
    flags[distinct] = uses_tensor_cores([span.names.values[code] for code in distinct.tolist()])
    return flags[codes]


def _eligible(calls: Calls) -> Bools:
    """Calls of operators that can use tensor cores, that did, and those around them."""
    names = calls.span.names
    codes = names.codes[calls.rows]
    distinct = np.unique(codes[codes >= 0])
    flags = np.zeros(len(names.values) + 1, bool)
    flags[distinct] = eligible([names.values[code] for code in distinct.tolist()])
    result: Bools = flags[codes]
    device = calls.device
    result[device.call[_on_cores(calls.span, device.rows)]] = True
    return result | tree.above(calls.caller, np.flatnonzero(result))


def _has_stack(calls: Calls) -> Bools:
    """Calls with a recorded call stack, or below a Python function."""
    span = calls.span
    found = span.series("frame").gather(calls.rows).is_not_null()
    stacks = span.series("call_stack").gather(calls.rows)
    if stacks.null_count() < len(stacks):
        found |= stacks.fill_null("") != ""
    return found.to_numpy()
