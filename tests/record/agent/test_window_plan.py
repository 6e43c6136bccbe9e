"""When windows open: decisions over a made-up sequence of step boundaries."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.record.agent import window
from stepscope.record.agent.config import WindowConfig
from stepscope.record.agent.window import DEVICE_WARMUP, HIGH, LOW, Boundary, Opening, Plan, SchedulePlan
from tests.records import replace

MS = 1_000_000
STEADY = Boundary(completed=1, kind="train", wall_ns=10 * MS, remaining=10_000)
UNKNOWN = replace(STEADY, remaining=None)


def auto(**options: object) -> Plan:
    return Plan(WindowConfig(**options))  # type: ignore[arg-type]


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


def walls(*milliseconds: float) -> list[Boundary]:
    return [replace(STEADY, wall_ns=int(value * MS)) for value in milliseconds]


LATE = [
    replace(STEADY, wall_ns=(20_000 if index % 2 else 28_000) * MS, elapsed_ns=24_000 * MS * index)
    for index in range(5)
]
ENDING = [replace(STEADY, remaining=5 - index, wall_ns=(50 - 10 * index) * MS) for index in range(5)]


@pytest.mark.parametrize(
    ("boundaries", "completed", "active", "confidence", "words"),
    [
        # the first batch does not count; a length of a tenth of a second of training, within 3 and 10 steps
        ([replace(STEADY, first_batch=True, wall_ns=900 * MS), *[STEADY] * 10], 6, 10, HIGH, "steady"),
        (walls(*[1] * 6), 5, 10, HIGH, "steady"),
        (walls(*[20] * 6), 5, 5, HIGH, "steady"),
        (walls(*[5000] * 6), 5, 3, HIGH, "steady"),
        (walls(900, 400, 10, 10.5, 10.2, 9.9, 10.1), 7, 9, HIGH, "steady"),  # only the newest count
        # an epoch that ends before step time is steady, however short
        (ENDING, 2, 3, LOW, "epoch ends"),
        ([replace(STEADY, remaining=1 - index) for index in range(2)], 1, 1, LOW, "epoch ends"),
        ([replace(STEADY, remaining=2 - index) for index in range(3)], 1, 2, LOW, "epoch ends"),
        ([replace(STEADY, remaining=3 - index) for index in range(4)], 1, 3, LOW, "epoch ends"),
        # three that agree are enough where nobody knows how many come, within a quarter
        ([UNKNOWN] * 3, 3, 10, LOW, "3 steps agree"),
        ([replace(one, remaining=None) for one in walls(10, 11, 12)], 3, 9, LOW, "3 steps agree"),
        # a loop that never gets steady, by steps and by time
        (walls(*[14, 10] * 25), 40, 10, LOW, "40 steps"),
        (LATE, 4, 3, LOW, "4 steps in 72 s"),
        # stalls do not hide a steady loop
        (walls(10, 10, 40, 10) * 3, 12, 10, HIGH, "steady"),
    ],
)
def test_when_a_window_opens_and_how_long_it_is(
    boundaries: list[Boundary], completed: int, active: int, confidence: str, words: str
) -> None:
    found = first_opening(auto(), boundaries)
    assert found is not None
    assert (found[0], found[1].active, found[1].confidence) == (completed, active, confidence)
    assert words in found[1].reason


@pytest.mark.parametrize(
    "boundaries",
    [
        [STEADY] * 4,  # with a known length it waits for a steady step
        walls(50, 30, 20, 15, 12, 11),
        walls(14, 14, 14, 40, 14, 14, 12, 40, 12, 12, 12, 40),
        [replace(one, remaining=None) for one in walls(10, 11, 13)],
        [*[STEADY] * 4, replace(STEADY, wall_ns=100 * MS)],  # a step that took longer: logging, a checkpoint
        *([*[STEADY] * 4, *[replace(STEADY, **change)] * 100] for change in (
            {"compiled": True}, {"kind": "eval"}, {"saved": True}  # type: ignore[arg-type]
        )),
    ],
)  # fmt: skip
def test_when_none_opens(boundaries: list[Boundary]) -> None:
    plan = auto()
    assert first_opening(plan, boundaries) is None
    found = first_opening(plan, [STEADY] * 20)
    assert found is not None
    assert found[1].confidence == HIGH


def test_a_device_gets_a_warm_up_step_and_everywhere_means_evaluation_too() -> None:
    plan = auto()
    plan.warmup = DEVICE_WARMUP
    found = first_opening(plan, [STEADY] * 6)
    assert found is not None
    assert found[1].warmup == 1
    evaluation = [*[STEADY] * 4, replace(STEADY, kind="eval"), STEADY]
    assert first_opening(auto(everywhere=True), evaluation) is not None


def test_after_a_low_window_only_a_better_one_follows() -> None:
    plan = auto()
    assert first_opening(plan, [UNKNOWN] * 3) is not None
    plan.closed(kept=True, confidence=LOW)
    plan.max_active = 2  # bytes an earlier window took shorten the next
    found = first_opening(plan, [UNKNOWN] * 10)
    assert found is not None
    assert (found[1].active, found[1].confidence) == (2, HIGH)
    plan.closed(kept=True, confidence=HIGH)
    assert first_opening(plan, [UNKNOWN] * 100) is None


@pytest.mark.parametrize(
    ("schedule", "count", "compiled", "opens"),
    [
        ({"skip_first": 5, "wait": 2, "warmup": 1, "active": 3, "repeat": 2}, 60, False, [7, 13]),  # as torch counts
        ({"wait": 4, "warmup": 0, "active": 1, "repeat": 0}, 21, False, [4, 9, 14, 19]),  # for ever
        ({"wait": 0, "warmup": 1, "active": 8}, 20, False, [1]),  # late rather than never
        ({"wait": 1, "warmup": 1, "active": 8}, 5, True, []),
    ],
)
def test_a_schedule_opens_where_it_says(schedule: dict[str, int], count: int, compiled: bool, opens: list[int]) -> None:
    plan = SchedulePlan(WindowConfig(**schedule))  # type: ignore[arg-type]
    found, busy_until = [], 0
    for completed in range(1, count):
        at = replace(STEADY, completed=completed, compiled=compiled)
        plan.observe(at)
        opening = plan.decide(at) if completed >= busy_until else None
        if opening is not None:
            plan.opened(at)
            found.append(completed)
            busy_until = completed + opening.warmup + opening.active
    assert found == opens


@given(st.lists(st.integers(0, 10**12), max_size=20), st.integers(2, 1000))
def test_any_walls_get_an_answer_that_does_not_depend_on_the_unit(values: list[int], factor: int) -> None:
    assert isinstance(window.is_outlier(10**9, values), bool)
    scaled = [value * factor for value in values]
    assert window.spread(values) == window.spread(scaled)
    if len(values) < 5 or min(values) >= 1000:  # shares of less than a nanosecond are rounded
        assert window.is_steady(values) == window.is_steady(scaled)
