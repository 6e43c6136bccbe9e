"""Run folders as recordings leave them: whole, killed, empty, hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.model import STEP_COLUMNS, STEPS_SCHEMA
from stepscope.read import read_run, streams
from stepscope.read.raw import Losses, RawRun
from stepscope.read.run_folder import read_steps
from tests.builders import MS, T0, full_steps, step_rows
from tests.read.stack_text import read_all
from tests.run_folders import make_run_folder

TRACE = json.dumps({"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}).encode()
RAW = 'process 100:"python train.py --token secret";thread (100): MainThread;<module> (train.py:3) 7\n'


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
    assert "secret" not in repr(run)


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


# ---- the step journal: headers of other versions, torn lines, bounds

HEADER = {"schema": STEPS_SCHEMA, "columns": list(STEP_COLUMNS)}


def rows(count: int = 3, **columns: Any) -> list[list[Any]]:
    return [[row[name] for name in STEP_COLUMNS] for row in full_steps(step_rows(count, **columns))]


def read_journal(tmp_path: Path, lines: list[Any], tail: str = "") -> tuple[list[dict[str, Any]], Losses]:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    losses = Losses()
    return read_steps(path, losses, "steps.jsonl"), losses


def test_newer_and_older_columns(tmp_path: Path):
    newer = {"columns": [*STEP_COLUMNS, "energy_j"]}
    steps, losses = read_journal(tmp_path, [newer, *[[*row, 7] for row in rows()]])
    assert len(steps) == 3
    assert "energy_j" not in steps[0]
    older = {"columns": ["step", "kind", "start_ns", "wall_ns"]}
    steps, losses = read_journal(tmp_path, [older, [0, "train", T0, MS]])
    assert steps[0]["wall_ns"] == MS
    assert steps[0]["forward_ns"] is None
    assert not losses.counts


def test_bad_rows_are_skipped_one_by_one(tmp_path: Path):
    good = rows(6)
    good[1][STEP_COLUMNS.index("wall_ns")] = -5
    good[2][STEP_COLUMNS.index("start_ns")] = 10**30
    good[3][STEP_COLUMNS.index("samples")] = "many"
    good[4] = good[4][:-1]
    steps, losses = read_journal(tmp_path, [HEADER, *good, 17, None])
    assert [step["step"] for step in steps] == [0, 5]
    assert losses.counts == {"bad_steps": 6}


def test_repeated_and_unordered_steps(tmp_path: Path):
    first, second, third = rows()
    steps, losses = read_journal(tmp_path, [HEADER, first, third, second, second])
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert losses.counts == {"unordered_steps": 1, "bad_steps": 1}


# ---- the times beside a segment's stacks: read, checked value by value, absent or damaged without harm

RAW_TWO = "".join(f'process 100:"a";thread (100): MainThread;{name} 1\n' for name in ("f (a.py:1)", "g (a.py:2)"))


def run_with(tmp_path: Path, content: Any) -> RawRun:
    folder = make_run_folder(tmp_path, stacks_raw=RAW_TWO)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "host-a" / "stacks-0.times.json").write_text(text)
    return read_run(folder)


def times(record: Any, start_us: Any, end_us: Any, **more: Any) -> dict[str, Any]:
    stretches = {"record": record, "start_us": start_us, "end_us": end_us}
    return {"schema": "stepscope.times/1", "start_ns": T0, "stretches": stretches, **more}


def test_single_bad_stretches_are_counted(tmp_path: Path):
    run = run_with(tmp_path, times([0, -1, 1, 1, 0, 1], [0, 0, 10, -5, 10**18, 3], [9, 9, 5, 9, 10**18 + 1]))
    assert list(run.hosts[0].segments[0].stretches.record) == [0]
    assert run.losses.files == {"bad_stretches": ["host-a/stacks-0.times.json"]}
    assert run.losses.counts == {"bad_stretches": 5}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "[" * 5000,
        times([0], [0], [1], schema="other/1"),
        times([0], [0], [1], start_ns=-4),
        times([0], [0], [1], start_ns=10**30),
        times(["x"], [0], [1]),
        times([0.5], [0], [1]),
        times(None, [0], [1]),
    ],
)
def test_damaged_times_cost_the_times_alone(tmp_path: Path, content: Any):
    run = run_with(tmp_path, content)
    assert not run.hosts[0].segments[0].stretches.record
    assert run.losses.counts == {"unreadable_files": 1}


# ---- lines of JSON: kills, damage, and text that is no Unicode


def lines_of(tmp_path: Path, data: bytes) -> tuple[list[dict[str, object]], Losses]:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    losses = Losses()
    return streams.read_rows(path, losses, "a.jsonl"), losses


def test_torn_and_bad_lines_are_told_apart(tmp_path: Path):
    deep = b'{"a":' + b"[" * 200_000
    rows, losses = lines_of(tmp_path, b'{"a":1}\n{"a":\n\n[1]\n' + deep + b'\n{"a":2}\n{"a":3')
    assert rows == [{"a": 1}, {"a": 2}]
    assert losses.counts == {"bad_lines": 3, "torn_lines": 1}
    assert losses.files["torn_lines"] == ["a.jsonl"]
    rows, losses = lines_of(tmp_path, b'{"a":1}')  # without a newline, and yet complete
    assert (rows, losses.counts) == ([{"a": 1}], {})
    assert streams.read_rows(tmp_path / "none", losses, "none") == []
    assert streams.read_object(tmp_path / "none", losses, "none") is None
    assert not losses.counts


@pytest.mark.parametrize(
    ("line", "value"),
    [(b'{"a":"\\udcff"}', "\\xff"), (b'{"a":"\xff"}', "\\xff"), (b'{"a":"\\ud800"}', "\\ud800"), (b'{"a":NaN}', None)],
)
def test_odd_text_is_spelled_out(tmp_path: Path, line: bytes, value: object):
    rows, losses = lines_of(tmp_path, line + b"\n")
    assert rows == [{"a": value}]
    assert not losses.counts


def test_huge_line_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "MAX_LINE_BYTES", 64)
    rows, losses = lines_of(tmp_path, b'{"a":"' + b"x" * 1000 + b'"}\n{"a":1}\n')
    assert rows == [{"a": 1}]
    assert losses.counts == {"bad_lines": 1}
