"""Compile spans of traces: the union of nested and doubled spans, and nothing where the journal knows better.

Copies to the host in traces: counted by step, line and operator, with the host time that waited for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.read import read_paths
from stepscope.tables import build
from tests.records import replace


def slice_(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    where = {"pid": 0, "tid": 7} if cat.startswith("gpu") else {"pid": 1, "tid": tid}
    return {"ph": "X", **where, "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def step(number: int, ts: float, dur: float = 1000) -> dict[str, Any]:
    return slice_(f"ProfilerStep#{number}", ts, dur, "user_annotation")


def compiles(folder: Path, events: list[dict[str, Any]]) -> pl.DataFrame:
    path = folder / "worker0.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return build(read_paths([path])).compiles


def frame(ts: float, dur: float) -> list[dict[str, Any]]:
    """A frame compiled as torch 2.13 records it: each phase twice, one inside the other."""
    names = ["dynamo", "entire_frame_compile", "_compile.compile_inner (dynamo_timed)", "backend_compile"]
    names += ["OutputGraph.call_user_compiler (dynamo_timed)", "inductor_compile"]
    return [slice_(name, ts + i, dur - 2 * i) for i, name in enumerate(names)]


def test_the_union_not_the_sum(tmp_path: Path):
    table = compiles(tmp_path, [step(0, 0, 1000), *frame(100, 500), step(1, 1000, 1000), *frame(1200, 300)])
    assert table.select("step", "duration_ns", "kind", "direction").rows() == [
        (0, 498_000, "compile", "forward"),
        (1, 298_000, "compile", "forward"),
    ]
    assert set(table["step_source"]) == {"trace"}
    assert set(table["backend"]) == {"torch.compile"}


def test_overlap_on_another_thread_counts_once(tmp_path: Path):
    events = [
        step(0, 0, 1000),
        slice_("entire_frame_compile", 100, 300),
        slice_("backward._backward_impl (dynamo_timed)", 300, 300, "user_annotation", tid=2),
    ]
    table = compiles(tmp_path, events)
    assert table.select("time_ns", "duration_ns", "direction").rows() == [
        (100_000, 300_000, "forward"),
        (400_000, 200_000, "backward"),
    ]


def test_journals_that_tell_of_compiling_are_not_doubled(tmp_path: Path):
    path = tmp_path / "worker0.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [step(0, 0, 1000), *frame(100, 500)]}))
    raw = read_paths([path])
    told = {"kind": "compile", "time_ns": 0, "duration_ns": 7, "step": 0, "graph": "0/0"}
    other = {"kind": "graph_break", "time_ns": 0, "duration_ns": None, "step": 0, "reason": "x"}

    def rows(event: dict[str, Any]) -> list[tuple[Any, ...]]:
        ranks = tuple(replace(rank, journal=(event,)) for rank in raw.ranks)
        return build(replace(raw, ranks=ranks)).compiles.select("kind", "step_source").rows()

    assert rows(told) == [("compile", "poll")]
    assert rows({**told, "backend": "torch_xla"}) == [("compile", "poll"), ("compile", "trace")]
    assert rows(other) == [("graph_break", "poll"), ("compile", "trace")]


COLUMNS = ["step", "count", "operator", "cause", "duration_ns", "bytes"]


def copy(
    ts: float, correlation: int, *, call: float, wait: float | None, name: str = "Pageable", size: int | None = 4
) -> list[dict[str, Any]]:
    """A copy to the host: the runtime call at `ts`, the wait behind it, and the slice on the device at the end."""
    sized = {} if size is None else {"bytes": size}
    number = {"correlation": correlation}
    device = {**number, "device": 0, "stream": 7, **sized}
    found = [
        slice_("cudaMemcpyAsync", ts, call, "cuda_runtime", **number),
        slice_(f"Memcpy DtoH (Device -> {name})", ts + call, 1, "gpu_memcpy", **device),
    ]
    return found if wait is None else [*found, slice_("cudaStreamSynchronize", ts + call + 1, wait, "cuda_runtime")]


def item(ts: float, correlation: int, *, call: float = 20, wait: float = 10) -> list[dict[str, Any]]:
    inside = copy(ts + 2, correlation, call=call, wait=wait)
    names = ("aten::item", "aten::_local_scalar_dense")
    return [*(slice_(name, ts + i, 50 - 2 * i) for i, name in enumerate(names)), *inside]


def to_host(ts: float, correlation: int, **cost: Any) -> list[dict[str, Any]]:
    names = ("aten::to", "aten::_to_copy", "aten::copy_")
    return [*(slice_(name, ts + i, 80 - 2 * i) for i, name in enumerate(names)), *copy(ts + 3, correlation, **cost)]


def test_what_waited_is_the_call_and_its_synchronisation(tmp_path: Path):
    events = [step(0, 0), *item(100, 1), *item(300, 2, call=30, wait=5), step(1, 1000), *item(1100, 3)]
    table = compiles(tmp_path, events)
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
    assert compiles(tmp_path, events).select(COLUMNS).rows() == [(0, 1, "aten::to", "copy", 6_000, 4)]


def test_a_size_that_is_missing_is_not_zero(tmp_path: Path):
    events = [step(0, 0), *item(100, 1), *to_host(300, 2, call=5, wait=5, size=None)]
    assert compiles(tmp_path, events).select("operator", "bytes").rows() == [
        ("aten::_local_scalar_dense", 4),
        ("aten::to", None),
    ]


def test_a_copy_whose_launch_is_not_in_the_trace_counts_at_no_known_cost(tmp_path: Path):
    orphan = slice_("Memcpy DtoH (Device -> Pageable)", 200, 1, "gpu_memcpy", correlation=99, device=0, stream=7)
    table = compiles(tmp_path, [step(0, 0), orphan, *item(300, 2)])
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
    table = compiles(tmp_path, [step(0, 0), *functions, *item(100, 1)])
    row = table.row(0, named=True)
    assert (row["file"], row["function"], row["def_file"], row["def_line"]) == ("train.py", "log", "train.py", 40)
    assert row["line"] is None  # the trace knows where the function begins, not which line of it read the value
