"""What sampled stacks say of a run beyond hot lines: stages, phases, waits, slow steps, and where ranks differ."""

from __future__ import annotations

import polars as pl

from stepscope.analyze.context import Context
from stepscope.analyze.hotspots.idle import idle_sampled
from stepscope.analyze.sampled import callers, rank_lines, slow_steps, stages, waits
from stepscope.analyze.sampled.loop import SampledLoop, sampled_loop
from stepscope.analyze.sampled.user_paths import UserPaths
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import StepFacts
from stepscope.model.sampled import LoaderWait, SampledViews


def build(context: Context, labelled: LabelledSteps, train: StepFacts | None) -> SampledViews | None:
    """None without sampled stacks of time. What cannot be said is in `absent`, with its reason."""
    if context.tables.stacks.is_empty() or "bytes" in context.tables.segments["unit"]:
        return None
    idle = idle_sampled(context.tables)
    users = UserPaths(context.calls, context.code)
    loop = sampled_loop(context, users)
    found = () if loop is None else waits.facts(context, loop, users, idle, train)
    slow, no_slow = slow_steps.facts(context, users)
    ranks, no_ranks = rank_lines.facts(context, loop, users, idle)
    of_stages = stages.facts(context)
    absent = {
        "stages": "" if of_stages else "no main thread of a rank was sampled",
        "phases": "" if loop is not None else _no_loop(labelled),
        "waits": _no_waits(found, loop, labelled),
        "slow_steps": no_slow,
        "rank_lines": no_ranks,
    }
    return SampledViews(
        stages=of_stages,
        phases={} if loop is None else _phases(loop),
        waits=found,
        slow_steps=slow,
        rank_lines=ranks,
        absent={name: reason for name, reason in absent.items() if reason},
        callers=() if loop is None else callers.facts(loop, users),
    )


def _phases(loop: SampledLoop) -> dict[str, float]:
    """Phase -> its share of the loop's samples, largest first."""
    counts = (
        loop.rows.group_by("phase").agg(pl.col("samples").sum()).sort(["samples", "phase"], descending=[True, False])
    )
    total = int(counts["samples"].sum())
    return {str(phase): int(count) / total for phase, count in counts.iter_rows()}


def _no_loop(labelled: LabelledSteps) -> str:
    if labelled.frame.is_empty():
        return "no step is known, and no sampled stack of a main thread fetches a batch or calls a model"
    return "no stack of a main thread was sampled in steady steps"


def _no_waits(found: tuple[LoaderWait, ...], loop: SampledLoop | None, labelled: LabelledSteps) -> str:
    if found:
        return ""
    return _no_loop(labelled) if loop is None else "no main thread was sampled in a DataLoader"
