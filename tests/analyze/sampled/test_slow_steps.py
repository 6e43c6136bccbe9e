"""Lines that are hot in slow steps, against typical ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from stepscope.analyze import Context
from stepscope.analyze.host import sampled_stacks
from stepscope.engine.call_tree import UserPaths
from stepscope.model.sampled import SlowSteps
from tests.builders import MS, T0, make_tables

TRAIN = "/home/user/project/train.py"
TORCH = "torch/serialization.py"
FORWARD = [f"train ({TRAIN}:10)", f"Net.forward ({TRAIN}:3)", "Linear.forward (torch/nn/modules/linear.py:1)"]
SAVE = [f"train ({TRAIN}:20)", f"save ({TRAIN}:30)", f"save ({TORCH}:900)"]
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
    assert line.leaf == f"{TORCH}:save"


def test_the_rarely_sampled_line_is_not_named() -> None:
    tables = run(WALLS)
    rare = [{**row, "end_ns": row["start_ns"] + MS} for row in tables["stretches"] if row["frames"] == SAVE]
    rest = [
        {**row, "start_ns": row["start_ns"] + MS, "frames": LOG} for row in tables["stretches"] if row["frames"] == SAVE
    ]
    others = [row for row in tables["stretches"] if row["frames"] != SAVE]
    found, _ = facts_of(**{**tables, "stretches": [*others, *rare, *rest]})
    assert found is not None
    assert [line.place.line for line in found.lines] == [15]


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


def test_overlaps_equal_those_of_every_pair() -> None:
    """Random stretches and steps of two processes, against the sum over all pairs."""
    chance = random.Random(7)
    walls = [chance.choice([10, 11, 12, 60]) for _ in range(60)]
    steps = steps_of(walls)
    clock, rows = T0 - 30 * MS, []
    while clock < T0 + sum(walls) * MS:
        length = chance.randrange(1, 40) * MS
        frames = chance.choice([FORWARD, SAVE, LOG])
        rows.append(stretch(frames, clock, clock + length, phase="other"))
        clock += length + chance.choice([0, 0, 5 * MS])
    found, _ = facts_of(steps=steps, stretches=rows, stacks=[{"frames": LOG}])
    assert found is not None
    time: dict[tuple[bool, int], float] = {}
    for step in steps[1:]:
        for row in rows:
            both = min(row["end_ns"], step["start_ns"] + step["wall_ns"]) - max(row["start_ns"], step["start_ns"])
            line = 30 if row["frames"] is SAVE else 3 if row["frames"] is FORWARD else 15
            key = (step["wall_ns"] > found.threshold_ms * MS, line)
            time[key] = time.get(key, 0) + max(0, both)
    sums = {slow: sum(value for (which, _), value in time.items() if which == slow) for slow in (True, False)}
    for line in found.lines:
        number = line.place.line or 0
        assert line.slow_ms_per_step == pytest.approx(time[(True, number)] / sums[True] * found.slow_mean_ms)
        assert line.typical_ms_per_step == pytest.approx(time[(False, number)] / sums[False] * found.typical_mean_ms)
