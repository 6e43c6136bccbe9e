"""Readings of memory as a journal holds them, for the tests of facts and of rules; 400 steps of 10 ms, 20 apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepscope.tables.schema import Tables
from tests.builders import MS, T0, Row, make_tables, rank_info, step_rows

MIB, GIB = 1 << 20, 1 << 30
STEPS, EVERY = 400, 20
HARDWARE: dict[str, Any] = {"memory_bytes": 64 * GIB, "cgroup_memory_limit_bytes": None, "gpus": []}
DEVICE: dict[str, Any] = {
    "device": "cuda:0",
    "device_name": "NVIDIA H100 80GB HBM3",
    "allocated_bytes": 10 * GIB,
    "reserved_bytes": 30 * GIB,
    "peak_allocated_bytes": 20 * GIB,
    "peak_reserved_bytes": 30 * GIB,
    "free_bytes": 49 * GIB,
    "total_bytes": 80 * GIB,
    "retries": 0,
    "out_of_memory": 0,
    "fraction": 1.0,
}


def readings(
    host: Callable[[int], float] | None = None, device: Callable[[int], Mapping[str, Any]] | None = None, **row: Any
) -> list[dict[str, Any]]:
    """A reading every `EVERY` steps; `host` gives the bytes held after a step, `device` what differs from `DEVICE`."""
    rows = []
    for step in range(0, STEPS, EVERY):
        found: dict[str, Any] = {"kind": "memory", "step": step, "time_ns": T0 + (step + 1) * 10 * MS}
        if host is not None:
            found |= {"private_bytes": round(host(step)), "shared_bytes": 0}
        if device is not None:
            found |= {**DEVICE, **device(step)}
        rows.append({**found, **row})
    return rows


def memory_tables(
    journal: Sequence[Row], *, steps: Sequence[Row] | None = None, hardware: Mapping[str, Any] = HARDWARE, **more: Any
) -> Tables:
    """A run of 400 steps with these events; its ranks train on the device that the readings name."""
    rows = step_rows(STEPS) if steps is None else steps
    numbers = sorted({row.get("rank", 0) for row in rows})
    kind = "cuda" if any("device" in row for row in journal) else "cpu"
    return make_tables(
        steps=rows,
        journal=journal,
        ranks=[rank_info(rank, host="host-a", device=kind) for rank in numbers],
        manifests=[{"host": "host-a", "hardware": dict(hardware)}],
        **more,
    )


def struck_steps(more_ms: float = 20, *, every: int = 4) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(steps, journal): in one of `every` stretches the allocator retried, and its steps are longer."""
    rows, clock = [], T0
    ends = {}
    for number in range(STEPS):
        struck = _stretch(number) % every == 0
        rows += step_rows(1, first_step=number, start_ns=clock, forward_ms=3 + (more_ms if struck else 0))
        clock += rows[-1]["wall_ns"]
        ends[number] = clock
    journal = readings(device=lambda step: {"retries": sum(n % every == 0 for n in range(1, _stretch(step) + 1))})
    for row in journal:
        row["time_ns"] = ends[row["step"]]
    return rows, journal


def _stretch(step: int) -> int:
    """Stretch n holds the steps after reading n - 1, up to reading n."""
    return -(-step // EVERY)
