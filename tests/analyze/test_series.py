"""What is drawn over time: steps one by one, telemetry, and long series with fewer points."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analyze.pictures import series
from stepscope.analyze.pictures.series import MAX_SUBJECTS, pick, positions, telemetry
from stepscope.engine import step_labels
from stepscope.model.timeline import Telemetry
from tests.builders import MS, T0, make_tables, step_rows

NUMBERS = st.one_of(st.none(), st.floats(-1e9, 1e9), st.just(float("nan")))


@given(st.lists(NUMBERS, max_size=300), st.integers(4, 60))
def test_ends_and_extremes_stay_in_order_within_the_limit(values: list[float | None], limit: int) -> None:
    kept = positions(values, limit)

    assert kept == sorted(set(kept))
    assert len(kept) <= max(limit, 0)
    if values:
        assert (kept[0], kept[-1]) == (0, len(values) - 1)
    known = [value for value in values if value is not None and value == value]
    if known:
        shown = [value for value in pick(values, kept) if value is not None and value == value]
        assert (min(shown), max(shown)) == (min(known), max(known))


def rows(count: int = 40, **columns: Any) -> list[dict[str, Any]]:
    return step_rows(count, **columns)


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


SECOND = 1000 * MS


def reading(at: int, metric: str, value: float | None, **columns: Any) -> dict[str, Any]:
    return {"time_ns": T0 + at * SECOND, "metric": metric, "value": value, **columns}


def found(system: list[dict[str, Any]], *, limit: int = 100, **options: Any) -> Telemetry:
    between = options.pop("between", None)
    tables = make_tables(system=system, **options)
    made = telemetry(tables, step_labels.label(tables), limit, between)
    assert made is not None
    return made


def values(made: Telemetry) -> dict[tuple[str, str], tuple[float | None, ...]]:
    return {(one.metric, one.subject): one.values for one in made.series}


def test_too_many_subjects_are_counted_and_left_out() -> None:
    system = [reading(0, "gpu_util_pct", n, device=f"gpu:{n}") for n in range(MAX_SUBJECTS + 4)]
    made = found(system)
    assert (len(made.series), made.dropped) == (MAX_SUBJECTS, 4)
    assert [one.subject for one in made.series][:3] == ["gpu:0", "gpu:1", "gpu:2"]


def test_only_the_chosen_time_is_shown_with_its_steps() -> None:
    system = [reading(at, "load_1m", at) for at in range(10)]
    made = found(system, steps=step_rows(900), between=(T0 + 2 * SECOND, T0 + 4 * SECOND))
    assert values(made)["load_1m", "host-a"] == (2, 3, 4)
    assert (made.step_time_s[0], made.step_time_s[-1]) == pytest.approx((3, 5))
    assert made.step_process == "rank-0"
