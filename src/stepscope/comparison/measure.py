"""One run, or one trace, reduced to what a comparison needs.

The mean over all measured steps is what the user pays; the median is the usual step, the 95th percentile the stalls.
With several ranks a step counts once, with the mean over ranks: they wait for each other, so their walls differ little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from stepscope.analyze.machine import energy
from stepscope.comparison.flags import conditions, flags
from stepscope.comparison.measured_steps import restarts_ns, select
from stepscope.model import PHASES, Analysis
from stepscope.model.comparison import Measure, PhaseTime, SteadyStep
from stepscope.model.machine import StepEnergy
from stepscope.model.views import Overview
from stepscope.tables.metrics import BACKWARD, LOSS
from stepscope.tables.schema import Tables

UNATTRIBUTED = "unattributed"  # wall time of phases whose probe was off
RESTART = "loader_restart"  # between steps: a loader's old workers ended, its new iterator made
QUANTILES = {"p5_ms": 5, "p25_ms": 25, "p75_ms": 75, "p99_ms": 99}  # beside median and p95, which a measure has
MAX_LOSSES = 50_000  # steps of which the loss is compared
_ROUNDING = 1e-9  # of the mean; what is below it is no time but the end of a float


def measure(
    tables: Tables,
    analysis: Analysis,
    *,
    label: str,
    path: str,
    warmup_limit: int | None = None,
    asked: int | None = None,
) -> Measure | None:
    """The measure of a recorded run, with the flags that it raises by itself; None without steps.

    Args:
        warmup_limit: the most steps that may be dropped as warm-up; how many are is found in the run.
        asked: steps that should have been measured, where that was agreed.
    """
    steps = select(tables, warmup_limit=warmup_limit)
    if steps is None:
        return None
    together = steps.together()
    wall_ms = together["wall_ns"].to_numpy() / 1e6
    restarts_ms = restarts_ns(tables, steps) / steps.rows.height / 1e6
    mean_ms = float(wall_ms.mean()) + restarts_ms
    # of all ranks together: the mean of each, summed over those that saw batches
    by_rank = steps.rows.filter(pl.col("samples").is_not_null()).group_by("rank").agg(pl.col("samples").mean())
    samples = float(by_rank.sort("rank")["samples"].sum()) or None
    trial = analysis.trial
    figures = conditions(tables, steps)
    signals = steps.rows["signal"].drop_nulls().value_counts().sort(["count", "signal"], descending=[True, False])
    facts = next((one for one in analysis.steps if one.kind == steps.kind), None)
    drawn, sources, cost = _energy(tables, analysis, steps.rows, mean_ms)
    return Measure(
        label=label,
        path=path,
        steps=together.height,
        dropped=steps.dropped,
        mean_ms=mean_ms,
        median_ms=float(np.median(wall_ms)),
        p95_ms=float(np.percentile(wall_ms, 95)),
        samples_per_step=samples,
        samples_per_second=None if samples is None else samples * 1e3 / mean_ms,
        fixed_cost_s=analysis.fixed.before_first_step_s,
        phases=_phases(together, float(wall_ms.mean()), restarts_ms),
        losses=losses(tables),
        knobs=trial.knobs if trial is not None else (),
        flags=flags(tables, analysis, steps, figures, asked=asked),
        started_ns=analysis.run.started_ns,
        warmup_s=steps.warmup_s,
        signal=str(signals[0, 0]) if signals.height else None,  # what cut most of the steps
        conditions=figures,
        settings=analysis.settings,
        steady=None
        if facts is None
        else SteadyStep(
            steps=facts.count,
            of=facts.count + sum(facts.excluded.values()),
            mean_ms=facts.mean_ms,
            median_ms=facts.median_ms,
            p95_ms=facts.p95_ms,
        ),
        joules_per_step=drawn.joules_per_step,
        joules_per_sample=drawn.joules_per_sample,
        cost_per_1000_steps=cost,
        energy_sources=sources,
        energy_absent=drawn.absent,
    )


def _energy(
    tables: Tables, analysis: Analysis, rows: pl.DataFrame, mean_ms: float
) -> tuple[StepEnergy, tuple[str, ...], float | None]:
    """(energy of the measured steps, what is in it, the cost of 1,000 of them)."""
    of_run = analysis.energy
    if of_run is None:
        return StepEnergy(absent=energy.NO_TELEMETRY), (), None
    counted = energy.Counted(tables)
    found = counted.of_steps(rows)
    joules = None if found.joules_per_step is None else 1000 * found.joules_per_step
    hours = None if of_run.boards is None else of_run.boards * mean_ms / 3600
    return found, counted.sources, energy.priced(of_run.prices, joules, hours).cost


def of_overviews(overviews: Sequence[Overview], *, label: str, path: str) -> Measure:
    """The measure of all steps of `overviews`, at least one, each of a trace that marks its steps.

    Every worker weighs the same, whatever its number of steps.
    """
    workers: dict[str, list[Overview]] = {}
    for overview in overviews:
        workers.setdefault(overview.span.worker, []).append(overview)
    steps = [[step for overview in own for step in overview.steps] for own in workers.values()]
    walls = [np.array([step.wall_ns for step in own], np.float64) / 1e6 for own in steps]
    mean_ms = float(np.mean([wall.mean() for wall in walls]))
    parts: dict[str, float] = {}
    for own in steps:
        for step in own:
            for name, part_ns in step.parts_ns.items():
                parts[name] = parts.get(name, 0.0) + part_ns / 1e6 / len(own) / len(steps)
    everything = np.concatenate(walls)
    return Measure(
        label=label,
        path=path,
        steps=min(len(own) for own in steps),
        dropped=0,
        mean_ms=mean_ms,
        median_ms=float(np.median(everything)),
        p95_ms=float(np.percentile(everything, 95)),
        samples_per_step=None,
        samples_per_second=None,
        fixed_cost_s=None,
        phases=_fitted({name: ms for name, ms in parts.items() if ms > 0}, mean_ms),
    )


def losses(tables: Tables) -> tuple[tuple[int, float], ...]:
    """(step, loss) of the first rank that has any, in order; of a step's several updates the mean."""
    if tables.metrics.is_empty():
        return ()
    found = tables.metrics.filter((pl.col("name") == LOSS) & (pl.col("source") == BACKWARD) & (pl.col("step") >= 0))
    found = found.filter(pl.col("rank").eq_missing(found["rank"].min()))
    by_step = found.group_by("step").agg(pl.col("value").mean()).sort("step").head(MAX_LOSSES)
    return tuple(zip(by_step["step"].to_list(), by_step["value"].to_list(), strict=True))


def percentiles(walls_ns: Sequence[float]) -> dict[str, float]:
    """Percentiles of steps in ms, by name; empty without any."""
    if not walls_ns:
        return {}
    values = np.percentile(np.asarray(walls_ns, np.float64) / 1e6, list(QUANTILES.values()))
    return dict(zip(QUANTILES, values.tolist(), strict=True))


def _phases(together: pl.DataFrame, mean_ms: float, restarts_ms: float) -> tuple[PhaseTime, ...]:
    """The phases of the mean step, those of which no step tells left out."""
    parts = {}
    for phase in PHASES:
        column = together[f"{phase}_ns"]
        if column.null_count() < len(column):
            parts[phase] = float(column.fill_null(0).clip(lower_bound=0).sum()) / together.height / 1e6
    found = _fitted(parts, mean_ms)
    return (*found, PhaseTime(RESTART, restarts_ms)) if restarts_ms > 0 else found


def _fitted(parts: Mapping[str, float], mean_ms: float) -> tuple[PhaseTime, ...]:
    """`parts` so that they sum to the mean: what is missing is of no known phase, what is too much overlaps."""
    known = sum(parts.values())
    if known > mean_ms:
        return tuple(PhaseTime(name, ms * mean_ms / known) for name, ms in parts.items())
    found = tuple(PhaseTime(name, ms) for name, ms in parts.items())
    rest = mean_ms - known
    return (*found, PhaseTime(UNATTRIBUTED, rest)) if rest > _ROUNDING * mean_ms else found
