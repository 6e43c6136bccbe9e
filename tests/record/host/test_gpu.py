"""Readings of GPUs through a driver that is played: what it answers is told, what it refuses is left out."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stepscope.record.host.hardware import Gpus, Metric, numa_node


class Refused(Exception):
    """As pynvml raises."""


ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=10 << 30, total=80 << 30),
    "nvmlDeviceGetPowerUsage": 349_500,
    "nvmlDeviceGetEnforcedPowerLimit": 350_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetTemperature": 84,
    "nvmlDeviceGetClockInfo": 1200,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
    "nvmlDeviceGetComputeRunningProcesses": [
        SimpleNamespace(pid=100, usedGpuMemory=9 << 30),
        SimpleNamespace(pid=7, usedGpuMemory=None),
    ],
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:17:00.0"),
    "nvmlDeviceGetName": b"NVIDIA H100",
    "nvmlDeviceGetUUID": "GPU-1",
}


def driver(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> None:
    module = ModuleType("pynvml")
    module.__dict__.update(NVMLError=Refused, nvmlInit=lambda: None, nvmlShutdown=lambda: None)
    module.__dict__.update(nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetHandleByIndex=lambda index: f"handle {index}")

    def answering(name: str) -> Any:
        def call(*_: Any) -> Any:
            if name not in answers:
                raise Refused(name)
            return answers[name]

        return call

    module.__dict__.update({name: answering(name) for name in ANSWERS})
    monkeypatch.setitem(sys.modules, "pynvml", module)


def by_name(rows: list[Metric]) -> dict[str, float]:
    return {name: value for name, _, value, pid, device in rows if device == "gpu:0" and pid is None}


def test_clocks_with_their_reasons_and_power_with_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, ANSWERS)
    with Gpus() as gpus:
        found = by_name(gpus.metrics())
        (description,) = gpus.describe()
    assert found == {
        "gpu_util_pct": 97,
        "gpu_memory_bytes": 10 << 30,
        "gpu_power_w": 349.5,
        "gpu_power_limit_w": 350,
        "gpu_power_default_w": 700,
        "gpu_temperature_c": 84,
        "gpu_sm_clock_mhz": 1200,
        "gpu_sm_clock_max_mhz": 1980,
        "gpu_clock_reasons": 4,
    }
    assert (description["sm_clock_max_mhz"], description["power_default_w"]) == (1980, 700)
    assert description["name"] == "NVIDIA H100"


def test_what_a_driver_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, {"nvmlDeviceGetClockInfo": 1980})
    with Gpus() as gpus:
        assert by_name(gpus.metrics()) == {"gpu_sm_clock_mhz": 1980}
        (description,) = gpus.describe()
    assert {name for name, value in description.items() if value is not None} == {"index"}


def test_the_node_next_to_a_device(tmp_path: Path) -> None:
    for name, text in (("0000:17:00.0", "1\n"), ("0000:18:00.0", "-1\n"), ("0000:19:00.0", "?")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(text)
    assert numa_node("00000000:17:00.0", tmp_path) == 1
    for unknown in ("00000000:18:00.0", "00000000:19:00.0", "00000000:1A:00.0", "../../etc", None):
        assert numa_node(unknown, tmp_path) is None
