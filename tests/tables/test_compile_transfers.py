"""Copies to the host in traces: counted by step, line and operator, with the host time that waited for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tables.test_compile_spans import compiles, slice_, step

COLUMNS = ["step", "count", "operator", "cause", "duration_ns", "bytes"]


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
