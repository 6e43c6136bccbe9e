"""Findings say of which step they are a share, what can be gained, and when they overlap, in words that agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.diagnose.rule import based
from stepscope.model import Analysis, Diagnosis
from stepscope.report import document, sentences
from tests.report import fabricate


@pytest.fixture
def analysis(tmp_path: Path) -> Analysis:
    return fabricate.analysis(tmp_path)


def _finding(tmp_path: Path, **changes: Any) -> Any:
    return fabricate.finding(str(tmp_path / "train.py"), **changes)


def test_a_cost_above_the_step_names_the_step_it_is_of(analysis: Analysis, tmp_path: Path) -> None:
    found = based(_finding(tmp_path, cost_ms_per_step=776.0, share=0.5, basis="all", step_ms=1552.0), analysis)
    row = {"cost_ms_per_step": 776.0, "share": 0.5, "basis": found.basis, "step_ms": found.step_ms}
    assert sentences.cost(row) == "776 ms of 1,552 ms a step, 50 %"
    assert "all steps" in (sentences.basis(row) or "")


@pytest.mark.parametrize(("counted", "overlaps"), [(1.16, True), (0.9, False)])
def test_findings_of_more_than_the_step_say_so(analysis: Analysis, counted: float, overlaps: bool) -> None:
    report = document.build(analysis, Diagnosis((), (), counted_share=counted))
    said = sentences.overlap(report)
    assert (said is not None) == overlaps
    if overlaps:
        assert "116 %" in (said or "")
