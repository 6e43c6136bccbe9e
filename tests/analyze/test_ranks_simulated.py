"""Simulated runs of many ranks: their tables agree with themselves and with the truth, and are judged rightly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.analyze.ranks import judge
from stepscope.schema import PHASES
from stepscope.tables.reduced import LABELS, Reduced, load

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPES = {
    "dp": {},
    "fsdp": {},
    "hsdp": {"shard": 4},
    "3d": {"tp": 2, "pp": 2, "microbatches": 4},
}


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


@pytest.mark.parametrize("layout", SHAPES)
def test_a_slow_device_is_found_and_a_healthy_run_is_left_alone(tmp_path: Path, layout: str) -> None:
    planted = {"name": "slow_gpu", "size": 0.3, "rank": 6}
    slow, truth = _simulated(tmp_path / "slow", layout=layout, plants=[planted], **SHAPES[layout])
    healthy, _ = _simulated(tmp_path / "healthy", layout=layout, **SHAPES[layout])

    found = judge(slow).stragglers[0]

    assert (found.kind, found.ranks, found.hosts) == ("rank", (6,), ("node001",))
    assert found.cause in truth["plants"][0]["causes"]
    assert judge(healthy).stragglers == ()


@pytest.mark.parametrize("layout", SHAPES)
def test_tables_agree_with_themselves(tmp_path: Path, layout: str) -> None:
    from ranks_simulated.scenario import Clocks

    right = Clocks(offset_ms=0, drift_ppm=0, slews=0)
    reduced, truth = _simulated(tmp_path / "run", layout=layout, clocks=right, **SHAPES[layout])
    steps = reduced.scan("steps").collect()
    calls = reduced.scan("collectives").filter(pl.col("kind") != "send", pl.col("kind") != "recv").collect()
    members = {group.id: len(group.ranks) for host in reduced.hosts for group in host.groups}

    assert reduced.problems == ()
    assert reduced.ranks == tuple(range(truth["ranks"]))
    phases = pl.sum_horizontal(f"{phase}_us" for phase in PHASES)
    assert steps.select((phases.cast(pl.Int64) - pl.col("wall_us").cast(pl.Int64)).abs().max()).item() <= 1
    # a step begins where the one before it ended
    ends = steps.sort("rank", "step").select(
        pl.col("start_us").diff().over("rank") - pl.col("wall_us").shift(1).over("rank").cast(pl.Int64)
    )
    assert ends.to_series().abs().max() <= 5
    windowed = steps.filter(pl.col("label") == LABELS.index("window"))
    assert windowed["compute_us"].null_count() == windowed["collective_us"].null_count() == 0
    assert windowed.filter(pl.col("compute_us") > pl.col("wall_us")).is_empty()
    # every member takes part in every call, and nobody is let go before the last has come
    met = calls.group_by("group", "sequence").agg(pl.len(), pl.col("start_ns").max(), pl.col("end_ns").min())
    assert met.filter(pl.col("len") != pl.col("group").replace_strict(members)).is_empty()
    assert met.filter(pl.col("end_ns") + 1_000 < pl.col("start_ns")).is_empty()
    own = reduced.scan("work").filter(pl.col("end_ns") < pl.col("start_ns")).collect()
    assert own.is_empty()


def test_the_truth_stands_outside_and_names_what_is_missing(tmp_path: Path) -> None:
    plants = [{"name": "slow_data", "size": 0.2}]
    settings: dict[str, Any] = {"layout": "fsdp", "plants": plants, "missing": 0.1, "whole_hosts": True}
    reduced, truth = _simulated(tmp_path / "run", **settings)
    again, _ = _simulated(tmp_path / "again", **settings)
    healthy, even = _simulated(tmp_path / "healthy", layout="fsdp")

    assert reduced.missing == tuple(truth["missing"])
    assert len(truth["missing"]) >= 2
    assert not set(truth["plants"][0]["ranks"]) & set(truth["missing"])
    assert [host.tables for host in reduced.hosts] == [host.tables for host in again.hosts]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["reduced"]
    # what a plant costs is what the same run is longer by
    assert truth["plants"][0]["loss_ms"] == pytest.approx(truth["step_ms"] - even["step_ms"], rel=1e-6)
    assert healthy.missing == ()
