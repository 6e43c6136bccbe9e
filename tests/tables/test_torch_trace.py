"""Both directions on a trace that this torch makes: operators to lines, backward operators to forward ones."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from stepscope import tables
from stepscope.read import read_paths


@pytest.mark.torch
def test_forward_and_backward_reach_this_file(tmp_path: Path):
    torch = pytest.importorskip("torch")
    weight = torch.randn(64, 64, requires_grad=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, with_stack=True, record_shapes=True) as profiler:
        for _ in range(2):
            (torch.tanh(weight @ weight)).sum().backward()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = tables.build(read_paths([path])).events
    rows = {row["id"]: row for row in events.iter_rows(named=True)}

    def reaches_this_file(row: int | None) -> bool:
        while row is not None:
            frame = rows[row]["frame"]
            if frame is None:
                return False
            if "test_torch_trace.py" in rows[frame]["name"]:
                return True
            row = frame
        return False

    forward = events.filter(pl.col("name").is_in(["aten::matmul", "aten::tanh"]))
    assert forward.height >= 4
    assert all(reaches_this_file(row) for row in forward["id"])
    nodes = events.filter(pl.col("name").is_in(["MmBackward0", "TanhBackward0"]))
    assert nodes.height == 4
    made_by = [rows[row]["name"] for row in nodes["forward"]]
    assert sorted(made_by) == ["aten::mm", "aten::mm", "aten::tanh", "aten::tanh"]
    assert all(reaches_this_file(row) for row in nodes["forward"])
    starts = zip(nodes["start_ns"], nodes["forward"], strict=True)
    assert all(rows[row]["start_ns"] < start for start, row in starts)
