"""Files that tell of memory: snapshots of the allocator of every release, timelines, and what is neither."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.model import memory
from stepscope.model.findings import Place
from stepscope.model.memory import CHANGED, EXISTING, MemoryRecording
from stepscope.read.memory_recordings import (
    Detect,
    is_memory_snapshot,
    is_memory_timeline,
    read_memory_snapshot,
    read_memory_timeline,
    read_recordings,
)
from tests.analyze.shared_traces import TRACES, needs_traces
from tests.read.memory_files import FILE, SEGMENT, START_US, Allocator, stack


def snapshot(path: Path) -> Path:
    allocator = Allocator()
    allocator.record()
    allocator.allocate(10, line=1)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(allocator.snapshot()))
    return path


def test_recordings_are_told_from_traces(tmp_path: Path):
    trace = tmp_path / "trace.json"
    trace.write_text('{"traceEvents": [{"ph": "X", "name": "segments"}]}')
    timeline = tmp_path / "memory.json"
    timeline.write_text("[[1, 2], [[0, 5], [0, 6]]]")
    absent, folder = tmp_path / "absent.pickle", tmp_path / "folder"
    folder.mkdir()
    paths = [trace, snapshot(tmp_path / "a.pickle"), folder, timeline, absent]
    recordings, others = read_recordings(paths)
    assert [recording.worker for recording in recordings] == ["a", "memory"]
    assert others == (trace, folder, absent)
    (tmp_path / "broken.pickle").write_bytes(b"\x80\x04broken")
    with pytest.raises(UnreadableInputError, match=r"broken\.pickle"):
        read_recordings([tmp_path / "broken.pickle"])


def test_equal_names_get_their_folders(tmp_path: Path):
    paths = [snapshot(tmp_path / "rank0" / "s.pickle"), snapshot(tmp_path / "rank1" / "s.pickle")]
    recordings, _ = read_recordings([*paths, snapshot(tmp_path / "rank1" / "t.pickle")])
    assert [recording.worker for recording in recordings] == ["rank0/s", "rank1/s", "t"]


@pytest.mark.parametrize(
    ("detect", "name", "head", "expected"),
    [
        (is_memory_timeline, "a", b"[[-1, 1, 37888, 7], [", True),
        (is_memory_timeline, "a", b" [ [1696966047096061, 16969", True),
        (is_memory_timeline, "a", b"[[], []]", True),
        (is_memory_timeline, "x.raw.json.gz", b"[]", True),
        (is_memory_timeline, "x.json", b"[]", False),
        (is_memory_timeline, "x.html", b"<html>\n<head><title>GPU Memory Timeline HTML</title>", True),
        (is_memory_timeline, "x.json", b'[{"ph": "X"}]', False),
        (is_memory_timeline, "x.json", b'{"traceEvents": [[1, 2]]}', False),
        (is_memory_timeline, "x.json", b"[[1.5, 2]]", False),
        (is_memory_snapshot, "snapshot.pickle", b"", True),
        (is_memory_snapshot, "snapshot.pkl.gz", b"anything", True),
        (is_memory_snapshot, "snapshot", pickle.dumps({"segments": []}), True),
        (is_memory_snapshot, "snapshot", pickle.dumps([{"device": 0, "address": 1, "total_size": 1}], 2), True),
        (is_memory_snapshot, "weights.pt", pickle.dumps({"weights": []}), False),
        (is_memory_snapshot, "trace.json", b'{"traceEvents": [], "segments": 1}', False),
    ],
)
def test_detectors(detect: Detect, name: str, head: bytes, expected: bool):
    assert detect(Path(name), head) is expected


T = 1_700_000_000_000_000_000
SHARED = TRACES / "hta" / "memory_analysis" / "memory_timeline.raw.gz"


def write(folder: Path, value: Any, name: str = "timeline.raw.json.gz") -> Path:
    path = folder / name
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def read(folder: Path, value: Any, **how: Any) -> MemoryRecording:
    (recording,) = read_memory_timeline(write(folder, value, **how))
    return recording


def test_raw_rows(tmp_path: Path):
    rows = [[-1, 1, 100, 0], [T, 2, 50, 4], [T + 5, 3, -50, 4], [T + 5, 3, 50, 5], [T + 9, 4, -50, 5]]
    recording = read(tmp_path, rows)
    assert (recording.source, recording.worker, recording.clock) == ("timeline", "timeline", "epoch")
    assert list(recording.kind) == [EXISTING, CHANGED, CHANGED, CHANGED, CHANGED]
    assert list(recording.time_ns) == [T, T, T + 5, T + 5, T + 9]  # what was there stands from the first event on
    assert list(recording.bytes) == [100, 50, -50, 50, -50]
    assert [recording.categories[number] for number in recording.category] == [
        *("parameter", "activation", "activation"),
        *("gradient", "gradient"),
    ]


@pytest.mark.parametrize("name", ["timeline.json", "timeline.json.gz"])
def test_sizes_by_category(tmp_path: Path, name: str):
    us = T // 1000
    none = [0] * 9
    rows = [[0, 100, *none[2:]], [0, 100, 0, 0, 7, *none[5:]], [0, 90, 0, 0, 7, *none[5:]]]
    recording = read(tmp_path, [[us, us + 1, us + 4], rows], name=name)
    changes = [
        (time - T, recording.categories[category], size)
        for time, category, size in zip(recording.time_ns, recording.category, recording.bytes, strict=True)
        if size
    ]
    assert changes == [(0, "parameter", 100), (1_000, "temporary", 7), (4_000, "parameter", -10)]
    assert set(recording.time_ns) == {T, T + 1_000, T + 4_000}


def test_broken_rows_are_left_out_and_counted(tmp_path: Path):
    bad = [None, 3, [], [1, 2, 3], [T, 2, 1, 99], [T, 2, 1, -1], [T, 9, 1, 1], [T, 2, "x", 1], [T, 2, 2**60, 1]]
    recording = read(tmp_path, [*bad, [T, 2, 5, 1]])
    assert list(recording.bytes) == [5]
    assert recording.problems == (f"{len(bad)} rows could not be read",)


def test_broken_rows_by_category_change_nothing(tmp_path: Path):
    rows: list[Any] = [[0, 10], [0, "x"], [0, 30], [0, 2**60], [0, 40]]
    recording = read(tmp_path, [[1, 2, 3, 4, 5], rows], name="t.json")
    assert [size for size in recording.bytes if size] == [10, 20, 10]
    assert recording.problems == ("2 rows could not be read",)
    assert recording.clock == "start"


@pytest.mark.parametrize(
    ("value", "name", "why"),
    [
        ([], "t.raw.json.gz", "no row"),
        ([[], []], "t.json", "no row"),
        ({"a": 1}, "t.json", "no row"),
        (b"[[1, 2, 3", "t.json", "no valid JSON"),
        (b"<html><head><title>GPU Memory Timeline HTML</title></head></html>", "t.html", "picture"),
    ],
)
def test_nothing_to_read_is_said_in_one_line(tmp_path: Path, value: Any, name: str, why: str):
    with pytest.raises(UnreadableInputError, match=why) as caught:
        read(tmp_path, value, name=name)
    assert "\n" not in str(caught.value)


@needs_traces
def test_a_real_one():
    (recording,) = read_memory_timeline(SHARED)
    rows = json.loads(gzip.decompress(SHARED.read_bytes()))
    assert list(recording.bytes) == [row[2] for row in rows]
    assert recording.worker == "memory_timeline"
    assert recording.problems == ()


def write_snapshot(folder: Path, snapshot: Any, name: str = "snapshot.pickle", protocol: int | None = None) -> Path:
    path = folder / name
    data = pickle.dumps(snapshot, protocol)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def read_snapshot(folder: Path, snapshot: Any, **how: Any) -> memory.MemoryRecording:
    (recording,) = read_memory_snapshot(write_snapshot(folder, snapshot, **how))
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


@pytest.mark.parametrize(
    ("protocol", "name"), [(protocol, "snapshot" + ".pickle.gz" * (protocol % 2)) for protocol in range(6)]
)
def test_events_and_blocks(tmp_path: Path, protocol: int, name: str):
    recording = read_snapshot(tmp_path, used().snapshot(), name=name, protocol=protocol)
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


def test_each_device_is_a_recording(tmp_path: Path):
    one, other = used().snapshot(), used().snapshot(device=2)
    both = {
        "segments": [*one["segments"], *other["segments"]],
        "device_traces": [one["device_traces"][0], [], other["device_traces"][2]],
    }
    found = read_memory_snapshot(write_snapshot(tmp_path, both))
    assert [recording.device for recording in found] == ["cuda:0", "cuda:2"]
    assert [len(recording.kind) for recording in found] == [7, 7]
    assert [recording.segments for recording in found] == [(SEGMENT,), (SEGMENT,)]


def test_events_of_all_releases(tmp_path: Path):
    actions = ["segment_map", "segment_unmap", "segment_free", "free", "snapshot", "free_completed", "brand_new"]
    events = [{"action": action, "addr": 1, "size": 8, "stream": 0, "frames": []} for action in actions]
    recording = read_snapshot(tmp_path, {"segments": [], "device_traces": [events]})
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
    recording = read_snapshot(tmp_path, [segment])
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
    recording = read_snapshot(tmp_path, snapshot)
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
    recording = read_snapshot(tmp_path, {"segments": [], "device_traces": [events]})
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
        read_snapshot(tmp_path, value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path):
    path = write_snapshot(tmp_path, {"segments": [Path("x")]})
    with pytest.raises(UnreadableInputError, match="imports or calls code") as caught:
        read_memory_snapshot(path)
    assert str(caught.value).startswith(str(path))
    path = write_snapshot(tmp_path, used().snapshot())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UnreadableInputError, match=r"damaged|too early"):
        read_memory_snapshot(path)
    packed = write_snapshot(tmp_path, used().snapshot(), name="s.pickle.gz")
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(UnreadableInputError, match="too early"):
        read_memory_snapshot(packed)
    with pytest.raises(UnreadableInputError, match="No such file"):
        read_memory_snapshot(tmp_path / "absent.pickle")
