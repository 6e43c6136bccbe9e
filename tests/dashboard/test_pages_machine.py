"""The pages on the system and the environment, as documents."""

from __future__ import annotations

from pathlib import Path

from stepscope import api
from tests import builders
from tests.builders import MS, T0, step_rows
from tests.dashboard.opened import OPTIONS, page, part, series
from tests.records import replace
from tests.run_folders import make_run_folder

# ------------------------------------------------------------------------------------------------------ system


def test_counters_are_shown_as_growth(tmp_path: Path) -> None:
    readings = [
        {"time_ns": T0 + second * 1000 * MS, "metrics": [["read_bytes", "bytes", second * 5e6, builders.PID, None]]}
        for second in (0, 1, 2, 4)
    ]
    readings.append({"time_ns": T0 + 5000 * MS, "metrics": [["read_bytes", "bytes", 0, builders.PID, None]]})
    run = api.open_run(make_run_folder(tmp_path, steps=step_rows(30), system=readings), options=OPTIONS)
    chart = part(page(run, "system"), "io")
    assert chart["series"][0]["values"] == [5e6, 5e6, 5e6]  # the counter that fell is left out
    assert chart["y"]["unit"] == "bytes_per_s"


def test_workers_are_summed_and_long_recordings_averaged(tmp_path: Path) -> None:
    workers = [
        {"pid": pid, "ppid": builders.PID, "role": "loader_worker", "time_ns": T0, "start_ns": T0, "command": "python"}
        for pid in (201, 202)
    ]
    root = {"pid": builders.PID, "ppid": 1, "role": "root", "time_ns": T0, "start_ns": T0, "command": "python train.py"}
    readings = [
        {
            "time_ns": T0 + second * 1000 * MS,
            "metrics": [["cpu_pct", "pct", 50.0, pid, None] for pid in (builders.PID, 201, 202)],
        }
        for second in range(2_000)
    ]
    folder = make_run_folder(tmp_path, steps=step_rows(30), system=readings, processes=[root, *workers])
    chart = part(page(api.open_run(folder, options=OPTIONS), "system"), "cpu")
    assert len(chart["x"]["values"]) <= 500
    assert set(series(chart)["loader workers"]) == {100.0}
    assert set(series(chart)["rank-0"]) == {50.0}


def test_a_range_of_steps_cuts_the_telemetry(small: api.Run) -> None:
    chosen = api.open_run(small.folder, options=replace(OPTIONS, steps=(4, 10)))
    found = page(chosen, "system", base=small, steps=(4, 10))
    whole = part(page(small, "system"), "cpu")["x"]["values"]
    assert part(found, "cpu")["x"]["values"] == whole[:2]
    assert len(part(found, "steps-over-time")["x"]["values"]) == 7
