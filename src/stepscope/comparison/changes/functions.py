"""Sampled time of the training process: by function that it stands in, and by the user's line that led there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stepscope.comparison import thresholds
from stepscope.comparison.changes.rows import OF_SAMPLES, PER_STEP, Amount, Amounts, Pair, Thing, merged, rows
from stepscope.model import StackFacts
from stepscope.model.comparison import Change
from stepscope.model.views.hotspots import HotspotRow, Hotspots

Named = Callable[[str], str]


def amounts(sampled: Hotspots | None, stacks: StackFacts | None, name: Named) -> tuple[Amounts, bool]:
    """By the innermost function. The second value says that they are percent of the samples, as no step is known."""
    if sampled is None:
        return {}, False
    shares = sampled.mean_step_ms is None
    found = merged(
        (Thing(row.name, name(row.path or "") or None), amount)
        for row, amount in _weighted(sampled, stacks)
        if row.name is not None
    )
    return found, shares


def user_lines(sampled: Hotspots | None, stacks: StackFacts | None, name: Named) -> Amounts:
    """By the innermost line of the user's own code, with all that it calls in libraries."""
    if sampled is None:
        return {}
    return merged(
        (Thing(row.library_function_name, name(row.library_function_path), row.library_function_line), amount)
        for row, amount in _weighted(sampled, stacks)
        if row.library_function_name is not None and row.library_function_path is not None
    )


def changes(pairs: Sequence[Pair], floor: float, *, shares: bool) -> list[Change]:
    """Functions whose sampled time differs."""
    return (
        rows("function", OF_SAMPLES, pairs, thresholds.SHARE_FLOOR)
        if shares
        else rows("function", PER_STEP, pairs, floor)
    )


def _weighted(sampled: Hotspots, stacks: StackFacts | None) -> Iterator[tuple[HotspotRow, Amount]]:
    """Each row with its time, and the samples in steady steps that this stands on."""
    if sampled.mean_step_ms is None:
        for row in sampled.rows:
            yield row, Amount(row.proportion * 100, row.samples)
        return
    steady = stacks.steady_samples if stacks is not None else 0
    for row in sampled.rows:
        if row.ms_per_step:
            # a sample of a steady step is worth the mean step over all of them
            count = row.ms_per_step * steady / sampled.mean_step_ms if steady else row.samples
            yield row, Amount(row.ms_per_step, max(1.0, count))
