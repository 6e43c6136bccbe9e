"""Flame graphs in formats that other viewers read: speedscope's JSON and collapsed stacks.

Both hold what is drawn: paths too thin to be drawn count for the box that leads to them, so totals stay true.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from stepscope.model.sampled import FlameFrame, FlameGraph, FlameTree
from stepscope.report.escape import plain
from stepscope.report.flame.document import LONGEST_NAME, rounded

_UNITS = {"ms per step": "milliseconds", "us": "microseconds", "bytes": "bytes"}
_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_TINY = 1e-9  # of the root: what is left of a box after its children, when nothing is


def speedscope(graph: FlameGraph, version: str) -> str:
    """Every tree as a profile of its own. A difference's other side is left out: the format has no place for it."""
    profiles = [_profile(tree) for tree in graph.trees]
    document = {
        "$schema": _SCHEMA,
        "name": plain(graph.title),
        "exporter": f"stepscope@{version}",
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(frame) for frame in graph.frames]},
        "profiles": profiles,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def collapsed(graph: FlameGraph, tree: FlameTree) -> str:
    """One tree, a line per path: frames root first with ";" between them, a space, a whole number.

    Milliseconds per step are written as microseconds, as the format holds whole numbers only; a difference has two
    numbers, the other side's first.
    """
    factor = 1000.0 if tree.unit == "ms per step" else 1.0
    names = {frame: _collapsed_name(graph.frames[frame]) for frame in set(tree.frame)}
    other = own_values(tree, tree.base) if tree.base is not None else None
    lines = []
    for node, value in enumerate(own_values(tree, tree.value)):
        numbers = [round(value * factor)] if other is None else [round(other[node] * factor), round(value * factor)]
        if any(numbers):
            path = ";".join(names[frame] for frame in _path(tree, node)) or "(not drawn)"
            lines.append(f"{path} {' '.join(map(str, numbers))}")
    return "".join(f"{line}\n" for line in lines)


def own_values(tree: FlameTree, values: tuple[float, ...]) -> list[float]:
    """What each box is worth without its children."""
    own = list(values)
    for node, parent in enumerate(tree.parent):
        if parent >= 0:
            own[parent] -= values[node]
    least = _TINY * values[0]
    return [value if value > least else 0.0 for value in own]


def _profile(tree: FlameTree) -> dict[str, Any]:
    samples, weights = [], []
    for node, value in enumerate(own_values(tree, tree.value)):
        if value > 0:
            samples.append(list(_path(tree, node)))
            weights.append(rounded(value))
    return {
        "type": "sampled",
        "name": f"{plain(tree.label)} ({tree.unit})",
        "unit": _UNITS.get(tree.unit, "none"),
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }


def _path(tree: FlameTree, node: int) -> Iterator[int]:
    """The frames from below the root to `node`."""
    found = []
    while node > 0:
        found.append(tree.frame[node])
        node = tree.parent[node]
    return reversed(found)


def _frame(frame: FlameFrame) -> dict[str, Any]:
    described: dict[str, Any] = {"name": plain(frame.name, LONGEST_NAME)}
    if frame.file:
        described["file"] = plain(frame.file, LONGEST_NAME)
    if frame.line is not None:
        described["line"] = frame.line
    return described


def _collapsed_name(frame: FlameFrame) -> str:
    """A frame as py-spy writes it. A ";" would split it in two."""
    place = f" ({frame.file}{f':{frame.line}' if frame.line is not None else ''})" if frame.file else ""
    return plain(f"{frame.name}{place}", LONGEST_NAME).replace(";", ",")
