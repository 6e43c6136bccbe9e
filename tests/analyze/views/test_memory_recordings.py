"""Snapshots and timelines: the history told backwards from the end, the state, and who stood at the peak."""

from __future__ import annotations

import gzip
import json
import pickle
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.context import Context
from stepscope.analyze.views import allocated_memory
from stepscope.engine.user_code import CodeOptions, UserCode
from stepscope.errors import UnreadableInputError
from stepscope.model.findings import Place
from stepscope.model.memory import MemoryCurve, MemoryRecording, MemoryState, MemoryView
from stepscope.read.memory_recordings import read_memory_snapshot, read_memory_timeline
from tests.analyze.shared_traces import TRACES, needs_traces
from tests.analyze.traces import tables
from tests.read.memory_files import FILE, ROUND, SEGMENT, Allocator, stack
from tests.records import replace

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


def curve_of(found: MemoryView) -> MemoryCurve:
    (curve,) = found.curves
    return curve


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


def test_without_history_there_is_the_state_alone(tmp_path: Path):
    allocator = Allocator()
    allocator.allocate(4_000, line=1)
    found = view_of(recording_of(allocator, tmp_path))
    assert found.curves == ()
    assert state_of(found).in_use_bytes == 4_000
    (line,) = found.lines
    assert (line.place, line.standing_bytes, line.at_peak_bytes) == (place(1), 4_000, None)
    (block,) = found.blocks
    assert (block.bytes, block.at_peak) == (4_000, None)
    assert any("_record_memory_history" in note for note in found.notes)


def test_without_state_the_curve_is_relative(tmp_path: Path):
    recording = replace(recording_of(used(), tmp_path), blocks=None, segments=())
    found = view_of(recording)
    curve = curve_of(found)
    assert curve.relative
    assert curve.peak_allocated_bytes is curve.peak_before_bytes is None
    assert curve.peak_recorded_bytes == 3_300
    assert set(curve.reserved_bytes) == {None}
    assert found.states == ()
    assert {row.standing_bytes for row in found.lines} == {None}


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
def test_parts_at_the_peak_sum_to_it(
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


SNAPSHOT = pickle.dumps(used().snapshot())


@given(st.lists(st.tuples(st.integers(0, len(SNAPSHOT) - 1), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_damaged_snapshots_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
):
    data = bytearray(SNAPSHOT)
    for at, value in changes:
        data[at] = value
    path = tmp_path_factory.mktemp("d") / "snapshot.pickle"
    path.write_bytes(data)
    try:
        recordings = read_memory_snapshot(path)
    except UnreadableInputError:
        return
    found = view_of(*recordings)
    for state in found.states:
        parts = (state.in_use_bytes, state.rounding_bytes, state.pending_bytes, state.free_bytes)
        assert state.reserved_bytes == sum(parts)
        assert min(parts) >= 0


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
