"""The table of metrics in full: what is stored and what follows from steps, telemetry and the allocator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.analyze.views.select import Selection
from stepscope.errors import UsageError
from tests.builders import MS, PID, T0, step_rows
from tests.run_folders import make_run_folder, metrics_event

OPTIONS = api.ReadOptions(cache=False, keep=False)
START = T0 + 10 * MS
TIMES = [START + at * 10 * MS + MS for at in range(10)]


def rows(run: api.Run, **selected: Any) -> list[dict[str, Any]]:
    return list(run.table("metrics", Selection(**selected)).rows)


def points(run: api.Run, name: str, **selected: Any) -> list[tuple[int | None, float]]:
    return [(row["step"], row["value"]) for row in rows(run, name=f"^{name}$", **selected)]


@pytest.fixture
def run(tmp_path: Path) -> api.Run:
    steps = [{**row, "samples": None if at == 3 else 8} for at, row in enumerate(step_rows(10, start_ns=START))]
    for row in steps:
        row["forward_ns"] = None
    steps[9] |= {"kind": "eval"}
    steps[3] |= {"fetches": 2}
    steps[6] |= {"fetches": 2}
    gpu = [["gpu_power_w", "W", 200.0, None, "gpu:0"], ["gpu_power_w", "W", 100.0, None, "gpu:1"]]
    whole = [["busy_cores", "cores", 1.5, None, None], ["cpu_pct", "pct", 90.0, PID, None]]
    memory = {"kind": "memory", "device": "cuda:0", "allocated_bytes": 1, "peak_allocated_bytes": 7_000}
    events = [
        metrics_event(("train/loss", "log", TIMES[:3], [2.0, math.nan, -math.inf])),
        metrics_event(("perf/samples_per_s", "loader", TIMES[:1], [123.0])),
        metrics_event(("perf/batch_tokens", "loader", [TIMES[1], TIMES[5], TIMES[6]], [512.0, 256.0, 128.0])),
        {**memory, "time_ns": TIMES[4], "step": 4},
        {"kind": "memory", "time_ns": TIMES[5], "step": 5, "private_bytes": 5},
    ]
    system = [
        {"time_ns": START - 5 * MS, "metrics": whole},
        {"time_ns": START + 45 * MS, "metrics": [*whole, *gpu]},
    ]
    return api.open_run(make_run_folder(tmp_path, steps=steps, events=events, system=system), options=OPTIONS)


def test_what_steps_took_are_curves(run: api.Run) -> None:
    assert points(run, "perf/step_ms") == [(step, 10.0) for step in range(9)]
    assert points(run, "perf/eval/step_ms") == [(9, 10.0)]
    assert points(run, "perf/data_wait_ms", step=2) == [(2, 1.0)]
    assert points(run, "perf/forward_ms") == []  # no phase was told
    assert points(run, "perf/samples_per_s") == [(0, 123.0)]  # what is stored is not made again
    assert {row["source"] for row in rows(run, name="^perf/.*_ms")} == {"steps"}


def test_telemetry_is_laid_on_the_steps(run: api.Run) -> None:
    assert points(run, r"sys/gpu\.0\.power_w") == [(4, 200.0)]
    assert points(run, r"sys/gpu\.1\.power_w") == [(4, 100.0)]
    assert points(run, "sys/busy_cores") == [(None, 1.5), (4, 1.5)]  # the first before any step
    assert points(run, "sys/cpu_pct", worker="rank-0") == [(None, 90.0), (4, 90.0)]
    assert points(run, "sys/busy_cores", worker="rank-0") == []  # is the machine's
    assert points(run, r"sys/cuda\.0\.(peak_)?allocated_bytes") == [(4, 1.0), (4, 7_000.0)]
    assert points(run, "sys/private_bytes") == [(5, 5.0)]
    assert not rows(run, name="reserved")


def test_a_curve_in_a_line_counts_what_is_not_finite(run: api.Run) -> None:
    (loss,) = rows(run, name="loss", group="curve")
    assert (loss.points, loss.first, loss.last, loss.lowest, loss.highest) == (3, 2.0, 2.0, 2.0, 2.0)
    assert (loss.not_finite, loss.not_finite_step) == (2, 1)
    names = [row.name for row in rows(run, group="curve")]
    assert names[0] == "train/loss"
    assert len(names) == len(set(names))


def test_what_is_not_there_has_a_reason(run: api.Run) -> None:
    assert "--group curve" in str(run.table("metrics", Selection(name="nothing")).absent)
    with pytest.raises(UsageError, match="no such worker; there are rank-0"):
        run.table("metrics", Selection(worker="rank-7"))
    with pytest.raises(UsageError, match="not a regular expression"):
        run.table("metrics", Selection(name="("))
    with pytest.raises(UsageError, match="--span"):
        run.table("metrics", Selection(span=1))


def test_ranks_and_hosts_are_told_apart(tmp_path: Path) -> None:
    for rank, host in ((0, "a"), (1, "b")):
        reading = {"time_ns": START, "metrics": [["busy_cores", "cores", 1.0 + rank, None, None]]}
        events = [metrics_event(("loss", "log", TIMES[:1], [float(rank)]))]
        made = make_run_folder(
            tmp_path,
            rank=rank,
            host=host,
            pid=PID + rank,
            steps=step_rows(3, start_ns=START),
            events=events,
            system=[reading],
        )
    run = api.open_run(made, options=OPTIONS)
    assert [(row["rank"], row["value"]) for row in rows(run, name="^loss$")] == [(0, 0.0), (1, 1.0)]
    cores = {row["name"]: row["value"] for row in rows(run, name="busy_cores")}
    assert sorted(cores.values()) == [1.0, 2.0]
    assert all(name.startswith("sys/") and name.count("/") == 1 for name in cores)
