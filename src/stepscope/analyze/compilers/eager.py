"""What steps cost before and after a function ran into its limit of compiled versions.

From then on inputs that match none of its versions run eagerly, in silence. Steps that did not compile are compared;
before the limit there may be hardly any, and then compile time is taken out of those that did. What surrounds
compiling stays in them, so the loss is understated. Medians, because single steps of either side may be anything.
"""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from stepscope.analyze.compilers.causes import Group
from stepscope.analyze.compilers.constants import EAGER_STEPS
from stepscope.analyze.compilers.per_step import table
from stepscope.analyze.compilers.prepared import Prepared
from stepscope.model.compilers import EagerAfterLimit


def limits(prepared: Prepared, groups: Iterable[Group]) -> tuple[EagerAfterLimit, ...]:
    """One per cause of a limit hit, in the order of the causes."""
    hits = [group for group in groups if group.cause.kind == "limit_hit"]
    if not hits:
        return ()
    steps = {backend: table(prepared.of(backend)) for backend in {group.cause.backend for group in hits}}
    return tuple(_limit(group, steps[group.cause.backend]) for group in hits)


def _limit(group: Group, steps: pl.DataFrame) -> EagerAfterLimit:
    """Steps of the kind and the processes it happened in, windows and first batches left out, ranks pooled."""
    firsts: dict[str, int] = {}
    for row in group.rows:
        if row["at"] is not None:
            firsts.setdefault(row["process"], row["at"])
    before, after = [], []
    for process, at in firsts.items():
        kind = steps["kind"][at]
        own = steps.filter(
            (pl.col("process") == process) & (pl.col("kind") == kind) & ~pl.col("in_window") & ~pl.col("first_batch")
        )
        left = own.with_columns(left_ns=pl.col("wall_ns") - pl.col("compile_ns"))
        before.append(left.filter(pl.col("row") < at))
        after.append(left.filter(pl.col("row") > at))
    earlier, later = _comparable(before), _comparable(after)
    return EagerAfterLimit(
        cause=group.cause.id,
        step=group.cause.first_step,
        before_ms=_median_ms(earlier),
        before_steps=earlier.height,
        after_ms=_median_ms(later),
        after_steps=later.height,
        before_compiling=bool(earlier["compiling"].any()),
    )


def _comparable(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """The steps that did not compile, where there are enough of them, else all."""
    steps = pl.concat(parts) if parts else pl.DataFrame(schema={"left_ns": pl.Int64, "compiling": pl.Boolean})
    quiet = steps.filter(~pl.col("compiling"))
    return quiet if quiet.height >= EAGER_STEPS else steps


def _median_ms(steps: pl.DataFrame) -> float | None:
    median = steps["left_ns"].median() if steps.height >= EAGER_STEPS else None
    return median / 1e6 if isinstance(median, int | float) else None
