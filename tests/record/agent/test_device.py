"""What a device is asked for, without one: a fake torch.cuda that finishes events when told. Time, and memory."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.record.agent.step_readings import (
    ASKED_EVERY_NS,
    PENDING_LIMIT,
    DeviceTimer,
    MemoryLog,
    Question,
    host_memory,
)
from tests.record.agent.fake_agent import FakeAgent, row

SECOND = 1_000_000_000


class FakeCuda:
    """Every step moves it 10 ms on; `reached` is how far the device has come."""

    def __init__(self) -> None:
        self.position = self.reached = self.made = 0
        self.capturing = False

    def is_initialized(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        self.made += 1
        event = SimpleNamespace(elapsed_time=lambda later: float(later.at - event.at))
        event.record = lambda: setattr(event, "at", self.position)
        event.query = lambda: event.at <= self.reached
        return event


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    found = FakeCuda()
    version = SimpleNamespace(cuda="12.4", hip=None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=found, version=version))
    return found


def timed(cuda: FakeCuda) -> tuple[FakeAgent, DeviceTimer, Any]:
    agent: Any = FakeAgent()
    timer = DeviceTimer(agent.guard, agent.journal, lambda: agent.user_profiler_active)

    def step(number: int) -> None:
        cuda.position += 10
        timer.step_edge(row(number, number * ASKED_EVERY_NS, ASKED_EVERY_NS))

    return agent, timer, step


def test_a_steps_device_time_is_written_once_the_device_has_passed_it(cuda: FakeCuda) -> None:
    agent, timer, step = timed(cuda)
    for number in range(3):
        step(number)
    assert agent.written == []
    cuda.reached = 20
    step(3)
    assert [(event["steps"], event["device_ns"]) for event in agent.of("device_step")] == [([1], [10_000_000])]
    cuda.reached = 100
    timer.drain()
    assert [event["steps"] for event in agent.written] == [[1], [2, 3]]
    assert agent.errors == []


def test_nothing_is_recorded_during_capture_or_under_the_users_profiler(cuda: FakeCuda) -> None:
    agent, timer, step = timed(cuda)
    cuda.capturing = True
    step(0)
    cuda.capturing, agent.user_profiler_active = False, True
    step(1)
    assert cuda.made == 0
    agent.user_profiler_active = False
    cuda.reached = 1000
    step(2)
    step(3)
    timer.drain()
    assert [event["steps"] for event in agent.written] == [[3]]  # the edge before step 2 was never recorded


def test_a_device_far_behind_does_not_pile_up_events(cuda: FakeCuda) -> None:
    agent, _, step = timed(cuda)
    for number in range(2000):
        step(number)
    assert cuda.made <= 2 * PENDING_LIMIT
    assert agent.errors == []


STATS = {
    "allocated_bytes": {"all": {"current": 10, "peak": 20}, "small_pool": {"current": 1}},
    "reserved_bytes": {"all": {"current": 30, "peak": 40}},
    "num_alloc_retries": 2,
    "num_ooms": 1,
}
USUAL: dict[str, Any] = {
    "is_current_stream_capturing": lambda: False,
    "current_device": lambda: 1,
    "memory_stats_as_nested_dict": lambda _: STATS,
    "mem_get_info": lambda _: (50, 100),
    "get_device_properties": lambda _: SimpleNamespace(name="GPU"),
    "get_per_process_memory_fraction": lambda _: 0.5,
}
TOLD = {
    "device": "cuda:1",
    "device_name": "GPU",
    "free_bytes": 50,
    "total_bytes": 100,
    "allocated_bytes": 10,
    "peak_allocated_bytes": 20,
    "reserved_bytes": 30,
    "peak_reserved_bytes": 40,
    "retries": 2,
    "out_of_memory": 1,
    "fraction": 0.5,
}


def refuse(_: int) -> None:
    raise RuntimeError("not supported by this allocator")


@pytest.mark.parametrize(
    ("changes", "told", "errors"),
    [
        ({}, TOLD, 0),
        # an older torch
        (
            {"memory_stats_as_nested_dict": lambda _: {}, "get_per_process_memory_fraction": None},
            {name: TOLD[name] for name in ("device", "device_name", "free_bytes", "total_bytes")},
            0,
        ),
        ({"is_current_stream_capturing": lambda: True}, {}, 0),
        ({"memory_stats_as_nested_dict": refuse}, {}, 1),
    ],
)
def test_what_torch_says_of_the_device(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: dict[str, Any], errors: int
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(**{**USUAL, **changes})))
    agent: Any = FakeAgent(device=True)
    agent.now = 0
    log = MemoryLog(agent)
    for second in range(1, 4):
        log(row(7, second * SECOND - 100), second * SECOND)
    assert len(agent.of("memory")) == 3
    for event in agent.written:
        own = ("kind", "time_ns", "duration_ns", "step", "private_bytes", "shared_bytes")
        assert {name: value for name, value in event.items() if name not in own} == told
        assert event["step"] == 7
    assert len(agent.errors) == errors


def test_a_reading_a_second_and_later_fewer_and_none_of_what_is_not_training() -> None:
    agent: Any = FakeAgent()
    agent.now = 0
    log = MemoryLog(agent)
    log(row(7, 0, kind="eval"), SECOND)
    log(None, SECOND)
    agent.own_profiler_active = True
    log(row(7, 0), SECOND)
    assert agent.written == []
    agent.own_profiler_active = False
    for tenth in range(1, 51):
        log(row(7, 0), tenth * SECOND // 10)
    assert len(agent.written) == 5
    for second in range(200):
        log(row(7, 0), (10_000 + second) * SECOND)
    assert len(agent.written) == 5 + 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_what_the_host_holds_is_what_was_written_to() -> None:
    before = host_memory()
    block = bytearray(b"x" * (64 << 20))
    after = host_memory()
    assert after["private_bytes"] - before["private_bytes"] >= 0.9 * len(block)
    assert after["shared_bytes"] >= 0


MIB = 1 << 20


@pytest.mark.parametrize(
    ("readings", "question"),
    [
        ([{"private_bytes": 100 * MIB + number * 10 * MIB} for number in range(12)], "memory of the process grows"),
        ([{"private_bytes": 100 * MIB + number * MIB} for number in range(40)], None),  # an arena that fills
        ([{"private_bytes": min(number, 6) * 100 * MIB} for number in range(30)], None),  # a cache that is full
        (
            [{"private_bytes": 0, "allocated_bytes": number * 3 * MIB} for number in range(12)],
            "memory of the device grows",
        ),
        (
            [{"allocated_bytes": 1, "peak_allocated_bytes": 41, "total_bytes": 100, "fraction": 0.5}],
            "memory of the device is nearly full",
        ),
        ([{"allocated_bytes": 1, "peak_allocated_bytes": 41, "total_bytes": 100}], None),
        ([{}], None),
    ],
)
def test_what_readings_of_memory_leave_open(readings: list[dict[str, int]], question: str | None) -> None:
    judge = Question()
    asked = [judge.asked(reading) for reading in readings]
    assert next(filter(None, asked), None) == question
