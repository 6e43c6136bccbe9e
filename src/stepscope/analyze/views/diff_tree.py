"""The structures of two sides' steps laid against each other, in order, level by level.

First what has the same type and name is matched, in order; in the gaps between, what has the same type and class, so
that modules that were numbered differently meet. What is left of a gap stands together as not matched.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from difflib import SequenceMatcher

from msgspec import Struct

from stepscope.analyze.views.step_tree import KernelSum, StepNode, StepTree
from stepscope.model.views import DiffRow

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


def rows(base: StepTree, other: StepTree, base_divisor: int, other_divisor: int) -> tuple[list[DiffRow], list[str]]:
    """The rows of both trees in order, and what must be said of them. The divisors are steps, or 1 for plain totals."""
    alignment = _Alignment((base, base_divisor), (other, other_divisor))
    return list(alignment.pair(base.root, other.root, 0)), alignment.notes()


class _Alignment:
    def __init__(self, base: tuple[StepTree, int], other: tuple[StepTree, int]) -> None:
        self._sides = base, other
        every = sorted((kernel.ns for tree, _ in self._sides for kernel in _kernels(tree.root)), reverse=True)
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
            matched = (
                len(ours) == len(theirs) == 1 and ours[0].type == theirs[0].type and ours[0].kind == theirs[0].kind
            )
            if matched:
                yield from self.pair(ours[0], theirs[0], level)
                continue
            inside = level
            if ours and theirs:
                key = f"not matched: {_list(ours)} | {_list(theirs)}"
                yield row(key, self._value(ours, 0), self._value(theirs, 1), level)
                inside = level + 1
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
        """Kernels of two matched nodes by operator and position, whatever their names."""
        places = dict.fromkeys((*base.kernels, *other.kernels))
        for place in sorted(places, key=lambda place: -max(_ns(base, place), _ns(other, place))):
            if max(_ns(base, place), _ns(other, place)) > self._least_ns:
                one, two = base.kernels.get(place), other.kernels.get(place)
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


def _kernels(root: StepNode) -> Iterator[KernelSum]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield from node.kernels.values()
        waiting.extend(node.children)


def _ns(node: StepNode, place: tuple[str, int]) -> int:
    kernel = node.kernels.get(place)
    return kernel.ns if kernel else 0


def _kernel_key(place: tuple[str, int], base: KernelSum | None, other: KernelSum | None) -> str:
    """ "aten::mm, kernel 1: name", with both names where they differ."""
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
