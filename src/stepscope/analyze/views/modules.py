"""Time by nn.Module, as a tree: forward and backward, on the host and on the device.

Every slice of the host and every slice of the device counts for one module at most, the innermost whose code caused it,
so that self times and what no module caused sum to all there is. Totals are sums over the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from stepscope.engine.device_work import Work, work
from stepscope.engine.module_calls import ModuleCalls, Paths, module_class
from stepscope.engine.spans import Base, Span
from stepscope.model.trace import SpanRef
from stepscope.model.views import ModuleNode, ModuleTree
from stepscope.tables.arrays import NONE, Int64, climb, window_at

# Columns of sums by path. Times are self times.
_CALLS, _IN_STEPS, _OPERATORS, _HOST, _BACK_HOST, _DEVICE, _BACK_DEVICE = range(7)
_TIMES = {"host": _HOST, "device": _DEVICE, "backward_host": _BACK_HOST, "backward_device": _BACK_DEVICE}
_TOTALLED = (_HOST, _BACK_HOST, _DEVICE, _BACK_DEVICE)


def tree(base: Base, span: SpanRef | None = None) -> ModuleTree | None:
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
    attributed = int(sums[:, (_DEVICE, _BACK_DEVICE)].sum())
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
        return -int(ns[_DEVICE] + ns[_BACK_DEVICE]), -int(ns[_HOST] + ns[_BACK_HOST]), paths.name[number]

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
