"""Device time without a device: a fake torch.cuda that finishes events when told."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.record.agent.guard import Guard
from stepscope.record.agent.segments import StepRow
from stepscope.record.agent.step_readings import DeviceTimer


class FakeEvent:
    reached = 0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made += 1

    def record(self) -> None:
        self.at = FakeCuda.position

    def query(self) -> bool:
        return self.at <= FakeEvent.reached

    def elapsed_time(self, later: FakeEvent) -> float:
        return float(later.at - self.at)


class FakeCuda:
    position = 0
    capturing = False
    initialised = True
    Event = FakeEvent

    @staticmethod
    def is_initialized() -> bool:
        return FakeCuda.initialised

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return FakeCuda.capturing


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceTimer, list[dict[str, Any]], SimpleNamespace]:
    monkeypatch.setattr(FakeCuda, "position", 0)
    monkeypatch.setattr(FakeCuda, "capturing", False)
    monkeypatch.setattr(FakeEvent, "reached", 0)
    fake = SimpleNamespace(cuda=FakeCuda, version=SimpleNamespace(cuda="12.4", hip=None))
    monkeypatch.setitem(sys.modules, "torch", fake)
    written: list[dict[str, Any]] = []
    events = SimpleNamespace(write=lambda kind, **fields: written.append(dict(fields, kind=kind)))
    faults: list[str] = []
    agent = SimpleNamespace(guard=Guard(lambda *fault: faults.append(str(fault))), events=events, faults=faults)
    agent.user_profiler_active = False
    return DeviceTimer(agent.guard, events, lambda: agent.user_profiler_active), written, agent


def step(timer: DeviceTimer, number: int) -> None:
    FakeCuda.position += 10
    timer.step_edge(StepRow(number, "train", 0, number * 100, 100, 1, 1, 1, 1, 1, None, 8, 1, 0, 0, "loader"))


def test_a_steps_device_time_is_written_once_the_device_has_passed_it(timer: Any) -> None:
    device, written, agent = timer
    for number in range(3):
        step(device, number)
    assert written == []
    FakeEvent.reached = 20
    step(device, 3)
    assert written == [{"kind": "device_step", "step": 1, "device_ns": 10_000_000}]
    FakeEvent.reached = 100
    device.drain()
    assert [event["step"] for event in written] == [1, 2, 3]
    assert agent.faults == []


def test_nothing_is_recorded_during_capture_or_under_the_users_profiler(timer: Any) -> None:
    device, written, agent = timer
    made = FakeEvent.made
    FakeCuda.capturing = True
    step(device, 0)
    FakeCuda.capturing = False
    agent.user_profiler_active = True
    step(device, 1)
    assert FakeEvent.made == made
    agent.user_profiler_active = False
    FakeEvent.reached = 1000
    step(device, 2)
    step(device, 3)
    device.drain()
    assert [event["step"] for event in written] == [3]  # the edge before step 2 was never recorded


def test_a_device_far_behind_does_not_pile_up_events(timer: Any) -> None:
    device, _written, agent = timer
    made = FakeEvent.made
    for number in range(2000):
        step(device, number)
    assert FakeEvent.made - made < 600
    assert agent.faults == []
