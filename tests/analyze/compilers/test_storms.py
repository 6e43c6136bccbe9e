"""Storms: the article's rate over the whole run, the windowed count and the late compile on known sequences."""

from __future__ import annotations

import pytest

from stepscope.model.compilers import CompileStorm
from tests.analyze.compilers.scenes import compile_row, view, xla_compiles, xla_counters
from tests.builders import MS, T0, step_rows

BAD = [2] + [1] * 14
GOOD = [1] + [0] * 14
ITEM = [2] + [0] * 14
FALLBACK = [3] + [0] * 14
BURST = [1] * 9 + [0] * 31
LATE = [1] + [0] * 99 + [1] * 40


def live(per_step: list[int]) -> CompileStorm:
    """The sequence as a recording with steps has it."""
    rows = step_rows(len(per_step))
    compiles = [compile_row(step, function=f"f{n}") for step, count in enumerate(per_step) for n in range(count)]
    (storm,) = view(steps=rows, compiles=compiles).storms
    return storm


def offline(per_step: list[int]) -> CompileStorm:
    """The same as torch_xla's log with steps has it."""
    last = len(per_step) - 1
    (storm,) = view(compiles=xla_compiles(per_step), counters=xla_counters(per_step, step=last)).storms
    return storm


@pytest.mark.parametrize("made", [live, offline])
@pytest.mark.parametrize(
    ("per_step", "whole_run", "windows", "first"),
    [
        (BAD, True, 3, 12),
        (BURST, False, 0, None),
        (LATE, False, 38, 102),
        (GOOD, False, 0, None),
        (ITEM, False, 0, None),
        (FALLBACK, False, 0, None),
    ],
    ids=["bad", "burst", "late", "good", "item", "fallback"],
)
def test_known_sequences(made: object, per_step: list[int], whole_run: bool, windows: int, first: int | None) -> None:
    storm = made(per_step)  # type: ignore[operator]
    assert (storm.compiles, storm.steps) == (sum(per_step), len(per_step))
    assert storm.whole_run is whole_run
    assert (storm.windows, storm.first_window_step) == (windows, first)


@pytest.mark.parametrize("made", [live, offline])
def test_a_late_compile_follows_a_quiet_time(made: object) -> None:
    storm = made(LATE)  # type: ignore[operator]
    assert (storm.late_step, storm.quiet_before, storm.late_steps) == (100, 99, 40)
    storm = made([1] + [0] * 49 + [1])  # type: ignore[operator]
    assert (storm.late_step, storm.quiet_before) == (None, None)
    storm = made([1] + [0] * 50 + [1])  # type: ignore[operator]
    assert (storm.late_step, storm.quiet_before) == (51, 50)


def test_a_storm_in_evaluation_is_found_and_named() -> None:
    train = step_rows(100)
    evaluation = step_rows(30, first_step=100, start_ns=T0 + 1000 * MS, kind="eval")
    (storm,) = view(steps=train + evaluation, compiles=[compile_row(step) for step in (0, *range(100, 130))]).storms
    assert (storm.kind, storm.first_window_step, storm.windows) == ("eval", 112, 18)
    assert storm.late_ms == pytest.approx(80)
    assert storm.late_share == pytest.approx(80 / (900 + 200))


def test_without_steps_nothing_is_said() -> None:
    found = view(compiles=[compile_row(None)])
    assert found.storms == ()
    assert any("how often it compiled per step is not known" in note for note in found.notes)
