"""Several knobs at once: which of them matter, and the best combination, from a two-level design.

Every run of the design has half of the knobs on. A main effect is what a knob does on average over the settings of the
others. Those whose interval lies on the faster side make the combination that pairs of runs then confirm or refute: how
knobs act on each other is not in a main effect, so a screening proposes and never decides.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from stepscope.comparison import screening
from stepscope.comparison.thresholds import THRESHOLD
from stepscope.experiment.plan import Screened, candidate_of
from stepscope.experiment.propose import NEED_WORKERS, WORKERS
from stepscope.model.comparison import Effect, Measure
from stepscope.model.experiment import Candidate, MainEffect, Skipped
from stepscope.schema import Knob

# Knobs that exclude each other in one run: torch refuses both, or one is the other said differently.
EXCLUSIVE = (frozenset({"optimizer.fused", "optimizer.foreach"}), frozenset({"compile", "compile.mode"}))

Levels = tuple[bool, ...]
Row = tuple[Levels, int, Measure]


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
        elif len(found) == screening.MOST_KNOBS:
            reason = f"a screening takes {screening.MOST_KNOBS} knobs at most"
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
    rows = [tuple(levels) for levels in screening.design(count)]
    random.Random(seed).shuffle(rows)
    return tuple(rows)


def main_effects(chosen: Sequence[Candidate], rows: Sequence[Row]) -> tuple[MainEffect, ...]:
    """What each factor does, over the measured runs; one that these runs cannot tell is left out."""
    found = screening.main_effects([(levels, block, measure.mean_ms) for levels, block, measure in rows])
    return tuple(
        _main_effect(factor, effect) for factor, effect in zip(chosen, found, strict=False) if effect is not None
    )


def _main_effect(factor: Candidate, effect: Effect) -> MainEffect:
    knob, *others = factor.knobs
    return MainEffect(
        knob=knob,
        ratio=effect.ratio,
        low=effect.low,
        high=effect.high,
        runs=effect.pairs,
        with_knobs=tuple(others),
        ceiling=factor.ceiling,
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
