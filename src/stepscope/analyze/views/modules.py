"""Time by nn.Module, as a tree: forward and backward, on the host and on the device.

Every slice of the host and every slice of the device counts for one module at most, the innermost whose code caused it,
so that self times and what no module caused sum to all there is. Totals are sums over the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct, field

from stepscope.engine.device_work import work
from stepscope.engine.module_calls import ModuleCalls, Paths, module_class
from stepscope.engine.spans import Base, Span
from stepscope.model.trace import SpanRef
from stepscope.model.views import ModuleNode, ModuleTree
from stepscope.tables.arrays import NONE, Int32, Int64, climb

# Columns of sums by path. Times are self times.
_CALLS, _IN_STEPS, _OPERATORS, _HOST, _BACK_HOST, _DEVICE, _BACK_DEVICE = range(7)
_TOTALLED = (_HOST, _BACK_HOST, _DEVICE, _BACK_DEVICE)


def tree(base: Base, span: SpanRef | None = None) -> ModuleTree | None:
    """Modules of one span, or of all spans that hold any, by path; None where none does."""
    sums = _Sums()
    for one in base.chosen(span):
        sums.add(one)
    return sums.tree() if sums.paths.name else None


class _Sums(Struct):
    paths: Paths = field(default_factory=Paths)
    table: Int64 = field(default_factory=lambda: np.zeros((0, _BACK_DEVICE + 1), np.int64))
    steps: int = 0
    device_slices: int = 0
    device_ns: int = 0
    links_back: bool = False
    backward_ns: int = 0

    def add(self, span: Span) -> None:
        """The sums of one span; nothing where it holds no modules."""
        calls = ModuleCalls(span)
        if not len(calls.rows):
            return
        places = self.paths.take_in(calls.paths)  # the number here of each path of the span
        more = len(self.paths.name) - len(self.table)
        self.table = np.concatenate([self.table, np.zeros((more, self.table.shape[1]), np.int64)])
        own = np.zeros((len(places), self.table.shape[1]), np.int64)
        self._host(span, calls, own)
        self._device(span, calls, own)
        np.add.at(self.table, places, own)

    def _host(self, span: Span, calls: ModuleCalls, own: Int64) -> None:
        starts, ends = (span.steps[name].to_numpy() for name in ("start_ns", "end_ns"))
        begun = np.searchsorted(starts, span.start_ns[calls.rows], side="right") - 1
        inside = (begun >= 0) & (span.start_ns[calls.rows] < np.append(ends, 0)[begun])
        own[:, _CALLS] = np.bincount(calls.path, minlength=len(own))
        own[:, _IN_STEPS] = np.bincount(calls.path[inside], minlength=len(own))
        self.steps += len(starts)
        owners = calls.owners
        ns = span.series("self_ns").fill_null(0).to_numpy()
        mine = (owners.path >= 0) & ~span.on_device
        for column, rows in ((_HOST, mine & ~owners.backward), (_BACK_HOST, mine & owners.backward)):
            own[:, column] = _sum(owners.path[rows], ns[rows], len(own))
        direct = np.flatnonzero(mine & ~owners.backward & span.is_operator)
        above = climb(span.parent, span.parent[direct], calls.is_call | span.is_operator)
        direct = direct[(above >= 0) & calls.is_call[np.maximum(above, 0)]]
        own[:, _OPERATORS] = np.bincount(owners.path[direct], minlength=len(own))
        self.links_back |= bool((calls.forward >= 0).any())
        near = calls.near
        back = (near >= 0) & calls.is_backward[np.maximum(near, 0)] & ~span.on_device
        self.backward_ns += int(ns[back].sum())

    def _device(self, span: Span, calls: ModuleCalls, own: Int64) -> None:
        found = work(span)
        if not len(found):
            return
        duration = np.zeros(len(span), np.int64)
        duration[found.rows] = found.end_ns - found.start_ns
        self.device_slices += len(found)
        self.device_ns += int(duration.sum())
        owners = calls.owners_of(span.links)
        ns = duration[span.links["event"].to_numpy()]
        for column, back in ((_DEVICE, False), (_BACK_DEVICE, True)):
            rows = (owners.path >= 0) & (owners.backward == back)
            own[:, column] = _sum(owners.path[rows], ns[rows], len(own))

    def tree(self) -> ModuleTree:
        """The nodes in depth-first order."""
        totals = self.table.copy()
        for number in range(len(self.paths.name) - 1, -1, -1):  # children stand behind their parents
            if self.paths.parent[number] >= 0:
                totals[self.paths.parent[number], _TOTALLED] += totals[number, _TOTALLED]
        attributed = int(self.table[:, (_DEVICE, _BACK_DEVICE)].sum())
        linked = int(self.table[:, _BACK_HOST].sum())
        return ModuleTree(
            nodes=tuple(self._nodes(totals)),
            device_ns=self.device_ns if self.device_slices else None,
            unattributed_device_ns=self.device_ns - attributed if self.device_slices else None,
            backward_linked_share=linked / self.backward_ns if self.links_back and self.backward_ns else None,
            steps=self.steps or None,
        )

    def _nodes(self, totals: Int64) -> Iterator[ModuleNode]:
        inside: dict[int, list[int]] = {}
        for number, above in enumerate(self.paths.parent):
            inside.setdefault(above, []).append(number)

        def rank(number: int) -> tuple[int, int, str]:
            ns = totals[number]
            return -int(ns[_DEVICE] + ns[_BACK_DEVICE]), -int(ns[_HOST] + ns[_BACK_HOST]), self.paths.name[number]

        waiting = [(number, 0, "") for number in sorted(inside.get(NONE, []), key=rank, reverse=True)]
        while waiting:
            number, depth, above_path = waiting.pop()
            path = f"{above_path}/{self.paths.name[number]}" if above_path else self.paths.name[number]
            yield self._node(number, depth, path, totals[number])
            children = sorted(inside.get(number, []), key=rank, reverse=True)
            waiting.extend((child, depth + 1, path) for child in children)

    def _node(self, number: int, depth: int, path: str, totals: Int64) -> ModuleNode:
        own, total = self.table[number].tolist(), totals.tolist()
        times: dict[str, Any] = {}
        for name, column, known in (
            ("host", _HOST, True),
            ("device", _DEVICE, self.device_slices > 0),
            ("backward_host", _BACK_HOST, self.links_back),
            ("backward_device", _BACK_DEVICE, self.links_back and self.device_slices > 0),
        ):
            times[f"{name}_self_ns"] = own[column] if known else None
            times[f"{name}_total_ns"] = total[column] if known else None
        return ModuleNode(
            path=path,
            name=self.paths.name[number],
            module=module_class(self.paths.name[number]),
            depth=depth,
            calls=own[_CALLS],
            calls_per_step=own[_IN_STEPS] / self.steps if self.steps else None,
            operators=own[_OPERATORS],
            **times,
        )


def _sum(numbers: Int32, ns: Int64, length: int) -> Int64:
    # sums of nanoseconds in floats are exact up to 104 days
    return np.bincount(numbers, weights=ns, minlength=length).astype(np.int64)
