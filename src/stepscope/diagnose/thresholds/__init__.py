"""Every number a rule decides by, each with its reason. Shares are fractions of the mean steady step."""

from __future__ import annotations

from stepscope.diagnose.thresholds.compilers import COMPILE, EXECUTION, TRANSFERS, UNLOWERED
from stepscope.diagnose.thresholds.devices import COLLECTIVES, DEVICE, LAUNCH, LAYOUT, REPLAY, TENSOR_CORES
from stepscope.diagnose.thresholds.machine import CLOCKS, CORES, MEMORY, MEMORY_PRESSURE, PAGE_FAULTS, PAUSES, STORAGE
from stepscope.diagnose.thresholds.shares import AGREEMENT, CAUSES, CONFIDENCE, REPORT_FLOOR, SEVERITY, SILENCE, TRACE
from stepscope.diagnose.thresholds.steps import (
    DOUBLES,
    DRIFT,
    EPOCHS,
    IO,
    LOADER,
    LOOP,
    PASSES,
    PIPELINE,
    PROFILER,
    PYTHON,
    RANKS,
    RECOMPUTE,
    TRACED_LOADER,
    WAVES,
)

__all__ = [
    "AGREEMENT",
    "CAUSES",
    "CLOCKS",
    "COLLECTIVES",
    "COMPILE",
    "CONFIDENCE",
    "CORES",
    "DEVICE",
    "DOUBLES",
    "DRIFT",
    "EPOCHS",
    "EXECUTION",
    "IO",
    "LAUNCH",
    "LAYOUT",
    "LOADER",
    "LOOP",
    "MEMORY",
    "MEMORY_PRESSURE",
    "PAGE_FAULTS",
    "PASSES",
    "PAUSES",
    "PIPELINE",
    "PROFILER",
    "PYTHON",
    "RANKS",
    "RECOMPUTE",
    "REPLAY",
    "REPORT_FLOOR",
    "SEVERITY",
    "SILENCE",
    "STORAGE",
    "TENSOR_CORES",
    "TRACE",
    "TRACED_LOADER",
    "TRANSFERS",
    "UNLOWERED",
    "WAVES",
]
