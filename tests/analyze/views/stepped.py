"""Traces of a few steps for the tests of the overview, with the checks that hold of any."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze.context import Context
from stepscope.analyze.views import overview
from stepscope.model.views import DEVICE, DEVICE_PARTS, HOST_PARTS, IDLE_PARTS, PLUGIN_PARTS, Overview
from tests.analyze.traces import US, Slices, tables
from tests.builders import T0

DATALOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def step(number: int, start_us: float, duration_us: float) -> dict[str, Any]:
    return {
        "step": number,
        "start_ns": T0 + round(start_us * US),
        "wall_ns": round(duration_us * US),
        "in_window": True,
    }


def overviews_of(*traces: Slices, steps: list[dict[str, Any]] | None = None) -> tuple[Overview, ...]:
    return overview.overviews(Context(tables(*traces, steps=steps or [])).base)


def overview_of(trace: Slices, *steps: dict[str, Any]) -> Overview:
    for row in steps:
        trace.add("user_annotation", f"ProfilerStep#{row['step']}", (row["start_ns"] - T0) / US, row["wall_ns"] / US)
    (found,) = overviews_of(trace, steps=list(steps))
    return found


def used(parts: dict[str, int]) -> dict[str, float]:
    """The parts that have time, in µs."""
    return {part: ns / US for part, ns in parts.items() if ns}


def launched(
    trace: Slices,
    launch_us: float,
    start_us: float,
    duration_us: float,
    name: str = "gemm",
    *,
    category: str = "kernel",
    **more: Any,
) -> int:
    """A device slice from `start_us` on whose call of 1 µs begins at `launch_us`."""
    number = trace.kernel(start_us, duration_us, name, category=category, **more)
    call = trace.add("cuda_runtime", "cudaLaunchKernel", launch_us, 1)
    trace.links[-1].update(launch=call, state="linked", method="correlation")
    return number


def check_sums(found: Overview) -> None:
    parts = (*DEVICE_PARTS, *IDLE_PARTS) if found.basis == DEVICE else tuple(HOST_PARTS)
    for one in found.steps:
        assert tuple(one.plugin_ns) == tuple(PLUGIN_PARTS)
        assert tuple(one.parts_ns) == parts
        for shares in (one.plugin_ns, one.parts_ns):
            assert min(shares.values()) >= 0
            assert sum(shares.values()) == one.wall_ns
    for summaries in (found.plugin, found.parts):
        assert sum(one.share for one in summaries.values()) == pytest.approx(1)
        assert sum(one.mean_ns for one in summaries.values()) == pytest.approx(found.wall.mean_ns)
