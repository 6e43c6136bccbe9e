"""Steps one by one, of the journal or of traces: their parts, their distribution, and the longest of them.

The statistics of a run stand on steady steps alone (`steps.py`); here every step is shown with its reason, because the
one that is not steady is often the one that somebody looks for.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze.thinning import positions
from stepscope.engine.step_labels import STEADY, LabelledSteps
from stepscope.model import PHASES
from stepscope.model.timeline import LongStep, ProcessSteps, StepDistribution, StepEvent, StepPhases
from stepscope.tables.schema import Tables

UNATTRIBUTED = "unattributed"
SMALLEST_REST = 0.001  # of all wall time: less than that is rounding between clocks, and no part of its own
BINS = 40
WIDE = 3.0  # medians up to which bins reach, unless one step in a hundred is longer
MAX_EVENTS = 3  # of a step
EVENT_SHARE = 0.02  # of the step's wall time, below which an event says nothing about it
# kinds of events whose length is no time in the step
WITHOUT_TIME = ("memory", "counters", "loss", "device_step", "exit", "knob", "seed", "site")


def processes(labelled: LabelledSteps, kind: str) -> tuple[str, ...]:
    """The processes that have steps of a kind, in order of rank."""
    own = labelled.frame.filter(pl.col("kind") == kind).select("rank", "process").unique().sort("rank", "process")
    return tuple(str(process) for process in own["process"].to_list())


def parts(labelled: LabelledSteps, kind: str, process: str, limit: int) -> StepPhases:
    """The steps of one process and kind, at most `limit` of them, each with its phases."""
    own = _of(labelled, kind, (process,)).sort("step")
    total = own.height
    own = own[positions(own["wall_ns"].to_numpy(), limit)]
    wall = own["wall_ns"].to_numpy() / 1e6
    known = {phase: own[f"{phase}_ns"] for phase in PHASES if own[f"{phase}_ns"].null_count() < own.height}
    made = {phase: tuple(_milliseconds(column)) for phase, column in known.items()}
    if known:
        rest = wall - sum(column.fill_null(0).to_numpy() / 1e6 for column in known.values())
        rest = np.maximum(rest, 0.0)
        if rest.sum() > SMALLEST_REST * wall.sum():
            made[UNATTRIBUTED] = tuple(rest.tolist())
    return StepPhases(
        process=process,
        kind=kind,
        steps=tuple(own["step"].to_list()),
        wall_ms=tuple(wall.tolist()),
        reasons=tuple(own["reason"].to_list()),
        parts_ms=made,
        total=total,
    )


def distribution(labelled: LabelledSteps, kind: str, chosen: Collection[str] | None = None) -> StepDistribution | None:
    """How long the steps of a kind take, of all processes or the chosen ones; None without steps."""
    own = _of(labelled, kind, chosen)
    if own.is_empty():
        return None
    wall = own["wall_ns"].to_numpy() / 1e6
    steady = (own["reason"] == STEADY).to_numpy()
    usual = wall[steady] if steady.any() else wall  # one step that compiles or holds an export would hide all others
    low, high = float(wall.min()), float(wall.max())
    most = max(WIDE * float(np.median(usual)), float(np.quantile(usual, 0.99)))
    top = min(high, most)
    if top <= low:
        low, top = 0.9 * low, 1.1 * low
    edges = np.linspace(low, top, BINS + 1)
    inside = np.minimum(wall, top)
    return StepDistribution(
        edges_ms=tuple(edges.tolist()),
        steady=tuple(np.histogram(inside[steady], edges)[0].tolist()),
        others=tuple(np.histogram(inside[~steady], edges)[0].tolist()),
        longer=high > top,
        longest_ms=high,
    )


def by_process(labelled: LabelledSteps) -> tuple[ProcessSteps, ...]:
    """Each process and kind: train first, then in order of ranks."""
    found = [
        _summary(own)
        for own in labelled.frame.drop_nulls("kind")
        .sort("rank", "process")
        .partition_by("kind", "process", maintain_order=True)
    ]
    return tuple(sorted(found, key=lambda row: (row.kind != "train", row.kind)))


def longest(
    tables: Tables, labelled: LabelledSteps, kind: str, limit: int, chosen: Collection[str] | None = None
) -> tuple[LongStep, ...]:
    """The longest steps of a kind, by what they take above the median of their process."""
    found: list[tuple[float, dict[str, Any], dict[str, float]]] = []
    for own in _of(labelled, kind, chosen).partition_by("process", maintain_order=True):
        medians = _medians(own)
        wall = own["wall_ns"].to_numpy()
        for at in np.argsort(-wall, kind="stable")[:limit].tolist():
            row = own.row(at, named=True)
            found.append((row["wall_ns"] / 1e6 - medians["wall"], row, medians))
    found.sort(key=lambda item: -item[0])
    rows = found[:limit]
    events = _events(tables, [row for _, row, _ in rows])
    return tuple(_long(row, extra, medians, events) for extra, row, medians in rows)


def _long(
    row: dict[str, Any], extra: float, medians: dict[str, float], events: dict[tuple[str, int], list[StepEvent]]
) -> LongStep:
    over = {
        phase: row[f"{phase}_ns"] / 1e6 - medians[phase]
        for phase in PHASES
        if phase in medians and row[f"{phase}_ns"] is not None
    }
    phase = max(over, key=lambda name: over[name], default=None)
    if phase is not None and over[phase] <= 0:
        phase = None
    wall_ms = row["wall_ns"] / 1e6
    noted = [event for event in events.get((row["process"], row["step"]), ()) if event.ms >= EVENT_SHARE * wall_ms]
    return LongStep(
        process=row["process"],
        step=row["step"],
        wall_ms=wall_ms,
        extra_ms=extra,
        reason=row["reason"],
        phase=phase,
        phase_extra_ms=over[phase] if phase is not None else None,
        events=tuple(noted[:MAX_EVENTS]),
    )


def _medians(own: pl.DataFrame) -> dict[str, float]:
    """Of wall time and phases over steady steps, over all where there is none, ms."""
    steady = own.filter(pl.col("reason") == STEADY)
    steady = steady if steady.height else own
    found = {"wall": float(np.median(steady["wall_ns"].to_numpy())) / 1e6}
    for phase in PHASES:
        column = steady[f"{phase}_ns"].drop_nulls()
        if not column.is_empty():
            found[phase] = float(np.median(column.to_numpy())) / 1e6
    return found


def _events(tables: Tables, rows: list[dict[str, Any]]) -> dict[tuple[str, int], list[StepEvent]]:
    """By process and step what the journal notes with a duration, the longest first."""
    if not rows or tables.journal.is_empty():
        return {}
    wanted = pl.DataFrame(
        {"process": [row["process"] for row in rows], "step": [row["step"] for row in rows]},
        schema={"process": pl.String, "step": pl.Int64},
    ).unique()
    noted = tables.journal.filter(
        (pl.col("duration_ns") > 0) & pl.col("step").is_not_null() & ~pl.col("kind").is_in(WITHOUT_TIME)
    )
    noted = noted.join(wanted, on=["process", "step"], how="semi").sort("duration_ns", descending=True)
    found: dict[tuple[str, int], list[StepEvent]] = {}
    for row in noted.iter_rows(named=True):
        event = StepEvent(row["kind"], _name(row["data"]), row["duration_ns"] / 1e6)
        found.setdefault((row["process"], row["step"]), []).append(event)
    return found


def _name(data: str | None) -> str | None:
    """What the event is about, where it says so."""
    try:
        fields = json.loads(data or "{}")
    except ValueError:
        return None
    named = (fields.get(key) for key in ("name", "path", "function")) if isinstance(fields, dict) else ()
    return next((value for value in named if isinstance(value, str) and value), None)


def _summary(own: pl.DataFrame) -> ProcessSteps:
    wall = own["wall_ns"].to_numpy() / 1e6
    steady = wall[(own["reason"] == STEADY).to_numpy()]
    return ProcessSteps(
        process=own["process"][0],
        rank=own["rank"][0],
        kind=own["kind"][0],
        steps=own.height,
        steady=len(steady),
        mean_ms=float(steady.mean()) if len(steady) else None,
        median_ms=float(np.median(steady)) if len(steady) else None,
        p95_ms=float(np.quantile(steady, 0.95)) if len(steady) else None,
        longest_ms=float(wall.max()),
    )


def _of(labelled: LabelledSteps, kind: str, chosen: Collection[str] | None) -> pl.DataFrame:
    own = labelled.frame.filter(pl.col("kind") == kind)
    return own if chosen is None else own.filter(pl.col("process").is_in(list(chosen)))


def _milliseconds(column: pl.Series) -> Iterator[float | None]:
    return (None if value is None else value / 1e6 for value in column.to_list())
