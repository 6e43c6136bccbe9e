"""Operators below sampled frames: split like the time of the same call path in a trace, and no sample is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.pictures.trace_flame import OperatorLeaves
from stepscope.tables.schema import Tables
from tests.analyze.flame.scenes import ROOT, TRAIN, leaves_of, of, training
from tests.analyze.traces import Slices, tables
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
