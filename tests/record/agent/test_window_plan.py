"""When windows open: decisions over a made-up sequence of step boundaries."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from stepscope.record.agent.config import WindowConfig
from stepscope.record.agent.window_plan import (
    HIGH,
    LOW,
    AutoPlan,
    Boundary,
    Budget,
    Opening,
    Plan,
    SchedulePlan,
    make_plan,
)
from tests.records import replace

MS = 1_000_000
STEADY = Boundary(completed=1, kind="train", wall_ns=10 * MS, remaining=10_000)


def first_opening(plan: Plan, boundaries: Iterable[Boundary]) -> tuple[int, Opening] | None:
    """(steps completed, opening) of the first window the plan asks for."""
    for index, boundary in enumerate(boundaries, start=1):
        at = replace(boundary, completed=index)
        plan.observe(at)
        opening = plan.decide(at)
        if opening is not None:
            plan.opened(at)
            return index, opening
    return None


def test_opens_with_high_confidence_once_steady() -> None:
    found = first_opening(AutoPlan(), [replace(STEADY, first_batch=True, wall_ns=900 * MS), *[STEADY] * 10])
    assert found is not None
    completed, opening = found
    assert completed == 6  # the first batch does not count
    assert (opening.warmup, opening.active, opening.confidence) == (0, 10, HIGH)


@pytest.mark.parametrize(("wall_ms", "active"), [(1, 10), (20, 5), (5000, 3)])
def test_length_aims_for_a_tenth_of_a_second_of_training(wall_ms: int, active: int) -> None:
    found = first_opening(AutoPlan(), [replace(STEADY, wall_ns=wall_ms * MS)] * 6)
    assert found is not None
    assert found[1].active == active


def test_a_device_gets_a_warm_up_step() -> None:
    plan = AutoPlan()
    plan.set_device(True)
    found = first_opening(plan, [STEADY] * 6)
    assert found is not None
    assert found[1].warmup == 1


@pytest.mark.parametrize("change", [{"compiled": True}, {"kind": "eval"}, {"saved": True}])
def test_never_opens_after_such_a_step(change: dict[str, object]) -> None:
    plan = AutoPlan()
    assert first_opening(plan, [*[STEADY] * 4, replace(STEADY, **change)]) is None  # type: ignore[arg-type]
    assert first_opening(plan, [replace(STEADY, **change)] * 100) is None  # type: ignore[arg-type]
    assert first_opening(plan, [STEADY] * 2) is not None


def test_never_opens_right_after_a_step_that_took_longer() -> None:
    plan = AutoPlan()
    logging_step = replace(STEADY, wall_ns=100 * MS)
    assert first_opening(plan, [*[STEADY] * 4, logging_step]) is None
    found = first_opening(plan, [STEADY] * 20)
    assert found is not None
    assert found[1].confidence == HIGH


def test_everywhere_means_evaluation_too() -> None:
    plan = AutoPlan(everywhere=True)
    assert first_opening(plan, [*[STEADY] * 4, replace(STEADY, kind="eval"), STEADY]) is not None


def test_a_short_epoch_gets_a_window_before_it_ends() -> None:
    steps = [replace(STEADY, remaining=5 - index, wall_ns=(50 - 10 * index) * MS) for index in range(5)]
    found = first_opening(AutoPlan(), steps)
    assert found is not None
    completed, opening = found
    assert opening.confidence == LOW
    assert completed + opening.warmup + opening.active <= 6


@pytest.mark.parametrize("length", [2, 3, 4])
def test_even_a_tiny_epoch_gets_one_step(length: int) -> None:
    found = first_opening(AutoPlan(), [replace(STEADY, remaining=length - 1 - index) for index in range(length)])
    assert found is not None
    completed, opening = found
    assert opening.active >= 1
    assert completed + opening.warmup + opening.active <= length


def test_without_a_known_length_three_that_agree_are_enough() -> None:
    found = first_opening(AutoPlan(), [replace(STEADY, remaining=None)] * 3)
    assert found is not None
    assert found[1].confidence == LOW


def test_with_a_known_length_it_waits_for_a_steady_step() -> None:
    assert first_opening(AutoPlan(), [STEADY] * 4) is None


def test_a_loop_that_never_gets_steady_gets_a_window_after_forty_steps() -> None:
    noise = [replace(STEADY, wall_ns=(10 if index % 2 else 14) * MS) for index in range(50)]
    found = first_opening(AutoPlan(), noise)
    assert found is not None
    completed, opening = found
    assert completed == 40
    assert opening.confidence == LOW
    assert "40 steps" in opening.reason


def test_slow_steps_get_a_window_after_a_minute() -> None:
    noise = [
        replace(STEADY, wall_ns=(20_000 if index % 2 else 28_000) * MS, elapsed_ns=24_000 * MS * index)
        for index in range(5)
    ]
    found = first_opening(AutoPlan(), noise)
    assert found is not None
    assert found[0] == 4


def test_after_a_low_window_only_a_better_one_follows() -> None:
    plan = AutoPlan()
    unknown = replace(STEADY, remaining=None)
    assert first_opening(plan, [unknown] * 3) is not None
    plan.closed(kept=True, confidence=LOW)
    found = first_opening(plan, [unknown] * 10)
    assert found is not None
    assert found[1].confidence == HIGH
    plan.closed(kept=True, confidence=HIGH)
    assert first_opening(plan, [unknown] * 100) is None


def test_dropped_windows_are_tried_again_but_not_for_ever() -> None:
    plan = AutoPlan()
    tries = 0
    while first_opening(plan, [STEADY] * 10) is not None and tries < 50:
        tries += 1
        plan.closed(kept=False, confidence=HIGH)
    assert 2 <= tries <= 10


def test_bytes_an_earlier_window_took_shorten_the_next() -> None:
    plan = AutoPlan()
    plan.max_active = 2
    found = first_opening(plan, [STEADY] * 10)
    assert found is not None
    assert found[1].active == 2


def openings(plan: Plan, count: int, **change: object) -> list[int]:
    """After how many completed steps the plan opens windows, each lasting its warm-up and active steps."""
    found, busy_until = [], 0
    for completed in range(1, count):
        at = replace(STEADY, completed=completed, **change)  # type: ignore[arg-type]
        plan.observe(at)
        opening = plan.decide(at) if completed >= busy_until else None
        if opening is not None:
            plan.opened(at)
            found.append(completed)
            busy_until = completed + opening.warmup + opening.active
    return found


def test_schedule_counts_steps_as_torch_does() -> None:
    plan = SchedulePlan(skip_first=5, wait=2, warmup=1, active=3, repeat=2)
    assert openings(plan, 60) == [7, 13]


def test_schedule_repeats_for_ever_by_default() -> None:
    plan = SchedulePlan(skip_first=0, wait=4, warmup=0, active=1, repeat=0)
    assert openings(plan, 21) == [4, 9, 14, 19]


def test_schedule_begins_late_rather_than_never() -> None:
    plan = SchedulePlan(skip_first=0, wait=0, warmup=1, active=8, repeat=1)
    assert openings(plan, 20) == [1]


def test_schedule_waits_for_compilation_to_pass() -> None:
    plan = SchedulePlan(skip_first=0, wait=1, warmup=1, active=8, repeat=1)
    assert openings(plan, 5, compiled=True) == []
    assert openings(plan, 8) == [1]


def test_configuration_selects_the_plan() -> None:
    assert isinstance(make_plan(WindowConfig(mode="auto")), AutoPlan)
    plan = make_plan(WindowConfig(mode="schedule", skip_first=3, wait=1, warmup=0, active=2, repeat=1))
    assert openings(plan, 20) == [4]


def test_time_budget_allows_the_first_window_and_then_a_share() -> None:
    budget = Budget(began_ns=0, time_share=0.02, byte_budget=100)
    assert budget.affords_time(1)
    budget.opened()
    budget.charge(10)
    assert not budget.affords_time(999)
    assert budget.affords_time(1000)  # 2 % of 1000 holds the one spent and another like it
    assert "2 %" in budget.over_time()


def test_byte_budget_shrinks_and_predicts() -> None:
    budget = Budget(began_ns=0, time_share=1, byte_budget=100)
    assert budget.fits(100)
    assert not budget.fits(101)
    budget.bytes += 60
    assert not budget.fits(41)
    assert budget.steps_left(60, 3) == 2
    assert budget.steps_left(60, 1) == 0
    assert not budget.outgrown_by(0)
    assert budget.outgrown_by(1 << 40)
