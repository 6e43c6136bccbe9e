"""What retries of the device's allocator cost: steps near them against steps without, by the journal."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import polars as pl
from msgspec.structs import replace

from stepscope.analyze.memory_losses.readings import Readings
from stepscope.analyze.steps import mean
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model.memory import RetryFacts

MIN_STRETCHES = 3  # with a retry, and as many without: fewer are chance


def retries(processes: Iterable[Readings], labelled: LabelledSteps) -> RetryFacts | None:
    """Of the process that lost most; None where no retry was counted between steady steps."""
    found = [facts for own in processes for device in own.devices() if (facts := _of(own, device, labelled))]
    return max(found, key=lambda facts: (facts.lost_ms_per_step or 0.0, facts.retries), default=None)


def _of(own: Readings, device: str, labelled: LabelledSteps) -> RetryFacts | None:
    rows = own.steady.filter(pl.col("device") == device).drop_nulls(["retries", "step"]).sort("step")
    counts = rows.select("step", more=pl.col("retries").diff()).drop_nulls()
    total = int(counts["more"].clip(lower_bound=0).sum()) if counts.height else 0
    if not total:
        return None
    steady = labelled.steady().filter(pl.col("process") == own.process)
    # a reading is taken after its step: the steps up to it, from the reading before, are those its count speaks of
    steps = steady.filter(pl.col("step").is_between(rows["step"][0] + 1, rows["step"][-1])).sort("step")
    joined = steps.select("step", "wall_ns").join_asof(
        counts.with_columns(stretch=pl.int_range(pl.len())), on="step", strategy="forward"
    )
    struck, usual = joined.filter(pl.col("more") > 0), joined.filter(pl.col("more") <= 0)
    bare = RetryFacts(
        rank=own.rank,
        device=device,
        retries=total,
        steps=joined.height,
        steps_struck=struck.height,
        stretches=struck["stretch"].n_unique(),
        usual_ms=None,
        struck_ms=None,
        lost_ms_per_step=None,
        total_ms_per_step=mean(joined["wall_ns"]) / 1e6,
    )
    if min(bare.stretches, usual["stretch"].n_unique()) < MIN_STRETCHES:
        return bare
    usual_ms, struck_ms = float(np.median(usual["wall_ns"].to_numpy())) / 1e6, mean(struck["wall_ns"]) / 1e6
    # single slow steps come without retries as well: what the others' mean lies above their median is none of theirs
    noise_ms = max(0.0, mean(usual["wall_ns"]) / 1e6 - usual_ms)
    lost = max(0.0, struck_ms - usual_ms - noise_ms) * struck.height / joined.height
    return replace(bare, usual_ms=usual_ms, struck_ms=struck_ms, lost_ms_per_step=lost)
