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
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from stepscope.comparison.outcomes import NOT_APPLIED, refusal
from stepscope.comparison.thresholds import CONFIDENCE, THRESHOLD
from stepscope.comparison.verdicts import exp, student, two_sided
from stepscope.experiment import schedule
from stepscope.experiment.folder import Made
from stepscope.experiment.plan import SCREEN, Plan, Screened, candidate_of
from stepscope.experiment.propose import NEED_WORKERS, WORKERS
from stepscope.model.comparison import Candidate, Effect, MainEffect, Skipped

MOST_KNOBS = 11
_FACTORIAL = 3  # knobs up to which all combinations are no more than eight runs
_GENERATORS = {8: "+++-+--", 12: "++-+++---+-"}  # first rows of Plackett and Burman's designs
# Knobs that exclude each other in one run: torch refuses both, or one is the other said differently.
EXCLUSIVE = (frozenset({"optimizer.fused", "optimizer.foreach"}), frozenset({"compile", "compile.mode"}))

Levels = tuple[bool, ...]
Row = tuple[Levels, int, float]  # which knobs are on, the block, the mean step in ms


def designed(plan: Plan) -> Plan:
    """The plan with the runs that tell its candidates' main effects; with fewer than two it pairs them as they are."""
    chosen, skipped = factors(plan.candidates)
    if len(chosen) < 2:
        return replace(plan, notes=(*plan.notes, "Fewer than two knobs are left, so nothing is screened."))
    rows = design(len(chosen), seed=plan.protocol.seed or 0)
    return replace(plan, candidates=chosen, skipped=(*plan.skipped, *skipped), design=rows)


def judged(plan: Plan, made: Sequence[Made]) -> Screened:
    """The main effects, and the combination that pairs are to confirm. A knob that was not applied is left out."""
    last = {(run.slot.block, run.slot.candidate): run for run in made if run.slot.phase == SCREEN}
    refused: dict[int, str] = {}
    rows: list[Row] = []
    for (block, row), run in last.items():
        spoilt = {flag.name for flag in schedule.spoiling(run)} - {NOT_APPLIED}
        if run.measure is None or spoilt or row is None:
            continue
        for number, candidate in enumerate(plan.candidates):
            reasons = [reason for knob in candidate.knobs if (reason := refusal(knob, run.measure)) is not None]
            if reasons:
                refused[number] = reasons[-1]
        rows.append((plan.design[row], block, run.measure.mean_ms))
    kept = [number for number in range(len(plan.candidates)) if number not in refused]
    chosen = [plan.candidates[number] for number in kept]
    found = screened(chosen, [(tuple(levels[n] for n in kept), block, one) for levels, block, one in rows])
    skipped = tuple(
        Skipped(plan.candidates[number].name, plan.candidates[number].knobs, f"not applied: {reason}")
        for number, reason in refused.items()
    )
    return replace(found, skipped=(*skipped, *found.skipped))


def factors(candidates: Sequence[Candidate]) -> tuple[tuple[Candidate, ...], tuple[Skipped, ...]]:
    """What the design switches on and off, and what it leaves out.

    A knob takes part with one value, the first that is given. What needs loader workers is switched with their number.
    """
    found: list[Candidate] = []
    skipped: list[Skipped] = []
    most = f"a screening takes {MOST_KNOBS} knobs at most"
    for candidate in _joined(candidates):
        names = _names(candidate)
        excluded = names.union(*(pair for pair in EXCLUSIVE if pair & names))
        rival = next((each for each in found if excluded & _names(each)), None)
        if rival is None and len(found) < MOST_KNOBS:
            found.append(candidate)
            continue
        reason = f"takes part in the screening as {rival.name}, which excludes it" if rival is not None else most
        skipped.append(Skipped(candidate.name, candidate.knobs, reason))
    return tuple(found), tuple(skipped)


def _names(candidate: Candidate) -> set[str]:
    return {knob.knob for knob in candidate.knobs}


def _joined(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """With the knobs that need workers put to the first candidate that sets their number."""
    makers = (each for each in candidates if any(knob.knob == WORKERS and knob.value != "0" for knob in each.knobs))
    home = next(makers, None)
    if home is None:
        return candidates
    lost = [each for each in candidates if each is not home and _names(each) <= set(NEED_WORKERS)]
    more = tuple(knob for each in lost for knob in each.knobs if knob.knob not in _names(home))
    joined = replace(home, name=candidate_of((*home.knobs, *more)).name, knobs=(*home.knobs, *more)) if more else home
    return [joined if each is home else each for each in candidates if each not in lost]


def design(knobs: int, *, seed: int) -> tuple[Levels, ...]:
    """The runs of one block for so many knobs (at most `MOST_KNOBS`): for each run, which are on; in one run none is.

    `seed` shuffles them: runs of a design come in the order of their settings, and what drifts meanwhile would look
    like the last knob's effect.
    """
    if knobs <= _FACTORIAL:
        rows: list[Levels] = [tuple(reversed(levels)) for levels in itertools.product((False, True), repeat=knobs)]
    else:
        size = 8 if knobs < 8 else 12
        first = [sign == "+" for sign in _GENERATORS[size]]
        shifted = (first[-shift:] + first[:-shift] for shift in range(size - 1))
        rows = [(False,) * knobs, *(tuple(row[:knobs]) for row in shifted)]
    random.Random(seed).shuffle(rows)
    return tuple(rows)


def screened(chosen: Sequence[Candidate], rows: Sequence[Row]) -> Screened:
    """The main effects (one that these runs cannot tell is left out), the combination to confirm, and why the other
    factors are not in it.

    Certain effects smaller than `THRESHOLD` do not matter, and would make the combination longer for nothing.
    """
    known = list(zip(chosen, factor_effects(rows) or [None] * len(chosen), strict=True))
    effects = tuple(
        MainEffect(
            knob=factor.knobs[0],
            ratio=effect.ratio,
            low=effect.low,
            high=effect.high,
            runs=effect.pairs,
            with_knobs=factor.knobs[1:],
            ceiling=factor.ceiling,
        )
        for factor, effect in known
        if effect is not None
    )
    helpful = [
        (effect.ratio, number)
        for number, (_, effect) in enumerate(known)
        if effect is not None and effect.high is not None and effect.high < 1.0 and effect.ratio <= 1.0 - THRESHOLD
    ]
    parts = [chosen[number] for _, number in sorted(helpful)]
    skipped = tuple(
        Skipped(factor.name, factor.knobs, f"not in the combination: {_reason(effect)}")
        for factor, effect in known
        if factor not in parts
    )
    return Screened(effects, _combination(parts) if parts else None, skipped)


def _combination(parts: Sequence[Candidate]) -> Candidate:
    ceilings = sorted(
        (one.ceiling, one.finding) for one in parts if one.ceiling is not None and one.finding is not None
    )
    by_finding: dict[str | None, float] = {finding: ceiling for ceiling, finding in ceilings}  # the largest of each
    known = all(factor.finding in by_finding for factor in parts)
    return replace(
        candidate_of([knob for factor in parts for knob in factor.knobs]),
        # losses overlap, so that together they give at most the sum of their ceilings
        ceiling=min(1.0, sum(by_finding.values())) if known else None,
        finding=parts[0].finding if len({factor.finding for factor in parts}) == 1 else None,
    )


def _reason(effect: Effect | None) -> str:
    if effect is None:
        return "its runs were too few to tell its effect from the others'"
    if effect.low is None or effect.high is None:
        return "the runs were too few for an interval of its effect"
    if effect.low > 1.0:
        return f"it makes a step longer by {(effect.ratio - 1) * 100:.1f} % on average"
    if effect.high < 1.0:
        return f"it gains {(1 - effect.ratio) * 100:.1f} % on average, which does not matter"
    low, high = (f"{(limit - 1) * 100:+.1f} %" for limit in (effect.low, effect.high))
    return f"it makes no difference that shows (95 %: {low} to {high})"


def factor_effects(runs: Sequence[Row]) -> list[Effect | None]:
    """What each knob does on average: on over off.

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
    told = np.isclose(resolution, np.eye(matrix.shape[1]), atol=1e-6).all(axis=1)
    effects: list[Effect | None] = []
    for knob in range(signs.shape[1]):
        if not told[knob]:
            effects.append(None)
            continue
        size = 2 * float(found[knob])  # on logs
        effect = Effect(exp(size), None, None, len(usable), spread)
        if spread is not None:
            error = 2 * spread * float(np.linalg.norm(inverse[knob]))
            half = student(CONFIDENCE, freedom) * error
            chance = two_sided(size, error, freedom)
            effect = replace(effect, low=exp(size - half), high=exp(size + half), p_value=chance)
        effects.append(effect)
    return effects
