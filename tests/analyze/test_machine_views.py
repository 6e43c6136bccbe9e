"""Clocks of GPUs, storage and nodes of memory, from tables with known readings."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.model.machine import GpuClocks, MachineFacts
from stepscope.tables.schema import Tables
from tests.analyze.test_machine import SECOND
from tests.builders import MS, PID, T0, make_tables, rank_info, step_rows
from tests.records import some

STRANGER = 999


def machine_of(tables: Tables) -> MachineFacts:
    return some(analyze(tables).machine)


def gpu_rows(
    device: str = "gpu:0",
    *,
    clock: float = 1000,
    reasons: int = 0x40,
    limit_w: float = 700,
    pids: tuple[int, ...] = (PID,),
    seconds: int = 40,
    idle_every: int = 0,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for second in range(seconds):
        idle = bool(idle_every) and second % idle_every == 0
        levels = {
            "gpu_util_pct": 90.0,
            "gpu_power_w": 300.0,
            "gpu_power_limit_w": limit_w,
            "gpu_power_default_w": 700.0,
            "gpu_temperature_c": 60.0 + second,
            "gpu_sm_clock_mhz": 345.0 if idle else clock,
            "gpu_sm_clock_max_mhz": 2000.0,
            "gpu_clock_reasons": float(0x1 if idle else reasons),
        }
        at = {"time_ns": T0 + second * SECOND, "device": device}
        rows += [{**at, "metric": metric, "value": value} for metric, value in levels.items()]
        for pid in pids if second % 5 == 0 else ():
            rows.append({**at, "metric": "gpu_process", "value": 1.0, "pid": pid})
            rows.append({**at, "metric": "gpu_process_bytes", "value": 2e9, "pid": pid})
    return rows


def gpu_tables(*groups: list[dict[str, Any]], **more: Any) -> Tables:
    system = [row for group in groups for row in group]
    ranks = [rank_info(device="cuda")]
    return make_tables(**{"steps": step_rows(400, forward_ms=93), "system": system, "ranks": ranks, **more})


def clocks(**options: Any) -> GpuClocks:
    (found,) = machine_of(gpu_tables(gpu_rows(**options))).gpus
    return found


@pytest.mark.parametrize(
    ("reasons", "limit_w", "lost"),
    [
        (0x0, 700, 0.0),  # nothing told
        (0x4, 700, 0.0),  # at its power as delivered: how a board works under load
        (0x4, 500, 0.5),  # somebody has lowered the limit
        (0x2, 700, 0.5),
        (0x10, 700, 0.0),  # in step with another GPU, whose reasons count
        (0x20 | 0x4, 700, 0.5),
    ],
)
def test_reasons_that_somebody_can_remove(reasons: int, limit_w: float, lost: float) -> None:
    assert clocks(reasons=reasons, limit_w=limit_w).lost_share == pytest.approx(lost)


def test_an_idle_gpu_loses_nothing() -> None:
    found = clocks(idle_every=2)
    assert found.readings - found.busy_readings == pytest.approx(found.readings / 2, abs=1)
    assert found.lost_share == pytest.approx(0.25, abs=0.01)
    assert machine_of(gpu_tables(gpu_rows(reasons=0x1))).gpus == ()


def test_only_gpus_of_the_run_count_where_processes_are_told() -> None:
    other = gpu_rows("gpu:1", pids=(STRANGER,))
    found = machine_of(gpu_tables(gpu_rows(pids=(PID, STRANGER)), other)).gpus
    assert [(gpu.device, gpu.strangers, gpu.strangers_bytes) for gpu in found] == [("gpu:0", 1, 2_000_000_000)]
    untold = machine_of(gpu_tables(gpu_rows(pids=()), gpu_rows("gpu:1", pids=(STRANGER,)))).gpus
    assert [(gpu.device, gpu.strangers) for gpu in untold] == [("gpu:0", None), ("gpu:1", None)]


def storage_rows(*, asked: float = 20e6, device: float = 10e6, until: int | None = None) -> list[dict[str, Any]]:
    """Bytes per second; those from the device end at second `until`."""
    rows: list[dict[str, Any]] = []
    for second in range(40):
        brought = device * (second if until is None else min(second, until))
        at = {"time_ns": T0 + second * SECOND, "pid": PID}
        rows.append({**at, "metric": "requested_bytes", "value": asked * second})
        rows.append({**at, "metric": "read_bytes", "value": brought})
        rows.append({**at, "metric": "major_faults", "value": 0.0})
        if second % 4 == 0:
            rows.append({**at, "metric": "blocked", "value": 1.0})
    rows.append({"time_ns": T0, "pid": PID, "metric": "open_files", "value": 3.0, "device": "lustre:/scratch"})
    rows.append({"time_ns": T0, "pid": PID, "metric": "open_files", "value": 1.0, "device": "ext4:/"})
    return rows


def storage_tables(*rows: dict[str, Any], **more: Any) -> Tables:
    return make_tables(**{"steps": step_rows(400, forward_ms=93), "system": rows, **more})


TWO_NODES: dict[str, Any] = {
    "numa_nodes": {"0": [0, 1], "1": [2, 3], "2": []},
    "gpus": [{"index": 0, "numa_node": 1}, {"index": 1, "numa_node": None}],
}


def numa_tables(hardware: dict[str, Any], *cpus: int, gpu: bool = True) -> Tables:
    system: list[dict[str, Any]] = [
        {"metric": "processor", "time_ns": T0 + second * SECOND, "pid": PID, "value": float(cpus[second % len(cpus)])}
        for second in range(40)
    ]
    if gpu:
        at = {"time_ns": T0 + 1000 * MS, "device": "gpu:0", "pid": PID}
        system.append({**at, "metric": "gpu_process", "value": 1.0})
    return make_tables(steps=step_rows(400, forward_ms=93), system=system, manifests=[{"hardware": hardware}])


def test_a_gpu_that_is_not_known_and_a_machine_with_one_node() -> None:
    numa = some(machine_of(numa_tables(TWO_NODES, 0, gpu=False)).numa)
    assert numa.away_share is None
    assert machine_of(numa_tables({"numa_nodes": {"0": [0, 1]}}, 0)).numa is None
    assert machine_of(numa_tables({}, 0)).numa is None
