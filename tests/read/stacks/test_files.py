"""Files of stacks and folders of them as a run, and how paths are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.read import read_paths
from stepscope.read.stacks.sampled_files import read_stack_files
from tests.read.stack_text import read_all

RAW = 'process 5:"python train.py --token abc";thread (5): MainThread;f (x.py:1) 3\n'
TRACE = json.dumps({"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]})


def test_a_file(tmp_path: Path):
    path = tmp_path / "node.txt"
    path.write_text(RAW)
    run = read_paths([path])
    (host,) = run.hosts
    (segment,) = host.segments
    assert (host.name, host.manifest, run.ranks, run.folder) == ("", None, (), tmp_path)
    assert (segment.file, segment.source, segment.number, segment.status) == ("node.txt", "py-spy", 0, "ok")
    assert (segment.pid, segment.start_ns, segment.end_ns, segment.rate_hz, segment.idle) == (None,) * 5
    assert [stack.samples for stack in read_all(segment.stacks).stacks] == [3]
    assert not segment.stretches.record
    assert "abc" not in repr(run)


def test_a_folder_in_the_order_of_names(tmp_path: Path):
    for name in ("profile_10.txt", "profile_2.txt", "more/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(RAW)
    (tmp_path / "log.txt").write_text("epoch 3 started\n")
    (tmp_path / ".hidden").write_text(RAW)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_text(RAW)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    run = read_paths([tmp_path])
    assert [segment.file for segment in run.hosts[0].segments] == ["profile_2.txt", "profile_10.txt", "more/a.txt"]
    assert [segment.number for segment in run.hosts[0].segments] == [0, 1, 2]
    assert run.losses.files == {"foreign_files": ["log.txt"]}


def test_files_of_different_folders_keep_different_names(tmp_path: Path):
    for name in ("a", "b", "b/c/d/e/f/g/h/i/j/k"):  # the last is too deep
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.txt").write_text(RAW)
    run = read_paths([tmp_path / "a" / "x.txt", tmp_path / "b", tmp_path / "a" / "x.txt"])
    assert [segment.file for segment in run.hosts[0].segments] == ["a/x.txt", "b/x.txt"]


def test_losses_name_the_file(tmp_path: Path):
    (tmp_path / "x.txt").write_text(RAW + "garbage 4\n")
    run = read_paths([tmp_path / "x.txt"])
    parsed = read_all(run.hosts[0].segments[0].stacks)
    assert parsed.losses.files == {"skipped_records": ["x.txt"], "skipped_samples": ["x.txt"]}
    assert parsed.skipped_samples == 4


def test_files_in_which_nothing_can_be_read(tmp_path: Path):
    path = tmp_path / "x.txt"
    path.write_text('process 5:"never closed 3\n')
    with pytest.raises(UnreadableInputError, match="not one stack"):
        read_paths([path])
    (tmp_path / "y.txt").write_text(RAW)
    assert len(read_paths([tmp_path]).hosts[0].segments) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableInputError, match="no file of sampled stacks"):
        read_stack_files([tmp_path / "empty"])
    with pytest.raises(UnreadableInputError, match="no path given"):
        read_stack_files([])


def test_traces_and_stacks_in_one_call(tmp_path: Path):
    (tmp_path / "t.json").write_text(TRACE)
    (tmp_path / "x.txt").write_text(RAW)
    with pytest.raises(UnreadableInputError, match="one kind at a time"):
        read_paths([tmp_path / "t.json", tmp_path / "x.txt"])
    with pytest.raises(UnreadableInputError, match="one kind at a time"):
        read_paths([tmp_path / "none", tmp_path / "x.txt"])
    assert [rank.name for rank in read_paths([tmp_path]).ranks] == ["rank-0"]  # a folder with a trace is one of traces
    assert read_paths([tmp_path / "x.txt"]).ranks == ()
    assert read_paths([tmp_path / "t.json"]).hosts == ()
    (tmp_path / "x.txt").unlink()
    (tmp_path / "s.json").write_text('{"shared":{"frames":[]},"profiles":[]}')
    run = read_paths([tmp_path])
    assert [ref.name for rank in run.ranks for ref in rank.traces] == ["t.json"]
    assert run.losses.counts == {"foreign_files": 1}
