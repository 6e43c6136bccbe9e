"""Several knobs at once: which of them matter, and the best combination, from a two-level screening design.

In few runs every knob is on in one half and off in the other. Up to three knobs all combinations are run; beyond that
Plackett and Burman's designs of 8 or 12 runs, whose columns are orthogonal too. A main effect is what a knob does on
average over the settings of the others; in the small designs two knobs that only work together show up, diluted, in the
others' effects. Those whose interval lies on the faster side make the combination that pairs of runs then confirm or
refute: a screening proposes and never decides.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from msgspec.structs import replace

from stepscope.comparison.estimates import exp, student
from stepscope.comparison.outcomes import NOT_APPLIED
from stepscope.comparison.thresholds import CONFIDENCE, THRESHOLD
from stepscope.errors import UsageError
from stepscope.experiment import schedule
from stepscope.experiment.journal import Made
from stepscope.experiment.plan import SCREEN, Plan, Screened, candidate_of
from stepscope.experiment.propose import NEED_WORKERS, WORKERS
from stepscope.model.comparison import Effect, Measure
from stepscope.model.experiment import Candidate, MainEffect, Skipped
from stepscope.schema import Knob

MOST_KNOBS = 11
_FACTORIAL = 3  # knobs up to which all combinations are no more than eight runs
_GENERATORS = {8: "+++-+--", 12: "++-+++---+-"}  # first rows of Plackett and Burman's designs
# Knobs that exclude each other in one run: torch refuses both, or one is the other said differently.
EXCLUSIVE = (frozenset({"optimizer.fused", "optimizer.foreach"}), frozenset({"compile", "compile.mode"}))

Levels = tuple[bool, ...]
Row = tuple[Levels, int, Measure]


def designed(plan: Plan) -> Plan:
    """The plan with the runs that tell its candidates' main effects; with fewer than two it pairs them as they are."""
    chosen, skipped = factors(plan.candidates)
    if len(chosen) < 2:
        return replace(plan, notes=(*plan.notes, "Fewer than two knobs are left, so nothing is screened."))
    return replace(
        plan,
        candidates=chosen,
        skipped=(*plan.skipped, *skipped),
        design=design(len(chosen), seed=plan.protocol.seed or 0),
    )


def judged(plan: Plan, made: Sequence[Made]) -> Screened:
    """The main effects, and the combination that pairs are to confirm. A knob that was not applied is left out."""
    last: dict[tuple[int, int | None], Made] = {}
    for run in made:
        if run.slot.phase == SCREEN:
            last[run.slot.block, run.slot.candidate] = run
    refused: dict[int, str] = {}
    rows: list[Row] = []
    for (block, row), run in last.items():
        if run.measure is None or run.failure is not None or schedule.spoiling(run) - {NOT_APPLIED} or row is None:
            continue
        refused.update(_refused(plan, run.measure))
        rows.append((plan.design[row], block, run.measure))
    kept = [number for number in range(len(plan.candidates)) if number not in refused]
    chosen = [plan.candidates[number] for number in kept]
    found = screened(chosen, [(tuple(levels[n] for n in kept), block, one) for levels, block, one in rows])
    skipped = tuple(
        Skipped(plan.candidates[number].name, plan.candidates[number].knobs, f"not applied: {reason}")
        for number, reason in refused.items()
    )
    return replace(found, skipped=(*skipped, *found.skipped))


def _refused(plan: Plan, measure: Measure) -> dict[int, str]:
    """Candidates with a knob that no process of the run has applied, and why."""
    found = {}
    for number, candidate in enumerate(plan.candidates):
        for knob in candidate.knobs:
            told = [one for one in measure.knobs if (one.knob, one.value) == (knob.knob, knob.value)]
            if told and not any(one.applied for one in told):
                found[number] = told[0].reason or "no reason is known"
    return found


def factors(
    candidates: Iterable[Candidate], *, workers: int | None = None
) -> tuple[tuple[Candidate, ...], tuple[Skipped, ...]]:
    """What the design switches on and off, and what it leaves out.

    A knob takes part with one value, the first that is given. What needs loader workers is switched with their number,
    unless the script is known to have `workers` of its own.
    """
    found: list[Candidate] = []
    skipped: list[Skipped] = []
    for candidate in _joined(list(candidates), workers):
        names = {knob.knob for knob in candidate.knobs}
        rival = next((each for each in found if _clash(names, {knob.knob for knob in each.knobs})), None)
        if rival is not None:
            reason = f"takes part in the screening as {rival.name}, which excludes it"
            skipped.append(Skipped(candidate.name, candidate.knobs, reason))
        elif len(found) == MOST_KNOBS:
            reason = f"a screening takes {MOST_KNOBS} knobs at most"
            skipped.append(Skipped(candidate.name, candidate.knobs, reason))
        else:
            found.append(candidate)
    return tuple(found), tuple(skipped)


def _joined(candidates: list[Candidate], workers: int | None) -> list[Candidate]:
    """With the knobs that need workers put to the first candidate that sets their number."""
    if workers:
        return candidates
    home = next((each for each in candidates if any(_makes_workers(knob) for knob in each.knobs)), None)
    if home is None:
        return candidates
    lost = [each for each in candidates if each is not home and all(knob.knob in NEED_WORKERS for knob in each.knobs)]
    own = {knob.knob for knob in home.knobs}
    more = [knob for each in lost for knob in each.knobs if knob.knob not in own]
    joined = replace(home, name=candidate_of((*home.knobs, *more)).name, knobs=(*home.knobs, *more)) if more else home
    return [joined if each is home else each for each in candidates if each not in lost]


def _makes_workers(knob: Knob) -> bool:
    return knob.knob == WORKERS and knob.value != "0"


def _clash(names: set[str], others: set[str]) -> bool:
    if names & others:
        return True
    return any(pair & names and pair & others for pair in EXCLUSIVE)


def design(count: int, *, seed: int) -> tuple[Levels, ...]:
    """The runs of one block for so many factors, in an order that `seed` shuffles.

    Runs of a design come in the order of their settings; what drifts meanwhile would look like the last knob's effect.
    """
    rows = design_rows(count)
    random.Random(seed).shuffle(rows)
    return tuple(rows)


def main_effects(chosen: Sequence[Candidate], rows: Sequence[Row]) -> tuple[MainEffect, ...]:
    """What each factor does, over the measured runs; one that these runs cannot tell is left out."""
    found = factor_effects([(levels, block, measure.mean_ms) for levels, block, measure in rows])
    return tuple(
        MainEffect(
            knob=factor.knobs[0],
            ratio=effect.ratio,
            low=effect.low,
            high=effect.high,
            runs=effect.pairs,
            with_knobs=factor.knobs[1:],
            ceiling=factor.ceiling,
        )
        for factor, effect in zip(chosen, found, strict=False)
        if effect is not None
    )


def screened(chosen: Sequence[Candidate], rows: Sequence[Row], *, threshold: float = THRESHOLD) -> Screened:
    """The main effects, the combination to confirm, and why the other factors are not in it.

    Certain effects smaller than `threshold` do not matter, and would make the combination longer for nothing.
    """
    effects = main_effects(chosen, rows)
    helpful = [
        effect
        for effect in effects
        if effect.high is not None and effect.high < 1.0 and effect.ratio <= 1.0 - threshold
    ]
    helpful.sort(key=lambda effect: effect.ratio)
    skipped = [
        Skipped(factor.name, factor.knobs, _reason(factor, effects))
        for factor in chosen
        if not any(_knobs(effect) == factor.knobs for effect in helpful)
    ]
    return Screened(effects, _combination(chosen, helpful), tuple(skipped))


def _combination(chosen: Sequence[Candidate], helpful: Sequence[MainEffect]) -> Candidate | None:
    if not helpful:
        return None
    knobs = tuple(knob for effect in helpful for knob in _knobs(effect))
    parts = [factor for factor in chosen if any(_knobs(effect) == factor.knobs for effect in helpful)]
    by_finding: dict[str | None, float] = {}
    for factor in parts:
        if factor.ceiling is not None and factor.finding is not None:
            by_finding[factor.finding] = max(by_finding.get(factor.finding, 0.0), factor.ceiling)
    known = all(factor.finding in by_finding for factor in parts)
    return replace(
        candidate_of(knobs),
        # losses overlap, so that together they give at most the sum of their ceilings
        ceiling=min(1.0, sum(by_finding.values())) if known else None,
        finding=parts[0].finding if len({factor.finding for factor in parts}) == 1 else None,
    )


def _knobs(effect: MainEffect) -> tuple[Knob, ...]:
    return (effect.knob, *effect.with_knobs)


def _reason(factor: Candidate, effects: Sequence[MainEffect]) -> str:
    effect = next((each for each in effects if _knobs(each) == factor.knobs), None)
    if effect is None:
        return "not in the combination: its runs were too few to tell its effect from the others'"
    if effect.low is None or effect.high is None:
        return "not in the combination: the runs were too few for an interval of its effect"
    if effect.low > 1.0:
        return f"not in the combination: it makes a step longer by {(effect.ratio - 1) * 100:.1f} % on average"
    if effect.high < 1.0:
        return f"not in the combination: it gains {(1 - effect.ratio) * 100:.1f} % on average, which does not matter"
    low, high = _percent(effect.low - 1), _percent(effect.high - 1)
    return f"not in the combination: it makes no difference that shows (95 %: {low} to {high})"


def _percent(share: float) -> str:
    return f"{share * 100:+.1f} %"


def design_rows(knobs: int) -> list[Levels]:
    """The runs of one replicate for so many knobs: for each run, which knobs are on. One run has all of them off.

    Raises `UsageError` for none, or more than `MOST_KNOBS`.
    """
    if not 1 <= knobs <= MOST_KNOBS:
        raise UsageError(f"a screening takes 1 to {MOST_KNOBS} knobs, not {knobs}; leave some out")
    if knobs <= _FACTORIAL:
        return [tuple(reversed(levels)) for levels in itertools.product((False, True), repeat=knobs)]
    size = 8 if knobs < 8 else 12
    first = [sign == "+" for sign in _GENERATORS[size]]
    rows = [tuple(first[-shift:] + first[:-shift]) for shift in range(size - 1)]
    return [(False,) * knobs, *(row[:knobs] for row in rows)]


def factor_effects(runs: Sequence[tuple[Levels, Hashable, float]]) -> list[Effect | None]:
    """What each knob does on average, from (levels, block, mean step in ms): on over off.

    Logs are fitted by least squares with a level of its own for each block (a replicate), so that a machine that
    drifts between replicates costs nothing. `pairs` is the number of runs, `spread` the residual standard deviation;
    limits and p-value are None where no runs are left over to estimate it. An effect is None where the runs at hand
    cannot tell it. Runs whose figure is not positive and finite are left out.
    """
    usable = [run for run in runs if math.isfinite(run[2]) and run[2] > 0]
    if not usable:
        return [None] * (len(runs[0][0]) if runs else 0)
    blocks = list(dict.fromkeys(block for _, block, _ in usable))
    signs = np.array([[1.0 if on else -1.0 for on in levels] for levels, _, _ in usable])
    shifts = np.array([[1.0 if block == each else 0.0 for each in blocks] for _, block, _ in usable])
    matrix = np.hstack([signs, shifts])
    logs = np.log([mean for _, _, mean in usable])
    inverse = np.linalg.pinv(matrix)
    found = inverse @ logs
    freedom = len(usable) - int(np.linalg.matrix_rank(matrix))
    square = float(np.sum((logs - matrix @ found) ** 2))
    spread = math.sqrt(square / freedom) if freedom > 0 else None
    resolution = inverse @ matrix  # the identity in the rows of what the runs can tell
    effects: list[Effect | None] = []
    for knob in range(signs.shape[1]):
        told = np.zeros(matrix.shape[1])
        told[knob] = 1.0
        if not np.allclose(resolution[knob], told, atol=1e-6):
            effects.append(None)
            continue
        error = None if spread is None else 2 * spread * float(np.linalg.norm(inverse[knob]))
        effects.append(_effect(2 * float(found[knob]), error, freedom, len(usable), spread))
    return effects


def _effect(size: float, error: float | None, freedom: int, runs: int, spread: float | None) -> Effect:
    """`size` and its standard `error` are on logs."""
    if error is None:
        return Effect(exp(size), None, None, runs, spread)
    half = student(CONFIDENCE, freedom) * error
    return Effect(exp(size), exp(size - half), exp(size + half), runs, spread, _p(size, error, freedom))


def _p(size: float, error: float, freedom: int) -> float:
    if error == 0:
        return 0.0 if size else 1.0
    from scipy import special

    return float(2 * special.stdtr(freedom, -abs(size) / error))
