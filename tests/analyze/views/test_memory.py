"""Memory from the allocations in traces: pairs, the peak and what stood there, by operator and by line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope import api
from stepscope.analyze.context import Context
from stepscope.analyze.views import allocated_memory
from stepscope.analyze.views.allocated_memory import pair, thinned
from stepscope.model.memory import MemoryCurve, MemoryOperator, MemoryRecording, MemoryView
from stepscope.read.memory_recordings import CATEGORIES, read_recordings
from tests.analyze.shared_traces import needs_traces, run_of
from tests.analyze.traces import TRACE, US, Slices, tables
from tests.builders import T0

GPU, CPU = "cuda:0", "cpu"
ROWS = list[dict[str, Any]]


class Recorded:
    """Slices of a trace and its allocations; totals are kept as an allocator keeps them."""

    def __init__(self, *, before: int = 0, reserved: int | None = 10_000) -> None:
        self.slices = Slices()
        self.rows: ROWS = []
        self.reserved = reserved
        self.totals: dict[str, int] = defaultdict(int, {GPU: before})

    def add(self, size: int, at_us: float, address: int | None, *, device: str = GPU, track: str = "1/1") -> None:
        """An allocation, or a release where `size` is below 0."""
        self.totals[device] += size
        row = {"trace": TRACE, "track": track, "device": device, "time_ns": T0 + round(at_us * US), "bytes": size}
        row |= {"address": address, "allocated_bytes": self.totals[device], "reserved_bytes": self.reserved}
        self.rows.append(row)

    def view(self) -> MemoryView:
        if not self.slices.events:
            self.slices.add("cpu_op", "aten::nothing", 0, 1_000_000, track="9/9")
        found = allocated_memory.view(Context(tables(self.slices, memory=self.rows)).base)
        assert found is not None
        return found


def curve_of(found: MemoryView, device: str = GPU) -> MemoryCurve:
    (curve,) = [curve for curve in found.curves if curve.device == device]
    return curve


def operators_of(found: MemoryView, device: str = GPU) -> dict[str | None, MemoryOperator]:
    rows = [row for row in found.operators if row.device == device]
    named = {row.name: row for row in rows}
    assert len(named) == len(rows)
    return named


def nested() -> Recorded:
    """linear > (addmm > empty), a linear inside a linear, and a kernel's slice that lies over them all."""
    recorded = Recorded()
    slices = recorded.slices
    step = slices.add("user_annotation", "ProfilerStep#1", 0, 100)
    outer = slices.add("cpu_op", "aten::linear", 10, 40, parent=step, depth=1)
    addmm = slices.add("cpu_op", "aten::addmm", 15, 20, parent=outer, depth=2)
    launch = slices.add("cuda_runtime", "cudaMalloc", 16, 2, parent=addmm, depth=3)
    assert launch
    slices.add("cpu_op", "aten::empty", 20, 5, parent=addmm, depth=3)
    slices.add("cpu_op", "aten::linear", 40, 5, parent=outer, depth=2)
    slices.add("cpu_op", "aten::linear", 60, 5, parent=step, depth=1)
    slices.kernel(0, 100)
    recorded.add(1, 5, 0x1)  # in the step alone
    recorded.add(2, 12, 0x2)  # in linear
    recorded.add(4, 17, 0x3)  # in addmm, below its runtime call
    recorded.add(8, 20, 0x4)  # in empty, at its very start
    recorded.add(16, 25, 0x5)  # at empty's end: no longer in it
    recorded.add(32, 42, 0x6)  # in the inner linear
    recorded.add(-2, 45, 0x2)  # released in the outer one
    return recorded


def test_traces_of_2021_carry_no_addresses_and_no_totals():
    recorded = nested()
    for row in recorded.rows:
        row |= {"address": None, "allocated_bytes": None, "reserved_bytes": None}
    found = recorded.view()
    curve = curve_of(found)
    assert curve.relative
    assert curve.allocated_bytes == (0, 1, 3, 7, 15, 31, 63, 61)
    for figure in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_recorded_bytes", "peak_before_bytes"):
        assert getattr(curve, figure) is None
    assert curve.start_allocated_bytes is curve.end_allocated_bytes is None
    assert operators_of(found)["aten::linear"].total_allocated_bytes == 62
    assert {row.at_peak_bytes for row in found.operators} == {row.at_peak_bytes for row in found.lines} == {None}
    assert (found.blocks, found.pairs, found.unpaired_allocations) == ((), 0, 0)
    assert any("1.10" in note for note in found.notes)
    assert any("when it began" in note for note in found.notes)


def test_nothing_recorded_is_none():
    slices = Slices()
    slices.add("cpu_op", "aten::mm")
    assert allocated_memory.view(Context(tables(slices)).base) is None
    assert allocated_memory.view(Context(tables()).base) is None


def test_rows_that_say_nothing():
    recorded = Recorded()
    for missing in ("device", "bytes", "track"):
        recorded.add(5, 1, 0x1)
        recorded.rows[-1][missing] = None
    recorded.add(0, 2, 0x9)
    found = recorded.view()
    assert curve_of(found).events == 1
    assert operators_of(found)[None].self_allocated_bytes == 5


@st.composite
def histories(draw: st.DrawFn) -> tuple[Recorded, list[tuple[int, int]]]:
    """Allocations on a few addresses over random operators; some blocks stood before, some releases come late."""
    early = draw(st.lists(st.integers(1, 1_000), max_size=4))
    recorded = Recorded(before=sum(early))
    for number in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, 100))
        name = draw(st.sampled_from(["a", "b", "c"]))
        recorded.slices.add("cpu_op", name, start, draw(st.integers(0, 50)), track=f"1/{number % 3}")
    standing = {-1 - number: size for number, size in enumerate(early)}
    truth = []
    for at in range(draw(st.integers(1, 40))):
        address = draw(st.integers(0, 5) | st.sampled_from(sorted(standing)) if standing else st.integers(0, 5))
        track = f"1/{draw(st.integers(0, 3))}"
        if address in standing:
            recorded.add(-standing.pop(address), at * 3, address + 100, track=track)
        else:
            standing[address] = draw(st.integers(1, 1_000))
            recorded.add(standing[address], at * 3, address + 100, track=track)
        truth.append((sum(standing.values()), sum(size for key, size in standing.items() if key >= 0)))
    return recorded, [(sum(early), 0), *truth]


@given(histories())
@settings(max_examples=150, deadline=None)
def test_parts_at_the_peak_sum_to_it(case: tuple[Recorded, list[tuple[int, int]]]):
    recorded, truth = case
    found = recorded.view()
    curve = curve_of(found)
    peak = max(range(len(truth)), key=lambda at: (truth[at][0], -at))
    assert curve.allocated_bytes == tuple(level for level, _ in truth)
    assert curve.peak_allocated_bytes == truth[peak][0]
    assert curve.peak_recorded_bytes == truth[peak][1]
    assert curve.peak_before_bytes == truth[peak][0] - truth[peak][1]
    assert sum(row.at_peak_bytes or 0 for row in found.operators) == truth[peak][1]
    assert sum(row.at_peak_bytes or 0 for row in found.lines) == truth[peak][1]
    assert sum(block.bytes for block in found.blocks if block.at_peak) == truth[peak][1]
    sizes = [row["bytes"] for row in recorded.rows]
    assert sum(row.self_allocated_bytes for row in found.operators) == sum(size for size in sizes if size > 0)
    assert sum(row.self_increase_bytes for row in found.operators) == sum(sizes)
    assert found.pairs + found.unpaired_allocations == sum(size > 0 for size in sizes)
    assert found.pairs + found.unpaired_releases == sum(size < 0 for size in sizes)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=60))
@settings(max_examples=200, deadline=None)
def test_pairs_are_those_of_a_plain_loop(events: list[tuple[int, bool]]):
    """Any order of events, lost releases and lone ones included."""
    found = pair(np.array([key for key, _ in events], np.int64), np.array([opens for _, opens in events], bool))
    open_blocks: dict[int, int] = {}
    release, lone, unseen = {}, [], 0
    for number, (address, opens) in enumerate(events):
        if opens:
            if address in open_blocks:
                release[open_blocks[address]] = number
                unseen += 1
            open_blocks[address] = number
            release[number] = len(events)
        elif address in open_blocks:
            release[open_blocks.pop(address)] = number
        else:
            lone.append(number)
    assert dict(zip(found.allocation.tolist(), found.release.tolist(), strict=True)) == release
    assert found.lone.tolist() == lone
    assert (found.unseen, found.never) == (unseen, len(events))


@given(
    gaps=st.lists(st.integers(0, 10**12), min_size=1, max_size=300),
    seed=st.integers(0, 2**32 - 1),
    points=st.integers(20, 100),
)
@settings(max_examples=100, deadline=None)
def test_thinning_keeps_the_peaks(gaps: list[int], seed: int, points: int):
    times = T0 + np.cumsum(np.array(gaps, np.int64))
    random = np.random.default_rng(seed)
    levels, reserved = random.integers(-1_000, 1_000, (2, len(times)))
    kept = thinned(times, levels, reserved, points)
    assert len(kept) <= points
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, len(times) - 1)
    assert int(levels.argmax()) in kept
    assert levels[kept].min() == levels.min()
    assert reserved[kept].max() == reserved.max()


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
    found = allocated_memory.view(Context(run.tables).base)
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
    found = allocated_memory.view(Context(tables()).base, (snapshot,))
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
    return allocated_memory.view(Context(run_of(name).tables).base)


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
