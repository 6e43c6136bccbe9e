"""What a run pays once, in seconds: start-up, the first step, warm-up, windows. None where a source was silent."""

from __future__ import annotations

import polars as pl

from stepscope.analyze.steps import mean
from stepscope.analyze.windows import event_data
from stepscope.engine.step_labels import EDGE, STEADY, LabelledSteps
from stepscope.model import FixedCosts
from stepscope.tables.schema import Tables


def facts(tables: Tables, labelled: LabelledSteps) -> FixedCosts:
    """`warmup_s` is the excess of the first steps, what they compile included, over as many steady ones.

    `total_s` is the sum of what is known; the first step counts in it only where no warm-up does.
    """
    started = tables.run.started_ns
    train = labelled.frame.filter(pl.col("kind") == "train")
    steps = train if train.height else labelled.frame
    first = steps.filter(pl.col("start_ns").is_not_null()).sort("start_ns").head(1)
    before = first_step = None
    if started is None and first["in_window"].fill_null(False).all():
        return FixedCosts(None, None, None, None, None)  # traces of others begin anywhere in a run
    if first.height:
        first_step = first["wall_ns"][0] / 1e9
        if started is not None:
            before = max(0.0, (first["start_ns"][0] - started) / 1e9)
    warmup, windows = _warmup(steps), _windows(tables, labelled)
    known = [part for part in (before, first_step if warmup is None else warmup, windows) if part is not None]
    return FixedCosts(
        total_s=sum(known) if known else None,
        before_first_step_s=before,
        first_step_s=first_step,
        warmup_s=warmup,
        windows_s=windows,
    )


def _warmup(steps: pl.DataFrame) -> float | None:
    """Mean over processes: they warm up beside each other."""
    steady = steps.filter(pl.col("reason") == STEADY)
    slow = steps.filter(pl.col("warmup") & ~pl.col("in_window").fill_null(False))
    if steady.is_empty() or slow.is_empty():
        return None
    mean = steady["wall_ns"].sum() / steady.height
    excess = float((slow["wall_ns"] - mean).clip(lower_bound=0).sum())
    return excess / slow["process"].n_unique() / 1e9


def _windows(tables: Tables, labelled: LabelledSteps) -> float | None:
    """What windows took to start, stop and export: ours between steps, the script's own what its steps took longer."""
    spent: dict[str, float] = {}
    for row, data in event_data(tables, "window"):
        parts = [data.get("stop_duration_ns"), data.get("export_duration_ns")]
        known = [part for part in parts if isinstance(part, int)]
        if known:
            spent[row["process"]] = spent.get(row["process"], 0) + sum(known)
    for row in labelled.frame.filter(pl.col("reason") == EDGE).iter_rows(named=True):
        usual = labelled.steady(row["kind"]).filter(pl.col("process") == row["process"])["wall_ns"]
        if not usual.is_empty():
            spent[row["process"]] = spent.get(row["process"], 0) + max(0.0, row["wall_ns"] - mean(usual))
    return max(spent.values()) / 1e9 if spent else None
