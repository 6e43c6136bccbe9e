"""The profiler windows a run holds: whose, how many steps, what they cost, how much they slowed their steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from stepscope.engine.journal import event_data, mean
from stepscope.engine.step_labels import STEADY, LabelledSteps
from stepscope.model import WindowFacts
from stepscope.model.machine import ProfilerFacts
from stepscope.tables.categories import ANNOTATION, OPERATORS
from stepscope.tables.categories import STEP as MARK
from stepscope.tables.schema import Tables


def profiler_windows(tables: Tables, labelled: LabelledSteps) -> tuple[WindowFacts, ...]:
    """One per recorded window, the user's own included."""
    found = [
        _ours(row, data, labelled) for row, data in event_data(tables, "window") if data.get("status") != "dropped"
    ]
    known = {window.trace for window in found}
    for row, data in event_data(tables, "user_trace"):
        name = str(data.get("trace") or data.get("path") or "")
        if name not in known:
            found.append(_users(tables, row, name, labelled))
            known.add(name)
    return tuple(found)


def _ours(row: dict[str, Any], data: dict[str, Any], labelled: LabelledSteps) -> WindowFacts:
    first, count = _int(data.get("first_step")), _int(data.get("steps"))
    return WindowFacts(
        rank=row["rank"] if row["rank"] is not None else 0,
        trace=str(data.get("trace") or ""),
        owner="stepscope",
        steps=count or 0,
        low_confidence=data.get("confidence") == "low",
        reason=str(data.get("reason") or ""),
        stop_ms=_ms(data.get("stop_duration_ns")),
        export_ms=_ms(data.get("export_duration_ns")),
        bytes=_int(data.get("bytes")),
        overhead_ratio=_overhead(labelled, row["process"], first, count),
    )


def _users(tables: Tables, row: dict[str, Any], name: str, labelled: LabelledSteps) -> WindowFacts:
    stem = name.rsplit("/", 1)[-1]
    own = tables.events.filter((pl.col("process") == row["process"]) & pl.col("trace").str.ends_with(stem))
    marks = own.filter(
        pl.col("name").str.starts_with(MARK) & (pl.col("category") == ANNOTATION) & (pl.col("duration_ns") > 0)
    ).filter(pl.col("stream").is_null())
    count = marks.height or (own["step"].drop_nulls().n_unique() if own.height else 0)
    return WindowFacts(
        rank=row["rank"] if row["rank"] is not None else 0,
        trace=name,
        owner="user",
        steps=count,
        low_confidence=False,
        reason="written by the training script's own profiler",
        stop_ms=None,
        export_ms=None,
        bytes=None,
        overhead_ratio=_ratio(labelled, row["process"], marks["duration_ns"])
        if marks.height
        else _overhead(labelled, row["process"], None, None),
    )


def _overhead(labelled: LabelledSteps, process: str, first: int | None, count: int | None) -> float | None:
    """Mean wall of the window's train steps over the mean of the steady ones of the same process."""
    own = labelled.frame.filter((pl.col("process") == process) & (pl.col("kind") == "train"))
    inside = own.filter(pl.col("in_window").fill_null(False))
    if first is not None and count:
        inside = inside.filter(pl.col("step").is_between(first, first + count - 1))
    return _ratio(labelled, process, inside["wall_ns"])


def _ratio(labelled: LabelledSteps, process: str, inside_ns: pl.Series) -> float | None:
    """Their mean over that of the steady train steps of the process; None without either."""
    own = (pl.col("process") == process) & (pl.col("kind") == "train") & (pl.col("reason") == "steady")
    outside = labelled.frame.filter(own & ~pl.col("in_window").fill_null(False))
    if inside_ns.is_empty() or outside.is_empty():
        return None
    return mean(inside_ns) / mean(outside["wall_ns"])


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _ms(value: object) -> float | None:
    return value / 1e6 if isinstance(value, int | float) and not isinstance(value, bool) else None


JOURNAL, TRACE = "journal", "trace"


def profiler_cost(tables: Tables, labelled: LabelledSteps) -> ProfilerFacts | None:
    """None where no rank has training steps inside and outside a profiler that is the script's alone."""
    ours = tables.journal.filter(pl.col("kind") == "window")["process"].unique().to_list()
    train = labelled.frame.filter(
        (pl.col("kind") == "train") & ~pl.col("process").is_in(ours) & pl.col("start_ns").is_not_null()
    )
    profiled = pl.col("in_window").fill_null(False)
    inside = train.filter(profiled).select("process", "wall_ns")
    source = JOURNAL
    if inside.is_empty():
        inside, source = _traced(tables), TRACE
        train = pl.concat([train.select("process", "wall_ns", "reason"), inside.with_columns(reason=pl.lit(TRACE))])
        profiled = pl.col("reason") == TRACE
    outside = train.filter((pl.col("reason") == STEADY) & ~profiled)
    both = sorted(set(inside["process"]) & set(outside["process"]))
    if not both:
        return None
    lost = 0.0
    for process in both:
        usual, here = (each.filter(pl.col("process") == process)["wall_ns"] for each in (outside, inside))
        lost += len(here) * max(0.0, min(mean(here) - mean(usual), _median(here) - _median(usual)))
    inside, outside, train = (each.filter(pl.col("process").is_in(both)) for each in (inside, outside, train))
    return ProfilerFacts(
        inside=inside.height,
        outside=outside.height,
        inside_ms=_mean_ms(inside),
        outside_ms=_mean_ms(outside),
        steps=train.height,
        lost_ms_per_step=lost / train.height / 1e6,
        total_ms_per_step=_mean_ms(train),
        source=source,
    )


def _traced(tables: Tables) -> pl.DataFrame:
    """(process, wall_ns) of the steps that the script's own traces name on the host."""
    own = tables.traces.filter(pl.col("owner") == "user").select("process", "trace")
    marked = pl.col("name").str.starts_with("ProfilerStep#") & pl.col("stream").is_null()
    steps = tables.events.filter(marked & pl.col("category").is_in([ANNOTATION, *OPERATORS])).join(
        own, on=["process", "trace"], how="semi"
    )
    return steps.filter(pl.col("duration_ns") > 0).select("process", wall_ns=pl.col("duration_ns"))


def _median(values: pl.Series) -> float:
    return float(np.median(values.to_numpy()))


def _mean_ms(steps: pl.DataFrame) -> float:
    return mean(steps["wall_ns"]) / 1e6
