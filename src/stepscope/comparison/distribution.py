"""How the steps of one run are spread: all that a single run on each side can say beside its mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepscope.comparison import measured
from stepscope.model.views.overview import Overview
from stepscope.tables.schema import Tables

QUANTILES = {"p5_ms": 5, "p25_ms": 25, "p75_ms": 75, "p99_ms": 99}  # beside median and p95, which a measure has
NS_PER_MS = 1e6


def of_run(tables: Tables) -> dict[str, float]:
    """Percentiles of the measured steps in ms, by name; empty without any."""
    steps = measured.select(tables)
    return {} if steps is None else _quantiles(steps.together()["wall_ns"].to_list())


def of_traces(overviews: Sequence[Overview]) -> dict[str, float]:
    """The same of the steps that traces mark."""
    return _quantiles([step.wall_ns for one in overviews if one.has_steps for step in one.steps])


def _quantiles(walls_ns: Sequence[float]) -> dict[str, float]:
    if not walls_ns:
        return {}
    values = np.percentile(np.asarray(walls_ns, np.float64) / NS_PER_MS, list(QUANTILES.values()))
    return dict(zip(QUANTILES, values.tolist(), strict=True))
