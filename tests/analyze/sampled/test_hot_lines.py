"""Hot lines of the user's own code, and the loader's."""

from __future__ import annotations

import pytest

from stepscope.analyze import analyze
from stepscope.model.sampled import CallerLine
from tests.analyze.scenes import TORCH, TRAIN, loader_tables, stack
from tests.builders import make_tables, step_rows

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


def test_without_stacks_there_are_no_facts() -> None:
    analysis = analyze(make_tables(steps=STEPS))
    assert analysis.stacks is None
    assert analysis.python is None


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


def test_stacks_without_a_frame_are_in_no_phase() -> None:
    """As a process shows that ends, or that the sampler could not read."""
    stacks = [stack([f"main ({TRAIN}:1)", "load (/usr/lib/python3/json.py:3)"], 30), stack([], 20)]
    facts = analyze(make_tables(steps=STEPS, stacks=stacks)).stacks
    assert facts is not None
    assert facts.by_phase == {"other": 30}
    assert facts.hot_lines[0].share == 1


MAIN, HELPER, OTHER = f"main ({TRAIN}:60)", f"helper ({TRAIN}:20)", f"main ({TRAIN}:61)"
LIBRARY = "sub (re/__init__.py:180)"


def callers(*stacks: tuple[list[str], int]) -> dict[tuple[int | None, int | None], CallerLine]:
    rows = [stack(frames, samples) for frames, samples in stacks]
    sampled = analyze(make_tables(steps=step_rows(40), stacks=rows)).sampled
    assert sampled is not None
    return {(one.caller.line, one.callee.line): one for one in sampled.callers}


def test_a_line_below_another() -> None:
    found = callers(([MAIN, HELPER, LIBRARY], 30), ([OTHER, LIBRARY], 10))
    assert list(found) == [(60, 20)]
    assert (found[60, 20].samples, found[60, 20].share) == (30, 1.0)
    assert found[60, 20].callee.function == "helper"


def test_recursion_counts_a_sample_once() -> None:
    found = callers(([MAIN, HELPER, HELPER, LIBRARY], 12))
    assert found[60, 20].samples == 12
    assert (20, 20) not in found
