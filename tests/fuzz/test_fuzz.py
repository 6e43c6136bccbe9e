"""Some of the cases of `make fuzz`, in processes of their own as there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import pool, special

pytestmark = pytest.mark.process


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "cases", [range(40), pytest.param(range(40, 1000), marks=pytest.mark.thorough)], ids=["some", "more"]
)
def test_damaged_inputs_are_read_or_refused(tmp_path: Path, cases: range) -> None:
    outcome = pool.run(cases, tmp_path, workers=1)
    assert not outcome.bad, outcome.text()
    assert outcome.counts["report"] > len(cases) / 2  # most are damaged little
    assert outcome.counts["refused"] > len(cases) / 20
    assert sum(outcome.counts.values()) == len(cases)


@pytest.mark.thorough
def test_pipes_devices_holes_and_bombs_are_read_or_refused(tmp_path: Path) -> None:
    outcome = pool.run(range(-len(special.CASES), 0), tmp_path)
    assert not outcome.bad, outcome.text()
    assert sum(outcome.counts.values()) == len(special.CASES) == 111
