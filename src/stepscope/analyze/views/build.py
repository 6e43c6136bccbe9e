"""The views of profiler traces: what the TensorBoard plugin showed, under the names its users know, and more.

`build` makes all of them as the report shows them; `select.rows` makes one table in full, in the grouping asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepscope.analyze.places import UserCode
from stepscope.analyze.views import (
    communication,
    counters,
    distributed,
    gpus,
    kernels,
    memory,
    modules,
    operators,
    overview,
)
from stepscope.analyze.views.absent import reasons
from stepscope.analyze.views.base import Base
from stepscope.analyze.views.tensorboard import tensorboard
from stepscope.model.views import SpanViews, Views
from stepscope.model.views.memory import MemoryRecording
from stepscope.model.views.overview import GpuSummary, Overview
from stepscope.model.views.spans import SpanRef
from stepscope.tables.freed import give_back


def build(base: Base, recordings: Sequence[MemoryRecording], code: UserCode) -> Views | None:
    """All views; None without a trace and without a recording of memory."""
    if not base.spans and not recordings:
        return None
    allocations = memory.view(base, recordings, code)  # needs most memory for itself, so while others hold none yet
    slices = base.tables.events.height
    give_back(slices)
    overviews = overview.overviews(base)
    give_back(slices)
    summaries = gpus.summaries(base, overviews)
    by_span = {item.span: item for item in overviews}
    spans = tuple(_span(base, span.ref, by_span, summaries) for span in base.spans)
    give_back(slices)
    alone = spans[0] if len(spans) == 1 else None
    views = Views(
        spans=spans,
        operators=alone.operators if alone else operators.table(base),
        kernels=alone.kernels if alone else kernels.table(base),
        memory=allocations,
        modules=modules.tree(base),
        counters=counters.counters(base),
        communication=communication.collectives(base),
        distributed=distributed.view(base),
        tensorboard=tensorboard(spans),
    )
    return reasons(base, views)


def _span(
    base: Base, ref: SpanRef, overviews: Mapping[SpanRef, Overview], summaries: tuple[GpuSummary, ...]
) -> SpanViews:
    return SpanViews(
        span=ref,
        overview=overviews.get(ref),
        gpus=tuple(item for item in summaries if item.span == ref),
        operators=operators.table(base, span=ref),
        kernels=kernels.table(base, span=ref),
    )
