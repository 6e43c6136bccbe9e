"""Run folders as recordings leave them: whole, killed, empty, hostile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.read import read_run
from tests.builders import MS, T0
from tests.read.stack_text import read_all
from tests.run_folders import make_run_folder

TRACE = json.dumps({"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}).encode()
RAW = 'process 100:"python train.py --token abc";thread (100): MainThread;<module> (train.py:3) 7\n'


def test_whole_run(tmp_path: Path):
    folder = make_run_folder(
        tmp_path, stacks_raw=[RAW, RAW], events=[{"kind": "mark", "name": "x"}], traces={"trace-0.pt.trace.json": TRACE}
    )
    make_run_folder(tmp_path, rank=1, pid=101, host="b\n", manifest={"cwd": "/tmp/\udcff\x1b[31m"})
    run = read_run(folder)
    assert [host.name for host in run.hosts] == ["a", "b\n"]
    assert (run.hosts[1].manifest or {})["cwd"] == "/tmp/\\xff\x1b[31m"
    assert [rank.name for rank in run.ranks] == ["rank-0", "rank-1"]
    assert len(run.ranks[0].steps) == 10
    assert [event["kind"] for event in run.ranks[0].journal] == ["mark"]
    assert [segment.number for segment in run.hosts[0].segments] == [0, 1]
    assert [stack.samples for stack in read_all(run.hosts[0].segments[0].stacks).stacks] == [7]
    assert run.hosts[0].segments[1].start_ns == T0 + 5000 * MS
    assert [trace.name for trace in run.ranks[0].traces] == ["trace-0.pt.trace.json"]
    assert not run.losses.counts
    assert "abc" not in repr(run)


def test_restarted_ranks_are_told_apart_and_sorted(tmp_path: Path):
    folder = make_run_folder(tmp_path)
    for name in ("rank-10", "rank-0.2", "rank-2"):
        (folder / name).mkdir()
        (folder / name / "rank.json").write_text("{}")
    assert [rank.name for rank in read_run(folder).ranks] == ["rank-0", "rank-0.2", "rank-2", "rank-10"]


def test_not_a_run_folder(tmp_path: Path):
    for name in ("empty", "other", "nothing/rank-0", "nothing/host-a"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "other" / "notes.txt").write_text("x")
    for path in ("absent", "empty", "other", "other/notes.txt"):
        with pytest.raises(UnreadableInputError, match="give the folder"):
            read_run(tmp_path / path)
    with pytest.raises(UnreadableInputError, match="nothing can be read"):
        read_run(tmp_path / "nothing")


def test_killed_while_writing(tmp_path: Path):
    folder = make_run_folder(tmp_path, stacks_raw=RAW, events=[{"kind": "gc"}])
    for name in ("rank-0/steps.jsonl", "rank-0/events.jsonl", "host-a/agents.jsonl"):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-5])
    (folder / "host-a" / "manifest.json").write_text('{"schema": "stepsc')
    (folder / "host-a" / "stacks-1.raw").write_text(RAW)  # its line in stacks.jsonl was never written
    run = read_run(folder)
    assert run.losses.counts == {"torn_lines": 3, "unreadable_files": 1}
    assert len(run.ranks[0].steps) == 9
    assert run.hosts[0].manifest is None
    unindexed = run.hosts[0].segments[1]
    assert (unindexed.number, unindexed.start_ns, unindexed.idle) == (1, None, None)
    assert [stack.samples for stack in read_all(unindexed.stacks).stacks] == [7]


def test_files_outside_the_run_folder_are_not_read(tmp_path: Path):
    (tmp_path / "secret.raw").write_text(RAW)
    folder = make_run_folder(tmp_path, stacks_raw=RAW, stacks_index=[{"file": "../../secret.raw"}])
    run = read_run(folder)
    assert [segment.file for segment in run.hosts[0].segments] == ["stacks-0.raw"]
    assert run.losses.counts == {"bad_lines": 1}


def test_traces_are_listed_and_not_opened(tmp_path: Path):
    files = {"trace-0.json": b"not json", "trace-0.json.gz": b"\x1f\x8b half packed", "trace-1.json.gz": b"\x1f\x8b"}
    run = read_run(make_run_folder(tmp_path, traces={**files, "trace-1.json.gz.part": b"x"}))
    told = [(trace.name, trace.path.name, trace.owner) for trace in run.ranks[0].traces]
    assert told == [("trace-0.json", "trace-0.json", "stepscope"), ("trace-1.json", "trace-1.json.gz", "stepscope")]
    assert not run.losses.counts


def test_user_traces_are_adopted(tmp_path: Path):
    own = tmp_path / "log" / "worker.pt.trace.json"
    own.parent.mkdir()
    own.write_bytes(TRACE)
    paths = [str(own), str(own), str(tmp_path / "gone.json"), "/etc/passwd", "nul\0.json", 7]
    run = read_run(make_run_folder(tmp_path, events=[{"kind": "user_trace", "path": path} for path in paths]))
    assert [(trace.name, trace.owner) for trace in run.ranks[0].traces] == [(str(own), "user")]
    assert run.losses.counts == {"user_traces_left_out": 3}


def test_journal_rows_without_kind_or_time_are_bad(tmp_path: Path):
    events = [{"kind": "gc"}, {"kind": 3}, {"kind": "gc", "time_ns": "now"}, {"kind": "gc", "duration_ns": -4}]
    run = read_run(make_run_folder(tmp_path, events=events))
    assert [event["duration_ns"] for event in run.ranks[0].journal] == [None, None]
    assert run.losses.counts == {"bad_lines": 2}
