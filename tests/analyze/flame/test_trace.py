"""Flame graphs of traces, and the operators below sampled frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.pictures.trace_flame import OperatorLeaves, TraceWindows
from stepscope.tables.schema import Tables
from tests.analyze.flame.scenes import ROOT, SOURCE, TRAIN, leaves_of, of, own_values, training, trees
from tests.analyze.traces import US, Slices, tables
from tests.builders import make_tables
from tests.records import replace


def test_lines_of_calls_are_exact_where_the_source_is_known() -> None:
    found = own_values(*trees(of(training()), {TRAIN: SOURCE})["gpu"])
    assert found[("train:1", "forward:8", "linear", "aten::linear", "aten::addmm", "gemm")] == 0.08
    # the call of backward() is found as well, and the frames of one function are told apart by their lines
    node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    assert found[("train:3", "backward:500", node, "add")] == 0.02


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


def test_without_stacks_there_are_no_trees() -> None:
    bare = Slices()
    bare.kernel(3, 4, below=bare.add("cpu_op", "aten::mm"))
    without = "the trace holds no Python stacks (record it with with_stack=True)"
    for made, reason in ((tables(), "no trace was recorded"), (tables(bare), without), (of(training()), None)):
        assert TraceWindows(Context(made)).absent == reason
        assert bool(trees(made)) == (reason is None)


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
        while (outer := path[-1].get("parent")) is not None:
            path.append(trace.events[outer])
        if row["category"] != "kernel" and any(each["category"] != "user_annotation" for each in path):
            wanted += row["self_ns"]
    assert found["operators"][0].value[0] == wanted / 1e3


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
    (values,) = below(context, found).values()
    assert values == {
        (): pytest.approx(150),
        ("aten::linear",): pytest.approx(150),
        ("aten::linear", "aten::addmm"): pytest.approx(290),
    }
    assert found.own.sum() + found.value.sum() == own.sum()


def test_samples_that_no_trace_explains_stay_where_they_are() -> None:
    context = sampled(of(training()), {(*TOP, f"evaluate ({ROOT}/other.py:3)"): 10})
    found, own = leaves_of(context)
    assert found.own.tolist() == own.tolist()
    assert not len(found.value)
    assert not found.frames
