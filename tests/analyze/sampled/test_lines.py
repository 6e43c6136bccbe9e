"""Sampled stacks: hot lines and callers, stages of a run, and lines that are hot in slow steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.analyze.context import Context
from stepscope.analyze.host import sampled_stacks
from stepscope.engine.call_tree import UserPaths
from stepscope.model.sampled import CallerLine, SlowSteps
from tests.analyze.scenes import TORCH, TRAIN, loader_tables, stack
from tests.builders import MS, T0, make_tables, step_rows

STEPS = step_rows(400, first_batch=False)  # 4 s


def test_lines_are_the_innermost_of_the_user() -> None:
    stacks = [
        stack(
            [f"main ({TRAIN}:1)", f"Net.forward ({TRAIN}:7)", f"relu ({TORCH}/nn/functional.py:3)"], 30, phase="forward"
        ),
        stack([f"main ({TRAIN}:2)", "load (/home/user/project/.venv/lib/python3.11/site-packages/x/y.py:3)"], 10),
    ]
    facts = analyze(make_tables(steps=STEPS, stacks=stacks)).stacks
    assert facts is not None
    assert facts.by_phase == {"forward": 30, "other": 10}
    first, second = facts.hot_lines
    assert (first.file, first.line, first.function, first.phase) == (TRAIN, 7, "Net.forward", "forward")
    assert first.share == pytest.approx(0.75)
    assert first.ms_per_step == pytest.approx(7.5)
    assert first.library_leaf == f"{TORCH}/nn/functional.py:relu"
    assert second.line == 2


@pytest.mark.parametrize(
    ("wait_ms", "affinity", "quota", "expected"),
    [
        (60, 64, None, 3),  # ceil(60 / 40) + 1
        (60, 2, None, 2),
        (60, 64, 2.0, 2),  # the quota counts, not the 64 cores
        (60, 1, None, 1),
        (10, 64, None, 2),
        (4000, 8, None, 8),
    ],
)
def test_workers_follow_measured_times_and_allowed_cores(
    wait_ms: float, affinity: int, quota: float | None, expected: int
) -> None:
    loader = analyze(loader_tables(wait_ms=wait_ms, affinity=affinity, quota=quota)).loader
    assert loader is not None
    assert loader.suggested_workers == expected


MAIN, HELPER, OTHER = f"main ({TRAIN}:60)", f"helper ({TRAIN}:20)", f"main ({TRAIN}:61)"
LIBRARY = "sub (re/__init__.py:180)"


def callers(*stacks: tuple[list[str], int]) -> dict[tuple[int | None, int | None], CallerLine]:
    rows = [stack(frames, samples) for frames, samples in stacks]
    sampled = analyze(make_tables(steps=step_rows(40), stacks=rows)).sampled
    assert sampled is not None
    return {(one.caller.line, one.callee.line): one for one in sampled.callers}


def test_recursion_counts_a_sample_once() -> None:
    found = callers(([MAIN, HELPER, HELPER, LIBRARY], 12))
    assert found[60, 20].samples == 12
    assert (20, 20) not in found


# 100 steps of 10 ms from T0 on, the first of which is slow: warm-up
WARMED = [*step_rows(1, data_wait_ms=91, first_batch=False), *step_rows(99, start_ns=T0 + 100 * MS, first_step=1)]
FRAMES = ["<module> (train.py:3)", "main (train.py:9)"]


def timed_stack(samples: int, start_ms: float, end_ms: float, **more: Any) -> dict[str, Any]:
    times = {"start_ns": T0 + round(start_ms * MS), "end_ns": T0 + round(end_ms * MS)}
    return {"frames": FRAMES, "samples": samples, **times, **more}


def found(**tables: Any) -> dict[str, int]:
    return {each.stage: each.samples for each in sampled_stacks.stages(Context(make_tables(**tables)))}


def test_a_segment_that_spans_stages_is_divided_by_time() -> None:
    # 100 ms before the first step, 100 ms of warm-up, 200 ms of steady steps
    assert found(steps=WARMED, stacks=[timed_stack(40, -100, 300)]) == {
        "startup": 10,
        "warmup": 10,
        "steady": 20,
    }


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "samples": st.integers(1, 10**6),
            "start": st.integers(-2000, 3000),
            "length": st.integers(0, 3000),
            "stage": st.sampled_from([None, "import", "compile"]),
            "phase": st.sampled_from(["forward", "other", "startup", "data_wait", None]),
            "waiting": st.booleans(),
            "timed": st.booleans(),
            "main": st.sampled_from([True, True, False, None]),
            "role": st.sampled_from(["rank", "rank", "loader_worker"]),
            "seen": st.lists(st.tuples(st.integers(-2000, 3000), st.integers(0, 500)), max_size=3),
        }
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.booleans())
def test_no_sample_is_lost(rows: list[dict[str, Any]], with_steps: bool) -> None:
    stacks, stretches = [], []
    for number, row in enumerate(rows):
        common = {"frames": [f"f{number} (train.py:{number + 1})"], "role": row["role"], "main_thread": row["main"]}
        common |= {"stage": row["stage"], "phase": row["phase"], "waiting": row["waiting"]}
        times = (row["start"], row["start"] + row["length"])
        made = timed_stack(row["samples"], *times, **common)
        stacks.append(made if row["timed"] else made | {"start_ns": None, "end_ns": None})
        stretches += [timed_stack(1, at, at + length, **common) for at, length in row["seen"]]
    steps = WARMED if with_steps else []
    tables = make_tables(steps=steps, stacks=stacks, stretches=stretches)
    facts = sampled_stacks.stages(Context(tables))
    wanted = sum(row["samples"] for row in rows if row["role"] == "rank" and row["main"])
    assert sum(each.samples for each in facts) == wanted
    assert all(each.samples > 0 for each in facts)
    assert sum(each.share for each in facts) == pytest.approx(1.0 if wanted else 0.0)
    assert all(each.waiting_share is None or 0 <= each.waiting_share <= 1 for each in facts)
    if not with_steps:
        assert {each.stage for each in facts} <= {"import", "compile", "other"}


SAVING = "torch/serialization.py"
FORWARD = [f"train ({TRAIN}:10)", f"Net.forward ({TRAIN}:3)", "Linear.forward (torch/nn/modules/linear.py:1)"]
SAVE = [f"train ({TRAIN}:20)", f"save ({TRAIN}:30)", f"save ({SAVING}:900)"]
LOG = [f"train ({TRAIN}:15)"]


def facts_of(**rows: Any) -> tuple[SlowSteps | None, str]:
    context = Context(make_tables(**rows))
    return sampled_stacks.slow_steps(context, UserPaths(context.calls, context.code))


def steps_of(walls_ms: Sequence[float], **more: Any) -> list[dict[str, Any]]:
    starts = np.concatenate([[0], np.cumsum(walls_ms)])
    return [
        {
            "step": number + 1,
            "start_ns": T0 + round(starts[number] * MS),
            "wall_ns": round(wall * MS),
            "first_batch": False,
            **more,
        }
        for number, wall in enumerate(walls_ms)
    ]


def stretch(frames: Sequence[str], start_ns: int, end_ns: int, **more: Any) -> dict[str, Any]:
    return {"frames": frames, "start_ns": start_ns, "end_ns": end_ns, **more}


def run(walls_ms: Sequence[float], slow_ms: float = 60, **more: Any) -> dict[str, Any]:
    """A step is 8 ms of forward and the rest logging; a slow one saves for the rest instead."""
    rows = []
    steps = steps_of(walls_ms)
    for step in steps:
        start, end = step["start_ns"], step["start_ns"] + step["wall_ns"]
        slow = step["wall_ns"] >= slow_ms * MS
        rows += [
            stretch(FORWARD, start, min(start + 8 * MS, end), phase="forward", **more),
            stretch(SAVE if slow else LOG, min(start + 8 * MS, end), end, phase="other", **more),
        ]
    return {"steps": steps, "stretches": rows, "stacks": [{"frames": LOG}]}


WALLS = ([20.0] * 9 + [80.0]) * 6


def test_the_line_that_only_slow_steps_run_is_named_first() -> None:
    found, why = facts_of(**run(WALLS))
    assert found is not None
    assert not why
    assert (found.slow_steps, found.typical_steps) == (6, 53)  # the first step is warm-up
    assert found.median_ms == pytest.approx(20)
    assert found.threshold_ms == pytest.approx(30)
    assert found.slow_mean_ms == pytest.approx(80)
    assert found.typical_mean_ms == pytest.approx(20)
    (line,) = found.lines
    assert (line.place.file, line.place.line, line.place.function) == (TRAIN, 30, "save")
    assert line.phase == "other"
    assert line.only_slow
    assert line.slow_ms_per_step == pytest.approx(72)
    assert line.typical_ms_per_step == 0
    assert line.extra_ms_per_step == pytest.approx(72)
    assert line.samples == 43  # 6 times 72 ms at 100 Hz
    assert line.leaf == f"{SAVING}:save"


def test_without_times_nothing_is_said() -> None:
    rows = run(WALLS)
    assert facts_of(steps=rows["steps"], stacks=rows["stacks"]) == (None, "the samples of this run carry no time")
    assert facts_of(steps=rows["steps"]) == (None, "no stack was sampled")
    assert facts_of(**{**rows, "steps": []}) == (None, "no steady training step is known")


def test_too_few_slow_steps() -> None:
    found, why = facts_of(**run([20.0] * 30 + [80.0] * 2))
    assert found is None
    assert "2 of 31 sampled steady steps are slow" in why
    found, why = facts_of(**run([20.0] * 9 + [80.0] * 4))
    assert found is None
    assert "only 8 typical steps" in why


def test_samples_too_far_apart_for_short_steps() -> None:
    found, why = facts_of(**run(([2.0] * 9 + [6.0]) * 40, slow_ms=5))
    assert found is None
    assert (
        why == "slow steps take 4 ms more than typical ones, and samples are 10 ms apart: too coarse to tell the lines"
    )
