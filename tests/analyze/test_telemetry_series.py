"""Telemetry over time: one axis, growth of counters, processes by what they are."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze.pictures.series import MAX_SUBJECTS, telemetry
from stepscope.engine import step_labels
from stepscope.model.timeline import Telemetry
from tests.builders import MS, PID, T0, make_tables, rank_info, step_rows

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


def test_without_readings_there_is_nothing() -> None:
    for system in ([], [reading(0, "no_such_metric", 1.0)], [reading(0, "cpu_pct", None, pid=PID)]):
        tables = make_tables(system=system)
        assert telemetry(tables, step_labels.label(tables), 100) is None


def test_counters_of_each_process_grow_by_themselves() -> None:
    system = [reading(at, "run_delay_ns", at * 1e8 * pid, pid=pid) for at in (0, 1, 3) for pid in (1, 2)]
    made = found(system, ranks=[rank_info(0, pid=1), rank_info(1, pid=2)])
    assert values(made) == {
        ("run_delay_share", "rank-0"): pytest.approx((0.1, 0.1)),
        ("run_delay_share", "rank-1"): pytest.approx((0.2, 0.2)),
    }


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
