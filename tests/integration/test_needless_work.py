"""A step that validates in line, copies the model and computes a layer twice: each is told with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import PYTHON, SCRIPTS, Recorded, line_of, record

pytestmark = [pytest.mark.process, pytest.mark.torch]

SCRIPT = SCRIPTS / "needless_work.py"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("needless") / "run", [PYTHON, str(SCRIPT)], options=["--rate", "50"])


def finding(recorded: Recorded, rule: str) -> dict[str, Any]:
    assert recorded.status == 0, recorded.text
    (found,) = [one for one in recorded.findings if one["rule"] == rule]
    assert Path(found["where"][0]["file"]) == SCRIPT
    return dict(found)


def test_the_validation_is_told_with_its_line(recorded: Recorded) -> None:
    found = finding(recorded, "host.evaluation_in_step")
    place = found["where"][0]
    assert place["function"] == "train"
    # the line where samples tell it, else the function's first
    assert place["line"] in (line_of(SCRIPT, "scores = first(held)"), line_of(SCRIPT, "def train"))
    assert "no_grad" in found["fix"]
    assert {one["metric"]: one["value"] for one in found["evidence"]}["calls per step that no backward pass reads"] == 1


@pytest.mark.thorough
def test_the_copy_is_told_with_its_line(recorded: Recorded) -> None:
    found = finding(recorded, "host.model_copied_in_step")
    assert found["where"][0]["line"] == line_of(SCRIPT, "copy.deepcopy(model)")


def test_what_is_computed_again_is_told_with_its_line(recorded: Recorded) -> None:
    found = finding(recorded, "compute.recompute")
    assert found["where"][0]["line"] in (line_of(SCRIPT, "checkpoint(first, inputs"), line_of(SCRIPT, "def train"))
    assert found["confidence"] != "high"  # nothing tells how much memory is free
