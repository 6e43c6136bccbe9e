"""Traces of two workers with a device, modules and allocations, for the tests of pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepscope import api
from tests import gpu_traces

MIB = 2**20
EVIL = "aten::\x1b[31m</script>\u202e" + "long" * 200


def two_workers(folder: Path) -> api.Run:
    """Two steps each, the second worker with shorter matrix products."""
    for worker, gemm_us in (("worker0", 300), ("worker1", 150)):
        extra = [event for number in (1, 2) for event in more(number)]
        gpu_traces.write(folder / f"{worker}.pt.trace.json", steps=2, gemm_us=gemm_us, more=extra)
    return api.open_run(folder, options=api.ReadOptions(cache=False))


def memory(at_us: float, size: int, address: int, total: int, *, device: int = 0) -> dict[str, Any]:
    args = {"Addr": address, "Bytes": size, "Device Type": 1, "Device Id": device}
    args |= {"Total Allocated": total, "Total Reserved": 64 * MIB}
    event = {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": at_us}
    return {**event, "args": args}


def module(name: str, start: float, duration: float, number: int) -> dict[str, Any]:
    args = {"Python id": 1_000 + number, "Python module id": number}
    return gpu_traces.host(f"nn.Module: {name}", start, duration, "python_function", **args)


def more(number: int) -> list[dict[str, Any]]:
    """A model in step `number` of `gpu_traces`, and its allocations: 10 MiB before, 30 at the peak, 10 behind."""
    at = number * gpu_traces.STEP_US
    return [
        module("Net_0", at + 205, 200, 0),
        module("Linear_0", at + 208, 70, 1),
        memory(at + 225, 20 * MIB, 0xA00, 30 * MIB),
        memory(at + 365, -20 * MIB, 0xA00, 10 * MIB),
        gpu_traces.host(EVIL, at + 380, 5, **{"External id": number * 10 + 9}),
    ]
