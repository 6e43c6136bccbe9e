"""Operators below sampled frames: split like the time of the same call path in a trace, and no sample is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.pictures.operator_leaves import OperatorLeaves
from stepscope.tables.schema import Tables
from tests.analyze.flame.scenes import ROOT, SOURCE, TRAIN, leaves_of, of, training
from tests.analyze.traces import US, Slices, tables
from tests.builders import make_tables
from tests.records import replace

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


def test_a_line_that_only_calls_python_has_the_operators_of_unknown_lines() -> None:
    trace = Slices()
    forward = trace.add("python_function", "train.py(6): forward", 0, 100, self_ns=0)
    trace.add("python_function", "train.py(40): linear", 0, 10, parent=forward)  # called on line 8
    trace.add("cpu_op", "aten::mm", 10, 90, parent=forward)
    context = sampled(tables(trace), {(f"forward ({TRAIN}:8)",): 10}, {TRAIN: SOURCE})
    found, _ = leaves_of(context)
    assert below(context, found) == {("forward",): {(): 0.0, ("aten::mm",): 10.0}}


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
