"""What a run reached, at its end and on the way there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from stepscope.experiment.runner import StepsSeen
from stepscope.model.machine import Prices
from stepscope.model.sweep import Objective
from stepscope.sweep import engine as module
from stepscope.sweep.engine import Watch, reached
from tests.builders import MS, step_rows
from tests.records import some
from tests.report.test_energy import run as recorded
from tests.run_folders import make_run_folder, metrics_event

STEPS = 40


def run(folder: Path, *values: float, name: str = "val/loss", steps: int = STEPS) -> Path:
    """A run that logs a value in every step, from the first on."""
    rows = step_rows(steps)
    times = [row["start_ns"] + MS for row in rows]
    event = metrics_event((name, "log", times[: len(values)], list(values)))
    return make_run_folder(folder, steps=rows, events=[event] if values else [])


def test_the_figure_of_a_curve_is_its_last_its_best_or_the_mean_of_its_tail(tmp_path: Path) -> None:
    values = [10.0 - at for at in range(20)] + [3.0] * 18 + [5.0, 7.0, 9.0, 11.0][:2]
    folder = run(tmp_path, *values)
    asked = [Objective("val/loss", "min", of) for of in ("last", "best", "tail")] + [Objective("seconds")]
    found = reached(folder, tuple(asked))
    assert found.missing is None
    assert found.values[:3] == (7.0, -9.0, pytest.approx((3.0 + 3.0 + 5.0 + 7.0) / 4))
    assert found.values[3] == found.seconds
    assert found.seconds == pytest.approx(STEPS * (found.mean_ms or 0) / 1e3, rel=0.5)
    assert found.steps == STEPS
    assert reached(folder, (Objective("val/loss", "max", "best"),)).values == (10.0,)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_no_value(tmp_path: Path, value: float) -> None:
    folder = run(tmp_path, 1.0, 2.0, value)
    for of in ("last", "tail"):
        assert reached(folder, (Objective("val/loss", "min", of),)).missing == (
            f"val/loss is {value:g}, not a finite number"
        )


def test_a_metric_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    said = reached(run(tmp_path, 1.0), (Objective("val/acc", "max"),)).missing
    assert said == "it has no metric val/acc; there are val/loss"
    nothing = make_run_folder(tmp_path, name="nothing", steps=[], agents=[], events=[])
    assert reached(nothing, (Objective("val/loss"),)).missing == "it has no metric val/loss; there are none"
    assert "no training step" in str(reached(nothing, (Objective("seconds"),)).missing)
    assert reached(tmp_path / "absent", (Objective("val/loss"),)).missing is not None


def test_a_run_in_progress_is_reported_at_the_same_steps_and_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    monkeypatch.setattr(module, "_LOOK_SHARE", 0)
    folder = run(tmp_path, *[float(at) for at in range(34)], steps=34)
    told: list[tuple[float, int]] = []

    def report(value: float, step: int) -> bool:
        told.append((value, step))
        return step >= 20

    watch = Watch(folder, Objective("val/loss"), 10, report)
    seen = StepsSeen(folder)
    seen.look()
    assert not watch(seen)  # what was seen now may not be written yet
    assert watch(seen)
    assert told == [(9.0, 10), (19.0, 20)]
    assert watch.pruned == "after 20 steps val/loss was 19, worse than half of the others"
    # one that came to its end tells the rest, and is not pruned any more
    told.clear()
    ended = Watch(folder, Objective("val/loss"), 10, report)
    ended.finish(34)
    assert ended.pruned is None
    assert told == [(9.0, 10), (19.0, 20), (29.0, 30)]


def test_joules_are_those_of_the_report_and_where_nothing_counts_them_no_trial_has_any(tmp_path: Path) -> None:
    counted = recorded(tmp_path, Prices(), cpu_energy_uj=5e7)
    assert reached(counted.folder, (Objective("joules"),)).values == (pytest.approx(500.0),)
    without = reached(recorded(tmp_path / "without", Prices()).folder, (Objective("joules"),))
    assert some(without.missing).startswith("its energy is not known: ")
    assert without.lacks
