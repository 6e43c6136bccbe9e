"""Flame trees read back as plain dictionaries, and made-up rows to draw them from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from stepscope.analyze.context import Context
from stepscope.model.sampled import FlameGraph, FlameTree
from tests.builders import MS, T0, make_tables, step_rows

Path = tuple[str, ...]
PROJECT = "/home/user/project"


def context(stacks: Iterable[dict[str, Any]], **tables: Any) -> Context:
    """A run of these stacks."""
    return Context(make_tables(stacks=stacks, **tables))


def stack(*frames: str, samples: int = 1, **columns: Any) -> dict[str, Any]:
    """A stack in the first second of a run; "f:3" is line 3 of function f in train.py of the user's project."""
    return {"frames": [_frame(frame) for frame in frames], "samples": samples, "end_ns": T0 + 1000 * MS, **columns}


def steps(rank: int = 0, *, wall_ms: int = 10, count: int = 100) -> list[dict[str, Any]]:
    """Equal steps of a rank, from the start of the run on."""
    each = wall_ms / 5
    phases = dict.fromkeys(("data_wait_ms", "forward_ms", "backward_ms", "optimizer_ms", "other_ms"), each)
    return [{**row, "rank": rank, "process": f"rank-{rank}"} for row in step_rows(count, **phases)]


def _frame(text: str) -> str:
    if "(" in text:
        return text
    name, _, line = text.partition(":")
    return f"{name} ({PROJECT}/train.py:{line or 1})"


def tree(graph: FlameGraph, key: str = "all") -> FlameTree:
    return next(each for each in graph.trees if each.key == key)


def keys(graph: FlameGraph) -> list[str]:
    return [each.key for each in graph.trees]


def values(graph: FlameGraph, key: str = "all", *, base: bool = False) -> dict[Path, float]:
    """Value by path of function names below the root; the root is ()."""
    chosen = tree(graph, key)
    figures = chosen.base if base else chosen.value
    assert figures is not None
    return {path: figures[node] for node, path in enumerate(paths(graph, chosen))}


def paths(graph: FlameGraph, chosen: FlameTree) -> list[Path]:
    """The names from below the root to each node."""
    found: list[Path] = []
    for node, parent in enumerate(chosen.parent):
        found.append((*found[parent], graph.frames[chosen.frame[node]].name) if node else ())
    return found


def frame_at(graph: FlameGraph, path: Sequence[str], key: str = "all") -> Any:
    """The frame drawn for a path."""
    chosen = tree(graph, key)
    return graph.frames[chosen.frame[paths(graph, chosen).index(tuple(path))]]


def inclusive(own: dict[Path, float]) -> dict[Path, float]:
    """What every beginning of the given paths is worth, each path counted once for it."""
    total: Counter[Path] = Counter()
    for path, value in own.items():
        for end in range(len(path) + 1):
            total[path[:end]] += value  # type: ignore[assignment]
    return dict(total)
