"""Findings say of which step they are a share, what can be gained, and when they overlap, in words that agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.diagnose.rule import based
from stepscope.model import Analysis, Diagnosis, Interval
from stepscope.report import document, sentences
from tests.records import replace
from tests.report import fabricate


@pytest.fixture
def analysis(tmp_path: Path) -> Analysis:
    return fabricate.analysis(tmp_path)


def _finding(tmp_path: Path, **changes: Any) -> Any:
    return fabricate.finding(str(tmp_path / "train.py"), **changes)


def test_a_share_of_the_headlines_step_is_of_steady_steps(analysis: Analysis, tmp_path: Path) -> None:
    mean = analysis.steps[0].mean_ms
    found = based(_finding(tmp_path, cost_ms_per_step=0.25 * mean, share=0.25, step_ms=mean), analysis)
    assert found.basis == "steady"


def test_a_cost_above_the_step_names_the_step_it_is_of(analysis: Analysis, tmp_path: Path) -> None:
    found = based(_finding(tmp_path, cost_ms_per_step=776.0, share=0.5, basis="all", step_ms=1552.0), analysis)
    row = {"cost_ms_per_step": 776.0, "share": 0.5, "basis": found.basis, "step_ms": found.step_ms}
    assert sentences.cost(row) == "776 ms of 1,552 ms a step, 50 %"
    assert "all steps" in (sentences.basis(row) or "")


def test_an_expectation_is_never_above_what_can_be_gained(analysis: Analysis, tmp_path: Path) -> None:
    given = _finding(tmp_path, gain_ceiling=0.4, expected_gain=Interval(0.3, 0.9))
    assert based(given, analysis).expected_gain == Interval(0.3, 0.4)


@pytest.mark.parametrize(
    ("low", "high", "ceiling", "said"),
    [
        (0.871, 0.874, 0.9, "87 % of the step expected, 90 % at most"),
        (0.0, 0.83, 0.83, "up to 83 % of the step expected, 83 % at most"),
        (0.2, 0.5, 0.83, "20 % to 50 % of the step expected, 83 % at most"),
    ],
)
def test_a_gain_says_no_figure_twice_and_no_range_from_nothing(
    low: float, high: float, ceiling: float, said: str
) -> None:
    row = {"gain_ceiling": ceiling, "share": ceiling, "expected_gain": {"low": low, "high": high}}
    assert sentences.gain(row) == said


def test_a_ceiling_above_the_cost_says_what_it_is() -> None:
    assert "upper bound" in sentences.gain({"gain_ceiling": 0.56, "share": 0.33, "expected_gain": None})
    assert "upper bound" not in sentences.gain({"gain_ceiling": 0.33, "share": 0.33, "expected_gain": None})


@pytest.mark.parametrize(("counted", "overlaps"), [(1.16, True), (0.9, False)])
def test_findings_of_more_than_the_step_say_so(analysis: Analysis, counted: float, overlaps: bool) -> None:
    report = document.build(analysis, Diagnosis((), (), counted_share=counted))
    said = sentences.overlap(report)
    assert (said is not None) == overlaps
    if overlaps:
        assert "116 %" in (said or "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"count": 178, "excluded": {"warmup": 14}}, "178 of 192 train steps are steady"),
        ({"count": 1, "excluded": {}}, "1 train step"),
        ({"count": 12, "excluded": {}}, "12 train steps"),
        (
            {"count": 144, "excluded": {"warmup": 4}, "ranks": (0, 1), "by_rank": (72, 72)},
            "72 of 74 train steps on each of 2 ranks are steady",
        ),
        (
            {"count": 141, "excluded": {"warmup": 4}, "ranks": (0, 1), "by_rank": (72, 69)},
            "141 of 145 train steps of 2 ranks together are steady",
        ),
    ],
)
def test_counts_say_how_many_of_how_many(analysis: Analysis, changes: dict[str, Any], said: str) -> None:
    steps = replace(analysis.steps[0], **changes)
    report = document.build(replace(analysis, steps=(steps,)), Diagnosis((), ()))
    assert report.steps is not None
    assert sentences.counted(report.steps) == said
