"""A framework's own step number reaches the row of the step that it counts, however late the row is cut."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.record.agent.guard import Guard
from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.step_readings import FrameworkSteps, reader
from tests.record.agent.loops import Loop


class Framework:
    """A trainer that counts as frameworks do, and a loop that tells what the agent's probes tell."""

    def __init__(self, begun: bool = False) -> None:
        self.count: Any = 0
        self.faults: list[str] = []
        self.steps = FrameworkSteps(Guard(lambda probe, _error: self.faults.append(probe)))
        self.loop = Loop()
        self.rows: list[StepRow] = []
        self.loop.cutter._emit = lambda row, _live, now: self._keep([] if row is None else [row], now)
        self.loop.cutter._emit_rows = lambda rows: self._keep(rows, 0)
        self.steps.begin(reader(self, "count"), begun, self.loop.now)

    def _keep(self, rows: list[StepRow], now: int) -> None:
        self.rows += [self.steps.filled(row, now) for row in rows]

    def fetch(self, iterator: int) -> None:
        self.steps.sample(self.loop.now)
        self.loop.fetch(iterator)

    def stop(self, iterator: int) -> None:
        self.steps.sample(self.loop.now)
        self.loop.stop(iterator)

    def backward(self) -> None:
        self.loop.forward()
        self.steps.sample(self.loop.now)
        self.loop.backward()

    def numbers(self, kind: str = "train") -> list[int | None]:
        self.loop.finish()
        return [row.framework_step for row in self.rows if row.kind == kind]


@pytest.mark.parametrize("patient", [False, True])
def test_counted_after_the_optimizer(patient: bool) -> None:
    trainer = Framework()
    trainer.loop.cutter.patient = patient
    for _ in range(2):
        iterator = trainer.loop.iterate(1)
        for _ in range(20):
            trainer.fetch(iterator)
            trainer.backward()
            trainer.loop.step()
            trainer.loop.spend(1)
            trainer.count += 1
        trainer.stop(iterator)
    assert trainer.numbers() == list(range(1, 41))


def test_counted_when_the_step_begins() -> None:
    trainer = Framework(begun=True)
    iterator = trainer.loop.iterate(1)
    for _ in range(5):
        trainer.count += 1
        trainer.fetch(iterator)
        trainer.backward()
        trainer.loop.step()
    assert trainer.numbers() == [1, 2, 3, 4, 5]


def test_accumulated_batches_belong_to_one_update() -> None:
    trainer = Framework()
    iterator = trainer.loop.iterate(1)
    for micro in range(12):
        trainer.fetch(iterator)
        trainer.backward()
        if micro % 4 == 3:
            trainer.loop.step()
            trainer.count += 1
    trainer.stop(iterator)
    assert trainer.numbers() == [1, 2, 3]


def test_two_updates_on_one_batch_are_one_step() -> None:
    trainer = Framework()
    iterator = trainer.loop.iterate(1)
    for _ in range(2):
        trainer.fetch(iterator)
        for _ in range(2):
            trainer.backward()
            trainer.loop.step()
            trainer.count += 1
    trainer.stop(iterator)
    assert trainer.numbers() == [2, 4]


def test_nothing_outside_the_training() -> None:
    """Evaluation before it, a loop of the user's after it: no number, and a second training begins anew."""
    trainer = Framework()

    def epoch(train: bool) -> None:
        iterator = trainer.loop.iterate(1 if train else 2)
        for _ in range(3):
            trainer.fetch(iterator)
            if train:
                trainer.backward()
                trainer.loop.step()
                trainer.count += 1
            else:
                trainer.loop.forward()
        trainer.stop(iterator)

    epoch(train=False)
    epoch(train=True)
    epoch(train=False)
    trainer.steps.end(trainer.loop.now)
    trainer.loop.spend(1)
    epoch(train=True)
    trainer.count = 0
    trainer.loop.spend(1)
    trainer.steps.begin(reader(trainer, "count"), False, trainer.loop.now)
    epoch(train=True)
    assert trainer.numbers() == [1, 2, 3, None, None, None, 1, 2, 3]
    assert [row.framework_step for row in trainer.rows if row.kind == "eval"] == [None, None, None, 3, 3, 3]


def test_without_a_loader_a_number_is_right_or_missing() -> None:
    """Such a step ends with the optimizer, before the framework has counted it: missing, never one too few."""
    trainer = Framework()
    for _ in range(4):
        trainer.backward()
        trainer.loop.step()
        trainer.count += 1
    numbers = trainer.numbers()
    assert len(numbers) == 4
    assert all(number in (None, index + 1) for index, number in enumerate(numbers))


class OnDevice:
    device = type("Device", (), {"type": "cuda"})()

    def numel(self) -> int:
        raise AssertionError("a tensor on a device is not looked at")


def test_what_cannot_be_read_is_missing() -> None:
    class Owner:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    assert reader(Owner(), "state.global_step")() is None
    owner = Owner()
    owner.state = None
    assert reader(owner, "state.global_step")() is None
    owner.state = OnDevice()
    assert reader(owner, "state")() is None


def test_a_number_in_a_tensor_is_read_without_torch() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("numpy")
    owner = type("Owner", (), {})()
    owner.iterations = type("Variable", (), {})()
    owner.iterations._value = torch.nn.Parameter(torch.tensor(3), requires_grad=False)
    read = reader(owner, "iterations")
    assert read() == 3
    with torch.no_grad():
        owner.iterations._value.copy_(torch.tensor(7))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert read() == 7
    assert not list(profiler.events())


def test_a_counter_that_raises_is_switched_off() -> None:
    trainer = Framework()

    def broken() -> int:
        raise RuntimeError("no")

    trainer.steps.begin(broken, False, trainer.loop.now)
    iterator = trainer.loop.iterate(1)
    for _ in range(3):
        trainer.fetch(iterator)
        trainer.backward()
        trainer.loop.step()
    trainer.stop(iterator)
    assert trainer.numbers() == [None, None, None]
    assert trainer.faults == ["framework_steps"]
