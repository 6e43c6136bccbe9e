"""Who calls whom among the user's lines, by the samples of steady steps."""

from __future__ import annotations

from stepscope.analyze import analyze
from stepscope.model.sampled import CallerLine
from tests.analyze.scenes import TRAIN, stack
from tests.builders import make_tables, step_rows

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
