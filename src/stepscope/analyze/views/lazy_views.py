"""All views of traces as the report shows them, each made when it is asked for, the TensorBoard plugin's own too.

The plugin's figures are in its units and under its names, worker by worker and span by span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from stepscope.analyze.views import (
    allocated_memory,
    communication,
    distributed,
    gpus,
    kernels,
    modules,
    operators,
    overview,
)
from stepscope.analyze.views.kernels import plugin_kernels
from stepscope.analyze.views.operators import plugin_operators
from stepscope.analyze.views.overview import plugin_rows
from stepscope.analyze.views.select import reasons
from stepscope.engine.spans import Base
from stepscope.engine.user_code import UserCode
from stepscope.model.memory import MemoryRecording, MemoryView
from stepscope.model.trace import SpanRef
from stepscope.model.views import (
    CollectiveRow,
    Counter,
    Distributed,
    GpuSummary,
    KernelRow,
    ModuleTree,
    OperatorRow,
    Overview,
    SpanViews,
    Views,
)
from stepscope.tables.arrays import return_freed_memory


class _SpanViews(SpanViews):
    def __init__(self, views: LazyViews, span: SpanRef) -> None:
        self.__dict__.update(_views=views, span=span)  # what it inherits from is frozen

    _views: LazyViews

    @cached_property
    def overview(self) -> Overview | None:
        return self._views.overviews.get(self.span)

    @cached_property
    def gpus(self) -> tuple[GpuSummary, ...]:
        return tuple(item for item in self._views.summaries if item.span == self.span)

    @cached_property
    def operators(self) -> tuple[OperatorRow, ...]:
        return operators.table(self._views.base, span=self.span)

    @cached_property
    def kernels(self) -> tuple[KernelRow, ...]:
        return kernels.table(self._views.base, span=self.span)


class LazyViews(Views):
    """All views of traces, and of recordings of memory, of which there is one or the other."""

    def __init__(self, base: Base, recordings: Sequence[MemoryRecording], code: UserCode) -> None:
        self.__dict__.update(base=base, _recordings=recordings, _code=code)  # what it inherits from is frozen

    base: Base
    _recordings: Sequence[MemoryRecording]
    _code: UserCode

    @cached_property
    def memory(self) -> MemoryView | None:
        found = allocated_memory.view(self.base, self._recordings, self._code)
        return_freed_memory(self.base.tables.events.height)
        return found

    @cached_property
    def overviews(self) -> Mapping[SpanRef, Overview]:
        self.memory  # noqa: B018 - needs most memory for itself, so while others hold none yet
        return {item.span: item for item in overview.overviews(self.base)}

    @cached_property
    def summaries(self) -> tuple[GpuSummary, ...]:
        return gpus.summaries(self.base, tuple(self.overviews.values()))

    @cached_property
    def spans(self) -> tuple[SpanViews, ...]:
        return tuple(_SpanViews(self, span.ref) for span in self.base.spans)

    @cached_property
    def operators(self) -> tuple[OperatorRow, ...]:
        found = self.spans[0].operators if len(self.spans) == 1 else operators.table(self.base)
        return_freed_memory(self.base.tables.events.height)
        return found

    @cached_property
    def kernels(self) -> tuple[KernelRow, ...]:
        return self.spans[0].kernels if len(self.spans) == 1 else kernels.table(self.base)

    @cached_property
    def modules(self) -> ModuleTree | None:
        return modules.tree(self.base)

    @cached_property
    def counters(self) -> tuple[Counter, ...]:
        return gpus.counters(self.base)

    @cached_property
    def communication(self) -> tuple[CollectiveRow, ...]:
        return communication.collectives(self.base)

    @cached_property
    def distributed(self) -> Distributed | None:
        return distributed.view(self.base)

    @cached_property
    def tensorboard(self) -> dict[str, Any]:
        return tensorboard(self.spans)

    @cached_property
    def absent(self) -> dict[str, str]:
        return reasons(self.base, self)


MAX_ROWS = 500  # of operators and of kernels
MAX_SPANS = 64
_GPU_FIGURES = ("utilization_pct", "sm_efficiency_pct", "achieved_occupancy_pct", "tensor_core_pct")


def tensorboard(spans: Sequence[SpanViews]) -> dict[str, Any]:
    """{"workers": {worker: {"spans": {number: {...}}}}}; numbers of spans are texts, from "1" on."""
    workers: dict[str, Any] = {}
    for views in spans[:MAX_SPANS]:
        own = workers.setdefault(views.span.worker, {"spans": {}})
        gpus_of = {
            str(gpu.gpu.device): {
                name: None if (value := getattr(gpu, name)) is None else round(value, 2) for name in _GPU_FIGURES
            }
            for gpu in views.gpus
        }
        own["spans"][str(views.span.span)] = {
            **(plugin_rows(views.overview) if views.overview is not None else {}),
            "gpu": gpus_of,
            "operators": plugin_operators(views.operators[:MAX_ROWS]),
            "kernels": plugin_kernels(views.kernels[:MAX_ROWS]),
        }
    return {"workers": workers}
