"""Time by module: by hand, and for any tree of slices."""

from __future__ import annotations

import cProfile
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.views import operators
from stepscope.engine.module_calls import MAX_LEVELS, ModuleCalls
from stepscope.model.views import ModuleTree
from tests.analyze import shared_traces
from tests.analyze.traces import US, Nested, base_of
from tests.records import some


def tree_of(trace: Nested, steps_us: list[tuple[float, float]] | None = None) -> ModuleTree:
    found = operators.module_tree(base_of(trace.tables(steps_us)))
    assert found is not None
    return found


def us(ns: int | None) -> float | None:
    return None if ns is None else ns / US


def recursion(depth: int) -> Nested:
    trace = Nested()
    parent: int | None = None
    for level in range(depth):
        parent = trace.module("Tree_0", level, 2 * depth - 2 * level, parent)
    return trace


def test_endless_recursion_ends_at_the_deepest_level() -> None:
    depth = MAX_LEVELS + 100
    found = tree_of(recursion(depth))
    assert len(found.nodes) == MAX_LEVELS
    assert found.nodes[-1].calls == 101
    assert us(found.nodes[0].host_total_ns) == 2 * depth


def test_what_is_too_deep_takes_no_rounds_of_its_own() -> None:
    counts = []
    for depth in (2 * MAX_LEVELS, 8 * MAX_LEVELS):
        calls = ModuleCalls(base_of(recursion(depth).tables()).spans[0])
        assert len(calls.outer) == depth
        profile = cProfile.Profile()
        assert profile.runcall(getattr, calls, "path").max() == MAX_LEVELS - 1
        counts.append(sum(entry.callcount for entry in profile.getstats()))
    assert counts[1] < 1.2 * counts[0]


@pytest.mark.parametrize(
    ("name", "number", "expected"),
    [
        ("Conv2d_3", 7, ("Conv2d_3", "Conv2d")),
        ("Conv2d", 7, ("Conv2d_7", "Conv2d")),
        ("Conv2d", None, ("Conv2d", "Conv2d")),
        ("My_Net_12", 12, ("My_Net_12", "My_Net")),
    ],
)
def test_the_instance_has_a_name(name: str, number: int | None, expected: tuple[str, str]) -> None:
    trace = Nested()
    trace.module(name, 0, 10, python_module=number)
    trace.module("Other_0", 10, 10, python_module=0)
    assert expected in [(node.name, node.module) for node in tree_of(trace).nodes]


KINDS = ("module", "function", "operator", "backward")
SHAPES = st.recursive(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.just(())),
    lambda inner: st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.lists(inner, max_size=4)),
    max_leaves=25,
)


def lay_out(trace: Nested, shape: Any, parent: int | None, forwards: list[int], choose: Any) -> None:
    """Slices of a shape below `parent`, each with some kernels."""
    kind, kernels, children = shape
    number = len(trace.events)
    if kind == "module":
        trace.module(f"M{kernels}_{number % 3}", 0, 0, parent)
    elif kind == "backward":
        forward = choose(st.sampled_from([*forwards, None])) if forwards else None
        trace.backward("Node", 0, 0, forward, parent)
    else:
        trace.add("cpu_op" if kind == "operator" else "python_function", f"{kind}{number}", 0, 0, parent=parent)
        if kind == "operator":
            forwards.append(number)
    for _ in range(kernels):
        trace.launch("k", 0, choose(st.integers(0, 50)), choose(st.sampled_from([number, number, None])))
    for child in children:
        lay_out(trace, child, number, forwards, choose)


@settings(deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=4), st.data())
def test_every_slice_counts_once(shapes: list[Any], data: st.DataObject) -> None:
    trace = Nested()
    for shape in shapes:
        lay_out(trace, shape, None, [], data.draw)
    own = {row["id"]: data.draw(st.integers(0, 20)) * US for row in trace.events if not row.get("stream")}
    for row in reversed(trace.events):  # children stand behind their parents
        if row["id"] in own:
            row["duration_ns"] = own[row["id"]]
            if row.get("parent") is not None:
                own[row["parent"]] += row["duration_ns"]
    made = trace.tables()
    found = operators.module_tree(base_of(made))
    if found is None:
        assert not any(row["name"].startswith("nn.Module: ") for row in trace.events)
        return
    device = sum(row["duration_ns"] for row in trace.events if row["category"] == "kernel")
    host = sum(row["self_ns"] for row in trace.events if row["category"] != "kernel")
    kernels = sum(row["category"] == "kernel" for row in trace.events)
    if kernels:
        parts = sum((node.device_self_ns or 0) + (node.backward_device_self_ns or 0) for node in found.nodes)
        assert found.device_ns == device
        assert found.unattributed_device_ns == device - parts >= 0
    assert sum(node.host_self_ns + (node.backward_host_self_ns or 0) for node in found.nodes) <= host
    for node in found.nodes:
        inside = [other for other in found.nodes if other.path.rpartition("/")[0] == node.path]
        assert node.host_total_ns == node.host_self_ns + sum(other.host_total_ns for other in inside)
        if node.device_total_ns is not None:
            assert node.device_total_ns == (node.device_self_ns or 0) + sum(n.device_total_ns or 0 for n in inside)
    calls = Counter(row["name"].removeprefix("nn.Module: ") for row in trace.events if "nn.Module" in row["name"])
    assert calls == sum((Counter({node.name: node.calls}) for node in found.nodes), Counter())


# from torch-tb-profiler 0.4.3 on the same file: calls, operators called directly, µs on the host
PLUGIN = {
    "BertLMHeadModel_0": (1, 0, 4216.941),
    "BertModel_0": (1, 3, 3910.787),
    "BertEmbeddings_0": (1, 4, 426.236),
    "BertEncoder_0": (1, 0, 3230.337),
    "BertLMPredictionHead_0": (1, 0, 189.993),
    "Linear_25": (1, 1, 47.651),
}


@shared_traces.needs_traces
def test_modules_are_those_of_the_plugin() -> None:
    (name,) = [name for name in shared_traces.files() if name.startswith("tracelens/h100/gaunernst_bert")]
    found = some(operators.module_tree(base_of(shared_traces.run_of(name).tables)))
    known = {node.name: node for node in found.nodes}
    for instance, (calls, inside, host_us) in PLUGIN.items():
        node = known[instance]
        assert (node.calls, node.operators) == (calls, inside)
        assert node.host_total_ns == pytest.approx(host_us * US, abs=US)
