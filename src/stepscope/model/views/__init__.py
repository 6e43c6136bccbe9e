"""The views of profiler traces, as typed results: overview, GPUs, operators, kernels, memory, modules, communication.

Times are integer nanoseconds; a figure that a trace does not give is None. Every figure is defined in docs/metrics.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stepscope.model.views.communication import CollectiveRow, Distributed
from stepscope.model.views.memory import MemoryView
from stepscope.model.views.modules import ModuleTree
from stepscope.model.views.operators import KernelRow, OperatorRow
from stepscope.model.views.overview import Counter, GpuSummary, Overview
from stepscope.model.views.spans import SpanRef


@dataclass(frozen=True)
class SpanViews:
    """What is shown of one span by itself, as the TensorBoard plugin did."""

    span: SpanRef
    overview: Overview | None
    gpus: tuple[GpuSummary, ...]
    operators: tuple[OperatorRow, ...]
    kernels: tuple[KernelRow, ...]


@dataclass(frozen=True)
class Views:
    """All views of the traces of a run. `absent` says of each view that is empty why it is."""

    spans: tuple[SpanViews, ...]
    operators: tuple[OperatorRow, ...]  # of all spans together, as are the next three
    kernels: tuple[KernelRow, ...]
    memory: MemoryView | None
    modules: ModuleTree | None
    counters: tuple[Counter, ...]
    communication: tuple[CollectiveRow, ...]
    distributed: Distributed | None
    # the TensorBoard plugin's own figures: {"workers": {worker: {"spans": {number: {...}}}}}, units in the names
    tensorboard: dict[str, Any]
    absent: dict[str, str] = field(default_factory=dict)
