"""Files that tell of memory are picked out of the paths given; everything else is left for others to read."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.model.memory import CHANGED, EXISTING, MemoryRecording
from stepscope.read.memory_recordings import (
    Detect,
    is_memory_snapshot,
    is_memory_timeline,
    read_memory_timeline,
    read_recordings,
)
from tests.analyze.shared_traces import TRACES, needs_traces
from tests.read.memory_files import Allocator


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
