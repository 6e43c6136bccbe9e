"""What the script's own profiler costs its steps: those it recorded against the steady ones outside.

While a profiler records stacks nothing is journaled, so that it sees no frame of ours. Its steps are then those that
the trace it wrote names. Means and medians must agree on a loss: a few slow steps on either side make none.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from stepscope.analyze.steps import mean
from stepscope.engine.step_labels import STEADY, LabelledSteps
from stepscope.model.machine import ProfilerFacts
from stepscope.tables.categories import ANNOTATION, OPERATORS
from stepscope.tables.schema import Tables

JOURNAL, TRACE = "journal", "trace"


def facts(tables: Tables, labelled: LabelledSteps) -> ProfilerFacts | None:
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
