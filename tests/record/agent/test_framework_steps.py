"""A framework's own step number reaches the row of the step that it counts, however late the row is cut."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.record.agent.guard import Guard
from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.step_readings import FrameworkSteps, reader
from tests.record.agent.loops import Loop
from tests.record.agent.test_steps import happen


class Trainer:
    """Counts as frameworks do, in a loop that tells what the agent's probes tell; `count` is the word for it."""

    def __init__(self, begun: bool = False, read: Any = None) -> None:
        self.count: Any = 0
        self.faults: list[str] = []
        self.steps = FrameworkSteps(Guard(lambda probe, _error: self.faults.append(probe)))
        self.loop = Loop()
        self.rows: list[StepRow] = []
        self.loop.cutter._emit = lambda row, _live, now: self._keep([] if row is None else [row], now)
        self.loop.cutter._emit_rows = lambda rows: self._keep(rows, 0)
        self.steps.begin(read or reader(self, "count"), begun, self.loop.now)

    def _keep(self, rows: list[StepRow], now: int) -> None:
        self.rows += [self.steps.filled(row, now) or row for row in rows]

    def does(self, words: str, times: int = 1) -> None:
        for word in words.split() * times:
            if word == "count":
                self.count += 1
                continue
            if word.startswith(("fetch", "stop", "bwd")):
                self.steps.sample(self.loop.now)
            happen(self.loop, [word])

    def numbers(self, kind: str = "train") -> list[int | None]:
        self.loop.finish()
        return [row.framework_step for row in self.rows if row.kind == kind]


BATCH = "fetch1 fwd bwd "


@pytest.mark.parametrize(
    ("words", "begun", "patient", "numbers"),
    [
        (("iter1 " + (BATCH + "opt wait:1 count ") * 20 + "stop1 ") * 2, False, False, list(range(1, 41))),
        (("iter1 " + (BATCH + "opt wait:1 count ") * 20 + "stop1 ") * 2, False, True, list(range(1, 41))),
        ("iter1 " + ("count " + BATCH + "opt ") * 5, True, False, [1, 2, 3, 4, 5]),  # when the step begins
        ("iter1 " + (BATCH * 4 + "opt count ") * 3 + "stop1", False, False, [1, 2, 3]),  # accumulated batches
        ("iter1 " + ("fetch1 " + "fwd bwd opt count " * 2) * 2 + "stop1", False, False, [2, 4]),  # two updates on one
        # without a loader a step ends with the optimizer, before it is counted: missing, never one too few
        ("fwd bwd opt count " * 4, False, False, [1, None, None, None]),
    ],
)
def test_a_step_has_the_number_that_counts_it(
    words: str, begun: bool, patient: bool, numbers: list[int | None]
) -> None:
    trainer = Trainer(begun)
    trainer.loop.cutter.patient = patient
    trainer.does(words)
    assert trainer.numbers() == numbers


def test_nothing_outside_the_training() -> None:
    """Evaluation before it, a loop of the user's after it: no number, and a second training begins anew."""
    trainer = Trainer()
    train, evaluate = f"iter1 {(BATCH + 'opt count ') * 3} stop1", "iter2 fetch2 fwd fetch2 fwd fetch2 fwd stop2"
    trainer.does(f"{evaluate} {train} {evaluate}")
    trainer.steps.end(trainer.loop.now)
    trainer.does(f"wait:1 {train} wait:1")
    trainer.count = 0
    trainer.steps.begin(reader(trainer, "count"), False, trainer.loop.now)
    trainer.does(train)
    assert trainer.numbers() == [1, 2, 3, None, None, None, 1, 2, 3]
    assert trainer.numbers("eval") == [None, None, None, 3, 3, 3]


def test_a_counter_that_raises_is_switched_off() -> None:
    trainer = Trainer(read=lambda: 1 // 0)
    trainer.does("iter1 " + (BATCH + "opt ") * 3 + "stop1")
    assert trainer.numbers() == [None, None, None]
    assert trainer.faults == ["framework_steps"]


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
