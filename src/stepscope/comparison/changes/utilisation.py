"""How much of the machine was in use. Less of it in a shorter step is no loss, so a row says nothing but figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stepscope.comparison import thresholds
from stepscope.comparison.changes.rows import GREW, SAME, SHRANK, ordered
from stepscope.model import Analysis
from stepscope.model.comparison import Change

PERCENT = "%"
CORES = "cores"


def of_run(analysis: Analysis) -> dict[str, float]:
    """By name; only what was measured. Means over the devices of the run."""
    found: dict[str, float] = {}
    gpus = [gpu for span in (analysis.views.spans if analysis.views is not None else ()) for gpu in span.gpus]
    for name, field in (("GPU utilisation", "utilization_pct"), ("SM efficiency", "sm_efficiency_pct")):
        values = [value for gpu in gpus if (value := getattr(gpu, field)) is not None]
        if values:
            found[name] = math.fsum(values) / len(values)
    cpu = analysis.machine.cpu if analysis.machine is not None else None
    if cpu is not None:
        found["CPU cores used"] = cpu.own_cores
    return found


def changes(baseline: Sequence[Mapping[str, float]], candidate: Sequence[Mapping[str, float]]) -> list[Change]:
    """What both sides know and what differs; values are means over runs."""
    found = []
    for name in dict.fromkeys(name for side in baseline for name in side):
        sides = [[run[name] for run in side if name in run] for side in (baseline, candidate)]
        if not all(sides):
            continue
        before, after = (math.fsum(side) / len(side) for side in sides)
        unit = CORES if name.endswith("cores used") else PERCENT
        least = thresholds.CORES_FLOOR if unit == CORES else thresholds.UTILISATION_FLOOR
        difference = after - before
        status = SAME if abs(difference) < least else GREW if difference > 0 else SHRANK
        found.append(Change("utilisation", name, before, after, difference, unit, status))
    return ordered(change for change in found if change.status != SAME)
