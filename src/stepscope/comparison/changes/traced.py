"""What traces hold on both sides: parts of profiled steps, operators, kernels.

The sides are laid against each other by `analyze.views.diff`; here its rows become changes. Several pairs of runs are
compared pair by pair, and a row holds their means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stepscope.analyze.views import diff as views
from stepscope.analyze.views.diff import STEP, DiffSide
from stepscope.comparison.changes.rows import (
    DEVICE_PER_STEP,
    IN_ALL,
    PER_STEP,
    Amount,
    Pair,
    Thing,
    row,
    rows,
    total,
)
from stepscope.model.comparison import Change
from stepscope.model.views.diff import Diff, DiffRow

NS_PER_MS = 1e6
ALL_KERNELS = "all kernels"
ALL_OPERATORS = "all operators, on the host"
OTHER_BASIS = (
    "one side's traces hold device work and the other's do not: parts of their steps have nothing in common, so the "
    "TensorBoard plugin's parts stand in"
)

Value = Callable[[DiffRow], tuple[float | None, float | None]]


def diffs(pairs: Sequence[tuple[DiffSide, DiffSide]]) -> list[Diff]:
    """Each pair's sides laid against each other."""
    return [views.diff(one, other) for one, other in pairs]


def categories(found: Sequence[Diff], floor: float) -> tuple[list[Change], str | None]:
    """Parts of the profiled step, all that there are, and what must be said of them."""
    ours = _pairs(found, "overview", _host)
    before, after = ({thing.name for pair in ours for thing in pair[side]} - {STEP} for side in (0, 1))
    if before and after and not before & after:
        return _parts(_pairs(found, "tensorboard", _host), _unit(found), floor), OTHER_BASIS
    return _parts(ours, _unit(found), floor), None


def operators(found: Sequence[Diff], floor: float) -> list[Change]:
    """Operators by self time of the host, and by self time of the device where there is one; their sum first."""
    unit = _unit(found)
    host, device = _pairs(found, "operators", _host), _pairs(found, "operators", _device)
    sums = _sum(host, ALL_OPERATORS, "operator", unit, floor)
    on_device = DEVICE_PER_STEP if unit == PER_STEP else "ms of the device"
    return [*sums, *rows("operator", unit, host, floor), *rows("operator", on_device, device, floor)]


def kernels(found: Sequence[Diff], floor: float) -> list[Change]:
    """Kernels by time on the device; their sum first."""
    pairs = _pairs(found, "kernels", _host)
    unit = DEVICE_PER_STEP if _unit(found) == PER_STEP else "ms of the device"
    return [*_sum(pairs, ALL_KERNELS, "kernel", unit, floor), *rows("kernel", unit, pairs, floor)]


def why_absent(found: Sequence[Diff], table: str) -> str | None:
    """Why no pair has the table."""
    reasons = [one.absent[table] for one in found if table in one.absent]
    return reasons[0] if reasons and len(reasons) == len(found) else None


def _parts(pairs: Sequence[Pair], unit: str, floor: float) -> list[Change]:
    return [change for change in rows("category", unit, pairs, floor) if change.name != STEP]


def _sum(pairs: Sequence[Pair], name: str, kind: str, unit: str, floor: float) -> list[Change]:
    """The row of all together, kept where nothing changed: that all stayed the same is worth a line."""
    sums = [(total(name, one), total(name, other)) for one, other in pairs]
    return [row(kind, Thing(name), unit, sums, floor)] if any(one or other for one, other in sums) else []


def _unit(found: Sequence[Diff]) -> str:
    return PER_STEP if all(one.per_step for one in found) else IN_ALL


def _host(one: DiffRow) -> tuple[float | None, float | None]:
    return one.base_ns, one.other_ns


def _device(one: DiffRow) -> tuple[float | None, float | None]:
    return one.base_device_ns, one.other_device_ns


def _pairs(found: Sequence[Diff], table: str, value: Value) -> list[Pair]:
    return [_pair(one.tables[table], value) for one in found if table in one.tables]


def _pair(table: Iterable[DiffRow], value: Value) -> Pair:
    sides: tuple[dict[Thing, Amount], dict[Thing, Amount]] = ({}, {})
    for one in table:
        for side, ns in zip(sides, value(one), strict=True):
            if ns is not None:
                side[Thing(one.key)] = Amount(ns / NS_PER_MS)
    return sides
