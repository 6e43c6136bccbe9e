"""What a run pays once, in seconds: start-up, the first step, warm-up, windows. None where a source was silent."""

from __future__ import annotations

import polars as pl

from stepscope.analyze.steps import STEADY, LabelledSteps
from stepscope.analyze.windows import event_data
from stepscope.model import FixedCosts
from stepscope.tables.schema import Tables


def facts(tables: Tables, labelled: LabelledSteps) -> FixedCosts:
    """`warmup_s` is the excess of all warm-up steps, the first included, over as many steady ones."""
    run = tables.run
    started = run.started_ns
    total = (run.ended_ns - started) / 1e9 if run.ended_ns is not None and started is not None else None
    train = labelled.frame.filter(pl.col("kind") == "train")
    steps = train if train.height else labelled.frame
    first = steps.filter(pl.col("start_ns").is_not_null()).sort("start_ns").head(1)
    before = first_step = None
    if first.height:
        first_step = first["wall_ns"][0] / 1e9
        if started is not None:
            before = max(0.0, (first["start_ns"][0] - started) / 1e9)
    return FixedCosts(
        total_s=total,
        before_first_step_s=before,
        first_step_s=first_step,
        warmup_s=_warmup(steps),
        windows_s=_windows(tables),
    )


def _warmup(steps: pl.DataFrame) -> float | None:
    """Mean over processes: they warm up beside each other."""
    steady = steps.filter(pl.col("reason") == STEADY)
    slow = steps.filter(pl.col("reason") == "warmup")
    if steady.is_empty() or slow.is_empty():
        return None
    mean = steady["wall_ns"].sum() / steady.height
    excess = float((slow["wall_ns"] - mean).clip(lower_bound=0).sum())
    return excess / slow["process"].n_unique() / 1e9


def _windows(tables: Tables) -> float | None:
    spent: dict[str, int] = {}
    for row, data in event_data(tables, "window"):
        parts = [data.get("stop_duration_ns"), data.get("export_duration_ns")]
        known = [part for part in parts if isinstance(part, int)]
        if known:
            spent[row["process"]] = spent.get(row["process"], 0) + sum(known)
    return max(spent.values()) / 1e9 if spent else None
