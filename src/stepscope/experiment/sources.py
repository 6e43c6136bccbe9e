"""Candidates of two sources: those that the user named come first, then those that the findings of a run suggest."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from stepscope.experiment import propose
from stepscope.experiment.baseline import Baseline
from stepscope.experiment.propose import Options, Proposals
from stepscope.model.experiment import Candidate


def proposals(base: Baseline, named: Sequence[Candidate], *, threshold: float, width: float) -> Proposals:
    """What to try on the run `base`. Knobs that no finding names are proposed only where there is nothing else."""
    general = propose.NEVER if named else propose.IF_NONE
    found = propose.of_baseline(base, Options(threshold=threshold, width=width, general=general))
    known = {frozenset(candidate.knobs) for candidate in named}
    more = (candidate for candidate in found.candidates if frozenset(candidate.knobs) not in known)
    return replace(
        found,
        candidates=(*propose.with_ceilings(named, base), *more),
        notes=() if named else found.notes,
    )
