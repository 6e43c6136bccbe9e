"""Two sides laid against each other: spans, traces or runs, by name and by the structure of their steps.

A side is made once by `side` and can be compared with any other by `diff`. Values are means per step where both sides
know their steps, else totals. What one side lacks makes its tables absent, with the reason; nothing raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from stepscope.analyze.views import diff_tree, kernels, modules, operators, overview, step_tree
from stepscope.analyze.views.diff_tree import NOTHING, Value, row
from stepscope.analyze.views.step_tree import StepTree
from stepscope.engine.spans import Base, Span
from stepscope.model.trace import SpanRef
from stepscope.model.views import Diff, DiffRow, KernelRow, ModuleTree, OperatorRow, Overview

STEP = "step"
_NEEDS = {
    "overview": "no steps and no slices of the host",
    "tensorboard": "no steps and no slices of the host",
    "operators": "no operators: record with ProfilerActivity.CPU",
    "kernels": "no work of a device: recorded on a CPU, without ProfilerActivity.CUDA, or CUPTI was not allowed",
    "modules": "no modules: record with with_stack=True",
    "tree": "no slices of the host",
}
_Values = dict[str, Value]


class DiffSide(Struct, frozen=True):
    """One side: a span, or all spans of a trace or run together. `steps` is None where the spans have none."""

    label: str
    steps: int | None
    overviews: tuple[Overview, ...]
    operators: tuple[OperatorRow, ...]
    kernels: tuple[KernelRow, ...]
    modules: ModuleTree | None
    tree: StepTree | None
    without_steps: int = 0  # spans that have none while others do


def side(base: Base, span: SpanRef | None = None, label: str = "") -> DiffSide:
    """What is to be compared of a span, or of all spans together.

    Args:
        label: how the side is called; by default the span, or the first one's worker.
    """
    spans = [one for one in base.spans if span in (None, one.ref)]
    chosen = {one.ref for one in spans}
    steps = [len(one.steps) for one in spans]
    return DiffSide(
        label=label or _label(spans, span),
        steps=sum(steps) or None,
        overviews=tuple(item for item in overview.overviews(base) if item.span in chosen),
        operators=operators.table(base, span=span),
        kernels=kernels.table(base, span=span),
        modules=modules.tree(base, span),
        tree=step_tree.tree(spans),
        without_steps=steps.count(0) if any(steps) else 0,
    )


def diff(base: DiffSide, other: DiffSide) -> Diff:
    """Both sides, table by table."""
    per_step = bool(base.steps and other.steps)
    tables: dict[str, tuple[DiffRow, ...]] = {}
    absent: dict[str, str] = {}
    notes = [_divided(base, other, per_step)]
    notes += [
        f"{one.label}: {one.without_steps} of its traces have no steps; only operators, kernels and modules hold them"
        for one in (base, other)
        if one.without_steps
    ]
    found = [_tables(one, (one.steps or 1) if per_step else 1, per_step=per_step) for one in (base, other)]
    for name in found[0]:
        lacking = [one.label for one, own in zip((base, other), found, strict=True) if not own[name]]
        if lacking:
            absent[name] = f"{' and '.join(dict.fromkeys(lacking))}: {_NEEDS[name]}"
        else:
            tables[name] = tuple(_joined(found[0][name], found[1][name], levels=_levels(name, base, other)))
    if base.tree is None or other.tree is None:
        lacking = [one.label for one in (base, other) if one.tree is None]
        absent["tree"] = f"{' and '.join(dict.fromkeys(lacking))}: {_NEEDS['tree']}"
    else:
        divisors = [one.tree.steps or 1 if per_step and one.tree else 1 for one in (base, other)]
        rows, more = diff_tree.rows(base.tree, other.tree, *divisors)
        tables["tree"] = tuple(rows)
        notes += more
    return Diff(
        base=base.label,
        other=other.label,
        per_step=per_step,
        tables=tables,
        absent=absent,
        notes=tuple(notes),
    )


def _label(spans: list[Span], span: SpanRef | None) -> str:
    if span is not None:
        return span.label
    return spans[0].ref.worker if spans else "nothing"


def _divided(base: DiffSide, other: DiffSide, per_step: bool) -> str:
    if per_step:
        return f"times and calls per step: {base.steps} steps of {base.label}, {other.steps} of {other.label}"
    lacking = " and ".join(dict.fromkeys(one.label for one in (base, other) if not one.steps))
    return f"times and calls in total, because {lacking} has no steps: their lengths may differ"


def _tables(one: DiffSide, steps: int, *, per_step: bool) -> dict[str, _Values]:
    """The flat tables of a side, key to value."""
    return {
        "overview": _parts(one.overviews, "parts_ns", per_step=per_step),
        "tensorboard": _parts(one.overviews, "plugin_ns", per_step=per_step),
        "operators": {
            item.name: Value(item.calls / steps, item.host_self_ns / steps, _divide(item.device_self_ns, steps))
            for item in one.operators
        },
        "kernels": {item.name: Value(item.calls / steps, item.total_ns / steps) for item in one.kernels},
        "modules": {
            node.path: Value(
                node.calls / steps,
                (node.host_total_ns + (node.backward_host_total_ns or 0)) / steps,
                _divide(node.device_total_ns, steps, node.backward_device_total_ns or 0),
            )
            for node in (one.modules.nodes if one.modules else ())
        },
    }


def _parts(overviews: Iterable[Overview], partition: str, *, per_step: bool) -> _Values:
    """A partition of the steps that the overview shows, and the step itself."""
    steps = [step for item in overviews for step in item.steps]
    if not steps:
        return {}
    count = len(steps) if per_step else 1
    sums = {STEP: sum(step.wall_ns for step in steps)}
    for step in steps:
        parts: Mapping[str, int] = getattr(step, partition)
        for name, ns in parts.items():
            sums[name] = sums.get(name, 0) + ns
    return {name: Value(None, ns / count) for name, ns in sums.items()}


def _divide(ns: int | None, steps: int, more: int = 0) -> float | None:
    return None if ns is None else (ns + more) / steps


def _levels(name: str, base: DiffSide, other: DiffSide) -> dict[str, int]:
    """Depth by path of modules."""
    trees = [one.modules for one in (other, base) if one.modules] if name == "modules" else []
    return {node.path: node.depth for tree in trees for node in tree.nodes}


def _joined(base: _Values, other: _Values, levels: Mapping[str, int]) -> list[DiffRow]:
    keys = dict.fromkeys((*base, *other))
    rows = [row(key, base.get(key, NOTHING), other.get(key, NOTHING), levels.get(key, 0)) for key in keys]
    return sorted(rows, key=_weight)


def _weight(one: DiffRow) -> tuple[float, float, str]:
    """Largest change first, then most time."""
    change = max(abs(one.delta_ns), abs(one.device_delta_ns or 0))
    return -change, -max(one.base_ns or 0, one.other_ns or 0), one.key
