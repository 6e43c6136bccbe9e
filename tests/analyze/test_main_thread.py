"""The main thread: loops in Python, plain Python, file I/O, and which call a sampled stack could be spared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.analyze.context import Context
from stepscope.analyze.host.loops import explain
from stepscope.analyze.host.sampled_time import Calls, removable_calls
from stepscope.analyze.host.sampled_time import sampled_time as prepare_time
from stepscope.analyze.step_times import step_facts as step_facts
from stepscope.model import LoopFacts, Place
from stepscope.tables.schema import Tables
from tests.analyze.scenes import (
    CALL_LINE,
    LOOP_SOURCE,
    TORCH,
    TRAIN,
    US,
    Trace,
    loop_tables,
    loop_trace,
    python_tables,
    stack,
    steps_with_window,
)
from tests.builders import MS, T0, make_tables, step_rows

SOURCES = {TRAIN: LOOP_SOURCE}


def only_loop(tables: Tables, sources: dict[str, str] | None = None) -> LoopFacts:
    loops = analyze(tables, sources).loops
    assert loops is not None
    assert len(loops) == 1
    return loops[0]


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


def test_an_inner_loop_is_no_more_than_its_own_iterations() -> None:
    """Neither what lies between its runs nor what hands out parameters; signs call operators that no name tells."""
    source = """def adapt(model, made):
    for task in range(3):
        loss = differentiate(list(model.parameters()))
        for weight, gradient in zip(model.parameters(), loss):
            made.append(weight + gradient)
"""
    steps, trace = steps_with_window(), Trace()
    for row in steps:
        if row["in_window"]:
            at, step = row["start_ns"], row["step"]
            trace.add("train.py(1): adapt", at, 80 * MS, step=step)
            for run in range(at, at + 60 * MS, 20 * MS):
                trace.add("aten::mm", run, 10 * MS, step=step, category="cpu_op")
                for start in range(run + 12 * MS, run + 16 * MS, 100 * US):
                    trace.add("torch/nn/modules/module.py(2600): parameters", start, 60 * US, step=step)
                    trace.add("aten::add", start + 60 * US, 30 * US, step=step, category="cpu_op")
    loop = only_loop(make_tables(steps=steps, events=trace.rows), {TRAIN: source})
    assert (loop.callee, loop.calls_per_step, loop.calls_per_invocation) == ("aten::add", 120, 40)
    assert (loop.place.line, loop.loop_line, loop.operators_per_call) == (5, 4, 1)
    assert loop.ms_per_step < 20


@pytest.mark.parametrize(
    ("caller", "callee", "objects", "loop_line", "source"),
    [  # experts, called in turn, are one loop; what is made of a class is called by its own name
        (
            "forward",
            "Expert",
            3,
            2,
            "def forward(self, tokens):\n    for token in tokens:\n        self.experts[0](token)\n",
        ),
        (
            "<module>",
            "Decoder",
            1,
            3,
            "decode = Decoder()\nfor b in range(9):\n    for t in range(40):\n        decode(t)\n",
        ),
    ],
)
def test_modules_that_a_loop_calls(caller: str, callee: str, objects: int, loop_line: int, source: str) -> None:
    steps, trace = steps_with_window(), Trace()
    for row in steps:
        if row["in_window"]:
            at, step = row["start_ns"], row["step"]
            trace.add(f"train.py(1): {caller}", at, 60 * MS, step=step)
            for number in range(40):
                trace.add(f"nn.Module: {callee}_{number % objects}", at + number * MS, 900 * US, step=step)
                trace.add("aten::mm", at + number * MS, 800 * US, step=step, category="cpu_op")
    loop = only_loop(make_tables(steps=steps, events=trace.rows), {TRAIN: source})
    assert (loop.callee, loop.calls_per_step, loop.loop_line, loop.place.line) == (callee, 40, loop_line, loop_line + 1)


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


def test_a_line_of_plain_python_counts_and_a_line_that_calls_torch_does_not() -> None:
    facts = analyze(python_tables()).python
    assert facts is not None
    by_line = {fact.place.line: fact for fact in facts}
    assert by_line[20].ms_per_step == pytest.approx(50)
    assert by_line[20].python_fraction == pytest.approx(1)
    assert by_line[51].ms_per_step < 3  # forward: 57 of 60 ms are an operator


@pytest.mark.parametrize(("phase", "unknown_ms"), [("other", [50]), ("forward", [])])
def test_a_function_of_no_profiled_step_is_no_part_of_the_usual_one(phase: str, unknown_ms: list[float]) -> None:
    """As a rollout between updates; in a pass of the model it may be nothing but operators."""
    base = python_tables()
    trained = stack(
        [f"<module> ({TRAIN}:90)", f"train ({TRAIN}:12)", f"Net.forward ({TRAIN}:51)"], 100, phase="forward"
    )
    rollout = stack([f"<module> ({TRAIN}:90)", f"rollout ({TRAIN}:70)"], 100, phase=phase)
    steps, events = (table.to_dicts() for table in (base.steps, base.events))
    facts = analyze(make_tables(steps=steps, events=events, stacks=[trained, rollout])).python
    assert facts is not None
    assert [fact.unknown_ms_per_step for fact in facts if fact.place.line == 70] == pytest.approx(unknown_ms)


def test_time_in_other_libraries_is_python_work_and_time_in_torch_is_not() -> None:
    pillow = analyze(python_tables(leaf="paste (/venv/lib/python3.11/site-packages/PIL/Image.py:3)")).python
    torch = analyze(python_tables(leaf=f"linear ({TORCH}/nn/functional.py:3)")).python
    assert pillow is not None
    assert torch is not None
    assert pillow[0].place.line == 20
    assert pillow[0].library_leaf == "paste"
    assert all(fact.place.line != 20 for fact in torch)


def save(at_ms: float, **more: Any) -> dict[str, Any]:
    row = {"kind": "save", "time_ns": T0 + round(at_ms * MS), "duration_ns": 4 * MS, "path": "c.pt"}
    return {**row, "file": TRAIN, "line": 30, "function": "train", **more}


def test_saves_inside_steady_steps_are_timed() -> None:
    steps = step_rows(21, first_batch=False)  # 10 ms each
    steps[11]["start_ns"] += 5 * MS  # a gap between two steps
    for row in steps[12:]:
        row["start_ns"] += 5 * MS
    journal = [save(15), save(25), save(111), save(5), save(900), {**save(35), "file": None}]
    facts = analyze(make_tables(steps=steps, journal=journal)).io
    assert facts is not None
    (fact,) = facts
    assert (fact.operation, fact.place.line) == ("torch.save", 30)
    assert fact.count == 2  # not the one between steps, in the first step, behind the last
    assert fact.ms_per_step == pytest.approx(2 * 4 / 20)
    assert fact.calls_per_step == pytest.approx(0.1)


def io_window() -> tuple[list[dict[str, Any]], Trace]:
    steps = steps_with_window()
    trace = Trace()
    for row in steps:
        if row["in_window"]:
            at, step = row["start_ns"], row["step"]
            trace.add("train.py(10): log", at, 30 * MS, step=step)
            trace.add("<built-in method write of _io.TextIOWrapper object at 0x7f>", at, 2 * MS, step=step)
            trace.add("<built-in function fsync>", at + 5 * MS, 20 * MS, step=step)
            trace.add(
                "<built-in method readline of _io.BufferedRWPair object at 0x7f>", at + 26 * MS, 3 * MS, step=step
            )
            trace.add("/usr/lib/python3.11/socket.py(706): readinto", at + 26 * MS, 3 * MS, step=step)  # no file
            loader = "torch/utils/data/dataloader.py(733): __next__"
            trace.add(loader, at + 40 * MS, 30 * MS, step=step)
            trace.add("train.py(20): __getitem__", at + 40 * MS, 30 * MS, step=step)
            trace.add("<built-in function open>", at + 40 * MS, 29 * MS, step=step)
    return steps, trace


def test_built_in_io_is_timed_in_the_window_but_not_below_the_loader() -> None:
    steps, trace = io_window()
    source = "\n" * 9 + "def log(handle, line):\n    handle.write(line)\n    os.fsync(handle)\n"
    facts = analyze(make_tables(steps=steps, events=trace.rows), {TRAIN: source}).io
    assert facts is not None
    assert [(f.operation, f.place.line, f.ms_per_step) for f in facts] == [
        ("fsync", 12, pytest.approx(20)),
        ("write", 11, pytest.approx(2)),
    ]
    assert all(fact.measured for fact in facts)


def test_sampled_io_by_library_and_by_the_text_of_the_line() -> None:
    stacks = [
        stack([f"main ({TRAIN}:1)", "Path.write_text (/usr/lib/python3.11/pathlib.py:1)"], 20),
        stack([f"main ({TRAIN}:2)"], 30),
        stack([f"main ({TRAIN}:3)"], 50),
    ]
    tables = make_tables(steps=steps_with_window(window=()), stacks=stacks)
    facts = analyze(tables, {TRAIN: "p.write_text(x)\nf.flush()\ny = a * b\n"}).io
    assert facts is not None
    assert [(f.operation, f.place.line, f.ms_per_step) for f in facts] == [
        ("flush", 2, pytest.approx(30)),
        ("write_text", 1, pytest.approx(20)),
    ]
    assert not any(fact.measured for fact in facts)


MODULE = f"Module._call_impl ({TORCH}/nn/modules/module.py:1790)"
MAIN = f"<module> ({TRAIN}:90)"


def main(line: int) -> str:
    return f"main ({TRAIN}:{line})"


TRAINING: list[dict[str, Any]] = [
    stack([MAIN, main(40), MODULE, f"Net.forward ({TRAIN}:12)", f"linear ({TORCH}/nn/functional.py:1)"], 100),
    stack([MAIN, main(41), f"Tensor.backward ({TORCH}/_tensor.py:600)"], 200, phase="backward"),
    stack([MAIN, main(42), f"Optimizer.step ({TORCH}/optim/sgd.py:5)"], 50, phase="optimizer"),
]
DESCRIBE: list[dict[str, Any]] = [
    stack([MAIN, main(50), f"describe ({TRAIN}:20)"], 20),
    stack([MAIN, main(50), f"describe ({TRAIN}:21)", f"describe.<locals>.<listcomp> ({TRAIN}:21)"], 40),
    stack([MAIN, main(50), f"describe ({TRAIN}:22)", "dumps (/usr/lib/python3.11/json/__init__.py:231)"], 60),
    stack([MAIN, main(50), f"describe ({TRAIN}:23)", f"norm ({TORCH}/functional.py:9)"], 30),
]


def tables(stacks: Sequence[dict[str, Any]], **phases: float) -> Tables:
    """Steps of 100 ms by default: 20 forward, 40 backward, 10 optimizer, 30 other."""
    times: dict[str, Any] = {
        "data_wait_ms": 0,
        "forward_ms": 20,
        "backward_ms": 40,
        "optimizer_ms": 10,
        "other_ms": 30,
        **phases,
    }
    return make_tables(steps=step_rows(40, **times), stacks=stacks)


def calls_of(made: Tables) -> Calls:
    context = Context(made)
    train = next(fact for fact in step_facts(context.labelled) if fact.kind == "train")
    found = removable_calls(context.sampled, prepare_time(context.sampled, train, context.tables.quality))
    assert found is not None
    return found


def test_a_call_holds_what_it_calls_wherever_that_is_written() -> None:
    calls = calls_of(tables([*TRAINING, *DESCRIBE]))
    number = calls.number(Place(TRAIN, 22, "describe"))
    assert number is not None
    assert calls.place(number) == Place(TRAIN, None, "describe")
    assert int(calls.rows.filter(pl.col("call") == number)["samples"].sum()) == 150
    inner = calls.number(Place(TRAIN, 21, "describe.<locals>.<listcomp>"))
    assert inner == number


def test_the_journal_times_what_samples_only_divide() -> None:
    """150 of 500 samples, but all that is sampled beside training stands in a part of 50 ms with 250 samples."""
    calls = calls_of(tables([*TRAINING, *DESCRIBE]))
    share = calls.share(calls.number(Place(TRAIN, 22, "describe")), calls.time.rows["row"])
    assert share is not None
    assert share.ms == pytest.approx(50 * 150 / 250)
    assert share.ms < share.at_most_ms < 50
    assert share.samples == 150


def test_a_place_no_sample_saw_has_no_call() -> None:
    calls = calls_of(tables([*TRAINING, *DESCRIBE]))
    assert calls.number(Place("/home/user/project/other.py", 1, "other")) is None
    assert calls.share(None, calls.time.rows["row"]) is None


def test_what_one_rank_alone_does_may_gain_as_much_as_it_takes_there() -> None:
    """The other rank waits for it: the mean over ranks is half of what can be gained."""
    both = [{**row, "rank": rank, "process": f"rank-{rank}"} for rank in (0, 1) for row in TRAINING]
    alone = stack([MAIN, main(50), f"log ({TRAIN}:33)"], 150, rank=0, process="rank-0")
    waits = stack(
        [MAIN, main(51), f"barrier ({TORCH}/distributed/distributed_c10d.py:9)"], 150, rank=1, process="rank-1"
    )
    steps = [row for rank in (0, 1) for row in step_rows(40, rank=rank, process=f"rank-{rank}", forward_ms=20)]
    calls = calls_of(make_tables(steps=steps, stacks=[*both, alone, waits]))
    share = calls.share(calls.number(Place(TRAIN, 33, "log")), calls.time.rows["row"])
    assert share is not None
    assert share.at_most_ms >= 2 * share.ms * 0.99
