"""Where steps are cut and what their phases hold, for every kind of loop: a fake clock, no torch."""

from __future__ import annotations

import pytest

from .loops import Loop, phases, walls


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_a_plain_loop_over_a_loader(loop: Loop) -> None:
    for _epoch in range(2):
        for _ in loop.batches(loader=1, count=3):
            loop.train()
            loop.spend(1.5)  # logging
        loop.spend(500)  # a checkpoint between the epochs is no step's cost
    rows = loop.finish()
    assert [row.step for row in rows] == list(range(6))
    assert {row.kind for row in rows} == {"train"}
    assert [row.epoch for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row.first_batch for row in rows] == [1, 0, 0, 1, 0, 0]
    assert [row.samples for row in rows] == [8] * 6
    assert [row.fetches for row in rows] == [1] * 6
    assert walls(rows) == [11.5] * 6
    assert {phases(row) for row in rows} == {(2.0, 3.0, 4.0, 1.0, 1.5)}
    assert {row.signal for row in rows} == {"loader"}


def test_gradient_accumulation_is_one_step_per_update(loop: Loop) -> None:
    for number in loop.batches(1, 8):
        loop.forward()
        loop.backward()
        if number % 4 == 3:
            loop.step()
    rows = loop.finish()
    assert [(row.fetches, row.samples) for row in rows] == [(4, 32), (4, 32)]
    assert walls(rows) == [4 * 9 + 1] * 2
    assert phases(rows[0]) == (8.0, 12.0, 16.0, 1.0, 0.0)


def test_micro_batches_left_over_at_the_end_of_an_epoch_are_a_step_of_their_own(loop: Loop) -> None:
    for _epoch in range(2):
        for number in loop.batches(1, 5):
            loop.forward()
            loop.backward()
            if number % 4 == 3:
                loop.step()
        loop.spend(100)
    rows = loop.finish()
    assert [(row.fetches, row.signal) for row in rows] == [(4, "loader"), (1, "end")] * 2
    assert walls(rows) == [37, 9] * 2


def test_an_update_after_the_loop_belongs_to_the_step_the_loop_ended_in(loop: Loop) -> None:
    for _epoch in range(2):
        for _ in loop.batches(1, 3):
            loop.forward()
            loop.backward()
        loop.step()
    rows = loop.finish()
    assert [row.fetches for row in rows] == [3, 3]
    assert walls(rows) == [28, 28]


def test_an_overflow_does_not_merge_two_iterations(loop: Loop) -> None:
    for number in loop.batches(1, 4):
        loop.forward()
        loop.backward()
        if number in (1, 2):
            loop.cutter.optimizer_skipped(500, loop.now)
        else:
            loop.step()
    assert walls(loop.finish()) == [10, 9, 9, 10]


def test_a_hand_written_update_is_cut_by_the_fetch() -> None:
    loop = Loop(optimizers=False)
    for _ in loop.batches(1, 3):
        loop.forward()
        loop.backward()
        loop.spend(2)  # parameter -= rate * gradient
    rows = loop.finish()
    assert walls(rows) == [11] * 3
    assert phases(rows[1]) == (2.0, 3.0, 4.0, 0.0, 2.0)
    assert rows[1].kind == "train"


def test_an_optimizer_inside_backward_is_a_phase_and_the_boundary_stays_the_fetch(loop: Loop) -> None:
    for _ in loop.batches(1, 3):
        loop.forward()
        loop.cutter.backward_start(loop.now)
        for parameter in (600, 601):
            loop.spend(2)
            loop.step(parameter, ms=1)
        loop.cutter.backward_end(loop.now)
    rows = loop.finish()
    assert walls(rows) == [11] * 3
    assert phases(rows[0]) == (2.0, 3.0, 4.0, 2.0, 0.0)


def test_an_optimizer_inside_backward_without_a_loader(loop: Loop) -> None:
    for _ in range(5):
        loop.spend(2)
        loop.forward()
        loop.cutter.backward_start(loop.now)
        for parameter in (600, 601):
            loop.step(parameter, ms=1)
        loop.cutter.backward_end(loop.now)
    rows = loop.finish()
    assert walls(rows) == [5] + [7] * 4  # of the first one, what came before its first module was not seen
    assert {(row.backward_ns, row.optimizer_ns) for row in rows} == {(0, 2_000_000)}


def test_two_optimizers_on_one_batch_are_one_step(loop: Loop) -> None:
    for _ in loop.batches(1, 3):
        loop.train(optimizer=500)
        loop.train(optimizer=501)
    rows = loop.finish()
    assert walls(rows) == [18] * 3
    assert phases(rows[2]) == (2.0, 6.0, 8.0, 2.0, 0.0)


def test_two_optimizers_and_two_loaders_are_one_step(loop: Loop) -> None:
    first, second = loop.iterate(1), loop.iterate(2)
    for _ in range(4):
        loop.fetch(first)
        loop.train(optimizer=500)
        loop.fetch(second, ms=5)
        loop.train(optimizer=501)
    loop.stop(first)
    rows = loop.finish()
    assert walls(rows) == [23] * 4
    assert phases(rows[1]) == (7.0, 6.0, 8.0, 2.0, 0.0)
    assert [row.samples for row in rows] == [8] * 4


def test_two_optimizers_without_a_loader_are_one_step(loop: Loop) -> None:
    for _ in range(6):
        loop.spend(2)
        loop.train(optimizer=500)
        loop.train(optimizer=501)
    rows = loop.finish()
    assert walls(rows) == [16] + [18] * 5
    assert {row.signal for row in rows} <= {"optimizer", "end"}


def test_no_loader_data_wait_is_the_gap_before_the_first_module(loop: Loop) -> None:
    for _ in range(4):
        loop.spend(7)
        loop.train()
        loop.spend(0.5)
    rows = loop.finish()
    assert walls(rows) == [8.0] + [15.5] * 3
    assert phases(rows[0]) == (None, 3.0, 4.0, 1.0, 0.0)
    assert phases(rows[2]) == (7.5, 3.0, 4.0, 1.0, 0.0)
    assert rows[1].samples is None
    assert rows[1].fetches == 0
    assert rows[1].epoch is None


def test_no_loader_and_no_module_seen_leaves_data_wait_unknown(loop: Loop) -> None:
    for _ in range(4):
        loop.spend(7)
        loop.backward()
        loop.step()
    rows = loop.finish()
    assert phases(rows[1]) == (None, None, 4.0, 1.0, 7.0)
    assert walls(rows) == [12] * 3


def test_lbfgs_backward_inside_the_optimizer_is_one_step(loop: Loop) -> None:
    for _ in loop.batches(1, 3):
        loop.cutter.optimizer_start(500, loop.now)
        for _ in range(3):
            loop.forward()
            loop.backward()
        loop.cutter.optimizer_end(500, loop.now)
    rows = loop.finish()
    assert walls(rows) == [23] * 3
    assert phases(rows[0]) == (2.0, 0.0, 12.0, 9.0, 0.0)


def test_nested_optimizer_steps_count_once(loop: Loop) -> None:
    for _ in range(5):
        loop.spend(2)
        loop.forward()
        loop.backward()
        loop.cutter.optimizer_start(700, loop.now)
        loop.step(500)
        loop.cutter.optimizer_end(700, loop.now)
    assert walls(loop.finish()) == [8] + [10] * 4


def test_inference_only(loop: Loop) -> None:
    for _ in loop.batches(1, 3):
        loop.forward()
        loop.spend(1)
    rows = loop.finish()
    assert [row.kind for row in rows] == ["eval"] * 3
    assert phases(rows[1]) == (2.0, 4.0, 0.0, 0.0, 0.0)


def test_leaving_the_loop_by_break_ends_the_step_there(loop: Loop) -> None:
    iterator = loop.iterate(1)
    for _ in range(2):
        loop.fetch(iterator)
        loop.train()
    loop.dead(iterator)
    loop.spend(1000)
    for _ in loop.batches(1, 1):
        loop.train()
    assert walls(loop.finish()) == [10] * 3


def test_a_peek_at_the_first_batch_is_no_step(loop: Loop) -> None:
    peek = loop.iterate(1)
    loop.fetch(peek)
    loop.dead(peek)
    loop.spend(100)
    for _ in loop.batches(1, 2):
        loop.train()
    assert walls(loop.finish()) == [10, 10]


@pytest.mark.parametrize("kept", [True, False])
def test_many_updates_on_one_batch_are_steps(loop: Loop, kept: bool) -> None:
    iterator = loop.iterate(1)
    loop.fetch(iterator)
    if not kept:
        loop.dead(iterator)
    for _ in range(200):
        loop.forward()
        loop.backward()
        loop.step()
    rows = loop.finish()
    assert 198 <= len(rows) <= 200
    assert sum(wall != 8 for wall in walls(rows)) <= 3


def test_a_loader_that_fetches_one_ahead(loop: Loop) -> None:
    iterator = loop.iterate(1)
    loop.fetch(iterator)
    for _ in range(3):
        loop.fetch(iterator)
        loop.train()
    loop.stop(iterator)
    loop.train()
    rows = loop.finish()
    assert [(row.kind, row.fetches, row.samples) for row in rows] == [("train", 1, 8)] * 4
    assert walls(rows) == [12, 10, 10, 8]


def test_a_silent_optimizer_falls_back_to_the_fetches(loop: Loop) -> None:
    for _ in loop.batches(1, 100):
        loop.forward()
        loop.backward()
        loop.spend(1)
    rows = loop.finish()
    assert walls(rows) == [10] * 100
    assert {row.signal for row in rows} == {"loader"}


def test_the_first_update_after_undecided_fetches_merges_them(loop: Loop) -> None:
    for number in loop.batches(1, 32):
        loop.forward()
        loop.backward()
        if number % 16 == 15:
            loop.step()
    assert [row.fetches for row in loop.finish()] == [16, 16]


def test_an_optimizer_that_falls_silent_later(loop: Loop) -> None:
    for number in loop.batches(1, 200):
        loop.forward()
        loop.backward()
        if number < 5:
            loop.step()
    rows = loop.finish()
    assert len(rows) == 200


def test_time_in_listeners_is_in_no_step(loop: Loop) -> None:
    loop.listener_ms = 1000
    for _ in loop.batches(1, 4):
        loop.train()
    rows = loop.finish()
    assert walls(rows) == [10] * 4
    assert rows[1].start_ns - rows[0].start_ns == 1010 * 1_000_000


def test_listeners_hear_of_every_step_of_a_plain_loop_and_of_its_start(loop: Loop) -> None:
    for _ in loop.batches(1, 3):
        loop.train()
    assert [None if row is None else row.step for row in loop.live] == [None, 0, 1, 2]


def test_listeners_hear_of_steps_without_a_loader(loop: Loop) -> None:
    for _ in range(10):
        loop.train()
    assert [row.step for row in loop.live if row is not None][-3:] == [7, 8, 9]


def test_the_last_step_ends_at_its_last_signal(loop: Loop) -> None:
    iterator = loop.iterate(1)
    for _ in range(2):
        loop.fetch(iterator)
        loop.train()
    loop.spend(5000)  # plotting, waiting for the user
    rows = loop.finish()
    assert walls(rows) == [10, 10]
    assert rows[-1].signal == "end"


def test_an_incomplete_last_step_is_dropped(loop: Loop) -> None:
    iterator = loop.iterate(1)
    loop.fetch(iterator)
    loop.train()
    loop.fetch(iterator)
    loop.forward()
    loop.backward()
    assert walls(loop.finish()) == [10]


def test_an_interruption_closes_what_is_complete_and_forgets_the_rest(loop: Loop) -> None:
    training = loop.iterate(1)
    for _ in range(2):
        loop.fetch(training)
        loop.train()
    loop.cutter.interrupt(loop.now)
    loop.spend(5000)
    loop.backward()  # the middle of a step nobody saw begin
    loop.step()
    for _ in range(2):
        loop.fetch(training)
        loop.train()
    assert walls(loop.finish()) == [10] * 4


def test_the_window_flag_sticks_to_every_step_it_touches(loop: Loop) -> None:
    for number in loop.batches(1, 5):
        if number == 1:
            loop.cutter.window(True)
        loop.train()
        if number == 2:
            loop.cutter.window(False)
    assert [row.in_window for row in loop.finish()] == [0, 1, 1, 0, 0]


def test_an_optimizer_that_raised_does_not_swallow_the_steps_after_it(loop: Loop) -> None:
    for number in loop.batches(1, 6):
        loop.forward()
        loop.backward()
        if number == 1:
            loop.cutter.optimizer_start(500, loop.now)  # out of memory, caught by the script
            loop.spend(1)
        else:
            loop.step()
    rows = loop.finish()
    assert walls(rows)[:1] + walls(rows)[-3:] == [10] * 4
