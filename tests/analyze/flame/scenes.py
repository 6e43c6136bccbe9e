"""A traced training step and stacks written out by hand, and flame trees as plain dictionaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from stepscope.analyze.context import Context
from stepscope.analyze.pictures.flame_tree import Limits
from stepscope.analyze.pictures.trace_flame import OperatorLeaves, TraceWindows
from stepscope.model.sampled import FlameFrame, FlameGraph, FlameTree
from stepscope.tables.arrays import Numbers
from stepscope.tables.schema import Tables
from tests.analyze.traces import BACK_THREAD, US, Slices, tables
from tests.builders import MS, T0, make_tables, step_rows

ROOT = "/home/user/project"
TRAIN = f"{ROOT}/train.py"
SOURCE = """\
def train(model, x):
    loss = model(x)
    loss.backward()


def forward(x):
    y = relu(x)
    return linear(y)
"""
ALL = Limits(min_share=0.0, max_depth=100_000)
ENGINE = "9/9"  # a thread of the autograd engine
Drawn = dict[tuple[str, ...], float]  # names below the root -> own value


def trees(of: Tables, sources: dict[str, str] | None = None) -> dict[str, tuple[FlameTree, list[FlameFrame]]]:
    frames: Numbers[FlameFrame] = Numbers()
    found = TraceWindows(Context(of, sources)).trees(frames, ALL)
    return {tree.key: (tree, list(frames)) for tree in found}


def own_values(tree: FlameTree, frames: list[FlameFrame]) -> Drawn:
    """The own value of every path that has one."""
    below = np.zeros(len(tree.value))
    np.add.at(below, np.asarray(tree.parent[1:], int), tree.value[1:])
    found: Drawn = {}
    for node, value in enumerate(tree.value):
        own = value - below[node]
        path, at = [], node if own > 1e-9 else 0
        while at > 0:
            frame = frames[tree.frame[at]]
            path.append(f"{frame.name}:{frame.line}" if frame.line else frame.name)
            at = tree.parent[at]
        if path:
            found[tuple(reversed(path))] = round(own, 6)
    return found


def training() -> Slices:
    """A step: train() calls forward(), then backward(), whose operators run on a thread of the engine."""
    trace = Slices()
    trace.add("user_annotation", "ProfilerStep#3", 0, 400, step=3)
    train = trace.add("python_function", "train.py(1): train", 0, 400, self_ns=40 * US, step=3)
    forward = trace.add("python_function", "train.py(6): forward", 10, 100, self_ns=10 * US, parent=train, step=3)
    built = trace.add(
        "python_function", "<built-in function linear>", 50, 50, self_ns=5 * US, parent=forward, frame=forward, step=3
    )
    linear = trace.add("cpu_op", "aten::linear", 51, 45, self_ns=15 * US, parent=built, frame=forward, step=3)
    addmm = trace.add(
        "cpu_op", "aten::addmm", 55, 30, self_ns=28 * US, parent=linear, frame=forward, step=3, sequence=5
    )
    trace.kernel(60, 80, "gemm", below=addmm, operator=addmm, frame=forward, step=3)
    backward = trace.add(
        "python_function", "torch/_tensor.py(500): backward", 200, 150, self_ns=100 * US, parent=train, step=3
    )
    on_engine: dict[str, Any] = {"track": ENGINE, "step": 3}
    node = trace.add(
        "cpu_op",
        "autograd::engine::evaluate_function: AddmmBackward0",
        210,
        60,
        forward=addmm,
        forward_thread=BACK_THREAD,
        **on_engine,
    )
    mm = trace.add("cpu_op", "aten::mm", 215, 30, parent=node, **on_engine)
    trace.kernel(230, 50, "gemm_grad", below=mm, operator=mm, forward=addmm, step=3)
    grads = trace.add(
        "cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 280, 20, **on_engine
    )
    trace.kernel(300, 20, "add", below=grads, operator=grads, step=3)
    trace.kernel(5, 30, "early", step=3)
    assert backward > 0
    return trace


def of(trace: Slices, **more: Any) -> Tables:
    return tables(trace, steps=[{"step": 3, "start_ns": T0, "wall_ns": 400 * US, "in_window": True}], **more)


def leaves_of(context: Context) -> tuple[OperatorLeaves, np.ndarray]:
    stacks = context.tables.stacks
    own = np.zeros(len(context.calls))
    np.add.at(own, stacks["node"].to_numpy(), stacks["samples"].to_numpy())
    return TraceWindows(context).operator_leaves(context.calls, own), own


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
