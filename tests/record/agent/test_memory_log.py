"""Readings of memory between two steps: when, of what, and that a device that refuses them costs only its own part."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.record.agent.guard import Guard
from stepscope.record.agent.memory import MemoryLog, host_memory
from stepscope.record.agent.segments import StepRow
from tests.record.agent.processes import run_script

SECOND = 1_000_000_000
STATS = {
    "allocated_bytes": {"all": {"current": 10, "peak": 20}, "small_pool": {"current": 1}},
    "reserved_bytes": {"all": {"current": 30, "peak": 40}},
    "num_alloc_retries": 2,
    "num_ooms": 1,
}


class Agent:
    """What the log needs of an agent; `cuda` None is a process without a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: Any = None) -> None:
        self.written: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self.guard = Guard(lambda probe, error: self.faults.append(f"{probe}: {error}"))
        self.events = SimpleNamespace(write=self.write)
        self.clock = SimpleNamespace(now=lambda: 0)
        self.device = SimpleNamespace(in_use=cuda is not None)
        self.own_profiler_active = self.user_profiler_active = False
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    def write(self, kind: str, time_ns: int, **fields: Any) -> None:
        self.written.append({"kind": kind, "time_ns": time_ns, **fields})


def cuda(**overrides: Any) -> Any:
    usual = {
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: 1,
        "memory_stats_as_nested_dict": lambda _: STATS,
        "mem_get_info": lambda _: (50, 100),
        "get_device_properties": lambda _: SimpleNamespace(name="GPU"),
        "get_per_process_memory_fraction": lambda _: 0.5,
    }
    return SimpleNamespace(**{**usual, **overrides})


def step(log: MemoryLog, now_ns: int, *, kind: str = "train", number: int = 7) -> None:
    log(StepRow(number, kind, 0, now_ns - 100, 100, 1, 1, 1, 1, 1, None, 8, 1, 0, 0, "loader"), now_ns)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_what_the_host_holds_is_what_was_written_to() -> None:
    before = host_memory()
    block = bytearray(b"x" * (64 << 20))
    after = host_memory()
    assert after["private_bytes"] - before["private_bytes"] >= 0.9 * len(block)
    assert after["shared_bytes"] >= 0


def test_a_reading_a_second_and_later_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(monkeypatch)
    log = MemoryLog(agent)  # type: ignore[arg-type]
    for tenth in range(1, 51):
        step(log, tenth * SECOND // 10)
    assert len(agent.written) == 5
    assert agent.written[0]["step"] == 7
    late = 10_000 * SECOND
    agent.written.clear()
    for second in range(200):
        step(log, late + second * SECOND)
    assert len(agent.written) == 2


def test_none_in_evaluation_at_a_loops_start_or_under_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(monkeypatch)
    log = MemoryLog(agent)  # type: ignore[arg-type]
    step(log, SECOND, kind="eval")
    log(None, SECOND)
    agent.own_profiler_active = True
    step(log, SECOND)
    assert agent.written == []
    agent.own_profiler_active = False
    step(log, SECOND)
    assert len(agent.written) == 1


def test_what_torch_says_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(monkeypatch, cuda())
    step(MemoryLog(agent), SECOND)  # type: ignore[arg-type]
    (event,) = agent.written
    assert {key: event[key] for key in event if key not in ("private_bytes", "shared_bytes")} == {
        "kind": "memory",
        "time_ns": SECOND,
        "step": 7,
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


def test_an_older_torch_tells_less(monkeypatch: pytest.MonkeyPatch) -> None:
    old = cuda(memory_stats_as_nested_dict=lambda _: {})
    del old.get_per_process_memory_fraction
    agent = Agent(monkeypatch, old)
    step(MemoryLog(agent), SECOND)  # type: ignore[arg-type]
    assert agent.written[0]["free_bytes"] == 50
    assert not {"fraction", "allocated_bytes", "retries"} & set(agent.written[0])


def test_nothing_is_asked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(monkeypatch, cuda(is_current_stream_capturing=lambda: True))
    step(MemoryLog(agent), SECOND)  # type: ignore[arg-type]
    assert "device" not in agent.written[0]


def test_an_allocator_that_refuses_leaves_the_host_s_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise RuntimeError("not supported by this allocator")

    agent = Agent(monkeypatch, cuda(memory_stats_as_nested_dict=refuse))
    log = MemoryLog(agent)  # type: ignore[arg-type]
    for second in range(1, 4):
        step(log, second * SECOND)
    assert len(agent.faults) == 1
    assert len(agent.written) == 3
    assert all("device" not in event for event in agent.written)


SCRIPT = """\
import contextlib
import torch
from plain_sgd import PlainSGD

with contextlib.suppress(Exception):  # a torch without CUDA refuses; that it was asked is noted all the same
    torch.cuda.set_per_process_memory_fraction(0.5)
model = torch.nn.Linear(4, 4)
optimizer = PlainSGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_recorded_process_tells_what_it_holds_and_the_fraction_it_was_given(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    outcome = run_script(tmp_path, script)
    assert outcome.status == 0, outcome.stderr
    first = outcome.events("memory")[0]
    assert first["step"] == 1
    assert first["private_bytes"] > 10 << 20
    assert "device" not in first
    (site,) = [event for event in outcome.events("site") if event["what"] == "set_per_process_memory_fraction"]
    assert site["arguments"] == {"fraction": "0.5"}
    assert site["line"] == 6
    assert outcome.events("probe_error") == []
