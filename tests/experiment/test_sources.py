"""What is tried where the user names candidates and a run has findings too."""

from __future__ import annotations

from stepscope.experiment.baseline import Baseline, Loss
from stepscope.experiment.plan import candidates_of
from stepscope.experiment.sources import proposals
from stepscope.schema import Knob

SLOW_LOADER = Baseline(
    losses=(
        Loss(
            "slow",
            "The loader is slow",
            "Use workers",
            0.6,
            (Knob("loader.num_workers", "2"), Knob("loader.pin_memory", "true")),
        ),
    ),
    devices=("cuda",),
)


def test_what_the_user_names_comes_first_once_and_with_its_ceiling() -> None:
    named = candidates_of(["gc=freeze", "loader.num_workers=2"])
    found = proposals(SLOW_LOADER, named, threshold=0.01, width=0.02)
    names = [candidate.name for candidate in found.candidates]
    assert names[:2] == ["gc=freeze", "loader.num_workers=2"]
    assert len(names) == len(set(names))
    ceilings = {candidate.name: candidate.ceiling for candidate in found.candidates}
    assert ceilings["gc=freeze"] is None
    assert ceilings["loader.num_workers=2"] == 0.6
    assert "loader.pin_memory=true" in names


def test_knobs_that_no_finding_names_are_for_when_there_is_nothing_else() -> None:
    healthy = Baseline(losses=(), devices=("cpu",))
    named = candidates_of(["gc=freeze"])
    found = proposals(healthy, named, threshold=0.01, width=0.02)
    assert [candidate.name for candidate in found.candidates] == ["gc=freeze"]
    assert found.notes == ()
    alone = proposals(healthy, (), threshold=0.01, width=0.02)
    assert alone.candidates
    assert alone.notes
