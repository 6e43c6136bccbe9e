"""Which run comes next: a pure function of the plan and of the runs that were made.

A block holds the baseline and every candidate that is not decided, once; the order is turned round in every second
block, so that what drifts over the hours does not speak for one side. The baseline stands in the middle of its block,
which keeps every pair close together. A run that a passing trouble has spoilt is made again at once, at most twice.

Since nothing but the finished runs decides, an experiment that was killed goes on exactly where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from stepscope.comparison.flags import with_flags_of_set
from stepscope.experiment.journal import Made
from stepscope.experiment.plan import PAIRS, SCREEN, Plan, Screened, Slot, settings_of
from stepscope.model.comparison import Measure
from stepscope.model.experiment import Candidate
from stepscope.schema import Knob

ATTEMPTS = 3  # runs for one place in a block: the run, and two more where it was spoilt
SCREEN_BLOCKS = 2  # times every row of a design is run, once in either order
EXTRA_BLOCKS = 3  # beyond the most pairs, for blocks whose pairs were spoilt
SPOILT_BASELINES = 6  # runs of the baseline in a row, after which the machine is not going to be quiet
BASELINE = "baseline"
AGAIN = "baseline again"

# Flags that another run would get as well: the change itself is not there, or the command cannot do it.
LASTING = frozenset({"knob_not_applied", "run_failed", "few_steps", "profiled", "cut_differently"})

Pair = tuple[Measure, Measure]  # baseline, candidate
Judge = Callable[[Candidate, Sequence[Pair]], bool]  # whether these pairs are enough
Wanted = Callable[[Candidate, Sequence[Pair]], int]  # about how many more there will be


class Place(Struct, frozen=True):
    """Where a run belongs: see `Slot`."""

    phase: str
    block: int
    candidate: int | None


def candidates(plan: Plan, screened: Screened | None) -> tuple[Candidate, ...]:
    """What is paired with the baseline: the plan's candidates, or the one that a screening has left."""
    if not plan.design:
        return plan.candidates
    return (screened.candidate,) if screened is not None and screened.candidate is not None else ()


def next_slot(plan: Plan, screened: Screened | None, made: Sequence[Made], enough: Judge) -> Slot | None:
    """The run to make now, None when there is none left (or a screening has to be judged first)."""
    if plan.design and screened is None:
        return _next_of_screening(plan, made)
    tried = candidates(plan, screened)
    paired = [run for run in made if run.slot.phase == PAIRS]
    latest = max((run.slot.block for run in paired), default=0)
    for block in range(latest, plan.protocol.most_pairs + EXTRA_BLOCKS):
        places = _block(tried, block, paired, enough)
        if not places:
            return None
        for place in places:
            slot = _slot_in(plan, tried, place, paired)
            if slot is not None:
                return slot
    return None


def _block(tried: Sequence[Candidate], block: int, paired: Sequence[Made], enough: Judge) -> list[Place]:
    """The places of a block in their order, empty when all candidates are decided."""
    earlier = [run for run in paired if run.slot.block < block]
    active = [
        number
        for number, candidate in enumerate(tried)
        if given_up(number, earlier) is None and not enough(candidate, pairs_of(number, earlier))
    ]
    if all(given_up(number, paired) is not None for number in active):
        return []
    half = len(active) // 2
    order: list[int | None] = [*active[:half], None, *active[half:]]
    return [Place(PAIRS, block, number) for number in (reversed(order) if block % 2 else order)]


def _slot_in(plan: Plan, tried: Sequence[Candidate], place: Place, paired: Sequence[Made]) -> Slot | None:
    """The run that `place` still lacks, None when it has what it needs or its candidate is given up."""
    if place.candidate is not None and given_up(place.candidate, paired) is not None:
        return None
    attempt = _attempt(place, paired)
    if attempt is None:
        return None
    own = tried[place.candidate] if place.candidate is not None else None
    label = (own.name or AGAIN) if own is not None else BASELINE
    knobs = settings_of(plan.protocol, own.knobs if own is not None else ())
    return Slot(place.phase, place.block, place.candidate, attempt, knobs, label)


def _attempt(place: Place, made: Iterable[Made]) -> int | None:
    """The number of the next attempt, None when the last one counts or there were enough."""
    tries = _at(place, made)
    if tries and (len(tries) >= ATTEMPTS or not _may_pass(tries[-1])):
        return None
    return len(tries)


def with_flags_of_pairs(made: Sequence[Made]) -> tuple[Made, ...]:
    """The runs with the flags that only the other runs of the pairs make visible."""
    sides: dict[int | None, list[int]] = {}
    for place, run in enumerate(made):
        if run.slot.phase == PAIRS and run.measure is not None:
            sides.setdefault(run.slot.candidate, []).append(place)
    measures = {place: run.measure for place, run in enumerate(made) if run.measure is not None}
    flagged = with_flags_of_set(*([measures[place] for place in places] for places in sides.values()))
    for places, own in zip(sides.values(), flagged, strict=True):
        measures.update(zip(places, own, strict=True))
    return tuple(replace(run, measure=measures.get(place)) for place, run in enumerate(made))


def _may_pass(run: Made) -> bool:
    """Whether the run was spoilt by something that may be over in the next one."""
    if run.failure is not None:
        return run.slot.candidate is None and run.slot.phase == PAIRS  # a candidate that fails is not run again
    names = spoiling(run)
    return bool(names) and not names & LASTING


def spoiling(run: Made) -> frozenset[str]:
    """Names of the flags of a run that withhold a verdict."""
    return (
        frozenset(flag.name for flag in run.measure.flags if flag.withholds) if run.measure is not None else frozenset()
    )


def is_clean(run: Made) -> bool:
    """Whether a verdict may rest on the run."""
    return run.measure is not None and run.failure is None and not spoiling(run)


def given_up(number: int, paired: Sequence[Made]) -> str | None:
    """Why a candidate is not run again before its pairs are enough; None while it is in the race."""
    own = [run for run in paired if run.slot.candidate == number]
    for run in own:
        if run.failure is not None:
            return run.failure
        lasting = spoiling(run) & LASTING
        if lasting and run.measure is not None:
            return next(flag.text for flag in run.measure.flags if flag.name in lasting)
    if len(own) >= ATTEMPTS and not any(is_clean(run) for run in own):
        flags = [flag for run in own if run.measure is not None for flag in run.measure.flags if flag.withholds]
        return f"each of its {len(own)} runs is flagged: {flags[-1].text}" if flags else "none of its runs has steps"
    return None


def pairs_of(number: int, paired: Sequence[Made]) -> tuple[Pair, ...]:
    """(baseline, candidate) of every block in which both have been measured, flagged or not: the last of either."""
    found = []
    for block in sorted({run.slot.block for run in paired}):
        sides = [_last(Place(PAIRS, block, side), paired) for side in (None, number)]
        if sides[0] is not None and sides[1] is not None:
            found.append((sides[0], sides[1]))
    return tuple(found)


def replaced(number: int | None, paired: Sequence[Made]) -> tuple[Measure, ...]:
    """Measures of a side that a later attempt in the same block took the place of."""
    runs = [run for run in paired if run.slot.candidate == number and run.measure is not None]
    last = {run.slot.block: run for run in runs}
    return tuple(run.measure for run in runs if last[run.slot.block] is not run and run.measure is not None)


def trouble(made: Sequence[Made]) -> str | None:
    """Why it is no use to go on: the baseline itself cannot be run, or is never undisturbed."""
    own = [run for run in made if run.slot.phase == PAIRS and run.slot.candidate is None]
    failed = own[-ATTEMPTS:]
    if len(failed) == ATTEMPTS and all(run.failure is not None for run in failed):
        return f"the baseline failed {ATTEMPTS} times in a row: {failed[-1].failure}"
    recent = own[-SPOILT_BASELINES:]
    if len(recent) == SPOILT_BASELINES and not any(is_clean(run) for run in recent):
        flags = [flag for run in recent if run.measure is not None for flag in run.measure.flags if flag.withholds]
        if flags:
            return f"the last {SPOILT_BASELINES} runs of the baseline are flagged: {flags[-1].text}"
    return None


def runs_left(plan: Plan, screened: Screened | None, made: Sequence[Made], wanted: Wanted) -> int:
    """About how many runs are to come, if no further one is spoilt: what progress shows."""
    if plan.design and screened is None:
        done = sum(run.slot.phase == SCREEN for run in made)
        return max(0, SCREEN_BLOCKS * len(plan.design) - done) + 2 * plan.protocol.least_pairs
    paired = [run for run in made if run.slot.phase == PAIRS]
    missing = {
        number: wanted(candidate, pairs_of(number, paired))
        for number, candidate in enumerate(candidates(plan, screened))
        if given_up(number, paired) is None
    }
    block = max((run.slot.block for run in paired), default=0)
    sides = {run.slot.candidate for run in paired if run.slot.block == block}
    # runs of the block in progress that are not part of a pair yet: they need not be made
    alone = any(missing.get(number) for number in missing if number not in sides) if None in sides else len(sides)
    return max(0, sum(missing.values()) + max(missing.values(), default=0) - int(alone))


def _next_of_screening(plan: Plan, made: Sequence[Made]) -> Slot | None:
    for block in range(SCREEN_BLOCKS):
        rows = range(len(plan.design))
        for row in reversed(rows) if block % 2 else rows:
            place = Place(SCREEN, block, row)
            attempt = _attempt(place, made)
            if attempt is not None:
                chosen = _knobs_of(plan, plan.design[row])
                label = " + ".join(f"{knob.knob}={knob.value}" for knob in chosen) or BASELINE
                return Slot(SCREEN, block, row, attempt, settings_of(plan.protocol, chosen), label)
    return None


def _knobs_of(plan: Plan, levels: Sequence[bool]) -> tuple[Knob, ...]:
    return tuple(knob for candidate, on in zip(plan.candidates, levels, strict=True) if on for knob in candidate.knobs)


def _at(place: Place, made: Iterable[Made]) -> list[Made]:
    return [run for run in made if Place(run.slot.phase, run.slot.block, run.slot.candidate) == place]


def _last(place: Place, made: Iterable[Made]) -> Measure | None:
    measures = [run.measure for run in _at(place, made) if run.failure is None and run.measure is not None]
    return measures[-1] if measures else None
