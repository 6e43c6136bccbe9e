"""A screening within an experiment: its design put into the plan, and its runs judged once all are made."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from stepscope.experiment import schedule, screen
from stepscope.experiment.journal import Made
from stepscope.experiment.plan import SCREEN, Plan, Screened
from stepscope.model.comparison import Measure
from stepscope.model.experiment import Skipped

NOT_APPLIED = "knob_not_applied"


def designed(plan: Plan) -> Plan:
    """The plan with the runs that tell its candidates' main effects; with fewer than two it pairs them as they are."""
    chosen, skipped = screen.factors(plan.candidates)
    if len(chosen) < 2:
        return replace(plan, notes=(*plan.notes, "Fewer than two knobs are left, so nothing is screened."))
    return replace(
        plan,
        candidates=chosen,
        skipped=(*plan.skipped, *skipped),
        design=screen.design(len(chosen), seed=plan.protocol.seed or 0),
    )


def judged(plan: Plan, made: Sequence[Made]) -> Screened:
    """The main effects, and the combination that pairs are to confirm. A knob that was not applied is left out."""
    last: dict[tuple[int, int | None], Made] = {}
    for run in made:
        if run.slot.phase == SCREEN:
            last[run.slot.block, run.slot.candidate] = run
    refused: dict[int, str] = {}
    rows: list[tuple[tuple[bool, ...], int, Measure]] = []
    for (block, row), run in last.items():
        if run.measure is None or run.failure is not None or schedule.spoiling(run) - {NOT_APPLIED} or row is None:
            continue
        refused.update(_refused(plan, run.measure))
        rows.append((plan.design[row], block, run.measure))
    kept = [number for number in range(len(plan.candidates)) if number not in refused]
    chosen = [plan.candidates[number] for number in kept]
    found = screen.screened(chosen, [(tuple(levels[n] for n in kept), block, one) for levels, block, one in rows])
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
