"""The figures of the TensorBoard plugin in report.json, against what its last release computed of its own samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.api import ReadOptions, open_run
from tests import gpu_traces
from tests.analyze.shared_traces import PRESENT, SHARED, needs_traces, run_of

ORACLE = SHARED / "oracles" / "tb_plugin.json"
GPU = {
    "GPU Utilization": "utilization_pct",
    "Est. SM Efficiency": "sm_efficiency_pct",
    "Est. Achieved Occupancy": "achieved_occupancy_pct",
    "Kernel Time using Tensor Cores": "tensor_core_pct",
}
EXPECTED: dict[str, Any] = json.loads(ORACLE.read_text()) if PRESENT else {}


def close(expected: float) -> Any:
    """Within 1 µs or 0.1 %, whichever is more."""
    return pytest.approx(expected, rel=1e-3, abs=1)


def found(key: str) -> dict[str, Any]:
    run, worker, span = key.split("/")
    report = run_of(f"kineto_tb_plugin/{run}").report()
    view: dict[str, Any] = report.views["tensorboard"]["workers"][worker]["spans"][span.removeprefix("span")]
    return view


@needs_traces
@pytest.mark.parametrize("key", EXPECTED)
def test_steps_and_their_parts_are_the_plugins(key: str) -> None:
    expected, view = EXPECTED[key], found(key)
    assert view["average_step_us"] == close(expected["average_step_us"])
    assert view["partition_us"] == {part: close(us) for part, us in expected["partition_us"].items()}
    assert [row["step"] for row in view["steps"]] == [row["step"] for row in expected["steps"]]
    for row, wanted in zip(view["steps"], expected["steps"], strict=True):
        assert row == {part: us if part == "step" else close(us) for part, us in wanted.items()}


@needs_traces
@pytest.mark.parametrize("key", EXPECTED)
def test_gpu_summaries_are_the_plugins(key: str) -> None:
    expected, view = EXPECTED[key]["gpu"], found(key)
    assert list(view["gpu"]) == ["0"]
    for name, figure in GPU.items():
        # the plugin rounds to two digits
        assert view["gpu"]["0"][figure] == pytest.approx(float(expected[name].split()[0]), abs=0.0101)


@needs_traces
@pytest.mark.parametrize("key", EXPECTED)
def test_operators_are_the_plugins(key: str) -> None:
    rows = {row["name"]: row for row in found(key)["operators"]}
    for wanted in EXPECTED[key]["top_operators"]:
        row = rows[wanted["name"]]
        assert row == {name: close(value) if name.endswith("_duration") else value for name, value in wanted.items()}


@needs_traces
@pytest.mark.parametrize("key", EXPECTED)
def test_kernels_are_the_plugins(key: str) -> None:
    rows = {row["Name"]: list(row.values()) for row in found(key)["kernels"]}
    for wanted in EXPECTED[key]["top_kernels"]:
        row = rows[wanted[0]]
        assert row[:3] == wanted[:3]
        assert row[3:7] == [close(us) for us in wanted[3:7]]
        assert row[7:] == pytest.approx(wanted[7:], rel=1e-3, abs=0.01)


def test_workers_of_two_runs_keep_their_folders_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        gpu_traces.write(tmp_path / name / "worker0.pt.trace.json")
    report = open_run(tmp_path, options=ReadOptions(cache=False)).report()
    assert sorted(report.views["tensorboard"]["workers"]) == ["one/worker0", "two/worker0"]
