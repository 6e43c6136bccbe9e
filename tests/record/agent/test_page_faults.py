"""Page faults of each step: what the process counted between the edges of the step, or null."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope.record.agent.step_readings import READINGS_LIMIT, PageFaults
from tests.record.agent.fake_agent import row
from tests.record.agent.processes import run_script

UNIT = 2000  # pages, in the script


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.parametrize("kind", ["loader", "optimizer", "marks"])
def test_a_step_has_the_faults_between_its_edges(tmp_path: Path, kind: str):
    outcome = run_script(tmp_path, "page_faults.py", kind)
    assert outcome.status == 0, outcome.stderr
    rows = [row for row in outcome.steps() if row["kind"] == "train"]
    assert len(rows) >= 29
    later = [row for row in rows if row["step"] >= 5]  # what is loaded with the first steps is behind us
    assert all(row["major_faults"] is not None for row in later)
    units = [row["minor_faults"] // UNIT for row in later]
    assert set(units) == {1, 2, 3}
    assert all(following == unit % 3 + 1 for unit, following in pairwise(units))


class Counter:
    """Counts 10 minor faults and 1 major one with each reading."""

    def __init__(self) -> None:
        self.readings = 0

    def __call__(self) -> SimpleNamespace:
        self.readings += 1
        return SimpleNamespace(ru_minflt=10 * self.readings, ru_majflt=self.readings)


def test_an_edge_that_was_not_read_leaves_null():
    faults = PageFaults(lambda: 0, Counter())
    for moment in (100, 150, 200, 300, 500):
        faults.note(moment)
    filled = faults.fill([row(0, start, 100) for start in (100, 200, 300, 400)])
    assert [(each.minor_faults, each.major_faults) for each in filled] == [(20, 2), (10, 1), (None, None), (None, None)]
    assert [each.minor_faults for each in faults.fill([row(0, 100, 400)])] == [None]  # forgotten with the rows before


def test_readings_nobody_asks_for_do_not_pile_up():
    faults = PageFaults(lambda: 0, Counter())
    for moment in range(3 * READINGS_LIMIT):
        faults.note(moment)
    (filled,) = faults.fill([row(0, 3 * READINGS_LIMIT - 2, 1)])
    assert filled.minor_faults == 10
    assert len(faults._readings) == 1
