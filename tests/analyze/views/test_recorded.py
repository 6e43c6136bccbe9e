"""What torch records on the CPU, against what torch itself tells of it: operators, memory, modules."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.analyze.context import Context
from stepscope.analyze.views import allocated_memory, operators
from stepscope.model.memory import MemoryRecording
from stepscope.model.views import OperatorRow
from stepscope.read.memory_recordings import CATEGORIES, read_recordings
from stepscope.tables.schema import Tables
from tests.analyze.traces import US, base_of, tables
from tests.records import some

pytestmark = [pytest.mark.torch, pytest.mark.process]
SCRIPT = Path(__file__).with_name("scripts") / "recorded.py"
TOLERANCE_US = 0.05  # sums of floats, of times with three decimals


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script wrote."""
    made = tmp_path_factory.mktemp("averages")
    done = subprocess.run([sys.executable, SCRIPT, made], capture_output=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return made


def opened(folder: Path, kind: str) -> Tables:
    return api.open_run(folder / f"{kind}.pt.trace.json", options=api.ReadOptions(cache=False)).tables


def expected(folder: Path, kind: str, by: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = json.loads((folder / f"{kind}.averages.json").read_text())[by]
    named = {(row["key"], row["annotation"], compact(row["shapes"])): row for row in rows}
    assert len(named) == len(rows) > 50
    return named


def compact(shapes: Any) -> str | None:
    if isinstance(shapes, str):
        shapes = json.loads(shapes)
    return None if shapes is None else json.dumps(shapes)


def same(ours: OperatorRow, row: dict[str, Any]) -> bool:
    times = abs(ours.host_self_ns / US - row["self_cpu_us"]) + abs(ours.host_total_ns / US - row["cpu_us"])
    counts = (ours.calls, ours.self_memory_bytes, ours.total_memory_bytes)
    return times < TOLERANCE_US and counts == (row["count"], row["self_bytes"], row["bytes"])


@pytest.mark.parametrize("by", ["name", "shapes"])
@pytest.mark.parametrize("kind", ["plain", "stacks"])
def test_operators_agree_where_nothing_recurs_and_nothing_else_lies_between(folder: Path, kind: str, by: str) -> None:
    wanted = expected(folder, kind, by)
    found = operators.table(base_of(opened(folder, kind)), by=by)
    others = {
        row.name
        for row in found
        if not same(row, wanted[row.name, False, compact(row.shapes or "[]") if by == "shapes" else None])
    }
    # with stacks, Python functions are the next thing within these two
    assert others == ({"Cube", "CubeBackward"} if kind == "stacks" else set())
    assert len(found) > 50


def test_memory_by_operator_is_that_of_pytorch(folder: Path) -> None:
    """Self and total memory of every operator, as `key_averages()` gives them."""
    averages = {name: row for (name, annotation, _), row in expected(folder, "plain", "name").items() if not annotation}
    found = some(allocated_memory.view(base_of(opened(folder, "plain"))))
    named = {row.name: (row.self_increase_bytes, row.total_increase_bytes) for row in found.operators if row.name}
    assert len(named) > 15
    assert named == {name: (averages[name]["self_bytes"], averages[name]["bytes"]) for name in named}


def test_timelines_of_pytorch(folder: Path):
    names = ("m.json", "m.json.gz", "m.raw.json.gz")
    (plain, packed, raw), others = read_recordings([folder / name for name in names])
    assert others == ()
    assert plain.bytes == packed.bytes
    assert final(plain) == final(raw)
    assert final(raw)["parameter"] == 4 * (64 * 64 + 64 + 64 * 8 + 8)
    assert plain.clock == raw.clock == "epoch"
    assert abs(plain.time_ns[-1] - raw.time_ns[-1]) <= 1_000


def final(recording: MemoryRecording) -> dict[str, int]:
    sums = dict.fromkeys(CATEGORIES, 0)
    for category, size in zip(recording.category, recording.bytes, strict=True):
        sums[recording.categories[category]] += size
    return sums


def test_a_snapshot_of_pytorch(folder: Path):
    """PyTorch makes it of a recording of its profiler; its events have no times."""
    if not (folder / "snapshot.pickle").exists():
        pytest.skip("PyTorch could not name the functions of its own recording")
    (snapshot,), _ = read_recordings([folder / "snapshot.pickle"])
    assert snapshot.problems == ()
    found = allocated_memory.view(Context(tables()).base, (snapshot,))
    assert found is not None
    (curve,), (state,) = found.curves, found.states
    assert curve.clock == "order"
    assert curve.end_allocated_bytes == state.in_use_bytes > 3 * 4 * (64 * 64 + 64 + 64 * 8 + 8)
    assert found.pairs > 10
    assert sum(row.at_peak_bytes or 0 for row in found.lines) == curve.peak_recorded_bytes


def test_the_tree_is_the_models_own(folder: Path) -> None:
    """The paths a model's hooks see, as often as they see them, and nothing else."""
    found = operators.module_tree(base_of(opened(folder, "modules")))
    assert found is not None
    assert found.steps == 3
    expected: Counter[tuple[tuple[str, int], ...]] = Counter()
    for way in json.loads((folder / "called.json").read_text()):
        expected[tuple(map(tuple, way))] += 1
    # instances are numbered by the profiler in its own way: one number for one instance, by class
    seen: dict[tuple[str, ...], int] = {}
    for node in found.nodes:
        seen[tuple(node.path.split("/"))] = node.calls
        assert node.calls_per_step == node.calls / 3
    classes = Counter({tuple(name.rsplit("_", 1)[0] for name in way): 0 for way in seen})
    for way, calls in seen.items():
        classes[tuple(name.rsplit("_", 1)[0] for name in way)] += calls
    wanted: Counter[tuple[str, ...]] = Counter()
    for objects, calls in expected.items():
        wanted[tuple(name for name, _ in objects)] += calls * 3
    assert classes == wanted
    assert len(seen) == len(expected)
    assert len({way[-1] for way in seen}) == len({objects[-1] for objects in expected})
    nodes = {node.path: node for node in found.nodes}
    for node in found.nodes:
        inside = [other for path, other in nodes.items() if path.rpartition("/")[0] == node.path]
        assert node.host_total_ns >= sum(other.host_total_ns for other in inside)
        assert node.host_self_ns > 0
        assert node.device_total_ns is None
    linear = [node for node in found.nodes if node.module == "Linear"]
    assert all((node.backward_host_self_ns or 0) > 0 and node.operators == node.calls for node in linear)
    assert found.backward_linked_share is not None
    assert 0.5 < found.backward_linked_share < 1  # sums of gradients belong to no module
