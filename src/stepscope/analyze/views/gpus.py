"""How well each device of a trace was used, over its steps: what the TensorBoard plugin called the GPU summary.

All figures are of kernels alone, clipped to the time from the first step's start to the last one's end. They come from
what the writer noted at each launch (grid, registers, shared memory), not from counters of the device: estimates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.views import tensor_cores
from stepscope.analyze.views.device_load import Load, load
from stepscope.engine import intervals
from stepscope.engine.device_work import Work, by_device, work
from stepscope.engine.spans import Base, Span
from stepscope.engine.tree import below
from stepscope.model.trace import GpuProperties
from stepscope.model.views import GpuSummary, Overview
from stepscope.tables.arrays import Bools, Floats, Int64


def summaries(base: Base, overviews: Sequence[Overview]) -> tuple[GpuSummary, ...]:
    """One per trace and device that ran a kernel, in order of span and device; none of a trace without overview."""
    by_span = {overview.span: overview for overview in overviews}
    return tuple(summary for span in base.spans if span.ref in by_span for summary in _of_span(span, by_span[span.ref]))


def sm_load(span: Span, rows: Int64) -> Load | None:
    """The share of multiprocessors (0 to 1) that these kernels give a block to, over time; None without grid sizes."""
    blocks = _floats(span, "blocks_per_sm", rows)
    known = blocks > 0
    if not known.any():
        return None
    rows = rows[known]
    # one kernel with a block for each is all there is, whatever runs beside it
    return load(span.start_ns[rows], span.ends(rows), np.minimum(blocks[known], 1.0), limit=1.0)


class _Kernels(Struct, frozen=True):
    """Kernels of one device: the ns of each within the window."""

    inside: Int64

    def mean(self, values: Floats) -> float | None:
        """Of a value of each kernel, weighted by time; missing ones (nan) do not count."""
        weights = np.where(np.isnan(values), 0, self.inside)
        total = int(weights.sum())
        return float((np.nan_to_num(values) * weights).sum() / total) if total else None

    def percent(self, flags: Bools, among: Bools | None = None) -> float | None:
        """Of the time of all, or of those `among`; None where these take none."""
        total = int(self.inside.sum() if among is None else self.inside[among].sum())
        return 100 * int(self.inside[flags].sum()) / total if total else None


def _of_span(span: Span, overview: Overview) -> Iterator[GpuSummary]:
    found = work(span)
    start = overview.steps[0].start_ns
    end = overview.steps[-1].start_ns + overview.steps[-1].wall_ns
    linked, eligible = _eligible(span, found)
    for device, own in by_device(found).items():
        chosen = np.flatnonzero(own & found.is_kernel)
        if not len(chosen):
            continue
        rows, starts, ends = found.rows[chosen], found.start_ns[chosen], found.end_ns[chosen]
        inside = np.maximum(np.minimum(ends, end) - np.maximum(starts, start), 0)
        kernels = _Kernels(inside)
        busy = intervals.total(intervals.clip(intervals.union(starts, ends), start, end))
        sm = sm_load(span, rows)
        occupancy = _floats(span, "occupancy_percent", rows)
        yield GpuSummary(
            span=span.ref,
            gpu=span.gpus.get(device) or GpuProperties(device, None, None, None, None, None, None),
            window_ns=end - start,
            utilization_pct=100 * busy / (end - start),
            sm_efficiency_pct=None if sm is None else 100 * float(sm.mean(np.asarray([start, end]))[0]),
            achieved_occupancy_pct=kernels.mean(np.where((occupancy >= 0) & np.isfinite(occupancy), occupancy, np.nan)),
            tensor_core_pct=kernels.percent(_by_name(span, rows, tensor_cores.uses_tensor_cores)),
            tensor_core_plugin_pct=kernels.percent(_by_name(span, rows, tensor_cores.plugin_tensor_cores)),
            kernels=int((inside > 0).sum()),
            tensor_core_eligible_pct=kernels.percent(eligible[chosen], linked[chosen]),
        )


def _floats(span: Span, column: str, rows: Int64) -> Floats:
    """A column's values at rows; nan where the writer gave none."""
    values: Floats = span.events[column].cast(pl.Float64).fill_null(math.nan).to_numpy()
    return values[rows]


def _by_name(span: Span, rows: Int64, judge: Callable[[list[str]], list[bool]]) -> Bools:
    """`judge` of each row's name, asked once for each distinct one."""
    codes = span.names.codes[rows]
    distinct = np.unique(codes[codes >= 0])
    flags = np.zeros(len(span.names.values) + 1, bool)
    flags[distinct] = judge([span.names.values[code] for code in distinct])
    return flags[codes]


def _eligible(span: Span, found: Work) -> tuple[Bools, Bools]:
    """Of each slice of work whether it has an operator, and whether one that it is below can use tensor cores."""
    able = span.names.pick(tensor_cores.eligible(span.names.values)) & span.is_operator
    return found.operator >= 0, below(span.parent, found.operator, able)
