"""Which torch operators the window's steps call, how often, and from which of the user's lines."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from stepscope.engine.host_calls import OPERATOR, Function, HostCalls, Window
from stepscope.engine.source_lines import Lines
from stepscope.model import OperatorFacts, Place
from stepscope.tables.arrays import NONE, Int64

MAX_OPERATORS = 100
MAX_PLACES = 40  # a place costs a look through the syntax tree; the operators below these cost next to nothing
_ENGINE = "autograd::engine::evaluate_function"


def facts(window: Window | None, lines: Lines) -> tuple[OperatorFacts, ...] | None:
    """Operators by host time per step of the window; times are the window's own, not scaled to the steady step."""
    if window is None:
        return None
    sums: dict[str, list[int]] = {}  # calls, self ns, total ns
    for part in window.parts:
        own = np.flatnonzero((part.what == OPERATOR) & part.inside)
        codes, self_ns = part.codes[own], part.self_ns[own]
        # a call inside a call of the same name is one of the two calls, but its time is already in the outer one
        above = part.parent[own]
        inner = (above >= 0) & part.inside[above] & (part.codes[above] == codes)
        columns = (
            np.ones(len(own), np.int64),
            np.where(self_ns != NONE, self_ns, part.duration_ns[own]),
            np.where(inner, 0, part.duration_ns[own]),
        )
        for code, row in zip(*_by(codes.astype(np.int64), *columns), strict=True):
            name = part.span.names.values[code] if code >= 0 else ""
            if name and not name.startswith(_ENGINE):
                sums[name] = [before + more for before, more in zip(sums.get(name, (0, 0, 0)), row, strict=True)]
    chosen = sorted(sums, key=lambda name: (-sums[name][2], name))[:MAX_OPERATORS]
    places = _places(window, lines, chosen[:MAX_PLACES])
    return tuple(
        OperatorFacts(
            name=name,
            calls_per_step=sums[name][0] / window.steps,
            host_self_ms_per_step=sums[name][1] / window.steps / 1e6,
            host_total_ms_per_step=sums[name][2] / window.steps / 1e6,
            place=places.get(name),
        )
        for name in chosen
    )


def _by(keys: Int64, *columns: Int64) -> tuple[list[int], list[tuple[int, ...]]]:
    """The distinct keys, and for each the sums of the columns."""
    distinct, number = np.unique(keys, return_inverse=True)
    sums = np.zeros((len(distinct), len(columns)), np.int64)
    for at, column in enumerate(columns):
        np.add.at(sums[:, at], number, column)
    return distinct.tolist(), [tuple(row) for row in sums.tolist()]


def _places(window: Window, lines: Lines, names: list[str]) -> dict[str, Place]:
    """The user's call an operator's time comes from most; its line is exact where stacks or the source tell it."""
    everything: dict[str, int] = defaultdict(int)
    called: dict[str, dict[tuple[Function, str], int]] = defaultdict(lambda: defaultdict(int))
    for part in window.parts:
        own = np.flatnonzero(part.named(frozenset(names).__contains__, (part.what == OPERATOR) & part.inside))
        for (name, call), ns in _by_call(part, own).items():
            everything[name] += ns
            if call is not None:
                called[name][call] += ns
    found = {}
    for name, calls in called.items():
        (function, label), ns = min(calls.items(), key=lambda item: (-item[1], item[0][0].file, item[0][0].line or 0))
        site = lines.call_site(function.file, function.name, function.line, label, loop=False)
        share = ns / everything[name] if everything[name] else None
        found[name] = Place(function.file, site.line if site else function.line, function.name, share)
    return found


def _by_call(part: HostCalls, own: Int64) -> dict[tuple[str, tuple[Function, str] | None], int]:
    """ns by name and by the call of the user's that leads there, None for none."""
    caller, via = part.caller[own], part.via[own]
    width = len(part.span.names.values) + 1
    key = (part.codes[own].astype(np.int64) * width + np.where(caller >= 0, part.codes[caller], -1) + 1) * width
    key += np.where(via >= 0, part.codes[via], -1) + 1
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    sums = np.zeros(len(first), np.int64)
    np.add.at(sums, number, part.duration_ns[own])
    found: dict[tuple[str, tuple[Function, str] | None], int] = defaultdict(int)
    for at, ns in zip(first.tolist(), sums.tolist(), strict=True):
        call = (part.function_at(caller[at]), part.label(via[at])) if caller[at] >= 0 else None
        found[part.name(own[at]), call] += ns
    return found
