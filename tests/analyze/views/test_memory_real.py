"""Memory in traces, snapshots and timelines that PyTorch itself wrote, against its own figures and the plugin's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope import api
from stepscope.analyze.context import Context
from stepscope.analyze.views import trace_memory
from stepscope.analyze.views.memory_blocks import POINTS
from stepscope.model.memory import MemoryOperator, MemoryRecording, MemoryView
from stepscope.read.memory_recordings import CATEGORIES, read_recordings
from tests.analyze.shared_traces import files, needs_traces, run_of
from tests.analyze.traces import tables

GPU, CPU = "cuda:0", "cpu"

SCRIPT = """\
import json, pickle, sys
import torch
from torch.cuda._memory_viz import _profile_to_snapshot
from torch.profiler import ProfilerActivity, profile

folder = sys.argv[1] + "/"
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters())


def recorded(**how):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, **how) as prof:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).sum().backward()
            optimizer.step()
    return prof


prof = recorded()
prof.export_chrome_trace(folder + "trace.json")
figures = {row.key: [row.self_cpu_memory_usage, row.cpu_memory_usage] for row in prof.key_averages()}
with open(folder + "averages.json.txt", "w") as file:
    json.dump(figures, file)
prof = recorded(record_shapes=True, with_stack=True)
for name in ("m.json", "m.json.gz", "m.raw.json.gz"):
    prof.export_memory_timeline(folder + name, device="cpu")
try:
    snapshot = _profile_to_snapshot(prof)
except UnicodeDecodeError:  # names of built-in functions may lie in memory that was released
    sys.exit()
with open(folder + "snapshot.pickle", "wb") as file:
    pickle.dump(snapshot, file)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CPU trace and PyTorch's averages of it, and of another recording the timelines and a snapshot."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "record.py").write_text(SCRIPT)
    line = [sys.executable, "-W", "ignore", "record.py", "."]
    done = subprocess.run(line, cwd=folder, capture_output=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.torch
def test_operators_are_those_of_pytorch(recorded: Path):
    """Self and total memory of every operator, as `key_averages()` gives them."""
    averages: dict[str, list[int]] = json.loads((recorded / "averages.json.txt").read_text())
    run = api.open_run(recorded / "trace.json", options=api.ReadOptions(cache=False))
    found = trace_memory.view(Context(run.tables).base)
    assert found is not None
    named = [row for row in found.operators if row.name is not None]
    assert len(named) > 15
    assert {row.name: [row.self_increase_bytes, row.total_increase_bytes] for row in named} == {
        row.name: averages[row.name] for row in named if row.name
    }
    assert sum(row.self_increase_bytes for row in found.operators) == sum(own for own, _ in averages.values())


@pytest.mark.torch
def test_timelines_of_pytorch(recorded: Path):
    names = ("m.json", "m.json.gz", "m.raw.json.gz")
    (plain, packed, raw), others = read_recordings([recorded / name for name in names])
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


@pytest.mark.torch
def test_a_snapshot_of_pytorch(recorded: Path):
    """PyTorch makes it of a recording of its profiler; its events have no times."""
    if not (recorded / "snapshot.pickle").exists():
        pytest.skip("PyTorch could not name the functions of its own recording")
    (snapshot,), _ = read_recordings([recorded / "snapshot.pickle"])
    assert snapshot.problems == ()
    found = trace_memory.view(Context(tables()).base, (snapshot,))
    assert found is not None
    (curve,), (state,) = found.curves, found.states
    assert curve.clock == "order"
    assert curve.end_allocated_bytes == state.in_use_bytes > 3 * 4 * (64 * 64 + 64 + 64 * 8 + 8)
    assert found.pairs > 10
    assert sum(row.at_peak_bytes or 0 for row in found.lines) == curve.peak_recorded_bytes


# Figures of the TensorBoard plugin 0.4.3: (self increase, self allocated, self count, increase, allocated, count).
PLUGIN: dict[str, dict[tuple[str, str], tuple[Any, ...]]] = {
    "kineto_tb_plugin/resnet50_num_workers_0/worker0.1623143089861.pt.trace.json.gz": {
        (CPU, "aten::empty_strided"): (115606272, 115606272, 384, 115606272, 115606272, 384),
        (CPU, "aten::div"): (115604736, 115605552, 198, 115605504, 115606320, 390),
        (CPU, "aten::empty_like"): (0, 0, 0, 28901376, 28901376, 192),
        (GPU, "aten::empty"): (34000779264, 34000779264, 2694, 34000779264, 34000779264, 2694),
        (GPU, "aten::cudnn_convolution"): (4961150976, 8563458048, 318, 8563458048, 12165765120, 468),
        (GPU, "aten::cudnn_convolution_backward_input"): (1025473536, 8088453120, 312, 8088453120, 15151432704, 462),
    },
    "kineto_tb_plugin/resnet50_num_workers_4/worker0.1623212756351.pt.trace.json.gz": {
        (CPU, "aten::zeros"): (0, 0, 0, 96, 96, 24),
        (CPU, "MeanBackward1"): (0, 0, 0, 0, 48, 6),
        (GPU, "aten::cudnn_convolution"): (5151940608, 8562671616, 318, 8562671616, 11973402624, 450),
        (GPU, "aten::threshold_backward"): (7390494720, 7390494720, 294, 7390494720, 7390494720, 294),
    },
    "hta/df_index_resolver/df_index_resolver.json.gz": {
        (CPU, "CompiledFunctionBackward"): (0, 2480, 310, 0, 2480, 310),
        ("cuda:1", "aten::mul"): (12402728960, 12402728960, 2295, 12402728960, 12402728960, 2295),
        ("cuda:1", "aten::addmm"): (2461409280, 3253084160, 755, 3253084160, 4044759040, 1510),
    },
}


def shared_view(name: str) -> MemoryView | None:
    return trace_memory.view(Context(run_of(name).tables).base)


def of(found: MemoryView, device: str, name: str) -> MemoryOperator:
    (row,) = [row for row in found.operators if (row.device, row.name) == (device, name)]
    return row


@needs_traces
@pytest.mark.parametrize("name", PLUGIN)
def test_operators_are_those_of_the_plugin(name: str):
    found = shared_view(name)
    assert found is not None
    ours = {
        (row.device, row.name): (
            *(row.self_increase_bytes, row.self_allocated_bytes, row.allocations),
            *(row.total_increase_bytes, row.total_allocated_bytes, row.total_allocations),
        )
        for row in found.operators
    }
    assert {key: ours.get(key) for key in PLUGIN[name]} == PLUGIN[name]


@needs_traces
@pytest.mark.parametrize("name", files())
def test_real_traces(name: str):
    found = shared_view(name)
    recorded = run_of(name).tables.memory
    assert (found is None) == recorded.is_empty()
    if found is None:
        return
    assert {curve.device for curve in found.curves} == set(recorded["device"].drop_nulls())
    for curve in found.curves:
        key = (curve.worker, curve.span, curve.device)
        assert 0 < len(curve.times_ns) <= POINTS
        assert len(curve.times_ns) == len(curve.allocated_bytes) == len(curve.reserved_bytes)
        rows = [row for row in (*found.operators, *found.lines) if (row.worker, row.span, row.device) == key]
        assert rows
        if curve.peak_recorded_bytes is not None:
            assert curve.peak_before_bytes is not None
            assert curve.peak_before_bytes >= 0
            assert sum(row.at_peak_bytes or 0 for row in rows) == 2 * curve.peak_recorded_bytes
