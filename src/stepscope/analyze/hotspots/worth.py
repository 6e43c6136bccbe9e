"""What a sample is worth in milliseconds per step: a rank's main-thread samples of steady steps are its mean step."""

from __future__ import annotations

import polars as pl
from msgspec import Struct

from stepscope.analyze.context import Context
from stepscope.model import PHASES

_SEGMENT = ["process", "start_ns", "end_ns"]


class StepWorth(Struct, frozen=True):
    """`ms_per_sample` by rank, mean over ranks included: summed over a rank's samples in steps it gives its mean step,
    divided by the number of ranks. `segments` are those that steady steps fill; `profiling` nodes are in no step."""

    ms_per_sample: dict[int, float]
    segments: pl.DataFrame
    profiling: pl.Series
    steps: int
    mean_ms: float

    def of(self, stacks: pl.DataFrame) -> pl.Series:
        """The worth of one sample of each row of `stacks`; null for all that is no main thread in a steady step."""
        inside = (
            (pl.col("role") == "rank")
            & pl.col("main_thread").fill_null(False)
            & pl.col("phase").is_in(PHASES).fill_null(False)
            & ~pl.col("node").is_in(self.profiling.implode()).fill_null(False)
            & pl.col("steady").fill_null(False)
        )
        worth = pl.col("rank").replace_strict(self.ms_per_sample, default=None, return_dtype=pl.Float64)
        joined = stacks.join(self.segments, on=_SEGMENT, how="left", nulls_equal=True, maintain_order="left")
        return joined.select(pl.when(inside).then(worth).alias("worth"))["worth"]


def step_worth(context: Context) -> StepWorth | None:
    """None without steps or without samples in them."""
    if context.tables.steps.is_empty() or context.sampled is None:
        return None
    steady = context.labelled.steady("train")
    steady = context.labelled.steady("eval") if steady.is_empty() else steady
    means = {int(rank): float(ms) for rank, ms in steady.group_by("rank").agg(pl.col("wall_ns").mean() / 1e6).rows()}
    counts = dict(context.sampled.rank_steps().group_by("rank").agg(pl.col("samples").sum()).rows())
    ranks = [rank for rank in sorted(means) if counts.get(rank)]
    if not ranks:
        return None
    rows = context.sampled.rows
    return StepWorth(
        ms_per_sample={rank: means[rank] / counts[rank] / len(ranks) for rank in ranks},
        segments=rows.group_by(_SEGMENT).agg(pl.col("steady").any()),
        profiling=rows.filter(pl.col("in_profiler"))["node"].drop_nulls().unique(),
        steps=steady.filter(pl.col("rank").is_in(ranks)).height,
        mean_ms=sum(means[rank] for rank in ranks) / len(ranks),
    )
