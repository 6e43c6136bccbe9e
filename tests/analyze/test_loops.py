"""Python loops, operators and their places, found in the window's calls."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.analyze.host.loops import explain
from stepscope.model import LoopFacts
from stepscope.tables.schema import Tables
from tests.analyze.scenes import (
    CALL_LINE,
    LOOP_LINE,
    LOOP_SOURCE,
    TRAIN,
    US,
    Trace,
    loop_tables,
    loop_trace,
    steps_with_window,
)
from tests.builders import MS, make_tables

SOURCES = {TRAIN: LOOP_SOURCE}


def only_loop(tables: Tables, sources: dict[str, str] | None = None) -> LoopFacts:
    loops = analyze(tables, sources).loops
    assert loops is not None
    assert len(loops) == 1
    return loops[0]


def test_the_loop_its_line_and_its_dimension() -> None:
    loop = only_loop(loop_tables(), SOURCES)
    assert loop.callee == "cross_entropy"
    assert loop.calls_per_step == 256
    assert loop.dimension == "256 = dim 1 of (8, 256)"
    assert (loop.place.file, loop.place.line, loop.place.function) == (TRAIN, CALL_LINE, "token_loss")
    assert loop.loop_line == LOOP_LINE
    assert loop.exact_line
    assert loop.operators_per_call == pytest.approx(3)
    assert loop.backward_node == "SelectBackward0"
    assert loop.backward_calls_per_step == 256
    assert loop.backward_ms_per_step == pytest.approx(32)  # 64 ms in a window that halves the speed
    # the 36 ms between the nodes are theirs too, as there are no others
    assert loop.backward_at_most_ms_per_step == pytest.approx(50)
    assert loop.operators_ms_per_step == pytest.approx(256 * 0.09)
    assert loop.calls_per_invocation == 256


def test_time_comes_from_samples_where_they_are_many_else_from_the_window() -> None:
    # the journal's 40 ms forward, as all samples outside the backward pass stand in the loop
    assert only_loop(loop_tables(), SOURCES).ms_per_step == pytest.approx(40)
    assert only_loop(loop_tables(stacks=False), SOURCES).ms_per_step == pytest.approx(51.2 / 2, rel=0.01)


@pytest.mark.parametrize(
    ("stacks", "sources", "line", "exact"),
    [(True, None, CALL_LINE, True), (False, SOURCES, CALL_LINE, True), (False, None, 3, False)],
)
def test_the_line_degrades_openly(stacks: bool, sources: dict[str, str] | None, line: int, exact: bool) -> None:
    loop = only_loop(loop_tables(stacks=stacks), sources)
    assert (loop.place.line, loop.exact_line) == (line, exact)


def test_a_generator_expression_counts_its_items() -> None:
    source = "def total(xs):\n    return sum(x.item() for x in xs)\n"
    steps = steps_with_window()
    trace = Trace()
    for row in steps:
        if row["in_window"]:
            at, step = row["start_ns"], row["step"]
            trace.add("train.py(1): total", at, 60 * MS, step=step)
            trace.add("<built-in function sum>", at, 59 * MS, step=step)
            for i in range(101):  # the last resumption ends it
                trace.add("train.py(2): <genexpr>", at + i * 500 * US, 400 * US, step=step)
                if i < 100:
                    name = "<built-in method item of Tensor object at 0x7f12>"
                    trace.add(name, at + i * 500 * US + 10 * US, 300 * US, step=step)
                    trace.add("aten::item", at + i * 500 * US + 20 * US, 200 * US, step=step, category="cpu_op")
    loop = only_loop(make_tables(steps=steps, events=trace.rows), {TRAIN: source})
    assert (loop.callee, loop.calls_per_step, loop.place.line) == ("item", 100, 2)


def test_broken_source_is_as_good_as_none() -> None:
    assert only_loop(loop_tables(stacks=False), {TRAIN: "def token_loss(:\n"}).place.line == 3


def nested_tables() -> Tables:
    """`outer` calls `inner` 40 times, which calls an operator 50 times."""
    steps = steps_with_window()
    trace = Trace()
    for row in steps:
        if row["in_window"]:
            at = row["start_ns"]
            trace.add("train.py(3): outer", at, 80 * MS, step=row["step"])
            for i in range(40):
                trace.add("train.py(9): inner", at + i * 2 * MS, 2 * MS, step=row["step"])
                for j in range(50):
                    start = at + i * 2 * MS + j * 40 * US
                    trace.add("aten::add", start, 20 * US, step=row["step"], category="cpu_op")
    return make_tables(steps=steps, events=trace.rows)


def test_a_loop_inside_a_loop_says_so() -> None:
    loops = analyze(nested_tables()).loops
    assert loops is not None
    by_function = {loop.place.function: loop for loop in loops}
    assert by_function["inner"].nested_in == by_function["outer"].place
    assert by_function["outer"].nested_in is None
    assert by_function["inner"].calls_per_step == 2000


@pytest.mark.parametrize("category", ["user_annotation", "Operator"])
def test_loops_of_a_trace_without_a_journal_go_by_its_own_step_marks(category: str) -> None:
    steps = steps_with_window()
    marks = [
        {"name": f"ProfilerStep#{row['step']}", "category": category, "step": None}
        | {"start_ns": row["start_ns"], "duration_ns": row["wall_ns"]}
        for row in steps
        if row["in_window"]
    ]
    loop = only_loop(make_tables(events=[{**row, "step": None} for row in loop_trace(steps).rows] + marks))
    assert (loop.callee, loop.calls_per_step, loop.window_steps) == ("cross_entropy", 256, 2)


def test_a_cyclic_tree_does_not_hang() -> None:
    rows = [{"name": name, "category": "cpu_op", "parent": parent} for name, parent in (("aten::a", 1), ("aten::b", 0))]
    analysis = analyze(make_tables(steps=steps_with_window(), events=[{**row, "step": 10} for row in rows]))
    assert analysis.views is not None
    assert {row.name for row in analysis.views.operators} == {"aten::a", "aten::b"}


@pytest.mark.parametrize(
    ("count", "shapes", "expected"),
    [
        (256, ["[[8, 256, 96], [], []]", "[[8, 256], [], []]"], "256 = dim 1 of (8, 256)"),
        (255, ["[[8, 256], []]"], "255 = dim 1 of (8, 256) without one"),
        (12, ["[[[12, 3], [12, 3]], []]"], "12 = dim 0 of (12, 3)"),
        (7, ["[[7]]"], "7 = dim 0 of (7,)"),
        (1024, ["[[4, 256, 64], [], []]", "[[4, 256], [], []]"], "1024 = dims 0 * 1 of (4, 256)"),
        (512, ["[[2, 1, 512], []]", "[[2, 256], []]"], "512 = dim 2 of (2, 1, 512)"),
        (4, ["[[2, 1, 4, 1], []]", "[[2, 2], []]"], "4 = dim 2 of (2, 1, 4, 1)"),
        (9, ["[[1, 9, 1]]", "[[3, 3]]"], "9 = dim 1 of (1, 9, 1)"),
        (6, ["[[2, 3, 4]]", "[[1, 8]]"], "6 = dims 0 * 1 of (2, 3, 4)"),
        (8, ["[[2, 3, 4]]", "[[1, 2]]"], None),  # the product of dimensions that are no neighbours
        (5, ["[[8, 256]]", "", "nonsense", "{}", "[3, null]"], None),
    ],
)
def test_dimensions(count: int, shapes: list[str], expected: str | None) -> None:
    assert explain(count, pl.Series(shapes, dtype=pl.String)) == expected


@given(st.integers(0, 10**6), st.lists(st.text(max_size=20), max_size=5))
def test_any_text_is_survived_as_a_shape(count: int, texts: list[str]) -> None:
    explain(count, pl.Series(texts, dtype=pl.String))


def test_a_call_that_was_held_up_makes_no_second_loop() -> None:
    """The first iteration stood still for as long as twenty others between its two calls."""
    steps = steps_with_window()
    trace = Trace()
    for row in steps:
        if row["in_window"]:
            trace.add("train.py(3): update", row["start_ns"], 80 * MS, step=row["step"])
            at = row["start_ns"]
            for i in range(100):
                trace.add("aten::argmax", at, 100 * US, step=row["step"], category="cpu_op")
                at += 10 * MS if i == 0 else 200 * US
                trace.add("aten::sum", at, 150 * US, step=row["step"], category="cpu_op")
                at += 300 * US
    loops = analyze(make_tables(steps=steps, events=trace.rows)).loops
    assert loops is not None
    assert [loop.callee for loop in loops] == ["aten::sum"]
