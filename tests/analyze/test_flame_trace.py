"""Flame graphs of traces: whose path a slice stands in, sums that are exact, operators below sampled frames."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope import api
from stepscope.analyze.context import Context
from stepscope.analyze.flame_builder import FrameIndex, Limits
from stepscope.analyze.flame_trace import TraceWindows, operator_leaves, trace_absent, trace_trees
from stepscope.analyze.flame_trace_leaves import OperatorLeaves
from stepscope.model.views.flame import FlameTree
from stepscope.tables.schema import Tables
from tests.analyze import shared_traces
from tests.analyze.traces import BACK_THREAD, US, Slices, tables
from tests.builders import T0, make_tables

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


def trees(of: Tables, sources: dict[str, str] | None = None) -> dict[str, tuple[FlameTree, FrameIndex]]:
    frames = FrameIndex()
    return {tree.key: (tree, frames) for tree in trace_trees(Context(of, sources), frames, ALL)}


def own_values(tree: FlameTree, frames: FrameIndex) -> Drawn:
    """The own value of every path that has one."""
    below = np.zeros(len(tree.value))
    for parent, value in zip(tree.parent[1:], tree.value[1:], strict=True):
        below[parent] += value
    found: Drawn = {}
    for node, value in enumerate(tree.value):
        path, at = [], node
        while at > 0:
            frame = frames.frames[tree.frame[at]]
            path.append(f"{frame.name}:{frame.line}" if frame.line else frame.name)
            at = tree.parent[at]
        if value - below[node] > 1e-9:
            found[tuple(reversed(path))] = round(value - below[node], 6)
    return found


def kinds(tree: FlameTree, frames: FrameIndex) -> dict[str, str]:
    return {frames.frames[number].name: frames.frames[number].kind for number in tree.frame}


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


# ------------------------------------------------------------------------------------------------------ device time


def test_device_time_stands_below_the_python_path_its_operators_and_its_kernel() -> None:
    tree, frames = trees(of(training()))["gpu"]
    found = own_values(tree, frames)
    forward = ("train:1", "forward:6", "linear", "aten::linear")
    assert found[(*forward, "aten::addmm", "gemm")] == 0.08
    assert (tree.unit, tree.value[0], tree.hidden) == ("ms per step", 0.18, 0.0)
    named = kinds(tree, frames)
    assert (named["train"], named["linear"], named["aten::addmm"]) == ("user", "native", "operator")
    assert named["gemm"] == "kernel"


def test_the_backward_pass_stands_below_the_line_of_the_forward_pass() -> None:
    found = own_values(*trees(of(training()))["gpu"])
    node = "autograd::engine::evaluate_function: AddmmBackward0"
    assert found[("train:1", "forward:6", "linear", "backward of aten::linear", node, "aten::mm", "gemm_grad")] == 0.05


def test_what_the_engine_does_for_no_operator_stands_below_the_call_of_backward() -> None:
    found = own_values(*trees(of(training()))["gpu"])
    node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    assert found[("train:1", "backward:500", node, "add")] == 0.02


def test_what_has_no_origin_says_why() -> None:
    found = own_values(*trees(of(training()))["gpu"])
    assert found[("(not linked)", "launched before the recording began", "early")] == 0.03


def test_lines_of_calls_are_exact_where_the_source_is_known() -> None:
    found = own_values(*trees(of(training()), {TRAIN: SOURCE})["gpu"])
    assert found[("train:1", "forward:8", "linear", "aten::linear", "aten::addmm", "gemm")] == 0.08
    # the call of backward() is found as well, and the frames of one function are told apart by their lines
    node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    assert found[("train:3", "backward:500", node, "add")] == 0.02


def test_a_kernel_that_python_launches_itself_stands_below_its_function() -> None:
    trace = Slices()
    run = trace.add("python_function", "train.py(4): launch_triton", 0, 50)
    trace.kernel(10, 7, "triton_kernel", below=run, frame=run, state="unlinked")
    assert own_values(*trees(tables(trace))["gpu"]) == {("launch_triton:4", "triton_kernel"): 7.0}


def test_a_replayed_graph_stands_below_what_replayed_it() -> None:
    trace = Slices()
    replay = trace.add("python_function", "train.py(4): replay", 0, 50)
    trace.kernel(10, 7, "captured", below=replay, state="graph")
    trace.kernel(30, 5, "lost", state="graph")
    found = own_values(*trees(tables(trace))["gpu"])
    assert found[("replay:4", "captured")] == 7.0
    lost = [path for path in found if path[-1] == "lost"]
    assert lost == [("(not linked)", "replayed by a CUDA graph, which keeps no link to operators", "lost")]


def test_traces_with_call_stacks_in_place_of_functions() -> None:
    trace = Slices()
    stack = "torch/nn/functional.py(40): linear;train.py(12): forward;train.py(30): <module>"
    outer = trace.add("Operator", "aten::linear", 0, 50, self_ns=20 * US, call_stack=stack)
    inner = trace.add("Operator", "aten::addmm", 5, 30, parent=outer, call_stack=stack)
    trace.kernel(10, 9, "gemm", category="Kernel", below=inner, operator=inner)
    both = trees(tables(trace))
    path = ("<module>:30", "forward:12", "linear:40", "aten::linear")
    assert own_values(*both["gpu"]) == {(*path, "aten::addmm", "gemm"): 9.0}
    assert own_values(*both["operators"])[path] == 20.0


def test_a_backward_pass_inside_a_backward_pass_follows_its_own_forward_pass() -> None:
    trace = Slices()
    step = trace.add("python_function", "train.py(1): train", 0, 500)
    first = trace.add("cpu_op", "Checkpoint", 10, 20, parent=step)
    outer = trace.add("cpu_op", "CheckpointBackward", 100, 200, track=ENGINE, forward=first, forward_thread=1)
    again = trace.add("python_function", "train.py(6): forward", 110, 50, track=ENGINE, parent=outer)
    mul = trace.add("cpu_op", "aten::mul", 120, 10, track=ENGINE, parent=again)
    inner = trace.add("cpu_op", "MulBackward0", 200, 50, track=ENGINE, parent=outer, forward=mul, forward_thread=1)
    trace.kernel(210, 4, "mul_grad", below=inner, operator=inner)
    (path,) = own_values(*trees(tables(trace))["gpu"])
    assert path == (
        *("train:1", "backward of Checkpoint", "CheckpointBackward", "forward:6"),
        *("backward of aten::mul", "MulBackward0", "mul_grad"),
    )


def test_every_rank_has_a_tree_and_all_have_their_mean() -> None:
    parts = []
    for rank, us in ((0, 10), (1, 30)):
        trace = Slices(rank=rank)
        run = trace.add("python_function", "train.py(1): train", 0, 100, step=0)
        trace.kernel(10, us, below=run, frame=run)
        trace.events[-2]["step"] = 0  # the launch
        parts.append(trace)
    steps = [{"step": 0, "rank": rank, "process": f"rank-{rank}", "in_window": True} for rank in (0, 1)]
    found = trees(tables(*parts, steps=steps))
    assert {key: tree.value[0] for key, (tree, _) in found.items() if key != "operators"} == {
        "gpu": 0.02,
        "gpu:rank:0": 0.01,
        "gpu:rank:1": 0.03,
    }


def test_thousands_of_functions_around_each_other() -> None:
    trace = Slices()
    above = None
    for depth in range(3000):
        above = trace.add(
            "python_function", f"train.py({depth + 1}): f", depth, 9000 - 2 * depth, self_ns=2, parent=above
        )
    trace.kernel(4000, 7, below=above, frame=above)
    (path,) = own_values(*trees(tables(trace))["gpu"])
    assert len(path) == 3001


# -------------------------------------------------------------------------------------------------------- host time


def test_host_time_is_self_time_on_the_training_thread() -> None:
    tree, frames = trees(of(training()))["operators"]
    found = own_values(tree, frames)
    path = ("train:1", "forward:6", "linear", "aten::linear")
    assert found[path] == 0.015
    assert found[("train:1",)] == 0.04
    assert found[(*path, "aten::addmm", "cudaLaunchKernel")] == 0.001
    assert not [name for names in found for name in names if "AccumulateGrad" in name]  # the engine's thread
    assert "backward of aten::linear" not in kinds(tree, frames)


def test_waiting_for_the_device_is_told_apart() -> None:
    trace = Slices()
    run = trace.add("python_function", "train.py(1): train", 0, 100, self_ns=10 * US)
    trace.add("cuda_runtime", "cudaStreamSynchronize", 10, 90, parent=run)
    tree, frames = trees(tables(trace))["operators"]
    assert kinds(tree, frames)["cudaStreamSynchronize"] == "wait"
    assert own_values(tree, frames)[("train:1", "cudaStreamSynchronize")] == 90.0


def test_the_recorder_is_no_part_of_the_run() -> None:
    trace = Slices()
    run = trace.add("python_function", "train.py(1): train", 0, 100, self_ns=10 * US)
    ours = trace.add("python_function", "stepscope/record/agent/steps.py(9): cut", 10, 20, parent=run)
    trace.add("python_function", "<built-in function len>", 12, 5, parent=ours)
    name = "stepscope/record/agent/probes/wrapper_importlib_bootstrap.py(34): stepscope_wrapper"
    wrapper = trace.add("python_function", name, 40, 30, self_ns=1 * US, parent=run)
    trace.add("cpu_op", "aten::mm", 41, 29, parent=wrapper)
    found = own_values(*trees(tables(trace))["operators"])
    assert found[("train:1", "aten::mm")] == 29.0
    assert all("len" not in path and "cut:9" not in path for path in found)


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (None, "no trace was recorded"),
        (["aten::mm"], "the trace holds no Python stacks (record it with with_stack=True)"),
    ],
)
def test_without_stacks_there_are_no_trees(trace: list[str] | None, reason: str) -> None:
    slices = Slices()
    for name in trace or []:
        slices.kernel(3, 4, below=slices.add("cpu_op", name))
    context = Context(tables(slices) if trace else tables())
    assert trace_trees(context, FrameIndex()) == ()
    assert trace_absent(context) == reason
    assert operator_leaves(context, context.calls, np.zeros(0)).absent == reason
    assert trace_absent(Context(of(training()))) is None


SLICES = st.lists(
    st.tuples(
        st.integers(-1, 30),  # around it
        st.sampled_from(["python_function", "cpu_op", "user_annotation", "cuda_runtime", "kernel"]),
        st.integers(0, 3),  # its name
        st.integers(1, 10**7),  # ns
        st.integers(-1, 30),  # its forward operator
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=80, deadline=None)
@given(SLICES)
def test_sums_are_exact_whatever_a_trace_holds(rows: list[tuple[int, str, int, int, int]]) -> None:
    trace = Slices()
    trace.add("python_function", "train.py(1): train", 0, 1, self_ns=1)
    device = 0
    for number, (around, category, name, ns, forward) in enumerate(rows, 1):
        parent = around if 0 <= around < number and trace.events[around]["category"] != "kernel" else None
        if category == "kernel":
            trace.kernel(number, ns / US, f"k{name}", below=None)
            trace.links[-1] |= {"launch": parent, "state": "linked" if parent is not None else "unlinked"}
            device += ns
            continue
        names = {"python_function": f"train.py({name + 1}): f{name}", "cuda_runtime": "cudaLaunchKernel"}
        more: dict[str, Any] = {"forward": forward, "forward_thread": 1} if 0 <= forward < number else {}
        trace.add(category, names.get(category, f"op{name}"), number, ns / US, parent=parent, **more)
    found = trees(tables(trace))
    for tree, _ in found.values():
        below = np.zeros(len(tree.value))
        np.add.at(below, np.asarray(tree.parent[1:], int), np.asarray(tree.value[1:]))
        assert (below <= np.asarray(tree.value) * (1 + 1e-9)).all()
        assert tree.hidden == 0.0
    assert ("gpu" in found) == (device > 0)
    if device:
        assert found["gpu"][0].value[0] == device / 1e3
    wanted = 0
    for row in trace.events:
        path = [row]  # a range counts for the function or operator around it
        while (around := path[-1].get("parent")) is not None:
            path.append(trace.events[around])
        if row["category"] != "kernel" and any(each["category"] != "user_annotation" for each in path):
            wanted += row["self_ns"]
    assert found["operators"][0].value[0] == wanted / 1e3


@shared_traces.needs_traces
@pytest.mark.parametrize(
    "name",
    [name for name in shared_traces.files() if name.startswith(("kineto_tb_plugin", "tracelens"))]
    if shared_traces.PRESENT
    else [],
)
def test_real_traces_add_up_to_their_device_time(name: str) -> None:
    run = shared_traces.run_of(name)
    windows = TraceWindows(Context(run.tables))
    lines = run.analysis.device_lines
    assert lines is not None
    if windows.absent:
        assert "no Python stacks" in windows.absent
        assert lines.attributed_share == 0.0
        return
    frames = FrameIndex()
    found = {tree.key: tree for tree in windows.trees(frames)}
    gpu = found["gpu"]
    assert gpu.value[0] == (lines.total_ns / (1e6 * lines.steps) if lines.steps else lines.total_ns / 1e3)
    assert gpu.unit == ("ms per step" if lines.steps else "us")
    drawn = {frames.frames[number].kind for number in gpu.frame}
    assert {"kernel", "operator"} <= drawn
    assert found["operators"].value[0] > 0


@shared_traces.needs_traces
def test_the_backward_pass_of_a_real_trace_stands_below_the_lines_of_its_model() -> None:
    name = next(name for name in shared_traces.files() if "resnet50_num_workers_0" in name)
    frames = FrameIndex()
    gpu = trace_trees(Context(shared_traces.run_of(name).tables), frames, ALL)[0]
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(gpu.parent):
        below.setdefault(parent, []).append(node)
    backward = [n for n, f in enumerate(gpu.frame) if frames.frames[f].name == "backward of aten::conv2d"]
    assert len(backward) > 10
    for node in backward:
        caller = frames.frames[gpu.frame[gpu.parent[node]]]
        assert (caller.name, caller.file) == ("_conv_forward", "torch/nn/modules/conv.py")
    share = sum(gpu.value[node] for node in backward) / gpu.value[0]
    assert 0.3 < share < 0.6


# ------------------------------------------------------------------------------------------ operators below samples

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
TOP = [f"<module> ({TRAIN}:20)", f"train ({TRAIN}:2)"]
MODULE = [
    f"Module._wrapped_call_impl ({TORCH}/nn/modules/module.py:1773)",
    f"Module._call_impl ({TORCH}/nn/modules/module.py:1784)",
]


def sampled(of: Tables, stacks: dict[tuple[str, ...], int], sources: dict[str, str] | None = None) -> Context:
    """`of` with sampled stacks beside the trace."""
    rows = [{"frames": list(frames), "samples": samples} for frames, samples in stacks.items()]
    made = make_tables(stacks=rows)
    return Context(replace(of, stacks=made.stacks, nodes=made.nodes, frames=made.frames), sources)


def leaves_of(context: Context) -> tuple[OperatorLeaves, np.ndarray]:
    stacks = context.tables.stacks
    own = np.zeros(len(context.calls))
    np.add.at(own, stacks["node"].to_numpy(), stacks["samples"].to_numpy())
    return operator_leaves(context, context.calls, own), own


def below(context: Context, found: OperatorLeaves) -> dict[tuple[str, ...], dict[tuple[str, ...], float]]:
    """Sampled path -> operators below its innermost frame -> value; () stands for what stays the frame's own."""
    count = len(context.calls)
    result: dict[tuple[str, ...], dict[tuple[str, ...], float]] = {}
    for leaf, value in enumerate(found.value):
        names, at = [], leaf + count
        while at >= count:
            names.append(found.frames[found.frame[at - count]].name)
            at = int(found.parent[at - count])
        path = tuple(frame.function for frame in context.calls.path(at))
        result.setdefault(path, {(): found.own[at]})[tuple(reversed(names))] = value
    return result


def test_samples_are_split_like_the_functions_time_in_the_trace() -> None:
    # of the 58 µs that forward() spends in itself and in operators it calls, 15 are in aten::linear and 28 in what that
    # calls, with a launch of 1 µs in it
    path = (*TOP, *MODULE, f"Net.forward ({TRAIN}:8)")
    context = sampled(of(training()), {path: 590})
    found, own = leaves_of(context)
    assert found.absent is None
    (values,) = below(context, found).values()
    assert values == {
        (): pytest.approx(150),
        ("aten::linear",): pytest.approx(150),
        ("aten::linear", "aten::addmm"): pytest.approx(290),
    }
    assert found.own.sum() + found.value.sum() == own.sum()


def test_samples_on_a_line_go_to_the_operators_of_that_line() -> None:
    trace = Slices()
    forward = trace.add("python_function", "train.py(6): forward", 0, 100, self_ns=20 * US)
    trace.add("cpu_op", "aten::relu", 10, 30, parent=forward)
    trace.add("cpu_op", "aten::linear", 50, 50, parent=forward)
    context = sampled(
        tables(trace), {(f"forward ({TRAIN}:7)",): 10, (f"forward ({TRAIN}:8)",): 20, (f"forward ({TRAIN}:6)",): 5},
        {TRAIN: SOURCE},
    )  # fmt: skip
    found, _ = leaves_of(context)
    by_node = dict(zip(found.parent.tolist(), [found.frames[number].name for number in found.frame], strict=True))
    assert by_node == {0: "aten::relu", 1: "aten::linear"}
    assert found.value.tolist() == pytest.approx([8, 16])
    assert found.own.tolist() == pytest.approx([2, 4, 5])


def test_of_several_callers_the_one_on_the_same_path_decides() -> None:
    trace = Slices()
    for caller, operator in (("encode", "aten::mm"), ("decode", "aten::conv2d")):
        above = trace.add("python_function", f"train.py({len(caller)}): {caller}", 0, 100, self_ns=0)
        helper = trace.add("python_function", "train.py(40): helper", 0, 100, self_ns=0, parent=above)
        trace.add("cpu_op", operator, 0, 100, parent=helper)
    helper_frame = f"helper ({TRAIN}:41)"
    context = sampled(
        tables(trace),
        {
            (*TOP, f"Net.encode ({TRAIN}:9)", helper_frame): 10,
            (*TOP, f"Net.decode ({TRAIN}:9)", helper_frame): 20,
            (*TOP, f"unknown ({TRAIN}:9)", helper_frame): 8,
            (*TOP, f"elsewhere ({ROOT}/other.py:9)", f"helper ({ROOT}/other.py:41)"): 4,
        },
    )
    found, _ = leaves_of(context)
    values = {path[-2]: parts for path, parts in below(context, found).items()}
    assert values == {
        "Net.encode": {(): 0.0, ("aten::mm",): 10.0},
        "Net.decode": {(): 0.0, ("aten::conv2d",): 20.0},
        # where only the function matches, all its calls stand for it
        "unknown": {(): 0.0, ("aten::mm",): 4.0, ("aten::conv2d",): 4.0},
    }


def test_small_operators_count_for_what_is_around_them() -> None:
    trace = Slices()
    forward = trace.add("python_function", "train.py(6): forward", 0, 1000, self_ns=0)
    linear = trace.add("cpu_op", "aten::linear", 0, 1000, self_ns=995 * US, parent=forward)
    trace.add("cpu_op", "aten::view", 0, 5, parent=linear)
    context = sampled(tables(trace), {(f"forward ({TRAIN}:8)",): 100})
    found, _ = leaves_of(context)
    assert below(context, found) == {("forward",): {(): 0.0, ("aten::linear",): 100.0}}


def test_samples_that_no_trace_explains_stay_where_they_are() -> None:
    context = sampled(of(training()), {(*TOP, f"evaluate ({ROOT}/other.py:3)"): 10})
    found, own = leaves_of(context)
    assert found.own.tolist() == own.tolist()
    assert not len(found.value)
    assert found.absent == "no sampled function calls operators in the recorded windows"


NAMES = ("train", "forward", "relu_all", "other")


STACKS = st.tuples(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5), st.integers(1, 10**9))
CALLS = st.tuples(st.integers(-1, 20), st.sampled_from((*NAMES, "aten::a", "aten::b")), st.integers(0, 9999))


@settings(max_examples=60, deadline=None)
@given(st.lists(STACKS, max_size=8), st.lists(CALLS, max_size=20))
def test_sums_of_samples_stay_exact(stacks: list[tuple[list[str], int]], slices: list[tuple[int, str, int]]) -> None:
    trace = Slices()
    trace.add("python_function", "train.py(1): train", 0, 1)
    for number, (around, name, us) in enumerate(slices, 1):
        parent = around if 0 <= around < number else None
        text = name if "::" in name else f"train.py({NAMES.index(name) + 1}): {name}"
        trace.add("cpu_op" if "::" in name else "python_function", text, number, us, parent=parent)
    paths = {tuple(f"{name} ({TRAIN}:{len(name)})" for name in path): samples for path, samples in stacks}
    context = sampled(tables(trace), paths)
    found, own = leaves_of(context)
    count = len(context.calls)
    back = found.own.copy()
    for leaf, value in enumerate(found.value):
        at = int(found.parent[leaf])
        assert at < count + leaf  # parents come first
        while at >= count:
            at = int(found.parent[at - count])
        back[at] += value
    assert np.array_equal(back, own)
    assert (found.value >= 0).all()
    assert (found.own >= 0).all()


# --------------------------------------------------------------------------------------------------- a real recording

SCRIPT = """\
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(256, 256)

    def forward(self, x):
        q = torch.linalg.qr(self.inner.weight)[0]
        return self.inner(x) @ q  # MATMUL


def train():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(60):
        loss = model(torch.randn(64, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # BACKWARD
        optimizer.step()


train()
"""


@pytest.mark.process
@pytest.mark.torch
def test_a_recorded_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--out", "run", "--window", "skip_first=10,active=3", "--rate", "50", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "run", *options, "--", sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    context = Context(api.open_run(tmp_path / "run").tables, {str(tmp_path / "train.py"): SCRIPT})
    frames = FrameIndex()
    (tree,) = trace_trees(context, frames, ALL)
    assert tree.key == "operators"
    found = own_values(tree, frames)
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if "# MATMUL" in text)
    assert any(f"forward:{line}" in path and "aten::matmul" in path for path in found)
    assert any("aten::linalg_qr" in path for path in found)
    # of the training thread's slices nothing is lost but the recorder's own
    events = context.tables.events
    thread = events.filter(pl.col("name").str.contains("AddmmBackward0")).head(1)["track"][0]
    busy = events.filter((pl.col("track") == thread) & ~pl.col("name").str.contains("stepscope/record"))
    assert tree.value[0] * 1e6 * 3 == pytest.approx(busy["self_ns"].sum(), rel=0.05)
    leaves, own = leaves_of(_main_threads(context))
    assert leaves.own.sum() + leaves.value.sum() == own.sum()
    assert "aten::linalg_qr" in {frame.name for frame in leaves.frames}


def _main_threads(context: Context) -> Context:
    rows = context.tables.stacks.filter(
        (pl.col("role") == "rank") & pl.col("main_thread") & pl.col("node").is_not_null()
    )
    return Context(replace(context.tables, stacks=rows), context.sources)
