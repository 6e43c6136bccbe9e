"""One trace to Parquet: columns, parts, times, memory; however the reader cuts it."""

from __future__ import annotations

import random
from pathlib import Path

import polars as pl
import pytest

from stepscope.tables import parts
from stepscope.tables.schema import SCHEMAS
from tests.tables.fakes import RUN_COLUMNS, FakeSource, Row, arrow, take_in

FULL: Row = {
    "category": "kernel",
    "name": "gemm\x1b",
    "track": "0/7",
    "start_ns": 5,
    "duration_ns": 7,
    "correlation": 1,
    "external_id": 2,
    "sequence": 3,
    "forward_thread": 4,
    "device": 0,
    "stream": -(2**40),
    "bytes": 2**40,
    "python_module": 7,
    "blocks": 8,
    "threads": 9,
    "registers": 10,
    "shared_memory": 11,
    "blocks_per_sm": 0.5,
    "warps_per_sm": 4.0,
    "occupancy": 12.5,
    "shapes": "[[1]]",
    "types": '["float"]',
    "call_stack": "a.py(1): f",
    "collective": "{}",
}


def test_every_column_arrives_and_what_is_missing_is_null(tmp_path: Path):
    _, events, _ = take_in(tmp_path, FakeSource([FULL, {"start_ns": 100, "duration_ns": 1}], base_ns=1000))
    assert events.schema == {name: dtype for name, dtype in SCHEMAS["events"].items() if name not in RUN_COLUMNS}
    first, second = events.rows(named=True)
    renamed = {"shared_memory": "shared_memory_bytes", "occupancy": "occupancy_percent"}
    expected = {renamed.get(name, name): value for name, value in FULL.items()} | {"start_ns": 1005}
    assert {name: first[name] for name in expected} == expected
    known = ("id", "category", "name", "track", "start_ns", "duration_ns", "self_ns", "depth")
    assert {name for name, value in second.items() if value is not None} == set(known)
    assert second["start_ns"] == 1100


def some_trace() -> tuple[list[Row], list[Row]]:
    chance = random.Random(3)
    rows: list[Row] = []
    for i in range(60):
        start = i * 100
        name = chance.choice(["aten::mm", "aten::add", "aten::relu"])
        rows.append({"name": name, "start_ns": start, "duration_ns": 90, "shapes": chance.choice([None, "[[1]]"])})
        call = {"category": "cuda_runtime", "name": "cudaLaunchKernel", "start_ns": start + 10, "duration_ns": 5}
        kernel = {"category": "kernel", "name": f"k{i % 7}", "track": "0/7", "start_ns": start + 50, "duration_ns": 60}
        number = {"correlation": i} if i % 3 else {}
        rows += [{**call, **number}, {**kernel, **number}]
    chance.shuffle(rows)
    arrows = [end for i in range(60) for end in arrow(i, ("1/1", i * 100 + 10), ("0/7", i * 100 + 50))]
    return rows, arrows


@pytest.mark.parametrize(("size", "per_file"), [(1, 7), (13, 1), (1000, 50)])
def test_chunks_and_files_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, per_file: int):
    rows, arrows = some_trace()
    wanted = take_in(tmp_path, FakeSource(rows, arrows=arrows), "whole")
    monkeypatch.setattr(parts, "ROWS_PER_FILE", per_file)
    index, events, links = take_in(tmp_path, FakeSource(rows, arrows=arrows, size=size), "pieces")
    assert index.files == -(-len(rows) // per_file)
    assert events.equals(wanted[1])
    assert links.equals(wanted[2])
    assert links["method"].value_counts(sort=True).rows() == [("correlation", 40), ("flow", 20)]


def test_memory(tmp_path: Path):
    allocations = [
        {"time_ns": 5, "bytes": 512, "device_type": 0, "device": -1, "track": "1/9"},
        {"time_ns": 6, "bytes": -4, "device_type": 1, "device": 2, "address": 9, "allocated_bytes": 3},
        {"time_ns": 7, "bytes": 8, "device_type": 99, "device": 0, "reserved_bytes": 0},
        {"time_ns": 8},
    ]
    take_in(tmp_path, FakeSource([FULL], allocations=allocations, base_ns=1000))
    frame = pl.read_parquet(tmp_path / "entry" / "memory.parquet")
    assert frame.rows() == [
        ("cpu", 1005, 512, None, None, None, "1/9"),
        ("cuda:2", 1006, -4, 3, None, 9, "1/1"),
        ("device-99:0", 1007, 8, None, 0, None, "1/1"),
        (None, 1008, None, None, None, None, "1/1"),
    ]


@pytest.mark.parametrize(
    ("categories", "device"),
    [
        (["cpu_op"], "cpu"),
        (["cpu_op", "kernel"], "cuda"),
        (["cpu_op", "mtia_ccp_events"], "mtia"),
        (["cpu_op", "kernel", "xpu_runtime"], "xpu"),
        (["something"], None),
    ],
)
def test_kind_of_device(tmp_path: Path, categories: list[str], device: str | None):
    assert take_in(tmp_path, FakeSource([{"category": name} for name in categories]))[0].device == device
