"""Exclusive parts of the measured step: what the difference of the mean step is made of."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.comparison.changes.rows import PER_STEP, Amount, Pair, Thing, rows
from stepscope.model.comparison import Change, Measure


def changes(pairs: Sequence[tuple[Measure, Measure]], floor: float) -> list[Change]:
    """Phases that differ."""
    return rows("phase", PER_STEP, [_pair(one, other) for one, other in pairs], floor)


def _pair(one: Measure, other: Measure) -> Pair:
    base, candidate = ({Thing(part.category): Amount(part.ms) for part in side.phases} for side in (one, other))
    return base, candidate
