"""Simulated runs of many ranks are judged rightly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.analyze.ranks import judge
from stepscope.tables.reduced import Reduced, load

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPES = {
    "dp": {},
    "fsdp": {},
    "hsdp": {"shard": 4},
    "3d": {"tp": 2, "pp": 2, "microbatches": 4},
}
MORE = ("fsdp", "hsdp")


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks are not here")
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def _simulated(folder: Path, **settings: Any) -> tuple[Reduced, dict[str, Any]]:
    from ranks_simulated import simulate
    from ranks_simulated.scenario import Plant, Scenario

    plants = tuple(Plant(**plant) for plant in settings.pop("plants", ()))
    settings = {"hosts": 4, "per_host": 4, "steps": 160, "windows": 2, "seed": 11, "plants": plants, **settings}
    folder.mkdir()
    simulate(Scenario(**settings), folder)
    return load(folder / "reduced"), json.loads(folder.with_name(f"{folder.name}.truth.json").read_text())


@pytest.mark.parametrize("layout", ["dp", "3d", *(pytest.param(name, marks=pytest.mark.thorough) for name in MORE)])
def test_a_slow_device_is_found_and_a_healthy_run_is_left_alone(tmp_path: Path, layout: str) -> None:
    planted = {"name": "slow_gpu", "size": 0.3, "rank": 6}
    slow, truth = _simulated(tmp_path / "slow", layout=layout, plants=[planted], **SHAPES[layout])
    healthy, _ = _simulated(tmp_path / "healthy", layout=layout, **SHAPES[layout])

    found = judge(slow).stragglers[0]

    assert (found.kind, found.ranks, found.hosts) == ("rank", (6,), ("node001",))
    assert found.cause in truth["plants"][0]["causes"]
    assert judge(healthy).stragglers == ()
