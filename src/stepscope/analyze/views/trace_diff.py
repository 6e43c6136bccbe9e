"""Two sides laid against each other: spans, traces or runs, by name and by the structure of their steps.

A side is made once by `side` and can be compared with any other by `diff`. Values are means per step where both sides
know their steps, else totals. What one side lacks makes its tables absent, with the reason; nothing raises.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from msgspec import Struct

from stepscope.analyze.views import kernels, modules, operators, overview, step_tree
from stepscope.analyze.views.step_tree import KernelSum, StepNode, StepTree
from stepscope.engine.spans import Base
from stepscope.model.counted import things
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
MAX_CHILDREN = 1000  # of a node that are matched: those of most time
MAX_KERNELS = 200  # rows of kernels
_NAMED = 3  # of a gap's nodes that are named
_Pair = tuple[list[StepNode], list[StepNode]]


class Value(Struct, frozen=True):
    """One side of a row. ns; None: the side has no such thing, or no such figure."""

    calls: float | None
    ns: float | None
    device_ns: float | None = None


NOTHING = Value(None, None)
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
    spans = base.chosen(span)
    chosen = {one.ref for one in spans}
    steps = [len(one.steps) for one in spans]
    return DiffSide(
        label=label or (span.label if span else spans[0].ref.worker if spans else "nothing"),
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
    without = " and ".join(dict.fromkeys(one.label for one in (base, other) if not one.steps))
    tables: dict[str, tuple[DiffRow, ...]] = {}
    absent: dict[str, str] = {}
    notes = [
        f"times and calls per step: {things(base.steps or 0, 'step')} of {base.label}, {other.steps} of {other.label}"
        if per_step
        else f"times and calls in total, because {without} has no steps: their lengths may differ"
    ]
    notes += [
        f"{one.label}: {one.without_steps} of its traces have no steps; only operators, kernels and modules hold them"
        for one in (base, other)
        if one.without_steps
    ]
    found = [_tables(one, (one.steps or 1) if per_step else 1, per_step=per_step) for one in (base, other)]
    levels = {node.path: node.depth for one in (other, base) for node in (one.modules.nodes if one.modules else ())}
    there = {name: [bool(own[name]) for own in found] for name in found[0]}
    there["tree"] = [one.tree is not None for one in (base, other)]
    for name, known in there.items():
        lacking = dict.fromkeys(one.label for one, has in zip((base, other), known, strict=True) if not has)
        if lacking:
            absent[name] = f"{' and '.join(lacking)}: {_NEEDS[name]}"
        elif name in found[0]:
            tables[name] = tuple(_joined(found[0][name], found[1][name], levels if name == "modules" else {}))
    if base.tree is not None and other.tree is not None:
        divisors = [one.tree.steps or 1 if per_step and one.tree else 1 for one in (base, other)]
        alignment = _Alignment((base.tree, divisors[0]), (other.tree, divisors[1]))
        tables["tree"] = tuple(alignment.pair(base.tree.root, other.tree.root, 0))
        notes += alignment.notes()
    return Diff(base.label, other.label, per_step=per_step, tables=tables, absent=absent, notes=tuple(notes))


def _tables(one: DiffSide, steps: int, *, per_step: bool) -> dict[str, _Values]:
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


def _joined(base: _Values, other: _Values, levels: Mapping[str, int]) -> list[DiffRow]:
    """Largest change first, then most time. `levels`: depths by key."""

    def weight(one: DiffRow) -> tuple[float, float, str]:
        change = max(abs(one.delta_ns), abs(one.device_delta_ns or 0))
        return -change, -max(one.base_ns or 0, one.other_ns or 0), one.key

    keys = dict.fromkeys((*base, *other))
    rows = (row(key, base.get(key, NOTHING), other.get(key, NOTHING), levels.get(key, 0)) for key in keys)
    return sorted(rows, key=weight)


def row(key: str, base: Value, other: Value, level: int = 0) -> DiffRow:
    """A row with what follows from its two sides."""
    device = None
    if base.device_ns is not None or other.device_ns is not None:
        device = (other.device_ns or 0) - (base.device_ns or 0)
    return DiffRow(
        key=key,
        level=level,
        base_calls=base.calls,
        other_calls=other.calls,
        base_ns=base.ns,
        other_ns=other.ns,
        delta_ns=(other.ns or 0) - (base.ns or 0),
        ratio=other.ns / base.ns if base.ns and other.ns is not None else None,
        base_device_ns=base.device_ns,
        other_device_ns=other.device_ns,
        device_delta_ns=device,
    )


class _Alignment:
    """The structures of two sides' steps laid against each other, in order, level by level.

    A side is its tree and what its figures are divided by: its steps, or 1 for plain totals.
    """

    def __init__(self, base: tuple[StepTree, int], other: tuple[StepTree, int]) -> None:
        self._sides = base, other
        nodes = [base[0].root, other[0].root]
        for node in nodes:  # grows on the way
            nodes += node.children
        every = sorted((kernel.ns for node in nodes for kernel in node.kernels.values()), reverse=True)
        self._least_ns = every[MAX_KERNELS] if len(every) > MAX_KERNELS else -1
        self._left_out = 0

    def notes(self) -> list[str]:
        found = []
        if self._least_ns >= 0:
            found.append(f"tree: of the kernels only the {MAX_KERNELS} that take most time are shown")
        if self._left_out:
            found.append(f"tree: {self._left_out} short parts beside more than {MAX_CHILDREN} others are not shown")
        return found

    def pair(self, base: StepNode, other: StepNode, level: int) -> Iterator[DiffRow]:
        """Of two nodes that are matched, with all below."""
        yield row(_key(base, other), self._value([base], 0), self._value([other], 1), level)
        yield from self._kernel_rows(base, other, level + 1)
        yield from self.rows(base.children, other.children, level + 1)

    def rows(self, base: list[StepNode], other: list[StepNode], level: int) -> Iterator[DiffRow]:
        """Of nodes that stand below matched parents."""
        for ours, theirs in _matched(self._longest(base), self._longest(other)):
            if len(ours) == len(theirs) == 1 and (ours[0].type, ours[0].kind) == (theirs[0].type, theirs[0].kind):
                yield from self.pair(ours[0], theirs[0], level)
                continue
            inside = level + bool(ours and theirs)
            if inside > level:
                key = f"not matched: {_list(ours)} | {_list(theirs)}"
                yield row(key, self._value(ours, 0), self._value(theirs, 1), level)
            for node in ours:
                yield row(_title(node), self._value([node], 0), NOTHING, inside)
            for node in theirs:
                yield row(_title(node), NOTHING, self._value([node], 1), inside)

    def _longest(self, nodes: list[StepNode]) -> list[StepNode]:
        if len(nodes) <= MAX_CHILDREN:
            return nodes
        self._left_out += len(nodes) - MAX_CHILDREN
        by_time = sorted(range(len(nodes)), key=lambda place: -max(nodes[place].host_ns, nodes[place].device_ns))
        return [nodes[place] for place in sorted(by_time[:MAX_CHILDREN])]

    def _value(self, nodes: list[StepNode], side: int) -> Value:
        tree, divisor = self._sides[side]
        calls = sum(node.calls for node in nodes)
        return Value(
            calls=calls / divisor if calls else None,
            ns=sum(node.host_ns for node in nodes) / divisor,
            device_ns=sum(node.device_ns for node in nodes) / divisor if tree.has_device else None,
        )

    def _kernel_rows(self, base: StepNode, other: StepNode, level: int) -> Iterator[DiffRow]:
        pairs = {
            place: (base.kernels.get(place), other.kernels.get(place)) for place in (*base.kernels, *other.kernels)
        }
        longest = {place: max(one.ns for one in pair if one) for place, pair in pairs.items()}
        for place in sorted(pairs, key=lambda place: -longest[place]):
            if longest[place] > self._least_ns:
                one, two = pairs[place]
                yield row(_kernel_key(place, one, two), self._kernel(one, 0), self._kernel(two, 1), level)

    def _kernel(self, kernel: KernelSum | None, side: int) -> Value:
        if kernel is None:
            return NOTHING
        divisor = self._sides[side][1]
        return Value(kernel.slices / divisor, None, kernel.ns / divisor)


def _matched(base: list[StepNode], other: list[StepNode]) -> Iterator[_Pair]:
    """Pairs of one node each that match, and gaps in between, in order."""
    for ours, theirs in _aligned(base, other, lambda node: (node.type, node.name)):
        if len(ours) == len(theirs) == 1 and ours[0].name == theirs[0].name and ours[0].type == theirs[0].type:
            yield ours, theirs
        else:
            yield from _aligned(ours, theirs, lambda node: (node.type, node.kind))


def _aligned(
    base: Sequence[StepNode], other: Sequence[StepNode], key: Callable[[StepNode], Hashable]
) -> Iterator[_Pair]:
    matcher = SequenceMatcher(None, [key(node) for node in base], [key(node) for node in other], autojunk=False)
    ours = theirs = 0
    for block in matcher.get_matching_blocks():
        if block.a > ours or block.b > theirs:
            yield list(base[ours : block.a]), list(other[theirs : block.b])
        for offset in range(block.size):
            yield [base[block.a + offset]], [other[block.b + offset]]
        ours, theirs = block.a + block.size, block.b + block.size


def _kernel_key(place: tuple[str, int], base: KernelSum | None, other: KernelSum | None) -> str:
    operator, position = place
    names = dict.fromkeys(max(sorted(side.names), key=side.names.__getitem__) for side in (base, other) if side)
    where = f"{operator}, kernel {position + 1}" if operator else "launched outside of operators"
    return f"{where}: {' | '.join(names)}"


def _title(node: StepNode) -> str:
    return f"{node.type} {node.name}".rstrip()


def _key(base: StepNode, other: StepNode) -> str:
    if base.type != other.type:  # of steps, and of a trace without any
        return f"{_title(base)} | {_title(other)}"
    return _title(base) if base.name == other.name else f"{_title(base)} | {other.name}"


def _list(nodes: list[StepNode]) -> str:
    more = len(nodes) - _NAMED
    return ", ".join(_title(node) for node in nodes[:_NAMED]) + (f" and {more} more" if more > 0 else "")
