"""Windows, sites, processes, telemetry and regions."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.analyze import analyze
from tests.analyze.scenes import Trace, steps_with_window
from tests.builders import MS, PID, T0, make_tables, step_rows


def test_a_window_with_its_cost() -> None:
    window = {"kind": "window", "trace": "trace-0.pt.trace.json", "first_step": 10, "steps": 2, "bytes": 5000}
    window |= {"stop_duration_ns": 3 * MS, "export_duration_ns": 4 * MS, "confidence": "low", "reason": "short"}
    dropped = {"kind": "window", "trace": "trace-1.pt.trace.json", "status": "dropped"}
    theirs = {"kind": "user_trace", "path": "/logs/a.json"}
    ours, users = analyze(make_tables(steps=steps_with_window(), journal=[window, dropped, theirs])).windows
    assert (ours.owner, ours.steps, ours.low_confidence, ours.bytes) == ("stepscope", 2, True, 5000)
    assert (ours.stop_ms, ours.export_ms) == (3, 4)
    assert ours.overhead_ratio == pytest.approx(2)
    assert (users.owner, users.trace, users.export_ms) == ("user", "/logs/a.json", None)


@pytest.mark.parametrize(
    ("row", "reported", "remedy"),
    [
        ({}, True, None),
        ({"reported": False, "role": "other", "command": "python -I train.py"}, False, "-I"),
        ({"reported": False, "role": "other"}, False, "PYTHONPATH"),
        ({"reported": False, "role": "other", "torch": None}, True, None),
        ({"reported": False, "role": "loader_worker"}, True, None),
    ],
)
def test_silent_processes_get_a_remedy(row: dict[str, Any], reported: bool, remedy: str | None) -> None:
    (process,) = analyze(make_tables(processes=[row])).processes
    assert process.reported is reported
    assert process.remedy is None if remedy is None else remedy in (process.remedy or "")


def test_telemetry_during_training_only() -> None:
    def reading(at_ms: float, metric: str, value: float, pid: int | None = None) -> dict[str, Any]:
        return {"time_ns": T0 + round(at_ms * MS), "metric": metric, "value": value, "pid": pid}

    system = [
        reading(-500, "cpu_pct", 5, PID),
        reading(50, "cpu_pct", 80, PID),
        reading(150, "cpu_pct", 120, PID),
        reading(50, "cpu_pct", 40, PID + 1),
        reading(50, "cpu_pct", 30, PID + 2),
        reading(50, "migrations", 10, PID),
        reading(150, "migrations", 30, PID),
        reading(50, "cgroup_throttled_ns", 0),
        reading(150, "cgroup_throttled_ns", 2e9),
        reading(50, "load_1m", 3),
    ]
    workers = [{"pid": PID + i, "role": "loader_worker"} for i in (1, 2)]
    summary = analyze(make_tables(steps=step_rows(30), system=system, processes=workers)).system
    assert summary["rank_cpu_pct"] == pytest.approx(100)
    assert summary["workers_cpu_pct"] == pytest.approx(70)
    assert summary["rank_migrations_per_s"] == pytest.approx(200)
    assert summary["cgroup_throttled_s"] == pytest.approx(2)
    assert summary["load_1m"] == 3
    assert "gpu_util_pct" not in summary


def test_regions_from_the_journal_and_the_window() -> None:
    steps = steps_with_window()
    region = {"kind": "region", "name": "attention", "duration_ns": 3 * MS, "time_ns": T0}
    trace = Trace()
    for row in steps:
        if row["in_window"]:
            trace.add("aten::mm", row["start_ns"], MS, step=row["step"], category="cpu_op")
            for name in ("my range", "Optimizer.step#SGD.step", f"ProfilerStep#{row['step']}"):
                trace.add(name, row["start_ns"], MS, step=row["step"], category="user_annotation")
    journal = [{**region, "step": step} for step in (5, 6, 10)]  # 10 lies in the window
    regions = analyze(make_tables(steps=steps, journal=journal, events=trace.rows)).regions
    found = {region["name"]: region for region in regions}
    assert set(found) == {"attention", "my range"}
    assert found["attention"]["calls"] == 2
    assert found["attention"]["ms_per_step"] == pytest.approx(6 / 37)
    assert found["my range"]["calls_per_step"] == 1
