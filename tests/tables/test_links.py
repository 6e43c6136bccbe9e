"""Device slices to launches, operators, Python functions and forward operators, by every way there is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tables.fakes import FakeSource, Row, arrow, take_in

FRAME = {"category": "python_function", "name": "train.py(3): step", "start_ns": 0, "duration_ns": 1_000_000}


def op(name: str, start: int, duration: int, **more: Any) -> Row:
    return {"category": "cpu_op", "name": name, "start_ns": start, "duration_ns": duration, **more}


def call(start: int, name: str = "cudaLaunchKernel", **more: Any) -> Row:
    return {"category": "cuda_runtime", "name": name, "start_ns": start, "duration_ns": 5, **more}


def kernel(start: int, **more: Any) -> Row:
    return {"category": "kernel", "name": "gemm", "track": "0/7", "start_ns": start, "duration_ns": 100, **more}


def linked(tmp_path: Path, *rows: Row, arrows: Sequence[Row] = ()) -> list[dict[str, Any]]:
    return take_in(tmp_path, FakeSource(rows, arrows=arrows, size=2))[2].rows(named=True)


def test_by_correlation_to_the_innermost_operator_and_function(tmp_path: Path):
    (link,) = linked(
        tmp_path,
        kernel(500, correlation=9),
        call(25, correlation=9),
        op("aten::mm", 20, 30),
        op("aten::linear", 10, 50),
        FRAME,
    )
    wanted = {"event": 0, "launch": 1, "operator": 2, "frame": 4, "method": "correlation", "state": "linked"}
    assert {name: link[name] for name in wanted} == wanted
    assert (link["forward"], link["forward_method"]) == (None, None)


@pytest.mark.parametrize("category", ["Runtime", "cuda_driver", "xpu_runtime", "mtia_runtime", "privateuse1_runtime"])
@pytest.mark.parametrize("device", ["Kernel", "gpu_memcpy", "Memset", "mtia_ccp_events"])
def test_names_of_every_age_and_vendor(tmp_path: Path, category: str, device: str):
    (link,) = linked(
        tmp_path,
        op("aten::mm", 10, 50, category="Operator"),
        {**call(20), "category": category, "correlation": 1},
        {**kernel(90), "category": device, "correlation": 1},
    )
    assert (link["event"], link["operator"], link["state"]) == (2, 0, "linked")


@pytest.mark.parametrize("correlation", [{}, {"correlation": 0}])
@pytest.mark.parametrize("kind", ["ac2g", "async"])
def test_by_arrow_without_correlation(tmp_path: Path, correlation: dict[str, int], kind: str):
    (link,) = linked(
        tmp_path,
        op("aten::mm", 10, 50),
        call(20, correlation=0),
        kernel(90, **correlation),
        arrows=arrow(7, ("1/1", 20), ("0/7", 90), kind),
    )
    assert (link["launch"], link["operator"], link["method"], link["state"]) == (1, 0, "flow", "linked")


@pytest.mark.parametrize(
    ("rows", "names", "expected"),
    [
        (  # by External id, of the slice or of its launch
            [
                op("aten::mm", 10, 50, external_id=3),
                kernel(90, external_id=3),
                call(500, correlation=4, external_id=3),
                kernel(600, correlation=4),
                kernel(5, external_id=3),  # before the operator began
            ],
            ("launch", "operator", "method", "state"),
            [
                (None, 0, "external_id", "linked"),
                (2, 0, "external_id", "linked"),
                (None, None, None, "before_recording"),
            ],
        ),
        (  # by time on the launch's thread within rounding to whole microseconds
            [
                op("aten::mm", 0, 50_000),
                call(50_000, correlation=1),
                kernel(90_000, correlation=1),
                call(80_000, correlation=2),
                kernel(91_000, correlation=2),
            ],
            ("operator", "method", "state"),
            [(0, "containment", "linked"), (None, "correlation", "unlinked")],
        ),
        *(  # kernels of a graph share a launch and are apart
            (
                [op("replay", 10, 50), call(20, name, correlation=5), *(kernel(at, correlation=5) for at in (90, 200))],
                ("launch", "state"),
                [(1, "graph"), (1, "graph")],
            )
            for name in ("cudaGraphLaunch", "hipGraphLaunch", "cuGraphLaunch")
        ),
        (  # correlations that come twice
            [
                *(op("first", 0, 50), call(10, "hipLaunchKernel", correlation=5), kernel(40, correlation=5)),
                *(op("second", 100, 50), call(110, "hipLaunchKernel", correlation=5), kernel(140, correlation=5)),
                kernel(5, correlation=5),
            ],
            ("operator",),
            [(0,), (3,), (0,)],
        ),
    ],
)
def test_other_ways(tmp_path: Path, rows: list[Row], names: tuple[str, ...], expected: list[tuple[Any, ...]]):
    assert [tuple(row[name] for name in names) for row in linked(tmp_path, *rows)] == expected


BACKWARD = {"track": "1/2", "forward_thread": 1}


def backward(start: int, sequence: int, **more: Any) -> list[Row]:
    """A node of the backward pass, an operator in it, its launch and the kernel."""
    place = {"track": more.get("track", "1/2")}
    number = 1000 + start
    return [
        op("MmBackward0", start, 40, **{**BACKWARD, "sequence": sequence, **more}),
        op("aten::mm", start + 5, 30, **place),
        call(start + 10, correlation=number, **place),
        kernel(start + 500, correlation=number),
    ]


def test_backward_reaches_the_forward_operator_that_made_the_node(tmp_path: Path):
    (link,) = linked(
        tmp_path,
        op("aten::t", 0, 5, sequence=8),
        op("aten::linear", 10, 50, sequence=9, forward_thread=0),
        op("aten::mm", 20, 30, sequence=9),  # the last that began with the number made the node
        op("aten::relu", 70, 5, sequence=10),
        *backward(1000, 9),
        op("aten::mm", 5000, 30, sequence=9),  # after it
    )
    assert (link["forward"], link["forward_method"], link["operator"]) == (2, "sequence", 5)


def test_backward_by_arrow_where_there_is_no_number(tmp_path: Path):
    node = {"track": "1/2", "forward_thread": 1}
    (link,) = linked(
        tmp_path,
        op("aten::mm", 20, 30),
        op("MmBackward0", 1000, 40, **node),
        op("aten::mm", 1005, 30, track="1/2"),
        call(1010, correlation=4, track="1/2"),
        kernel(1500, correlation=4),
        arrows=arrow(3, ("1/1", 20), ("1/2", 1000), "fwdbwd"),
    )
    assert (link["forward"], link["forward_method"]) == (0, "flow")
