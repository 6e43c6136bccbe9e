"""The operators of a trace beside the averages that `torch.profiler` itself gives of the same recording."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.analyze.views import operators
from stepscope.engine.spans import Base
from stepscope.model.views import OperatorRow
from tests.analyze.views.module_traces import US, base_of

SCRIPT = Path(__file__).with_name("scripts") / "key_averages.py"
TOLERANCE_US = 0.05  # sums of floats, of times with three decimals


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script wrote."""
    made = tmp_path_factory.mktemp("averages")
    done = subprocess.run([sys.executable, SCRIPT, made], capture_output=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return made


def opened(folder: Path, kind: str) -> Base:
    return base_of(api.open_run(folder / f"{kind}.pt.trace.json", options=api.ReadOptions(cache=False)).tables)


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


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.parametrize("by", ["name", "shapes"])
@pytest.mark.parametrize("kind", ["plain", "stacks"])
def test_operators_agree_where_nothing_recurs_and_nothing_else_lies_between(folder: Path, kind: str, by: str) -> None:
    wanted = expected(folder, kind, by)
    found = operators.table(opened(folder, kind), by=by)
    others = {
        row.name
        for row in found
        if not same(row, wanted[row.name, False, compact(row.shapes or "[]") if by == "shapes" else None])
    }
    # with stacks, Python functions are the next thing within these two
    assert others == ({"Cube", "CubeBackward"} if kind == "stacks" else set())
    assert len(found) > 50
