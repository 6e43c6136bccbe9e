"""The TensorBoard plugin's own figures, in its units and under its names, worker by worker and span by span.

What it got wrong is right here; docs/from-tensorboard.md says where the two differ and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.analyze.views.kernels import plugin_kernels
from stepscope.analyze.views.operators import plugin_operators
from stepscope.analyze.views.plugin_steps import plugin_rows
from stepscope.model.views import GpuSummary, SpanViews

MAX_ROWS = 500  # of operators and of kernels
MAX_SPANS = 64


def tensorboard(spans: Sequence[SpanViews]) -> dict[str, Any]:
    """{"workers": {worker: {"spans": {number: {...}}}}}; numbers of spans are texts, from "1" on."""
    workers: dict[str, Any] = {}
    for views in spans[:MAX_SPANS]:
        own = workers.setdefault(views.span.worker, {"spans": {}})
        own["spans"][str(views.span.span)] = _span(views)
    return {"workers": workers}


def _span(views: SpanViews) -> dict[str, Any]:
    steps = plugin_rows(views.overview) if views.overview is not None else {}
    return {
        **steps,
        "gpu": {str(gpu.gpu.device): _gpu(gpu) for gpu in views.gpus},
        "operators": plugin_operators(views.operators[:MAX_ROWS]),
        "kernels": plugin_kernels(views.kernels[:MAX_ROWS]),
    }


def _gpu(gpu: GpuSummary) -> dict[str, Any]:
    figures = {
        "utilization_pct": gpu.utilization_pct,
        "sm_efficiency_pct": gpu.sm_efficiency_pct,
        "achieved_occupancy_pct": gpu.achieved_occupancy_pct,
        "tensor_core_pct": gpu.tensor_core_pct,
    }
    return {name: None if value is None else round(value, 2) for name, value in figures.items()}
