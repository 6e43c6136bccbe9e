"""Copies to the host in traces: counted by step, line and operator, with the host time that waited for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.read import read_paths
from stepscope.tables import build

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
COLUMNS = ["step", "count", "operator", "cause", "duration_ns", "bytes"]


def slice_(name: str, ts: float, dur: float, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    where = {"pid": 0, "tid": 7} if cat.startswith("gpu") or cat == "kernel" else {"pid": 1, "tid": 1}
    return {"ph": "X", **where, "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def step(number: int, ts: float, dur: float = 1000) -> dict[str, Any]:
    return slice_(f"ProfilerStep#{number}", ts, dur, "user_annotation")


def copy(
    ts: float, correlation: int, *, call: float, wait: float | None, name: str = "Pageable", size: int | None = 4
) -> list[dict[str, Any]]:
    """A copy to the host: the runtime call at `ts`, the wait behind it, and the slice on the device at the end."""
    sized = {} if size is None else {"bytes": size}
    found = [
        slice_("cudaMemcpyAsync", ts, call, "cuda_runtime", correlation=correlation),
        slice_(
            f"Memcpy DtoH (Device -> {name})",
            ts + call,
            1,
            "gpu_memcpy",
            correlation=correlation,
            device=0,
            stream=7,
            **sized,
        ),
    ]
    return found if wait is None else [*found, slice_("cudaStreamSynchronize", ts + call + 1, wait, "cuda_runtime")]


def item(ts: float, correlation: int, *, call: float = 20, wait: float = 10) -> list[dict[str, Any]]:
    inside = copy(ts + 2, correlation, call=call, wait=wait)
    names = ("aten::item", "aten::_local_scalar_dense")
    return [*(slice_(name, ts + i, 50 - 2 * i) for i, name in enumerate(names)), *inside]


def to_host(ts: float, correlation: int, **cost: Any) -> list[dict[str, Any]]:
    names = ("aten::to", "aten::_to_copy", "aten::copy_")
    return [*(slice_(name, ts + i, 80 - 2 * i) for i, name in enumerate(names)), *copy(ts + 3, correlation, **cost)]


def transfers(folder: Path, events: list[dict[str, Any]]) -> pl.DataFrame:
    path = folder / "worker0.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return build(read_paths([path])).compiles


def test_what_waited_is_the_call_and_its_synchronisation(tmp_path: Path):
    events = [step(0, 0), *item(100, 1), *item(300, 2, call=30, wait=5), step(1, 1000), *item(1100, 3)]
    table = transfers(tmp_path, events)
    assert table.select(COLUMNS).rows() == [
        (0, 2, "aten::_local_scalar_dense", "item", 65_000, 8),
        (1, 1, "aten::_local_scalar_dense", "item", 30_000, 4),
    ]
    assert set(table.select("kind", "backend", "direction", "step_source").rows()) == {
        ("transfer", "cuda", "device_to_host", "trace")
    }


def test_waits_of_others_are_not_charged(tmp_path: Path):
    """A copy nobody waits for costs its call; a wait in another operator, or before the copy, is not its own."""
    events = [
        step(0, 0),
        slice_("cudaStreamSynchronize", 90, 5, "cuda_runtime"),
        *to_host(100, 1, call=6, wait=None, name="Pinned"),
        slice_("aten::mm", 200, 100),
        slice_("cudaStreamSynchronize", 210, 50, "cuda_runtime"),
    ]
    assert transfers(tmp_path, events).select(COLUMNS).rows() == [(0, 1, "aten::to", "copy", 6_000, 4)]


def test_a_direct_call_has_no_operator(tmp_path: Path):
    events = [step(0, 0), *copy(100, 1, call=6, wait=40)]
    assert transfers(tmp_path, events).select(COLUMNS).rows() == [(0, 1, None, None, 6_000, 4)]


def test_shapes_that_depend_on_values(tmp_path: Path):
    events = [
        step(0, 0),
        slice_("aten::index", 100, 90),
        slice_("aten::nonzero", 101, 80),
        *copy(110, 1, call=20, wait=10),
    ]
    assert transfers(tmp_path, events).select(COLUMNS).rows() == [
        (0, 1, "aten::index", "data_dependent_shape", 30_000, 4)
    ]


def test_other_copies_and_copies_outside_steps_are_none(tmp_path: Path):
    there = slice_("Memcpy HtoD (Pageable -> Device)", 130, 1, "gpu_memcpy", correlation=1, device=0, stream=7)
    events = [slice_("cudaMemcpyAsync", 120, 5, "cuda_runtime", correlation=1), there, step(0, 100), *item(5000, 2)]
    assert transfers(tmp_path, events).is_empty()


def test_a_size_that_is_missing_is_not_zero(tmp_path: Path):
    events = [step(0, 0), *item(100, 1), *to_host(300, 2, call=5, wait=5, size=None)]
    assert transfers(tmp_path, events).select("operator", "bytes").rows() == [
        ("aten::_local_scalar_dense", 4),
        ("aten::to", None),
    ]


def test_a_copy_whose_launch_is_not_in_the_trace_counts_at_no_known_cost(tmp_path: Path):
    orphan = slice_("Memcpy DtoH (Device -> Pageable)", 200, 1, "gpu_memcpy", correlation=99, device=0, stream=7)
    table = transfers(tmp_path, [step(0, 0), orphan, *item(300, 2)])
    assert table.select("count", "operator", "duration_ns").rows() == [
        (1, None, None),
        (1, "aten::_local_scalar_dense", 30_000),
    ]


def test_the_innermost_function_of_the_users(tmp_path: Path):
    functions = [
        slice_("train.py(12): main", 10, 900, "python_function"),
        slice_("train.py(40): log", 90, 300, "python_function"),
        slice_("contextlib.py(75): inner", 91, 200, "python_function"),
        slice_("torch/_tensor.py(30): wrapper", 92, 190, "python_function"),
        slice_("<built-in method item of Tensor object at 0x7f>", 93, 180, "python_function"),
    ]
    table = transfers(tmp_path, [step(0, 0), *functions, *item(100, 1)])
    row = table.row(0, named=True)
    assert (row["file"], row["function"], row["def_file"], row["def_line"]) == ("train.py", "log", "train.py", 40)
    assert row["line"] is None  # the trace knows where the function begins, not which line of it read the value


def test_libraries_stand_in_where_nothing_else_is_known(tmp_path: Path):
    functions = [
        slice_("/env/lib/python3.11/site-packages/acme/loop.py(5): run", 10, 900, "python_function"),
        slice_("torch/nn/modules/module.py(1): call", 20, 800, "python_function"),
    ]
    row = transfers(tmp_path, [step(0, 0), *functions, *item(100, 1)]).row(0, named=True)
    assert (row["file"] or "").endswith("acme/loop.py")


def test_two_lines_are_two_rows(tmp_path: Path):
    functions = [
        slice_("a.py(1): f", 90, 100, "python_function"),
        slice_("b.py(2): g", 290, 100, "python_function"),
    ]
    table = transfers(tmp_path, [step(0, 0), *functions, *item(100, 1), *item(300, 2)])
    assert table.select("file", "count").rows() == [("a.py", 1), ("b.py", 1)]


@pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not here")
class TestRealTraces:
    def test_ten_copies_a_step(self):
        table = build(read_paths([TRACES / "hta/trace_diff/control/control.json.gz"])).compiles
        assert table.group_by("step").agg(pl.col("count").sum())["count"].to_list() == [10] * 6
        assert set(table.select("operator", "cause").rows()) == {
            ("aten::_local_scalar_dense", "item"),
            ("aten::to", "copy"),
        }

    def test_the_whole_forward_pass_waited_for(self):
        name = "tracelens/h100/facebook_timesformer-base-finetuned-k400__1016002.json.gz"
        row = build(read_paths([TRACES / name])).compiles.row(0, named=True)
        assert row["duration_ns"] == 125_948_634 + 12_150  # cudaMemcpyAsync and cudaStreamSynchronize of 800 bytes
        assert (row["operator"], row["bytes"]) == ("aten::to", 800)
        assert (row["file"], row["function"]) == ("transformers/pipelines/base.py", "_ensure_tensor_on_device")
