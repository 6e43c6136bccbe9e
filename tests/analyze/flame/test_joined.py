"""Flame graphs that join samples with traces, and those of real files of samples."""

from __future__ import annotations

import pytest

from stepscope.analyze.context import Context
from stepscope.analyze.host.stack_selection import StackSelection
from stepscope.analyze.pictures.sampled_flame import FlameOptions, flame_graph
from tests.analyze.flame.trees import PROJECT, frame_at, keys, paths, stack, tree, values
from tests.analyze.shared_traces import SHARED, run_of
from tests.analyze.traces import US, Slices, tables

SAMPLES = SHARED / "traces" / "py_spy"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason=f"the real samples are not at {SAMPLES}")
FILES = sorted(path.name for path in SAMPLES.glob("*")) if SAMPLES.is_dir() else []


def traced() -> Slices:
    """A function that spends three quarters of its time in an operator, which starts a kernel."""
    trace = Slices()
    function = trace.add("python_function", f"{PROJECT}/train.py(1): step", 0, 400, self_ns=100 * US)
    operator = trace.add("cpu_op", "aten::mm", 10, 300, self_ns=300 * US, parent=function, frame=function)
    trace.kernel(50, 80, "gemm", below=operator, operator=operator, frame=function)
    return trace


def test_operators_and_device_time_stand_in_the_same_graph() -> None:
    graph = flame_graph(Context(tables(traced(), stacks=[stack("step:2", samples=80), stack("other:9", samples=20)])))

    assert [key for key in keys(graph) if key != "all"] == ["process:main+operators", "gpu", "operators"]
    whole = values(graph, "process:main+operators")
    assert whole[()] == values(graph)[()] == 100
    assert whole["step",] == values(graph)["step",] == 80
    assert whole["step", "aten::mm"] == pytest.approx(60, rel=0.01)
    assert frame_at(graph, ("step", "aten::mm"), "process:main+operators").kind == "operator"
    assert [path[-1] for path in paths(graph, tree(graph, "gpu"))[1:]] == ["step", "aten::mm", "gemm"]


@needs_samples
@pytest.mark.parametrize("name", FILES)
def test_real_files_add_up(name: str) -> None:
    context = run_of(f"py_spy/{name}")._context
    graph = flame_graph(context)

    parked = flame_graph(context, FlameOptions(selection=StackSelection(parked=True)))
    stacks = context.tables.stacks
    left_out = stacks.filter(stacks["role"].is_in(["launcher", "helper"]))["samples"].sum()
    assert tree(parked).value[0] == stacks["samples"].sum() - left_out > 0
    assert tree(graph).value[0] <= tree(parked).value[0]
    for each in graph.trees:
        assert all(each.value[parent] >= each.value[node] for node, parent in enumerate(each.parent) if node)
        assert 0 <= each.hidden <= each.value[0]
