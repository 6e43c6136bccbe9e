"""Steps of the loops that frameworks run, as events; a fake clock, no torch. Fetch 10, forward 20, backward 40 ms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from .loops import Loop, phases, walls


class Framework(Loop):
    """A loop in a framework's order of events; `compiled`: no module can be heard."""

    def micro(self) -> None:
        self.forward(20)
        self.backward(40)

    def update(self, optimizer: int = 500) -> None:
        self.step(optimizer, 5)
        self.spend(1)

    def closure_step(self, passes: int = 1, optimizer: int = 500) -> None:
        self.cutter.optimizer_start(optimizer, self.now)
        for _ in range(passes):
            self.cutter.closure_start(self.now)
            self.micro()
            self.cutter.closure_end(self.now)
            self.spend(5)
        self.cutter.optimizer_end(optimizer, self.now)
        self.spend(1)

    def evaluate(self, batches: Iterator[int]) -> None:
        for _ in batches:
            self.forward(20, gradients=False)

    def sharded(self, loader: int, count: int, known: bool = True, dies: bool = True) -> Iterator[int]:
        """Accelerate's loader: a batch is handed out once the next one is there."""
        iterator = next(self._ids)
        self.cutter.loader_created(loader, iterator, self.now, known)
        self.fetch(iterator, 10)
        for number in range(1, count):
            self.fetch(iterator, 10)
            yield number - 1
        self.stop(iterator)
        yield count - 1
        if dies:
            self.dead(iterator)

    def ahead(self, batches: Iterator[int], count: int) -> Iterator[int]:
        """HF's Trainer: as many batches as an update takes are fetched first."""
        while True:
            got = list(itertools.islice(batches, count))
            if not got:
                return
            yield len(got)


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def loop(request: pytest.FixtureRequest) -> Framework:
    framework = Framework()
    framework.compiled = request.param
    return framework


def kinds(loop: Loop) -> list[tuple[str, int]]:
    return [(row.kind, row.fetches) for row in loop.rows]


def test_accelerate_hands_a_batch_out_once_the_next_is_there(loop: Framework) -> None:
    for _epoch in range(2):
        for _ in loop.sharded(1, 5):
            loop.micro()
            loop.update()
        loop.spend(100)
    rows = loop.finish()
    assert kinds(loop) == [("train", 1)] * 10
    assert [row.samples for row in rows] == [8] * 10
    assert [row.epoch for row in rows] == [0] * 5 + [1] * 5
    assert walls(rows[:5]) == [86, 76, 76, 76, 66]
    assert phases(rows[4]) == (0, 20, 40, 5, 1)


def test_a_loader_that_was_thought_to_look_ahead_and_does_not(loop: Framework) -> None:
    iterator = next(loop._ids)
    loop.cutter.loader_created(1, iterator, loop.now, True)
    for _ in range(4):
        loop.fetch(iterator, 10)
        loop.micro()
        loop.update()
    loop.stop(iterator)
    assert [(row.kind, row.fetches, row.samples) for row in loop.finish()] == [("train", 1, 8)] * 4


@pytest.mark.parametrize("known", [True, False])
def test_trainer_fetches_the_batches_of_an_update_first(loop: Framework, known: bool) -> None:
    for _epoch in range(2):
        for count in loop.ahead(loop.sharded(1, 9, known), 4):
            for _ in range(count):
                loop.micro()
            loop.update()
    rows = loop.finish()
    assert kinds(loop) == [("train", 4), ("train", 4), ("train", 1)] * 2
    assert [row.samples for row in rows] == [32, 32, 8] * 2
    assert [row.data_wait_ns for row in rows[:3]] == [50_000_000, 40_000_000, 0]


@pytest.mark.parametrize("dies", [True, False])
def test_trainer_with_evaluation_between_updates(loop: Framework, dies: bool) -> None:
    for number, count in enumerate(loop.ahead(loop.sharded(1, 24), 4)):
        for _ in range(count):
            loop.micro()
        loop.update()
        if number % 2 == 1:
            loop.evaluate(loop.sharded(2, 3, dies=dies))
    loop.finish()
    expected = ([("train", 4)] * 2 + [("eval", 1)] * 3) * 3
    if loop.compiled and not dies:
        expected.pop()  # nobody told that the last batch was used
    assert kinds(loop) == expected


def test_batches_fetched_together_are_trained_on_one_after_the_other(loop: Framework) -> None:
    iterator = loop.iterate(1)
    for _ in range(3):
        loop.fetch(iterator, 10)
        loop.fetch(iterator, 10)
        loop.micro()
        loop.micro()
        loop.update()
    rows = loop.finish()
    assert kinds(loop) == [("train", 2)] * 3
    assert [row.samples for row in rows] == [16] * 3
    assert {phases(row) for row in rows[:2]} == {(20, 40, 80, 5, 1)}


def test_two_batches_are_one_pass_s_input(loop: Framework) -> None:
    iterator = loop.iterate(1)
    for _ in range(4):
        loop.fetch(iterator, 10)
        loop.fetch(iterator, 10)
        loop.micro()
        loop.update()
    rows = loop.finish()
    assert len(rows) == 4
    assert sum(row.samples or 0 for row in rows) == 64
    assert [row.samples for row in rows[2:]] == [16, 16]


def test_accumulation_as_accelerate_writes_it(loop: Framework) -> None:
    for _epoch in range(2):
        for number in loop.sharded(1, 6):
            loop.micro()
            if number % 2 == 1:
                loop.update()
    rows = loop.finish()
    assert [(row.kind, row.samples) for row in rows] == [("train", 16)] * 6


def test_a_closure_holds_forward_and_backward(loop: Framework) -> None:
    for _ in loop.batches(1, 4, fetch_ms=10):
        loop.closure_step()
    rows = loop.finish()
    assert {phases(row) for row in rows} == {(10, 20, 40, 5, 1)}


def test_a_closure_that_is_called_several_times(loop: Framework) -> None:
    for _ in range(3):
        loop.closure_step(passes=4)
    rows = loop.finish()
    assert len(rows) == 3
    assert {phases(row)[2:4] for row in rows[1:]} == {(160, 20)}
    assert {row.forward_ns for row in rows[1:]} == {80_000_000} or loop.compiled


def test_accumulation_with_a_closure(loop: Framework) -> None:
    for number in loop.batches(1, 6, fetch_ms=10):
        if number % 2 == 0:
            loop.micro()
            loop.spend(1)
        else:
            loop.closure_step()
    assert {phases(row) for row in loop.finish()} == {(20, 40, 80, 5, 2)}


def test_a_sanity_check_and_validation_that_end_by_count() -> None:
    loop = Framework()
    check = loop.iterate(2)
    for _ in range(2):
        loop.fetch(check, 10)
        loop.forward(20, gradients=False)
    for _epoch in range(2):
        training = loop.iterate(1)
        if _epoch == 0:
            loop.dead(check)
        for _ in range(3):
            loop.fetch(training, 10)
            loop.closure_step()
        validation = loop.iterate(2)
        for _ in range(2):
            loop.fetch(validation, 10)
            loop.forward(20, gradients=False)
        if _epoch:
            loop.dead(validation)
        loop.dead(training)
    rows = loop.finish()
    assert [row.kind for row in rows] == ["eval"] * 2 + (["train"] * 3 + ["eval"] * 2) * 2
    assert {(row.samples, row.fetches) for row in rows} == {(8, 1)}
    assert {row.wall_ns for row in rows if row.kind == "train"} == {76_000_000}


def test_a_loop_over_training_data_that_does_not_train_is_evaluation() -> None:
    loop = Framework()
    for _epoch in range(2):
        for _ in loop.batches(1, 3):
            loop.train()
        loop.evaluate(loop.batches(1, 3))
    loop.finish()
    assert [row.kind for row in loop.rows] == (["train"] * 3 + ["eval"] * 3) * 2


def test_endless_loaders_are_validated_between_epochs(loop: Framework) -> None:
    training, validation = loop.iterate(1), loop.iterate(2)
    loop.cutter.loader_length(training, 4)
    for _epoch in range(2):
        for _ in range(4):
            loop.fetch(training, 10)
            loop.micro()
            loop.update()
        for _ in range(12):
            loop.fetch(validation, 10)
            loop.forward(20, gradients=False)
    rows = loop.finish()
    train = [row for row in rows if row.kind == "train"]
    expected = (["train"] * 4 + ["eval"] * 12) * 2
    assert [row.kind for row in rows] == (expected[:-1] if loop.compiled else expected)
    assert [row.epoch for row in train] == [0] * 4 + [1] * 4
    assert walls(train) == [76] * 8


def test_batches_that_are_only_looked_through_are_no_steps() -> None:
    loop = Framework()
    for _ in loop.batches(1, 20):
        loop.spend(1)  # the mean of the pixels
    peek = loop.iterate(1)
    loop.fetch(peek)
    loop.dead(peek)
    for _ in loop.batches(1, 3):
        loop.train()
    for _ in loop.batches(1, 20):
        loop.spend(1)
    assert [row.kind for row in loop.finish()] == ["train"] * 3


@pytest.mark.parametrize("count", [3, 300])
def test_a_script_that_only_looks_through_its_loader_has_steps(count: int) -> None:
    loop = Framework(optimizers=False)
    for _ in loop.batches(1, count):
        loop.spend(1)
    assert [row.kind for row in loop.finish()] == ["eval"] * count


def test_a_model_that_is_tried_on_one_batch_first_is_no_step() -> None:
    loop = Framework()
    peek = loop.iterate(1)
    loop.fetch(peek)
    loop.forward(20)
    loop.dead(peek)
    for _ in loop.batches(1, 3):
        loop.train()
    assert [row.kind for row in loop.finish()] == ["train"] * 3


def test_a_batch_fetched_and_not_used_before_the_loop_is_left_is_no_step() -> None:
    loop = Framework()
    iterator = loop.iterate(2)
    for number in range(6):
        loop.fetch(iterator)
        if number == 5:
            loop.spend(0.1)
            loop.dead(iterator)
            break
        loop.forward(20, gradients=False)
    assert [row.kind for row in loop.finish()] == ["eval"] * 5


def test_a_framework_that_says_it_evaluates_is_believed(loop: Framework) -> None:
    for _ in range(2):
        for _ in loop.batches(1, 3):
            loop.train()
        loop.cutter.evaluation_start(loop.now)
        for _ in loop.batches(2, 2):
            loop.spend(3)
        loop.cutter.evaluation_end(loop.now)
    assert [row.kind for row in loop.finish()] == (["train"] * 3 + ["eval"] * 2) * 2


# ------------------------------------------------------------------------------------- loops without an optimizer


class ByHand(Framework):
    """Parameters are changed by hand, and nothing is fetched from a loader."""

    def __init__(self) -> None:
        super().__init__(optimizers=False)

    def derive(self, root: int = 7, cleared: bool | None = True) -> None:
        self.forward(20)
        self.cutter.backward_start(self.now, root, cleared)
        self.spend(40)
        self.cutter.backward_end(self.now)


@pytest.mark.parametrize("compiled", [False, True])
def test_updates_by_hand_are_cut_by_the_next_pass_from_the_same_line(compiled: bool) -> None:
    loop = ByHand()
    loop.compiled = compiled
    for number in range(6):
        loop.derive(cleared=None if number == 0 else True)
        loop.spend(5)  # parameter -= rate * gradient
    rows = loop.finish()
    assert [row.kind for row in rows] == ["train"] * 6
    assert walls(rows) == [60] + [65] * 5
    assert phases(rows[3]) == (None, 20, 40, 0, 5)


def test_gradients_that_are_added_up_are_one_update_by_hand() -> None:
    loop = ByHand()
    for number in range(12):
        loop.derive(cleared=None if number == 0 else number % 3 == 0)
        if number % 3 == 2:
            loop.spend(5)
    rows = loop.finish()
    assert len(rows) == 4
    assert {row.backward_ns for row in rows} == {120_000_000}


def test_two_lines_that_take_turns_are_one_step_by_hand() -> None:
    loop = ByHand()
    for number in range(5):
        for root in (7, 8):
            loop.derive(root, None if number == 0 else True)
            loop.spend(5)
    assert len(loop.finish()) == 5


def test_an_evaluation_between_steps_without_a_loader_is_no_forward() -> None:
    loop = Framework()
    for _ in range(6):
        loop.forward(30, gradients=False)  # of the trained module
        loop.forward(20)
        loop.backward(40)
        loop.update()
    rows = loop.finish()
    assert len(rows) == 6
    assert phases(rows[4]) == (None, 20, 40, 5, 31)


def test_a_teacher_is_forward() -> None:
    loop = Framework()
    for _ in range(4):
        loop.spend(2)
        loop.forward(30, gradients=False, module=901)
        loop.forward(20)
        loop.backward(40)
        loop.update()
    assert phases(loop.finish()[3]) == (3, 50, 40, 5, 0)
