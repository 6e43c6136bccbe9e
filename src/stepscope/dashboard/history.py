"""The history of a script as a table: a row for each run, the oldest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Alone, Block, Row, rows_table
from stepscope.dashboard.pages import PageContext
from stepscope.report import words
from stepscope.report.comparison_report import signed_percent
from stepscope.report.history_report import MOST

_RUNS = blocks.columns(
    "Run: label; Mean step: mean_ms ms; Since before: ratio; Since first: of_first; Samples: samples_per_second /s; "
    "Findings: left count; Gone: gone count quiet; New: new count quiet",
    ratio=lambda row: signed_percent(row["ratio"]) if row["ratio"] is not None else None,
    of_first=lambda row: signed_percent(row["of_first"]) if row["of_first"] is not None else None,
    left=lambda row: len(row["findings"]),
    gone=lambda row: len(row["gone"]),
    new=lambda row: len(row["new"]),
)
_FINDINGS = blocks.columns("Cost a step: cost_ms_per_step ms; Finding: title; Rule: rule")


def table(context: PageContext | Alone, document: dict[str, Any], title: str) -> Iterator[Block]:
    """The blocks of a history: its runs, what was changed from each to the next, and what the last still loses."""
    runs = document["runs"]
    yield from rows_table(context, "history", title, "Version", _RUNS, runs, notes=document["notes"])
    changed = [blocks.fact(row["label"], _changed(row)) for row in runs[1:]]
    if changed:
        yield blocks.facts("What was changed", changed)
    last = runs[-1]
    left = f"What {last['label']} still loses"
    yield from rows_table(context, "history-left", left, "Version", _FINDINGS, last["findings"])


def _changed(row: Row) -> str:
    said = row["said"]
    more = f"; and {words.things(len(said) - MOST, 'other')}" if len(said) > MOST else ""
    return ("; ".join(said[:MOST]) or "nothing that is recorded") + more
