"""Steps one by one: parts, distribution, the longest and what happened in them."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze.pictures import series
from stepscope.engine import step_labels
from tests.builders import MS, make_tables, step_rows


def rows(count: int = 40, **columns: Any) -> list[dict[str, Any]]:
    return step_rows(count, **columns)


def test_parts_sum_to_the_step() -> None:
    given = rows()
    given[7] = {**given[7], "wall_ns": 30 * MS}
    found = series.step_phases(step_labels.label(make_tables(steps=given)), "train", "rank-0", 100)
    sums = [sum(values[at] or 0 for values in found.parts_ms.values()) for at in range(len(found.steps))]
    assert sums == pytest.approx(found.wall_ms)
    assert found.parts_ms["unattributed"][7] == pytest.approx(20)


def test_steps_of_traces_have_no_parts() -> None:
    given = [{"step": n, "wall_ns": 10 * MS} for n in range(5)]
    found = series.step_phases(step_labels.label(make_tables(steps=given)), "train", "rank-0", 100)
    assert (found.parts_ms, found.total) == ({}, 5)


def test_every_stall_stays_when_steps_are_thinned() -> None:
    given = rows(3_000)
    stalls = (17, 1_500, 2_998)
    for at in stalls:
        given[at] = {**given[at], "wall_ns": 500 * MS}
    found = series.step_phases(step_labels.label(make_tables(steps=given)), "train", "rank-0", 60)
    assert len(found.steps) <= 60
    assert set(stalls) <= set(found.steps)
    assert found.total == 3_000


def test_events_of_a_step_are_named_and_odd_ones_survive() -> None:
    given = rows()
    given[20] = {**given[20], "wall_ns": 90 * MS}
    noted = [
        {"kind": "save", "path": "a.pt", "step": 20, "duration_ns": 30 * MS},
        {"kind": "gc", "step": 20, "duration_ns": 40 * MS},
        {"kind": "memory", "step": 20, "duration_ns": 80 * MS},
        {"kind": "region", "name": "short", "step": 20, "duration_ns": 1},
        {"kind": "save", "path": "other.pt", "step": 21, "duration_ns": 30 * MS},
        {"kind": "region", "step": 20, "duration_ns": 20 * MS, "data": "[not json"},
        {"kind": "region", "step": 20, "duration_ns": 10 * MS, "data": "[1]"},
    ]
    tables = make_tables(steps=given, journal=noted)
    first = series.longest(tables, step_labels.label(tables), "train", 1, ["rank-0"])[0]
    assert [(event.kind, event.name) for event in first.events] == [("gc", None), ("save", "a.pt"), ("region", None)]
