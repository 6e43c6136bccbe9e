"""The operator table: times, recursion, streams, memory, lines, stacks; and the TensorBoard plugin's figures."""

from __future__ import annotations

from posixpath import basename
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.views import operators
from stepscope.engine.spans import Base
from stepscope.model.views import OperatorRow
from tests.analyze.scenes import TRAIN
from tests.analyze.traces import US, Nested, base_of
from tests.builders import T0


def rows(base: Base, **options: Any) -> dict[str, OperatorRow]:
    found = operators.table(base, **options)
    named = {row.name if row.shapes is None else f"{row.name} {row.shapes}": row for row in found}
    assert len(named) == len(found)
    return named


def us(ns: float | None) -> float | None:
    return None if ns is None else ns / US


@pytest.mark.parametrize("call", ["Sequential", "relu"])
def test_the_line_that_makes_a_module_is_not_the_one_that_calls_it(call: str) -> None:
    source = f"def main():\n    model = {call}(1)\n    for _ in range(9):\n        model(2)\n"
    trace = Nested()
    main = trace.python(f"{TRAIN}(1): main")
    name = "nn.Module: Sequential_0" if call == "Sequential" else f"torch/nn/functional.py(9): {call}"
    below = trace.add("python_function", name, 10, 80, parent=main)
    trace.operator("aten::mm", 20, 50, below, frame=below)
    row = rows(base_of(trace.tables(), {TRAIN: source}))["aten::mm"]
    assert row.place is not None
    assert (row.place.line, row.place_exact) == ((4, True) if call == "Sequential" else (2, True))


def test_stacks_of_2021_come_from_the_operators_text() -> None:
    trace = Nested()
    stack = "/x/site-packages/torch/nn/functional.py(9): relu;model.py(4): forward;train.py(8): <module>"
    trace.add("Operator", "aten::relu", 0, 10, call_stack=stack)
    trace.add("Operator", "aten::relu", 20, 10, call_stack=stack)
    trace.add("Operator", "aten::relu", 40, 10)
    base = base_of(trace.tables())
    (found,) = operators.stacks(base, "aten::relu")
    assert [(basename(place.file), place.line) for place in found.frames] == [("model.py", 4), ("train.py", 8)]
    assert (found.calls, us(found.host_self_ns)) == (2, 20)
    (row,) = operators.table(base)
    assert row.has_call_stack
    assert row.place_exact


SLICE = st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(0, 2), st.booleans())


@settings(deadline=None, max_examples=60)
@given(
    st.recursive(
        st.just([]), lambda inner: st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=3), max_leaves=8
    ),
    st.lists(SLICE, max_size=8),
)
def test_totals_of_any_tree(tree: list[Any], slices: list[tuple[int, int, int, bool]]) -> None:
    """Against sums made call by call: self times sum to the outermost calls, totals are unions of what lies below."""
    trace = Nested()
    above: list[tuple[int, ...]] = []  # of each call itself and those around it
    start = [0]

    def add(nodes: list[Any], parents: tuple[int, ...]) -> None:
        for name, inner in nodes:
            number = trace.operator(name, start[0], 1, parents[0] if parents else None)
            above.append((number, *parents))
            start[0] += 10
            add(inner, above[[chain[0] for chain in above].index(number)])
            start[0] += 10
            begun = (trace.events[number]["start_ns"] - T0) // US
            trace.events[number]["duration_ns"] = (start[0] - begun) * US

    add(tree, ())
    covered: dict[str, set[int]] = {}
    sums: dict[str, int] = {}
    for at, duration, stream, _ in slices if above else ():
        chain = above[at % len(above)]
        trace.kernel(5000 + at, duration, below=chain[0], operator=chain[0], track=f"0/{stream}")
        names = {trace.events[number]["name"] for number in chain}
        for name in names:
            covered.setdefault(name, set()).update(range(at, at + duration))
            sums[name] = sums.get(name, 0) + duration
    base = base_of(trace.tables())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "_AT_ONCE", 4)  # as of a large trace
        found = rows(base)
    outermost = sum(trace.events[chain[0]]["duration_ns"] for chain in above if len(chain) == 1)
    assert sum(row.host_self_ns + row.runtime_ns for row in found.values()) == outermost
    for name, row in found.items():
        inside = {chain[0] for chain in above if name in {trace.events[number]["name"] for number in chain[1:]}}
        calls = [chain[0] for chain in above if trace.events[chain[0]]["name"] == name]
        assert row.host_total_ns == sum(trace.events[call]["duration_ns"] for call in calls if call not in inside)
        if slices:
            assert us(row.device_total_ns) == len(covered.get(name, ()))
            assert us(row.device_total_sum_ns) == sums.get(name, 0)


def test_a_broken_tree_ends() -> None:
    trace = Nested()
    first = trace.operator("aten::a", 0, 10, 1)
    trace.operator("aten::b", 0, 10, first)
    trace.add("python_function", "f.py(1): f", 0, 10, parent=2)
    assert sum(row.calls for row in operators.table(base_of(trace.tables()))) == 2
