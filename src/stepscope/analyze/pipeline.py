"""What the steps of a run wait for and share: workers, main thread, cores, ranks. `diagnose/pipeline.py` plays them."""

from __future__ import annotations

import polars as pl

from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import LoaderFacts, StepFacts
from stepscope.model.machine import MachineFacts
from stepscope.model.ranks import Pipeline, RankWait

PARTS = 4  # of the run: what a loss takes at most is its part of the step in the worst of them
FEW = 8  # steps in a part; with fewer, one slow step makes the worst part


def facts(
    labelled: LabelledSteps, train: StepFacts | None, loader: LoaderFacts | None, machine: MachineFacts
) -> Pipeline | None:
    """None without training steps."""
    if train is None or train.mean_ms <= 0:
        return None
    steady = labelled.steady()
    known = steady.filter(pl.col("data_wait_ns").is_not_null())
    wait = next((part.ms for part in train.partition if part.category == "data_wait"), None)
    with_loader = loader is not None and (loader.num_workers is not None or loader.site is not None)
    workers = (loader.num_workers or 0) if loader is not None and with_loader else None
    cpu = machine.cpu
    return Pipeline(
        mean_ms=train.mean_ms,
        wait_ms=wait,
        wait_at_most_ms=None if wait is None else max(wait, _worst(known) * train.mean_ms),
        workers=workers,
        workers_ms=loader.load_ms if loader is not None and workers else None,
        cores=loader.cpu_limit / loader.ranks_on_host if loader is not None else None,
        contended_ms=cpu.own_ms_per_step if cpu is not None else None,
        ranks=tuple(
            RankWait(rank, wall / 1e6, data / 1e6)
            for rank, wall, data in known.filter(pl.col("rank").is_not_null())
            .group_by("rank")
            .agg(pl.col("wall_ns").mean(), pl.col("data_wait_ns").mean())
            .sort("rank")
            .iter_rows()
        ),
    )


def _worst(steady: pl.DataFrame) -> float:
    """The largest part of the step that was data wait in any quarter of the run, of all ranks together."""
    if steady.height < PARTS * FEW:
        return 0.0
    order = pl.col("step").rank("ordinal").over("process") - 1
    quarter = (order * PARTS // pl.len().over("process")).alias("quarter")
    parts = steady.with_columns(quarter).group_by("quarter").agg(pl.col("data_wait_ns").sum(), pl.col("wall_ns").sum())
    return float((parts["data_wait_ns"] / parts["wall_ns"]).max() or 0.0)  # type: ignore[arg-type]
