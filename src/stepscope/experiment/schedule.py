"""Which run comes next, and when a candidate has enough pairs: pure functions of the plan and of the runs made.

A block holds the baseline and every candidate that is not decided, once; the order is turned round in every second
block, so that what drifts over the hours does not speak for one side. The baseline stands in the middle of its block,
which keeps every pair close together. A run that a passing trouble has spoilt is made again at once, at most twice.

**The stopping rule** looks at how narrow the interval is, never at whether it excludes 1: stopping as soon as a
difference shows finds one in the end whatever is compared. It is not free either: of the looks it takes the first whose
spread came out small. With p < 0.05 for the mean alone, 9.0 % of verdicts on equal programs are false when the first
look is after three pairs, 6.9 % after five; so it is after five (`LEAST_PAIRS`), and a verdict then needs less of a
p-value (`LOOKING_ALPHA`), which leaves at most 5.7 % (`benchmarks/statistics.py`). It looks at the mean alone: a median
that is looked at once is not chosen by its looks.

Two ends come sooner: a loss that goes another way, and an effect so far from none that a wider interval does as well.
The second does look at the effect, so it asks for four half-widths between the effect and none, and for a p-value that
holds among all candidates: of 40,000 simulated comparisons at most 0.35 % more end in a false verdict for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from stepscope.comparison.flags import with_flags_of_set
from stepscope.comparison.outcomes import outcome
from stepscope.comparison.thresholds import FIXED_ALPHA, LOOKING_ALPHA, Alpha
from stepscope.comparison.verdicts import half_width, p_value, pairs_needed
from stepscope.experiment.folder import Made
from stepscope.experiment.plan import PAIRS, SCREEN, Plan, Screened, Slot, limits_of, together
from stepscope.model.comparison import Candidate, Effect, Flag, Measure, Protocol

ATTEMPTS = 3  # runs for one place in a block: the run, and two more where it was spoilt
SCREEN_BLOCKS = 2  # times every row of a design is run, once in either order
EXTRA_BLOCKS = 3  # beyond the most pairs, for blocks whose pairs were spoilt
SPOILT_BASELINES = 6  # runs of the baseline in a row, after which the machine is not going to be quiet
BASELINE = "baseline"
AGAIN = "baseline again"
ANEW = "if it finds what an earlier run left (an output folder, a checkpoint), have the command remove that first"
CLEAR = 4.0  # half-widths between an effect and none
CLEAR_PAIRS = 3
OTHER_WAY_PAIRS = 2

# Flags that another run would get as well: the change itself is not there, or the command cannot do it.
LASTING = frozenset({"knob_not_applied", "run_failed", "few_steps", "profiled", "cut_differently"})

Pair = tuple[Measure, Measure]  # baseline, candidate


def wanted(candidate: Candidate, pairs: Sequence[Pair], protocol: Protocol, candidates: int = 1) -> int:
    """About how many more pairs one of so many `candidates` gets, if their spread stays what it is; 0 if these are
    enough."""
    least, most, width = protocol.least_pairs, protocol.most_pairs, protocol.width
    found = outcome(candidate.knobs, pairs, limits_of(protocol))
    effect, same = found.effects.get(found.headline), found.equivalence
    if effect is None:
        return least
    other_way = same is not None and same.within is False and effect.pairs >= OTHER_WAY_PAIRS
    clear = least < most and is_clear(effect, alpha_after(least=least, most=most).mean / candidates)
    if other_way or clear or narrow_enough(effect, least=least, most=most, width=width):
        return 0
    known = effect.spread is not None and effect.pairs >= CLEAR_PAIRS
    expected = max(least, pairs_needed(effect.spread or 0.0, width)) if known else least
    return max(1, min(expected, most) - effect.pairs)


def is_clear(effect: Effect, alpha: float) -> bool:
    """Whether the effect is so large beside its interval that a narrower one would say the same, with `alpha` to spare
    for its p-value."""
    half, chance = half_width(effect), p_value(effect)
    if half is None or chance is None or effect.ratio <= 0:
        return False
    return chance < alpha and abs(math.log(effect.ratio)) >= CLEAR * half


def narrow_enough(effect: Effect, *, least: int, most: int, width: float) -> bool:
    """Whether these pairs suffice: `most` of them, or at least `least` with a half-width of at most `width`."""
    half = half_width(effect)
    return effect.pairs >= most or (effect.pairs >= least and half is not None and half <= width)


def alpha_after(*, least: int, most: int) -> Alpha:
    """The p-values below which a verdict is certain, after pairs by this rule; with `least` = `most` nobody looked."""
    return FIXED_ALPHA if least == most else LOOKING_ALPHA


def candidates(plan: Plan, screened: Screened | None) -> tuple[Candidate, ...]:
    """What is paired with the baseline: the plan's candidates, or the one that a screening has left."""
    if not plan.design:
        return plan.candidates
    return (screened.candidate,) if screened is not None and screened.candidate is not None else ()


def next_slot(plan: Plan, screened: Screened | None, made: Sequence[Made]) -> Slot | None:
    """The run to make now, None when there is none left (or a screening has to be judged first)."""
    for slot in _slots(plan, screened, made):
        place = (slot.phase, slot.block, slot.candidate)
        tries = [run for run in made if (run.slot.phase, run.slot.block, run.slot.candidate) == place]
        if not tries or (len(tries) < ATTEMPTS and _may_pass(tries[-1])):
            return replace(slot, attempt=len(tries))
    return None


def _slots(plan: Plan, screened: Screened | None, made: Sequence[Made]) -> Iterator[Slot]:
    """First attempts of all runs that are needed from here on, as far as can be told now, in their order."""
    base = plan.protocol.base_knobs
    if plan.design and screened is None:
        for block in range(SCREEN_BLOCKS):
            rows = range(len(plan.design))
            for row in reversed(rows) if block % 2 else rows:
                on = [candidate for candidate, level in zip(plan.candidates, plan.design[row], strict=True) if level]
                knobs = tuple(knob for candidate in on for knob in candidate.knobs)
                label = " + ".join(f"{knob.knob}={knob.value}" for knob in knobs) or BASELINE
                yield Slot(SCREEN, block, row, 0, together(base, knobs), label)
        return
    tried = candidates(plan, screened)
    paired = [run for run in made if run.slot.phase == PAIRS]
    latest = max((run.slot.block for run in paired), default=0)
    for block in range(latest, plan.protocol.most_pairs + EXTRA_BLOCKS):
        earlier = [run for run in paired if run.slot.block < block]
        active = [
            number
            for number, candidate in enumerate(tried)
            if given_up(number, earlier) is None
            and wanted(candidate, pairs_of(number, earlier), plan.protocol, len(tried))
        ]
        if all(given_up(number, paired) is not None for number in active):
            return
        half = len(active) // 2
        order: list[int | None] = [*active[:half], None, *active[half:]]
        for side in reversed(order) if block % 2 else order:
            own = tried[side] if side is not None else Candidate(BASELINE, ())
            if side is None or given_up(side, paired) is None:
                yield Slot(PAIRS, block, side, 0, together(base, own.knobs), own.name or AGAIN)


def _may_pass(run: Made) -> bool:
    """Whether the run was spoilt by something that may be over in the next one."""
    if run.failure is not None:
        return run.slot.candidate is None and run.slot.phase == PAIRS  # a candidate that fails is not run again
    names = {flag.name for flag in spoiling(run)}
    return bool(names) and not names & LASTING


def runs_left(plan: Plan, screened: Screened | None, made: Sequence[Made]) -> int:
    """About how many runs are to come, if no further one is spoilt: what progress shows."""
    if plan.design and screened is None:
        done = sum(run.slot.phase == SCREEN for run in made)
        return max(0, SCREEN_BLOCKS * len(plan.design) - done) + 2 * plan.protocol.least_pairs
    paired = [run for run in made if run.slot.phase == PAIRS]
    tried = candidates(plan, screened)
    missing = {
        number: wanted(candidate, pairs_of(number, paired), plan.protocol, len(tried))
        for number, candidate in enumerate(tried)
        if given_up(number, paired) is None
    }
    block = max((run.slot.block for run in paired), default=0)
    sides = {run.slot.candidate for run in paired if run.slot.block == block}
    # runs of the block in progress that are not part of a pair yet: they need not be made
    alone = any(missing.get(number) for number in missing if number not in sides) if None in sides else len(sides)
    return max(0, sum(missing.values()) + max(missing.values(), default=0) - int(alone))


def with_flags_of_pairs(made: Sequence[Made]) -> tuple[Made, ...]:
    """The runs with the flags that only the other runs of the pairs make visible."""
    sides: dict[int | None, list[int]] = {}
    measures = {place: run.measure for place, run in enumerate(made) if run.measure is not None}
    for place in measures:
        if made[place].slot.phase == PAIRS:
            sides.setdefault(made[place].slot.candidate, []).append(place)
    flagged = with_flags_of_set(*([measures[place] for place in places] for places in sides.values()))
    for places, own in zip(sides.values(), flagged, strict=True):
        measures.update(zip(places, own, strict=True))
    return tuple(replace(run, measure=measures.get(place)) for place, run in enumerate(made))


def spoiling(run: Made) -> tuple[Flag, ...]:
    return tuple(flag for flag in run.measure.flags if flag.withholds) if run.measure is not None else ()


def _is_clean(run: Made) -> bool:
    return run.measure is not None and not spoiling(run)


def given_up(number: int, paired: Sequence[Made]) -> str | None:
    """Why a candidate is not run again before its pairs are enough; None while it is in the race."""
    own = [run for run in paired if run.slot.candidate == number]
    for run in own:
        if run.failure is not None:
            return run.failure
        lasting = next((flag.text for flag in spoiling(run) if flag.name in LASTING), None)
        if lasting is not None:
            return lasting
    if len(own) >= ATTEMPTS and not any(_is_clean(run) for run in own):
        flags = [flag for run in own for flag in spoiling(run)]
        return f"each of its {len(own)} runs is flagged: {flags[-1].text}" if flags else "none of its runs has steps"
    return None


def pairs_of(number: int, paired: Sequence[Made]) -> tuple[Pair, ...]:
    """(baseline, candidate) of every block in which both have been measured, flagged or not: the last of either."""
    ours, theirs = (
        {run.slot.block: run.measure for run in paired if run.slot.candidate == side and run.measure is not None}
        for side in (None, number)
    )
    return tuple((ours[block], theirs[block]) for block in sorted(ours.keys() & theirs.keys()))


def replaced(number: int | None, paired: Sequence[Made]) -> tuple[Measure, ...]:
    """Measures of a side that a later attempt in the same block took the place of."""
    runs = [run for run in paired if run.slot.candidate == number and run.measure is not None]
    last = {run.slot.block: run for run in runs}
    return tuple(run.measure for run in runs if last[run.slot.block] is not run and run.measure is not None)


def trouble(made: Sequence[Made]) -> str | None:
    """Why it is no use to go on: the baseline itself cannot be run again, or is never undisturbed."""
    own = [run for run in made if run.slot.phase == PAIRS and run.slot.candidate is None]
    failed = own[-ATTEMPTS:]
    if len(failed) == ATTEMPTS and all(run.failure is not None for run in failed):
        return f"the baseline failed {ATTEMPTS} times in a row: {failed[-1].failure}; {ANEW}"
    short = next((flag for run in own[-1:] for flag in spoiling(run) if flag.name == "few_steps"), None)
    if short is not None:
        return f"the baseline did not run as it did before: {short.text}; {ANEW}"
    recent = own[-SPOILT_BASELINES:]
    flags = [flag for run in recent for flag in spoiling(run)]
    if len(recent) == SPOILT_BASELINES and flags and not any(_is_clean(run) for run in recent):
        return f"the last {SPOILT_BASELINES} runs of the baseline are flagged: {flags[-1].text}"
    return None
