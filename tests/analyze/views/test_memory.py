"""Memory of traces, snapshots and timelines: pairs, the peak and what stood there, by operator and by line."""

from __future__ import annotations

import gzip
import json
import pickle
from array import array
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.views import allocated_memory
from stepscope.analyze.views.allocated_memory import thinned
from stepscope.engine.user_code import CodeOptions, UserCode
from stepscope.model.findings import Place
from stepscope.model.memory import MemoryCurve, MemoryOperator, MemoryRecording, MemoryState, MemoryView
from stepscope.read.memory_recordings import read_memory_snapshot, read_memory_timeline
from tests.analyze.shared_traces import TRACES, needs_traces, run_of
from tests.analyze.traces import TRACE, US, Slices, tables
from tests.builders import T0
from tests.read.memory_files import FILE, ROUND, SEGMENT, Allocator, stack
from tests.records import replace

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


def curve_of(found: MemoryView) -> MemoryCurve:
    (curve,) = found.curves
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


CODE = UserCode(["/home/me/project"], [FILE])
BASE = Context(tables()).base


def recording_of(allocator: Allocator, folder: Path) -> MemoryRecording:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    (recording,) = read_memory_snapshot(path)
    return recording


def view_of(*recordings: MemoryRecording) -> MemoryView:
    found = allocated_memory.view(BASE, recordings, CODE)
    assert found is not None
    return found


def state_of(found: MemoryView) -> MemoryState:
    (state,) = found.states
    return state


def place(line: int) -> Place:
    return Place(FILE, line, "forward")


def used() -> Allocator:
    """Something stands before the history begins; of it one block goes and one stays."""
    allocator = Allocator()
    stays, goes = allocator.allocate(4_000, line=1), allocator.allocate(6_000, line=2)
    allocator.record()
    first = allocator.allocate(1_000, line=11)
    allocator.allocate(2_000, line=12)
    allocator.allocate(300, line=11)
    allocator.free(goes)
    allocator.free(first)
    assert stays in allocator.blocks
    return allocator


def test_state(tmp_path: Path):
    allocator = used()
    pending = allocator.allocate(700, line=3)
    other = allocator.allocate(SEGMENT, line=4)  # a segment of its own, released again
    allocator.free(pending, pending=True)
    allocator.free(other)
    state = state_of(view_of(recording_of(allocator, tmp_path)))
    in_use = allocator.in_use()
    assert state.reserved_bytes == 2 * SEGMENT
    assert state.in_use_bytes == 6_300 == sum(block.requested for block in in_use)
    assert state.rounding_bytes == sum(block.size - block.requested for block in in_use)
    assert state.pending_bytes == 2 * ROUND
    assert state.releasable_bytes == state.largest_free_block_bytes == SEGMENT
    assert state.free_bytes == state.releasable_bytes + state.fragmented_bytes
    assert state.reserved_bytes == sum(
        (state.in_use_bytes, state.rounding_bytes, state.pending_bytes, state.free_bytes)
    )
    assert (state.segments, state.blocks_in_use) == (2, 3)


def test_out_of_memory(tmp_path: Path):
    allocator = used()
    allocator.out_of_memory(2**40, device_free=77, line=13)
    (found,) = view_of(recording_of(allocator, tmp_path)).out_of_memory
    assert (found.requested_bytes, found.device_free_bytes) == (2**40, 77)
    assert (found.allocated_bytes, found.reserved_bytes) == (6_300, SEGMENT)
    assert found.place == place(13)
    assert [frame.file for frame in found.frames] == [frame["filename"] for frame in stack(13)]
    assert found.time_ns == allocator.now_us * 1_000


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (CodeOptions(), Place(FILE, 3, "forward")),
        (CodeOptions(libraries=("project",)), None),
        (
            CodeOptions(maps=(("/home/me/project", "/src"),), source_roots=("/src",)),
            Place("/src/train.py", 3, "forward"),
        ),
    ],
)
def test_whose_code_it_is(tmp_path: Path, options: CodeOptions, expected: Place | None):
    allocator = Allocator()
    allocator.record()
    allocator.allocate(10, line=3)
    code = UserCode(["/home/me/project"], [FILE], options=options)
    found = allocated_memory.view(BASE, (recording_of(allocator, tmp_path),), code)
    assert found is not None
    (line,) = found.lines
    assert line.place == expected


@given(
    before=st.lists(st.integers(1, 9_000), max_size=3),
    steps=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9_000), st.booleans()), min_size=1, max_size=40),
    kept=st.integers(1, 60),
)
@settings(max_examples=100, deadline=None)
def test_parts_of_a_snapshot_sum_to_its_peak(
    tmp_path_factory: pytest.TempPathFactory, before: list[int], steps: list[tuple[int, int, bool]], kept: int
):
    """For any use of an allocator, and a history that holds only the last events."""
    allocator = Allocator()
    mine = [allocator.allocate(size, line=1) for size in before]
    allocator.record()
    for choice, size, pending in steps:
        if choice < len(mine):
            allocator.free(mine.pop(choice), pending=pending)
        else:
            mine.append(allocator.allocate(size, line=10 + choice))
    forget(allocator, kept)
    found = view_of(recording_of(allocator, tmp_path_factory.mktemp("s")))
    moments = allocator.moments[-1 - len(allocator.events) :]
    levels = [moment.allocated for moment in moments]
    if not found.curves:
        assert not [event for event in allocator.events if event["action"] in ("alloc", "free_requested")]
        return
    curve = curve_of(found)
    assert set(curve.allocated_bytes) == set(levels)
    assert curve.peak_allocated_bytes == max(levels)
    assert curve.end_allocated_bytes == levels[-1]
    peak = moments[levels.index(max(levels))]
    assert curve.peak_recorded_bytes == sum(peak.by_line.values())
    assert curve.peak_before_bytes == peak.before
    assert {row.place.line: row.at_peak_bytes for row in found.lines if row.place and row.at_peak_bytes} == peak.by_line
    assert sum(row.standing_bytes or 0 for row in found.lines) == levels[-1] == state_of(found).in_use_bytes


def forget(allocator: Allocator, kept: int) -> None:
    """Only the last events are kept, as in a ring buffer: earlier allocations count as made before."""
    allocator.events[:] = allocator.events[-kept:]
    first = len(allocator.moments) - len(allocator.events)
    live: dict[int, tuple[int, int]] = {}
    for event, moment in zip(allocator.events, allocator.moments[first:], strict=True):
        if event["action"] == "alloc":
            live[event["addr"]] = (event["frames"][2]["line"], event["size"])
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)
        moment.by_line = {}
        for line, size in live.values():
            moment.by_line[line] = moment.by_line.get(line, 0) + size
        moment.before = moment.allocated - sum(moment.by_line.values())
    start = allocator.moments[first - 1]
    start.before, start.by_line = start.allocated, {}


COLUMN = st.integers(-(2**48), 2**48)


@given(
    st.lists(st.tuples(st.integers(0, 6), COLUMN, st.integers(0, 2**48), st.integers(-1, 6)), max_size=30),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_recording_raises(rows: list[tuple[int, int, int, int]], timeline: bool):
    """Whatever a damaged file says: times that run backwards, segments that are not there, releases alone."""
    count = len(rows)
    recording = MemoryRecording(
        source="timeline" if timeline else "snapshot",
        worker="x",
        device="cuda:0",
        clock="epoch",
        kind=array("b", [row[0] for row in rows] or [5] if timeline else [row[0] for row in rows]),
        time_ns=array("q", [row[1] for row in rows] or [0] if timeline else [row[1] for row in rows]),
        bytes=array("q", [row[2] for row in rows] or [0] if timeline else [row[2] for row in rows]),
        address=array("q", [row[3] for row in rows] or [-1]),
        stack=array("q", [-1]) * max(count, 1),
        category=array("b", [abs(row[3]) for row in rows] or [0]),
        categories=tuple("abcdefg"),
    )
    if not timeline and not rows:
        recording = replace(recording, address=array("q"), stack=array("q"), category=array("b"))
    found = view_of(recording)
    assert len(found.curves) <= 1


@needs_traces
def test_a_real_timeline():
    """The peak against a plain loop over the file's rows."""
    path = TRACES / "hta" / "memory_analysis" / "memory_timeline.raw.gz"
    curve = curve_of(view_of(*read_memory_timeline(path)))
    level = 0
    levels: dict[int, int] = {}
    for time, _, size, _ in json.loads(gzip.decompress(path.read_bytes())):
        level += size
        if time >= 0:
            levels[time] = level
    assert curve.peak_allocated_bytes == max(levels.values())
    assert curve.end_allocated_bytes == level
    assert sum(curve.peak_by_category.values()) == curve.peak_allocated_bytes
    for at, allocated in enumerate(curve.allocated_bytes):
        assert sum(values[at] for values in curve.by_category.values()) == allocated
