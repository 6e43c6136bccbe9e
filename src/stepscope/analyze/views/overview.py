"""The steps of each trace and where their time goes: the TensorBoard plugin's breakdown, and ours.

Both take the same steps apart, and both sum to them exactly; docs/metrics.md defines every part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepscope.analyze.views.idle import own_lengths
from stepscope.analyze.views.plugin_steps import plugin_lengths
from stepscope.engine.device_work import work
from stepscope.engine.spans import Base, Span
from stepscope.engine.step_windows import step_windows
from stepscope.model.views import PLUGIN_PARTS, Overview, StepBreakdown, Summary
from stepscope.tables.arrays import Int64


def overviews(base: Base) -> tuple[Overview, ...]:
    """One per trace; none of a trace in which nothing takes time."""
    found = (_overview(span) for span in base.spans)
    return tuple(one for one in found if one is not None)


def _overview(span: Span) -> Overview | None:
    found = work(span)
    windows = step_windows(span, found)
    wall = windows.end_ns - windows.start_ns
    if not wall.sum():
        return None
    plugin = plugin_lengths(span, found, windows)
    basis, parts, own = own_lengths(span, found, windows)
    steps = tuple(
        StepBreakdown(
            step=name,
            start_ns=int(windows.start_ns[i]),
            wall_ns=int(wall[i]),
            plugin_ns=dict(zip(PLUGIN_PARTS, plugin[i].tolist(), strict=True)),
            parts_ns=dict(zip(parts, own[i].tolist(), strict=True)),
        )
        for i, name in enumerate(windows.names)
    )
    return Overview(
        span=span.ref,
        steps=steps,
        wall=_summary(wall, wall),
        plugin=_summaries(tuple(PLUGIN_PARTS), plugin, wall),
        parts=_summaries(parts, own, wall),
        dropped_steps=windows.dropped,
        has_steps=windows.has_steps,
        basis=basis,
    )


def _summaries(parts: Sequence[str], lengths: Int64, wall: Int64) -> dict[str, Summary]:
    return {part: _summary(lengths[:, i], wall) for i, part in enumerate(parts)}


def _summary(lengths: Int64, wall: Int64) -> Summary:
    """Over the steps. `wall` sums to more than 0."""
    median, p95 = np.percentile(lengths, [50, 95])
    total = int(lengths.sum())
    return Summary(total / len(lengths), float(median), float(p95), total / int(wall.sum()))
