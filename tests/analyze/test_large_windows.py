"""A large recording is looked at for a few of its steps: means per step stay, and the report says which they are of."""

from __future__ import annotations

import pytest

from stepscope.analyze import analyze
from stepscope.engine import host_calls
from stepscope.tables.schema import Tables
from tests.analyze.scenes import Trace, loop_trace, steps_with_window
from tests.builders import MS, make_tables

STEPS = range(10, 16)


def tables() -> Tables:
    """Six window steps with the same loop in each, below a function that runs from before the first to the end."""
    steps = steps_with_window(window=STEPS)
    return make_tables(steps=steps, events=loop_trace(steps, items=64).rows)


def test_means_per_step_do_not_depend_on_how_many_steps_were_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = analyze(tables())
    assert whole.loops is not None  # made before less is looked at
    per_step = tables().events.height // len(STEPS)
    monkeypatch.setattr(host_calls, "MAX_SLICES", 4 * per_step + 10)
    cut = analyze(tables())

    assert cut.loops is not None
    assert (whole.loops[0].window_steps, cut.loops[0].window_steps) == (6, 4)
    assert cut.loops[0].ms_per_step == pytest.approx(whole.loops[0].ms_per_step, rel=0.05)
    assert cut.loops[0].calls_per_step == whole.loops[0].calls_per_step
    assert cut.loops[0].place == whole.loops[0].place
    assert "the first 4 of 6 steps" in cut.loops[0].source
    assert "the first" not in whole.loops[0].source


def test_without_steps_everything_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Trace()
    for number in range(5):
        calls.add("augment", number * 10 * MS, 2 * MS, step=None, category="user_annotation")
        calls.add("aten::mm", number * 10 * MS, MS, step=None, category="cpu_op")
    monkeypatch.setattr(host_calls, "MAX_SLICES", 2)
    (found,) = analyze(make_tables(events=calls.rows)).regions
    assert (found["name"], found["calls"]) == ("augment", 5)
