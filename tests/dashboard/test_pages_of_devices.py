"""The pages on memory and on GPUs as documents."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

from stepscope import api
from tests import gpu_traces
from tests.dashboard.page_shapes import is_empty, page, part
from tests.read.memory_files import Allocator

# ------------------------------------------------------------------------------------------------------- memory


def test_a_snapshot_of_the_allocator(tmp_path: Path):
    allocator = Allocator()
    allocator.record()
    first = allocator.allocate(1_000_000, line=11)
    allocator.allocate(500_000, line=12)
    allocator.free(first)
    allocator.out_of_memory(2**40, device_free=77, line=13)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    run = api.open_run(path)
    assert not is_empty(run, "memory")
    document = page(run, "memory")
    (state,) = part(document, "memory-states")["rows"]
    assert state["in_use_bytes"] == 500_000
    (failed,) = part(document, "out-of-memory")["rows"]
    assert failed["requested_bytes"] == 2**40
    assert failed["place"]["line"] == 13
    chart = part(document, "memory-peak-line")
    assert sorted(chart["series"][0]["values"]) == [500_000, 1_000_000]


# ------------------------------------------------------------------------------------------------------- GPUs


def test_what_ranks_exchange(tmp_path: Path):
    for rank in (0, 1):
        wait = 100 * (1 - rank)  # rank 1 comes last
        collective = [
            gpu_traces.host("record_param_comms", 1_900, 10, **{"External id": 77}),
            gpu_traces.launch(1_902, 77),
            gpu_traces.kernel("ncclDevKernel_AllReduce_Sum_f32", 2_020 - wait, 50 + wait, 77, stream=20),
        ]
        name = f"rank{rank}.pt.trace.json"
        path = gpu_traces.write(tmp_path / name, steps=2, more=collective)
        document = json.loads(path.read_text())
        document["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
        path.write_text(json.dumps(document))
    run = api.open_run(tmp_path, options=api.ReadOptions(cache=False))
    document = page(run, "gpu")
    rows = part(document, "communication")["rows"]
    assert {row["total_ns"] for row in rows} == {150_000, 50_000}
    alone = page(run, "gpu", worker="rank0")
    assert {row["total_ns"] for row in part(alone, "communication")["rows"]} == {150_000}
