"""What a run was started with to be compared: knobs, a seed, the loss of every step."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from stepscope.model.comparison import AppliedKnob

APPLIED, PARTLY, REFUSED = "applied", "partly", "not applied"


class TrialFacts(Struct, frozen=True):
    """Knobs as each process reported them, one entry for each place; those that no process reported are not applied.

    `losses` are (step, value) of the first rank that has any, in order of steps; of several backward passes in a step
    the mean. A value may be "not a number" or infinite. `skipped` counts entries of the recording that make no sense.
    """

    knobs: tuple[AppliedKnob, ...]
    losses: tuple[tuple[int, float], ...]
    seed: int | None
    losses_rank: int | None = None
    skipped: int = 0


def standing(reports: Sequence[AppliedKnob]) -> str:
    """What became of one knob by all reports of it: APPLIED, PARTLY (not at every place), or REFUSED.

    It has to be applied at some place of every rank. A refusal without a place is of the knob as a whole, whatever was
    reported before it.
    """
    applied = {report.rank for report in reports if report.applied}
    refused = [report for report in reports if not report.applied]
    if not applied or any(report.file is None or report.rank not in applied for report in refused):
        return REFUSED
    return PARTLY if refused else APPLIED
