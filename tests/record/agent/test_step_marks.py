"""Steps cut by marks: the user's, the profiler's, torch_xla's; a fake clock, no torch."""

from __future__ import annotations

import pytest

from .loops import Loop, phases, walls


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_the_first_mark_right_after_a_boundary_adds_no_step(loop: Loop) -> None:
    for number in range(8):
        loop.train()
        if number >= 4:
            loop.spend(0.1)
            loop.cutter.mark("profiler_step", loop.now)
    assert {row.kind for row in loop.finish()} == {"train"}


def test_user_marks_win_over_fetches(loop: Loop) -> None:
    for number in loop.batches(1, 6):
        loop.train()
        if number % 2 == 1:
            loop.cutter.mark("user", loop.now)
    rows = loop.finish()
    assert [row.signal for row in rows][-2:] == ["user", "user"]
    assert [row.fetches for row in rows][-2:] == [2, 2]
    assert walls(rows)[-2:] == [20, 20]


def test_a_weaker_mark_is_ignored_beside_a_stronger_one(loop: Loop) -> None:
    for _ in range(4):
        loop.spend(2)
        loop.train()
        loop.cutter.mark("xla_sync", loop.now)
        loop.spend(1)
        loop.cutter.mark("user", loop.now)
    rows = loop.finish()
    assert [row.signal for row in rows[-3:]] == ["user"] * 3
    assert walls(rows)[-3:] == [11] * 3


def test_a_mark_at_the_top_of_the_loop_body(loop: Loop) -> None:
    for _ in loop.batches(1, 4):
        loop.cutter.mark("user", loop.now)
        loop.train()
    rows = loop.finish()
    assert {row.kind for row in rows} == {"train"}
    assert len(rows) >= 3
    assert all(row.data_wait_ns is not None for row in rows)


def test_marks_that_stop_coming_are_noticed(loop: Loop) -> None:
    for number in loop.batches(1, 60):
        loop.train()
        if number < 10:
            loop.cutter.mark("profiler_step", loop.now)
    rows = loop.finish()
    assert walls(rows) == [10] * 60
    assert rows[-1].signal == "loader"


def test_evaluation_between_marked_steps_is_cut_by_its_fetches(loop: Loop) -> None:
    training = loop.iterate(1)
    for _ in range(3):
        loop.fetch(training)
        loop.train()
        loop.cutter.mark("user", loop.now)
        for _ in loop.batches(2, 2):
            loop.forward()
    rows = loop.finish()
    assert [row.kind for row in rows] == ["train", "eval", "eval"] * 3
    assert walls(rows) == [10, 5, 5] * 3


def test_marks_alone_without_any_hook_are_steps(loop: Loop) -> None:
    loop.cutter.mark("user", loop.now)
    for _ in range(3):
        loop.spend(5)
        loop.cutter.mark("user", loop.now)
    rows = loop.finish()
    assert walls(rows) == [5] * 3
    assert [phases(row)[0] for row in rows] == [None] * 3
