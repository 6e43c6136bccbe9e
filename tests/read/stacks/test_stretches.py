"""The times beside a segment's stacks: read, checked value by value, absent or damaged without harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.read import read_run
from stepscope.read.raw import RawRun
from tests.builders import T0
from tests.run_folders import make_run_folder

RAW = 'process 100:"a";thread (100): MainThread;f (a.py:1) 7\nprocess 100:"a";thread (100): MainThread;g (a.py:2) 1\n'


def run_with(tmp_path: Path, content: Any) -> RawRun:
    folder = make_run_folder(tmp_path, stacks_raw=RAW)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "host-a" / "stacks-0.times.json").write_text(text)
    return read_run(folder)


def times(record: Any, start_us: Any, end_us: Any, **more: Any) -> dict[str, Any]:
    stretches = {"record": record, "start_us": start_us, "end_us": end_us}
    return {"schema": "stepscope.times/1", "start_ns": T0, "stretches": stretches, **more}


def test_times_of_stacks(tmp_path: Path):
    run = run_with(tmp_path, times([1, 0], [0, 500], [500, 2000]))
    found = run.hosts[0].segments[0].stretches
    assert [*zip(found.record, found.start_ns, found.end_ns, strict=True)] == [
        (1, T0, T0 + 500_000),
        (0, T0 + 500_000, T0 + 2_000_000),
    ]
    assert not run.losses.counts
    run = read_run(make_run_folder(tmp_path / "without", stacks_raw=RAW))
    assert not run.hosts[0].segments[0].stretches.record
    assert not run.losses.counts


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
