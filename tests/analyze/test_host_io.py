"""Python on the main thread, and file I/O inside steps."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from tests.analyze.scenes import (
    TORCH,
    TRAIN,
    Trace,
    python_tables,
    stack,
    steps_with_window,
)
from tests.builders import MS, T0, make_tables, step_rows


def test_a_line_of_plain_python_counts_and_a_line_that_calls_torch_does_not() -> None:
    facts = analyze(python_tables()).python
    assert facts is not None
    by_line = {fact.place.line: fact for fact in facts}
    assert by_line[20].ms_per_step == pytest.approx(50)
    assert by_line[20].python_fraction == pytest.approx(1)
    assert by_line[51].ms_per_step < 3  # forward: 57 of 60 ms are an operator


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


def test_io_is_unknown_without_any_source_and_empty_when_none_was_seen() -> None:
    assert analyze(make_tables(steps=steps_with_window(window=()))).io is None
    assert analyze(python_tables()).io == ()
