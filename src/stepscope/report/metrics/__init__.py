"""What each figure means: the one list behind docs/metrics.md, the columns of tables, and their legends.

`python -m stepscope.report.metrics` prints docs/metrics.md; a test keeps page and list equal, and the list complete.
"""

from __future__ import annotations

from stepscope.report.metrics import (
    comparison,
    compilers,
    device_losses,
    findings,
    machine,
    memory,
    memory_losses,
    operators,
    passes,
    pipeline,
    ranks,
    replay,
    runs,
    sampled,
    series,
    telemetry,
    timeline,
    views,
    workers,
)
from stepscope.report.metrics.entry import Metric, Section

__all__ = ["SECTIONS", "Metric", "Section", "metric"]

SECTIONS: tuple[Section, ...] = (
    *runs.SECTIONS,
    *views.SECTIONS,
    *operators.SECTIONS,
    *sampled.SECTIONS,
    *compilers.SECTIONS,
    *memory.SECTIONS,
    *memory_losses.SECTIONS,
    *workers.SECTIONS,
    *machine.SECTIONS,
    *device_losses.SECTIONS,
    *replay.SECTIONS,
    *findings.SECTIONS,
    *passes.SECTIONS,
    *ranks.SECTIONS,
    *pipeline.SECTIONS,
    *comparison.SECTIONS,
    *telemetry.SECTIONS,
    *series.SECTIONS,
    *timeline.SECTIONS,
)


def metric(table: str, key: str) -> Metric | None:
    """The meaning of a column of a table of `analyze --table`; None for names and texts."""
    for section in SECTIONS:
        if table in section.tables and key in section.metrics:
            return section.metrics[key]
    return None
