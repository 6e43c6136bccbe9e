"""The figures that `torch.profiler` itself gives, recomputed from the trace it exports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.analyze.views import key_averages, operators
from stepscope.analyze.views.base import Base
from stepscope.analyze.views.key_averages import KeyAverage
from stepscope.model.views.operators import OperatorRow
from tests.analyze import shared_traces
from tests.analyze.traces import tables
from tests.analyze.views.module_traces import US, Nested, base_of

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


def same(ours: KeyAverage, row: dict[str, Any]) -> bool:
    times = abs(ours.self_cpu_ns / US - row["self_cpu_us"]) + abs(ours.cpu_total_ns / US - row["cpu_us"])
    counts = (ours.count, ours.self_cpu_memory_bytes, ours.cpu_memory_bytes)
    return times < TOLERANCE_US and counts == (row["count"], row["self_bytes"], row["bytes"])


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.parametrize("by", ["name", "shapes"])
@pytest.mark.parametrize("kind", ["plain", "stacks"])
def test_every_row_of_key_averages(folder: Path, kind: str, by: str) -> None:
    wanted = expected(folder, kind, by)
    found = key_averages.rows(opened(folder, kind), by_shapes=by == "shapes")
    ours = {(row.key, row.is_annotation, compact(row.shapes)): row for row in found}
    assert ours.keys() == wanted.keys()
    assert [(key, ours[key], row) for key, row in wanted.items() if not same(ours[key], row)] == []


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
        if not same(as_average(row), wanted[row.name, False, compact(row.shapes or "[]") if by == "shapes" else None])
    }
    # with stacks, Python functions are the next thing within these two
    assert others == ({"Cube", "CubeBackward"} if kind == "stacks" else set())
    assert len(found) > 50


def as_average(row: OperatorRow) -> KeyAverage:
    memory = row.self_memory_bytes, row.total_memory_bytes
    return KeyAverage(row.name, row.shapes, False, row.calls, row.host_self_ns, row.host_total_ns, *memory)


def figures(trace: Nested, **options: Any) -> dict[str, tuple[int, float, float]]:
    found = key_averages.rows(base_of(trace.tables()), **options)
    return {row.key: (row.count, row.self_cpu_ns / US, row.cpu_total_ns / US) for row in found}


def test_recursion_counts_at_every_level_unlike_in_the_operator_table() -> None:
    trace = Nested()
    outer = trace.operator("aten::sum", 0, 100)
    trace.operator("aten::sum", 10, 50, outer)
    trace.operator("aten::fill_", 70, 5, outer)
    assert figures(trace) == {"aten::sum": (2, 95, 150), "aten::fill_": (1, 5, 5)}
    (total,) = [row for row in operators.table(base_of(trace.tables())) if row.name == "aten::sum"]
    assert total.host_total_ns == 100 * US


def test_annotations_are_rows_and_leave_self_time() -> None:
    trace = Nested()
    step = trace.annotation("ProfilerStep#3", 0, 100)
    operator = trace.operator("aten::mm", 10, 50, step)
    trace.add("cuda_runtime", "cudaLaunchKernel", 20, 10, parent=operator)
    trace.operator("aten::is_leaf", 70, 5, step)
    trace.annotation("ProfilerStep#4", 100, 10)
    assert figures(trace) == {"ProfilerStep*": (2, 60, 110), "aten::mm": (1, 40, 50), "cudaLaunchKernel": (1, 10, 10)}


def test_slices_that_overlap_have_no_parent_but_the_one_around_both() -> None:
    trace = Nested()
    outer = trace.annotation("all", 0, 100)
    enter = trace.python("f.py(1): __enter__", outer)
    trace.events[enter].update({"start_ns": trace.events[outer]["start_ns"] + 10 * US, "duration_ns": 20 * US})
    trace.annotation("mine", 20, 40, enter)  # begins in the function and ends after it
    trace.operator("aten::mm", 35, 5, enter)
    found = figures(trace)
    assert found["all"] == (1, 100 - 20 - 40, 100)
    assert found["f.py(1): __enter__"] == (1, 20, 20)
    assert found["mine"] == (1, 35, 40)


def test_no_trace() -> None:
    assert key_averages.rows(base_of(tables())) == ()


@shared_traces.needs_traces
@pytest.mark.parametrize("name", shared_traces.files())
def test_any_trace_gives_rows(name: str) -> None:
    base = base_of(shared_traces.run_of(name).tables)
    for span in base.spans:
        calls = sum(row.calls for row in operators.table(base, span=span.ref))
        assert sum(row.count for row in key_averages.rows(base, span.ref)) >= calls > 0
