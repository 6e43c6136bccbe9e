"""Steps of scripts with more than one loader at a time; a fake clock, no torch."""

from __future__ import annotations

import pytest

from .loops import Loop, walls


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.mark.parametrize("making_ms", [0, 800])
def test_validation_in_the_middle_of_an_epoch(loop: Loop, making_ms: float) -> None:
    training = loop.iterate(1)
    for number in range(6):
        loop.fetch(training)
        loop.train()
        if number % 3 == 2:
            for _ in loop.batches(2, 2, making_ms=making_ms):
                loop.forward()
            loop.spend(50)
    loop.stop(training)
    rows = loop.finish()
    assert [row.kind for row in rows] == (["train"] * 3 + ["eval"] * 2) * 2
    assert walls(rows) == ([10] * 3 + [5] * 2) * 2
    assert [row.epoch for row in rows if row.kind == "eval"] == [0, 0, 1, 1]


def test_an_inner_training_loop_cuts_inside_an_outer_loader(loop: Loop) -> None:
    for _task in loop.batches(1, 2):
        for _ in loop.batches(2, 3):
            loop.train()
    rows = loop.finish()
    assert [row.kind for row in rows] == ["train"] * 6
    assert walls(rows) == [12, 10, 10] * 2


def test_zipped_loaders_are_one_step_and_both_waits_count(loop: Loop) -> None:
    first, second = loop.iterate(1), loop.iterate(2)
    for _ in range(3):
        loop.fetch(first, ms=2)
        loop.fetch(second, ms=6)
        loop.train()
    loop.stop(first)
    loop.dead(second)
    rows = loop.finish()
    assert walls(rows) == [16] * 3
    assert {row.data_wait_ns for row in rows} == {8_000_000}
    assert [row.samples for row in rows] == [8] * 3


def test_a_second_loader_that_is_restarted_inside_the_step_stays_nested(loop: Loop) -> None:
    unlabelled = loop.iterate(2)
    for number in loop.batches(1, 4):
        if number == 2:
            loop.stop(unlabelled)
            unlabelled = loop.iterate(2, making_ms=1)
        loop.fetch(unlabelled)
        loop.train()
    rows = loop.finish()
    assert len(rows) == 4
    assert walls(rows) == [12, 12, 13, 12]


def test_tasks_that_take_turns_are_steps_of_their_own(loop: Loop) -> None:
    tasks = [loop.iterate(1), loop.iterate(2)]
    for number in range(12):
        loop.fetch(tasks[number * 5 % 3 % 2])
        loop.train()
    assert walls(loop.finish()) == [10] * 12
