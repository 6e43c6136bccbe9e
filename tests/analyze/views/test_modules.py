"""Time by module: by hand, and for any tree of slices."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope import api
from stepscope.analyze.views import modules
from stepscope.engine.module_calls import MAX_LEVELS
from stepscope.model.views import ModuleTree
from tests.analyze import shared_traces
from tests.analyze.views.module_traces import US, Nested, base_of


def tree_of(trace: Nested, steps_us: list[tuple[float, float]] | None = None) -> ModuleTree:
    found = modules.tree(base_of(trace.tables(steps_us)))
    assert found is not None
    return found


def us(ns: int | None) -> float | None:
    return None if ns is None else ns / US


def forward_pass() -> tuple[Nested, int, int]:
    """A net that calls its layer twice, and a loss outside; returns the layer's first operator and the loss too."""
    trace = Nested()
    net = trace.module("Net_0", 0, 100)
    first = trace.module("Linear_0", 10, 30, net)
    linear = trace.operator("aten::linear", 15, 20, first)
    addmm = trace.operator("aten::addmm", 16, 10, linear)
    trace.launch("gemm", 20, 40, addmm)
    second = trace.module("Linear_0", 50, 20, net)
    trace.launch("gemm", 60, 30, trace.operator("aten::linear", 52, 10, second))
    trace.launch("relu", 90, 5, trace.operator("aten::relu", 80, 10, net))
    loss = trace.operator("aten::mse_loss", 110, 10)
    trace.launch("mse", 115, 7, loss)
    trace.launch("before", 0, 11, None)
    return trace, linear, loss


def test_without_a_backward_pass_and_steps_there_is_no_figure_for_them() -> None:
    trace, _, _ = forward_pass()
    found = tree_of(trace)
    assert found.steps is None
    assert found.backward_linked_share is None
    for node in found.nodes:
        assert node.calls_per_step is None
        assert node.backward_host_self_ns is node.backward_host_total_ns is None
        assert node.backward_device_self_ns is node.backward_device_total_ns is None


def test_a_trace_of_the_host_alone_has_no_device_times() -> None:
    trace = Nested()
    net = trace.module("Net_0", 0, 10)
    trace.backward("AddBackward0", 20, 5, trace.operator("aten::add", 1, 5, net))
    found = tree_of(trace)
    assert found.device_ns is None
    assert found.unattributed_device_ns is None
    (node,) = found.nodes
    assert node.device_self_ns is node.device_total_ns is node.backward_device_total_ns is None
    assert us(node.backward_host_total_ns) == 5


def test_endless_recursion_ends_at_the_deepest_level() -> None:
    trace = Nested()
    depth = MAX_LEVELS + 100
    parent: int | None = None
    for level in range(depth):
        parent = trace.module("Tree_0", level, 2 * depth - 2 * level, parent)
    found = tree_of(trace)
    assert len(found.nodes) == MAX_LEVELS
    assert found.nodes[-1].calls == 101
    assert us(found.nodes[0].host_total_ns) == 2 * depth


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


def test_without_modules_there_is_no_tree() -> None:
    trace = Nested()
    trace.operator("aten::mm", 0, 10)
    assert modules.tree(base_of(trace.tables())) is None
    assert modules.tree(base_of(Nested().tables())) is None


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
    found = modules.tree(base_of(made))
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


H100 = "tracelens/h100/"
SCRIPT = """\
import json, sys
import torch
from plain_sgd import PlainSGD
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), inner)

    def forward(self, x):
        return x + self.body(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = Block(), Block(), nn.Linear(16, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.two(self.one(self.one(x))))


net = Net()
optimizer = PlainSGD(net.parameters(), lr=0.1)


def step():
    optimizer.zero_grad()
    net(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()


running, called, handles = [], [], []
for module in net.modules():
    def enter(module, _):
        running.append(module)
        called.append([[type(outer).__name__, id(outer)] for outer in running])
    handles.append(module.register_forward_pre_hook(enter))
    handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
step()
for handle in handles:
    handle.remove()
json.dump(called, open(sys.argv[1], "w"))
with profile(
    activities=[ProfilerActivity.CPU], with_stack=True, with_modules=True,
    schedule=schedule(wait=0, warmup=1, active=3),
    on_trace_ready=lambda done: done.export_chrome_trace(sys.argv[2]),
) as profiler:
    for _ in range(4):
        step()
        profiler.step()
"""


@pytest.mark.process
@pytest.mark.torch
def test_the_tree_is_the_models_own(tmp_path: Path) -> None:
    """The paths a model's hooks see, as often as they see them, and nothing else."""
    called, trace = tmp_path / "called.json", tmp_path / "worker0.pt.trace.json"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, called, trace], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    found = modules.tree(base_of(api.open_run(trace, options=api.ReadOptions(cache=False)).tables))
    assert found is not None
    assert found.steps == 3
    expected: Counter[tuple[tuple[str, int], ...]] = Counter()
    for way in json.loads(called.read_text()):
        expected[tuple(map(tuple, way))] += 1
    # instances are numbered by the profiler in its own way: one number for one instance, by class
    seen: dict[tuple[str, ...], int] = {}
    for node in found.nodes:
        seen[tuple(node.path.split("/"))] = node.calls
        assert node.calls_per_step == node.calls / 3
    classes = Counter({tuple(name.rsplit("_", 1)[0] for name in way): 0 for way in seen})
    for way, calls in seen.items():
        classes[tuple(name.rsplit("_", 1)[0] for name in way)] += calls
    wanted: Counter[tuple[str, ...]] = Counter()
    for objects, calls in expected.items():
        wanted[tuple(name for name, _ in objects)] += calls * 3
    assert classes == wanted
    assert len(seen) == len(expected)
    assert len({way[-1] for way in seen}) == len({objects[-1] for objects in expected})
    nodes = {node.path: node for node in found.nodes}
    for node in found.nodes:
        inside = [other for path, other in nodes.items() if path.rpartition("/")[0] == node.path]
        assert node.host_total_ns >= sum(other.host_total_ns for other in inside)
        assert node.host_self_ns > 0
        assert node.device_total_ns is None
    linear = [node for node in found.nodes if node.module == "Linear"]
    assert all((node.backward_host_self_ns or 0) > 0 and node.operators == node.calls for node in linear)
    assert found.backward_linked_share is not None
    assert 0.5 < found.backward_linked_share < 1  # sums of gradients belong to no module


def one_of(beginning: str) -> str:
    names = [name for name in shared_traces.files() if name.startswith(beginning)]
    assert len(names) == 1, names
    return names[0]


# from torch-tb-profiler 0.4.3 on the same files: calls, operators called directly, µs on the host
PLUGIN = {
    "gaunernst_bert": {
        "BertLMHeadModel_0": (1, 0, 4216.941),
        "BertModel_0": (1, 3, 3910.787),
        "BertEmbeddings_0": (1, 4, 426.236),
        "BertEncoder_0": (1, 0, 3230.337),
        "BertLMPredictionHead_0": (1, 0, 189.993),
        "Linear_25": (1, 1, 47.651),
    },
}


@shared_traces.needs_traces
@pytest.mark.parametrize("name", ["gaunernst_bert", "Qwen_Qwen1.5", "facebook_timesformer"])
def test_modules_of_real_traces_take_all_that_they_launched(name: str) -> None:
    base = base_of(shared_traces.run_of(one_of(H100 + name)).tables)
    found = modules.tree(base)
    assert found is not None
    (span,) = base.spans
    outside = 0
    for event, launch in span.links.select("event", "launch").iter_rows():
        row = launch
        while row >= 0 and not span.names.values[span.names.codes[row]].startswith("nn.Module: "):
            row = int(span.parent[row])
        outside += int(span.duration_ns[event]) if row < 0 else 0
    assert found.unattributed_device_ns == outside
    parts = sum((node.device_self_ns or 0) + (node.backward_device_self_ns or 0) for node in found.nodes)
    assert parts + found.unattributed_device_ns == found.device_ns
    for above, node in pairwise(found.nodes):
        assert node.depth <= above.depth + 1
    expected = PLUGIN.get(name, {})
    known = {node.name: node for node in found.nodes}
    for instance, (calls, operators, host_us) in expected.items():
        node = known[instance]
        assert (node.calls, node.operators) == (calls, operators)
        assert node.host_total_ns == pytest.approx(host_us * US, abs=US)
