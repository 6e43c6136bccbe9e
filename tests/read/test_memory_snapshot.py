"""Snapshots of the allocator: what they hold, in the format of every release, and what is left out."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.model import memory
from stepscope.model.findings import Place
from stepscope.read.memory_recordings import read_memory_snapshot
from tests.read.memory_files import FILE, SEGMENT, START_US, Allocator, stack


def write(folder: Path, snapshot: Any, name: str = "snapshot.pickle", protocol: int | None = None) -> Path:
    path = folder / name
    data = pickle.dumps(snapshot, protocol)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def read(folder: Path, snapshot: Any, **how: Any) -> memory.MemoryRecording:
    (recording,) = read_memory_snapshot(write(folder, snapshot, **how))
    return recording


def used() -> Allocator:
    allocator = Allocator()
    allocator.record()
    first = allocator.allocate(1_000, line=11)
    second = allocator.allocate(3_000_0, line=12)
    allocator.allocate(500, line=11)
    allocator.free(first)
    allocator.free(second, pending=True)
    allocator.out_of_memory(2**40, device_free=77, line=13)
    return allocator


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", ["snapshot.pickle.gz", "snapshot"])
def test_events_and_blocks(tmp_path: Path, protocol: int, name: str):
    recording = read(tmp_path, used().snapshot(), name=name, protocol=protocol)
    assert (recording.source, recording.worker, recording.device) == ("snapshot", "snapshot", "cuda:0")
    assert recording.clock == "epoch"
    assert list(recording.kind) == [
        *(memory.SEGMENT_ADDED, memory.ALLOCATED, memory.ALLOCATED, memory.ALLOCATED),
        *(memory.RELEASED, memory.RELEASED, memory.OUT_OF_MEMORY),
    ]
    assert list(recording.bytes) == [SEGMENT, 1_000, 30_000, 500, 1_000, 30_000, 2**40]
    assert recording.time_ns[0] == (START_US + 10) * 1_000
    assert list(recording.time_ns) == sorted(recording.time_ns)
    assert recording.out_of_memory_free == {6: 77}
    assert recording.address[6] == -1
    assert recording.segments == (SEGMENT,)
    rows = recording.blocks
    assert rows is not None
    assert list(rows.state) == [memory.FREE, memory.PENDING, memory.IN_USE, memory.FREE]
    assert list(rows.requested) == [0, 30_000, 500, 0]
    assert list(rows.bytes) == [1_024, 30_208, 512, SEGMENT - 1_024 - 30_208 - 512]
    assert recording.problems == ()


def test_equal_stacks_get_one_number(tmp_path: Path):
    recording = read(tmp_path, used().snapshot())
    assert recording.stack[1] == recording.stack[3] != recording.stack[2]
    assert len(recording.stacks) == 3
    assert recording.stacks[recording.stack[2]] == tuple(
        Place(frame["filename"], frame["line"] or None, frame["name"]) for frame in stack(12)
    )
    assert recording.stacks[recording.stack[2]][2].file == FILE


def test_each_device_is_a_recording(tmp_path: Path):
    one, other = used().snapshot(), used().snapshot(device=2)
    both = {
        "segments": [*one["segments"], *other["segments"]],
        "device_traces": [one["device_traces"][0], [], other["device_traces"][2]],
    }
    found = read_memory_snapshot(write(tmp_path, both))
    assert [recording.device for recording in found] == ["cuda:0", "cuda:2"]
    assert [len(recording.kind) for recording in found] == [7, 7]
    assert [recording.segments for recording in found] == [(SEGMENT,), (SEGMENT,)]


def test_events_of_all_releases(tmp_path: Path):
    actions = ["segment_map", "segment_unmap", "segment_free", "free", "snapshot", "free_completed", "brand_new"]
    events = [{"action": action, "addr": 1, "size": 8, "stream": 0, "frames": []} for action in actions]
    recording = read(tmp_path, {"segments": [], "device_traces": [events]})
    assert list(recording.kind) == [
        memory.SEGMENT_ADDED,
        memory.SEGMENT_REMOVED,
        memory.SEGMENT_REMOVED,
        memory.RELEASED,
    ]
    assert any("brand_new" in problem for problem in recording.problems)
    assert list(recording.stack) == [-1] * 4
    assert (recording.clock, list(recording.time_ns)) == ("order", list(range(4)))  # without times


def test_blocks_of_torch_2_0(tmp_path: Path):
    """Sizes and stacks lie in the block's history, blocks carry no address, the file may be the segments alone."""
    frames = stack(5)
    blocks = [
        {"size": 512, "state": "inactive"},
        {"size": 1_024, "state": "active_allocated", "history": [{"real_size": 900, "frames": frames}]},
        {"size": 512, "state": "active_pending_free", "history": [{"real_size": 1, "addr": 5}]},
    ]
    segment = {"address": 4096, "total_size": 2_048, "stream": 0, "segment_type": "small", "blocks": blocks}
    recording = read(tmp_path, [segment])
    rows = recording.blocks
    assert rows is not None
    assert list(rows.address) == [4096, 4608, 5632]
    assert list(rows.requested) == [512, 900, 1]
    assert list(rows.state) == [memory.FREE, memory.IN_USE, memory.PENDING]
    assert recording.device == "cuda:0"
    assert recording.stacks[rows.stack[1]][2] == Place(FILE, 5, "forward")
    assert len(recording.kind) == 0


BROKEN: list[Any] = [
    None,
    7,
    [],
    {},
    {"action": 3, "size": 1, "addr": 1},
    {"action": "alloc", "addr": 1},
    {"action": "alloc", "size": "1", "addr": 1},
    {"action": "alloc", "size": -1, "addr": 1},
    {"action": "alloc", "size": 2**70, "addr": 1},
    {"action": "alloc", "size": 1},
    {"action": "alloc", "size": 1, "addr": 2**70},
]


def test_broken_records_are_left_out_and_counted(tmp_path: Path):
    good = used().snapshot()
    blocks = [None, {}, {"size": 1}, {"size": 1, "state": "odd"}]
    snapshot = {
        "segments": [
            *good["segments"],
            *[None, 3, {}, {"device": -1, "total_size": 1}, {"device": 10**6, "total_size": 1}],
            {"device": 0, "total_size": "x"},
            {"device": 0, "total_size": 64, "address": 9, "blocks": blocks},
        ],
        "device_traces": [[*BROKEN, *good["device_traces"][0]], None, 5],
    }
    recording = read(tmp_path, snapshot)
    assert len(recording.kind) == 7
    assert recording.segments == (SEGMENT, 64)
    lost = len(BROKEN) + 4 + 2 + 4  # segments that name no device or a wrong one, without size, and blocks
    assert recording.problems == (f"{lost} records could not be read",)


@pytest.mark.parametrize(
    "frames", [None, 5, {}, [], [None, 3], [{"filename": 3, "line": 1, "name": "f"}], [{"filename": "a.py"}], "text"]
)
def test_broken_stacks_are_none(tmp_path: Path, frames: Any):
    odd = [{"filename": "a\udcff.py", "line": -3, "name": "\ud800f"}]
    events = [{"action": "alloc", "addr": 1, "size": 8, "frames": each, "time_us": START_US} for each in (frames, odd)]
    recording = read(tmp_path, {"segments": [], "device_traces": [events]})
    assert list(recording.stack) == [-1, 0]
    ((frame,),) = recording.stacks
    assert (frame.file.encode(), frame.line) == (b"a\\xff.py", None)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"a": 1}, "no snapshot"),
        (5, "no snapshot"),
        ("segments", "no snapshot"),
        ([], "empty"),
        ({"segments": [], "device_traces": [[], []]}, "empty"),
        ({"segments": 5, "device_traces": None}, "empty"),
    ],
)
def test_what_is_no_snapshot_is_said_in_one_line(tmp_path: Path, value: Any, why: str):
    with pytest.raises(UnreadableInputError, match=why) as caught:
        read(tmp_path, value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path):
    path = write(tmp_path, {"segments": [Path("x")]})
    with pytest.raises(UnreadableInputError, match="imports or calls code") as caught:
        read_memory_snapshot(path)
    assert str(caught.value).startswith(str(path))
    path = write(tmp_path, used().snapshot())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UnreadableInputError, match=r"damaged|too early"):
        read_memory_snapshot(path)
    packed = write(tmp_path, used().snapshot(), name="s.pickle.gz")
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(UnreadableInputError, match="too early"):
        read_memory_snapshot(packed)
    with pytest.raises(UnreadableInputError, match="No such file"):
        read_memory_snapshot(tmp_path / "absent.pickle")
