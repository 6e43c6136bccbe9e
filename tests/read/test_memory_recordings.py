"""Files that tell of memory are picked out of the paths given; everything else is left for others to read."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.read.memory_recordings import read_recordings
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


def test_equal_names_get_their_folders(tmp_path: Path):
    paths = [snapshot(tmp_path / "rank0" / "s.pickle"), snapshot(tmp_path / "rank1" / "s.pickle")]
    recordings, _ = read_recordings([*paths, snapshot(tmp_path / "rank1" / "t.pickle")])
    assert [recording.worker for recording in recordings] == ["rank0/s", "rank1/s", "t"]


def test_an_unreadable_recording_is_an_error(tmp_path: Path):
    path = tmp_path / "broken.pickle"
    path.write_bytes(b"\x80\x04broken")
    with pytest.raises(UnreadableInputError, match=r"broken\.pickle"):
        read_recordings([path])
