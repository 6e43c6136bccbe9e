"""Which steps count: every step gets the reason why it is left out of a figure, or "steady".

This is the one place that says which steps a figure of a step stands on, and on which clock. Steady means: after
warm-up, not the first batch of an epoch, outside profiler windows, not compiling.
"""

from __future__ import annotations

import polars as pl
from msgspec import Struct

from stepscope.engine.intervals import Intervals, union
from stepscope.tables.schema import Tables

WARMUP_RATIO = 2.0  # a leading step slower than this many medians of the later half is warm-up (allocator, caches)
WARMUP_MAX_SHARE = 0.33  # never call more than a third of a run warm-up: a slow third is how the run is
COMPILING = ("compile", "recompile", "limit_hit", "failure")  # kinds of `compiles` that take time of their step

STEADY = "steady"  # the value of `reason` for a step that counts
EDGE = "profiler"  # the script's own profiler starts, or stops and exports, in the step
INCOMPLETE = "incomplete"  # of a step at the end of a trace: its device work was not recorded whole
FIRST_BATCH = "first_batch"  # of an epoch
MONITOR = "monitor"  # it carried a monitor of ours (--watch); also the kind of the event that says so
REASONS = {  # by the column that marks a step, the first that does
    "incomplete": INCOMPLETE,
    "edge": EDGE,
    "in_window": "window",
    "monitored": MONITOR,
    "compiling": "compile",
    "warmup": "warmup",
    "first_batch": FIRST_BATCH,
}


class LabelledSteps(Struct, frozen=True):
    """The steps with `reason`: "steady", or why one is left out. `fallback`: kind -> what stands in for steady ones.

    `warmup` marks the first steps that are slower than the run becomes, whatever their reason.
    """

    frame: pl.DataFrame
    fallback: dict[str, str]

    def steady(self, kind: str = "train") -> pl.DataFrame:
        """The rows the statistics of `kind` stand on."""
        return self.frame.filter((pl.col("kind") == kind) & (pl.col("reason") == STEADY))


def times_of(steps: pl.DataFrame) -> Intervals:
    """When any of these steps ran."""
    starts = steps["start_ns"].to_numpy()
    return union(starts, starts + steps["wall_ns"].to_numpy())


def label(tables: Tables, cut: pl.DataFrame | None = None) -> LabelledSteps:
    """Gives every step its reason. A kind without any steady step falls back to all outside windows, then to all.

    Args:
        cut: the steps of traces that others recorded, and of the script's own profiler, as `trace_steps.cut`
            takes them.
    """
    steps = tables.steps.filter(pl.col("wall_ns").is_not_null() & (pl.col("wall_ns") > 0))
    if steps.is_empty():
        return LabelledSteps(steps.with_columns(warmup=pl.lit(False), reason=pl.lit(STEADY)), {})
    if cut is None or cut.is_empty():
        steps = steps.with_columns(incomplete=pl.lit(False), edge=pl.lit(False))
    else:
        steps = _as_cut(steps, cut)
    steps = steps.sort("process", "step").join(compiling(tables), on=["process", "step"], how="left")
    steps = steps.join(monitored(tables), on=["process", "step"], how="left")
    parts = [_warmup(part) for part in steps.partition_by("process", "kind", maintain_order=True)]
    steps = pl.concat(parts).with_columns(
        reason=pl.coalesce(
            *(pl.when(column).then(pl.lit(reason)) for column, reason in REASONS.items()), pl.lit(STEADY)
        )
    )
    fallback: dict[str, str] = {}
    for kind in steps["kind"].unique().drop_nulls().to_list():
        own = steps.filter((pl.col("kind") == kind) & (pl.col("reason") != INCOMPLETE))
        if own.is_empty() or (own["reason"] == STEADY).any():
            continue
        outside = pl.col("reason").is_in(["window", EDGE, MONITOR]).not_()
        some = own.filter(outside).height > 0
        fallback[kind] = "all steps outside windows" if some else "all steps"
        relaxed = (outside if some else pl.lit(True)) & (pl.col("reason") != INCOMPLETE)
        steps = steps.with_columns(
            pl.when((pl.col("kind") == kind) & relaxed).then(pl.lit(STEADY)).otherwise(pl.col("reason")).alias("reason")
        )
    return LabelledSteps(steps.drop("compiling", "monitored", "edge", "incomplete"), fallback)


def _as_cut(steps: pl.DataFrame, cut: pl.DataFrame) -> pl.DataFrame:
    """Steps begin and end as they are cut; `incomplete` marks those that are cut away.

    A step that the script's own profiler did not record whole is `edge` and in no window: it started or stopped in it.
    """
    marked = cut.with_columns(incomplete=pl.col("cut_ns").is_null())
    wall = pl.col("end_ns") - pl.col("cut_ns")
    told = pl.col("process").is_in(cut["process"].unique().implode())
    inside = pl.col("in_window").fill_null(False)
    return (
        steps.join(marked, on=["process", "start_ns"], how="left", maintain_order="left")
        .with_columns(
            pl.when(wall > 0).then("cut_ns").otherwise("start_ns").alias("start_ns"),
            pl.when(wall > 0).then(wall).otherwise("wall_ns").alias("wall_ns"),
            pl.col("incomplete").fill_null(False),
            edge=inside & told & pl.col("incomplete").is_null(),
        )
        .with_columns(in_window=inside & ~pl.col("edge"))
        .drop("cut_ns", "end_ns")
    )


def compiling(tables: Tables) -> pl.DataFrame:
    """(process, step, compiling) of steps in which something was compiled or tried to be; graph breaks are none."""
    journal = tables.journal.filter(pl.col("kind") == "compile").select("process", "step")
    compiles = tables.compiles.filter(pl.col("kind").is_in(COMPILING)).select("process", "step")
    return pl.concat([journal, compiles]).drop_nulls().unique().with_columns(pl.lit(True).alias("compiling"))


def monitored(tables: Tables) -> pl.DataFrame:
    """(process, step, monitored) of the steps that carried a monitor: no figure of steps stands on them."""
    own = tables.journal.filter(pl.col("kind") == MONITOR).select("process", "step").drop_nulls().unique()
    return own.with_columns(pl.lit(True).alias("monitored"))


def _warmup(steps: pl.DataFrame) -> pl.DataFrame:
    """Marks the leading steps of one process and kind that are slower than the run becomes; at least the first."""
    wall = steps["wall_ns"].to_list()
    outside = steps.filter(~pl.col("in_window").fill_null(False))
    later = (outside if outside.height else steps)["wall_ns"].to_list()
    later = sorted(later[len(later) // 2 :])
    median = later[len(later) // 2]
    count = 1
    while count < len(wall) * WARMUP_MAX_SHARE and wall[count] > WARMUP_RATIO * median:
        count += 1
    return steps.with_columns((pl.int_range(pl.len()) < count).alias("warmup"))
