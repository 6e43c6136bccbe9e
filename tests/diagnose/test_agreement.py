"""Sources that tell the same quantity differently are shown, and lower the confidence of what stands on them."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.diagnose import diagnose, weigh
from stepscope.model import Analysis, Finding, WindowFacts
from stepscope.model.machine import RanksFacts, RankWork
from stepscope.model.sampled import RankLines, SampledViews
from tests.analyze.scenes import loader_tables
from tests.diagnose.test_causes import at, finding, scene
from tests.records import replace

LEVELS = ("low", "medium", "high")


def loader(**by_phase: int) -> Finding:
    """The loader's finding of a run that waits 60 % of its steps, as sampled stacks see the phases."""
    analysis = analyze(loader_tables())
    assert analysis.stacks is not None
    analysis = replace(analysis, stacks=replace(analysis.stacks, by_phase=by_phase))
    return next(one for one in diagnose(analysis).findings if one.rule == "input.loader_bound")


def test_sources_that_agree_raise_nothing_and_say_nothing() -> None:
    found = loader(data_wait=580, forward=420)
    assert found.disagreements == ()
    assert found.confidence == "high"


def test_a_sampled_wait_far_from_the_measured_one_is_said() -> None:
    found = loader(data_wait=440, forward=560)
    (said,) = found.disagreements
    assert (said.value, said.other, said.unit) == (pytest.approx(0.6), pytest.approx(0.44), "fraction")
    assert "steps.jsonl" in said.source
    assert "1,000 samples" in said.other_source
    assert found.confidence == "medium"


def window(ratio: float | None) -> WindowFacts:
    return WindowFacts(0, "trace-0", "stepscope", 4, False, "", None, None, None, ratio)


def stepped(**changes: Any) -> Analysis:
    return replace(analyze(loader_tables()), **changes)


def judged(analysis: Analysis, *findings: Finding) -> tuple[Finding, ...]:
    return weigh.weighed(findings, analysis)


@pytest.mark.parametrize(("ratio", "said"), [(1.3, 0), (None, 0), (2.4, 1)])
def test_a_window_whose_steps_are_slowed(ratio: float | None, said: int) -> None:
    shares = finding("launch.short_kernels", 5.0, at(30), confidence="medium")
    other = finding("io.blocking_in_step", 5.0, at(30))
    found, untouched = judged(stepped(windows=(window(ratio),)), shares, other)
    assert len(found.disagreements) == said
    assert found.confidence == LEVELS[1 - said]
    assert untouched is other


def ranks(waited_ms: float) -> RanksFacts:
    work = tuple(RankWork(rank, 40.0, 20.0, 20.0, {"forward": 20.0}, 8.0) for rank in (0, 1))
    return RanksFacts(work, 30, ("backward",), "DDP", 1, 10.0, 9.0, waited_ms, 1.0, {"forward": 10.0})


@pytest.mark.parametrize(("waited_ms", "said"), [(9.5, 0), (5.5, 1), (15.0, 1)])
def test_ranks_that_wait_for_another_time_than_one_takes_longer(waited_ms: float, said: int) -> None:
    """The rule lowers its own confidence for it, so it is only shown."""
    late = finding("communication.straggler", 8.0, at(30), confidence="medium")
    (found,) = judged(scene(ranks=ranks(waited_ms)), late)
    assert len(found.disagreements) == said
    assert found.confidence == "medium"


def test_several_disagreements_lower_confidence_once() -> None:
    lines = RankLines("ms per step", (0, 1), (), 0, None, (1,), None, "", "stacks.jsonl")
    sampled = SampledViews((), {}, (), None, lines, {})
    late = finding("communication.straggler", 5.0, at(30))
    weak = finding("sync.host_waits", 5.0, at(30), confidence="low")
    late, weak = judged(stepped(ranks=ranks(15.0), sampled=sampled, windows=(window(3.0),)), late, weak)
    assert [said.unit for said in late.disagreements] == ["ms", ""]
    assert (late.disagreements[1].value, late.disagreements[1].other) == (1, 0)
    assert (late.confidence, weak.confidence) == ("medium", "low")
