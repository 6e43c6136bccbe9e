"""What came of an experiment so far: the runs that were made, laid against each other and judged together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from stepscope.comparison.outcomes import corrected, outcome
from stepscope.experiment import noise, schedule, screening
from stepscope.experiment.journal import Made, State
from stepscope.experiment.plan import PAIRS, PILOT, Plan, Request
from stepscope.experiment.script_edits import edits
from stepscope.experiment.stopping import alpha_after
from stepscope.model.comparison import UNDECIDED, VOID, Outcome, Verdict
from stepscope.model.experiment import Candidate, Experiment, Noise, Tried


class Frame(Struct, frozen=True, kw_only=True):
    """What does not come from the runs. `repeat` is the line that makes the experiment again."""

    request: Request
    folder: str
    repeat: str
    notes: tuple[str, ...] = ()


def experiment(frame: Frame, plan: Plan, state: State, *, finished: bool, stopped: str | None = None) -> Experiment:
    """`experiment.json` of what has been made so far. `stopped` says why it ended early, in words."""
    paired = [run for run in schedule.with_flags_of_pairs(state.made) if run.slot.phase == PAIRS]
    candidates = schedule.candidates(plan, state.screened)
    outcomes = _outcomes(plan, candidates, paired)
    tried = tuple(
        _tried(frame, plan, candidate, found, [run for run in paired if run.slot.candidate == number])
        for number, (candidate, found) in enumerate(zip(candidates, outcomes, strict=True))
    )
    screened = state.screened
    if screened is None and plan.design and stopped is not None:  # what the runs made so far tell
        screened = replace(screening.judged(plan, state.made), candidate=None)
    return Experiment(
        protocol=plan.protocol,
        baseline=tuple(run.measure for run in paired if run.slot.candidate is None and run.measure is not None),
        tried=tried,
        skipped=(*plan.skipped, *(screened.skipped if screened is not None else ())),
        effects=screened.effects if screened is not None else (),
        noise=_noise(frame.request, plan, outcomes),
        repeat=frame.repeat,
        finished=finished,
        stopped=stopped,
        runs=len(state.made),
        wall_s=state.wall_s,
        by_hand=plan.by_hand,
        notes=(*plan.notes, *frame.notes),
        source=frame.request.source,
        folder=frame.folder,
        cwd=frame.request.cwd,
    )


def _outcomes(plan: Plan, candidates: Sequence[Candidate], paired: Sequence[Made]) -> list[Outcome]:
    protocol = plan.protocol
    found = []
    for number, candidate in enumerate(candidates):
        one = outcome(
            candidate.knobs,
            schedule.pairs_of(number, paired),
            threshold=protocol.threshold,
            width=protocol.width,
            loss_band=protocol.loss_band,
            candidates=len(candidates),
        )
        others = schedule.replaced(number, paired)
        found.append(replace(one, left_out=(*one.left_out, *others)) if others else one)
    alpha = alpha_after(least=protocol.least_pairs, most=protocol.most_pairs)
    judged = corrected(found, threshold=protocol.threshold, width=protocol.width, alpha=alpha)
    return [_in_words(plan, one, number, paired) for number, one in enumerate(judged)]


def _in_words(plan: Plan, found: Outcome, number: int, paired: Sequence[Made]) -> Outcome:
    """The outcome with the verdict of a candidate that was given up, or not run yet."""
    reason = schedule.given_up(number, paired)
    if reason is not None and (found.verdict.word != VOID or not found.pairs):
        return replace(found, verdict=Verdict(VOID, f"void: {reason}"))
    if not schedule.pairs_of(number, paired):
        return replace(
            found, verdict=Verdict(UNDECIDED, "undecided: not run yet", pairs_needed=plan.protocol.least_pairs)
        )
    return found


def _tried(frame: Frame, plan: Plan, candidate: Candidate, found: Outcome, made: Sequence[Made]) -> Tried:
    runs = [run.measure for run in made if run.measure is not None]
    applied = tuple(
        dict.fromkeys(knob for run in runs for knob in run.knobs)
    )  # each said once however many runs say it
    own = {knob.knob for knob in candidate.knobs}
    return Tried(
        candidate=candidate,
        outcome=found,
        applied=tuple(each for each in applied if each.knob in own),
        change=edits(
            candidate.knobs,
            applied,
            command=plan.protocol.command,
            cwd=frame.request.cwd,
            settings=next((run.settings for run in runs if run.settings is not None), None),
        ),
    )


def _noise(request: Request, plan: Plan, outcomes: Sequence[Outcome]) -> Noise | None:
    if not request.itself:
        return plan.noise
    found = noise.of_outcome(outcomes[0] if outcomes else None)
    if plan.noise is None:
        return found
    return replace(found, settings=plan.noise.settings, unchanged=plan.noise.unchanged)


def pilot_of(state: State) -> Made | None:
    """The first run, where it was made and went well."""
    pilots = [run for run in state.made if run.slot.phase == PILOT and run.failure is None and run.measure is not None]
    return pilots[-1] if pilots else None
