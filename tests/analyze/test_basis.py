"""Which steps figures stand on: those that the script's own profiler recorded whole, and those paid once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.model import Analysis
from tests.builders import MS, T0, step_rows
from tests.run_folders import make_run_folder

STEPS, FIRST, ACTIVE, STOP_MS = 40, 10, 15, 2000
OPERATORS = 3  # of each step
TEN: dict[str, Any] = {"data_wait_ms": 1, "forward_ms": 3, "backward_ms": 4, "optimizer_ms": 1, "other_ms": 1}


def _own_profiler(tmp_path: Path) -> Analysis:
    """Steps of 10 ms; the script's profiler records `ACTIVE` of them whole and stops in the next one."""
    rows = [dict(row) for row in step_rows(STEPS, **TEN, fetches=0)]
    for row in rows[FIRST : FIRST + ACTIVE + 1]:
        row["in_window"] = True
    rows[FIRST + ACTIVE]["data_wait_ns"] = STOP_MS * MS
    for row in rows:
        row.pop("start_ns", None)
        row.pop("wall_ns", None)
    events = []
    for number in range(FIRST, FIRST + ACTIVE):
        start = (T0 + number * 10 * MS) / 1e3
        mark = {"ph": "X", "pid": 1, "tid": 1, "ts": start + 20, "dur": 9960, "name": f"ProfilerStep#{number}"}
        events.append({**mark, "cat": "user_annotation"})
        for at in range(OPERATORS):
            call = {"ph": "X", "pid": 1, "tid": 1, "ts": start + 1000 * (at + 1), "dur": 500, "cat": "cpu_op"}
            events.append({**call, "name": "aten::mm", "args": {}})
    trace = tmp_path / "own.pt.trace.json"
    trace.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": 0, "traceEvents": events}))
    told = {"kind": "user_trace", "path": str(trace), "step": FIRST + ACTIVE, "time_ns": T0 + 400 * MS}
    folder = make_run_folder(tmp_path, steps=rows, events=[told])
    return api.open_run(folder, options=api.ReadOptions(cache=False)).analysis


def test_figures_of_the_scripts_own_profiler_are_divided_by_the_steps_it_recorded_whole(tmp_path: Path) -> None:
    found = _own_profiler(tmp_path)
    (window,) = found.windows
    assert window.owner == "user"
    assert window.steps == ACTIVE
    assert found.profiled is not None
    assert found.profiled.steps == ACTIVE
    assert found.views is not None
    assert [(row.name, row.calls_per_step, row.host_total_ns_per_step) for row in found.views.operators] == [
        ("aten::mm", OPERATORS, OPERATORS * 500_000)
    ]


def test_the_step_in_which_it_stops_is_no_profiled_one_and_is_paid_once(tmp_path: Path) -> None:
    found = _own_profiler(tmp_path)
    (steps,) = found.steps
    assert steps.excluded == {"profiler": 1, "warmup": 1, "window": ACTIVE}
    assert steps.mean_ms == pytest.approx(10)
    assert found.windows[0].overhead_ratio == pytest.approx(1, rel=0.01)
    assert found.fixed.windows_s == pytest.approx(STOP_MS / 1e3, rel=0.01)
    assert found.profiled is not None
    assert found.profiled.mean_ms == pytest.approx(10, rel=0.01)
