"""The files of a segment, as the readers see them: stacks of several py-spies, and the times beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.read.raw import Losses
from stepscope.read.run_folder import read_times
from stepscope.record.host import pyspy_stacks
from stepscope.record.host.pyspy_stacks import Counted, Stretch, write_segment
from tests.read.stack_text import parse

START_NS = 1_700_000_000_000_000_000


def part(pid: int, start_ns: int, *records: str) -> Counted:
    """A process whose thread passed through `records`, 1 ms each and 2 samples each."""
    stretches = tuple(Stretch(index, index * 1000, (index + 1) * 1000) for index in range(len(records)))
    return Counted(records, (2,) * len(records), stretches, 9_000, f'process {pid}:"python t.py";', start_ns)


def test_records_of_all_parts_are_found_again_with_their_times(tmp_path: Path) -> None:
    parts = [part(1, START_NS + 500_000, "thread (1);a (/t.py:1)", "thread (1);b (/t.py:2)"),
             part(2, START_NS, "thread (2): x\ny;c (/t.py:3)")]  # fmt: skip
    assert write_segment(tmp_path / "stacks-0.raw", parts) == (True, "stacks-0.times.json")
    text = (tmp_path / "stacks-0.raw").read_text()
    stacks = parse(text.splitlines(keepends=True)).stacks
    by_record = {stack.record: stack.frames[0].function for stack in stacks}
    losses = Losses()
    found = read_times(tmp_path / "stacks-0.times.json", losses, "x")
    assert not losses.counts
    assert [
        (by_record[record], start - START_NS, end - START_NS)
        for record, start, end in zip(found.record, found.start_ns, found.end_ns, strict=True)
    ] == [
        ("c", 0, 1_000_000),
        ("a", 500_000, 1_500_000),
        ("b", 1_500_000, 2_500_000),
    ]
    assert [(stack.pids, stack.samples) for stack in stacks] == [((1,), 2), ((1,), 2), ((2,), 2)]
    assert not list(tmp_path.glob("*.part"))


def test_a_name_that_looks_like_the_next_record_does_not_shift_the_others(tmp_path: Path) -> None:
    odd = 'thread (1): x\nprocess 9:"sh";thread (9);z (/z.py:1) 5;a (/t.py:1)'
    write_segment(tmp_path / "stacks-0.raw", [part(1, START_NS, odd, "thread (1);b (/t.py:2)")])
    stacks = parse((tmp_path / "stacks-0.raw").read_text().splitlines(keepends=True)).stacks
    assert [(stack.record, stack.pids) for stack in stacks] == [(0, (1,)), (1, (1,))]


def test_names_that_are_no_valid_text_are_written_all_the_same(tmp_path: Path) -> None:
    assert write_segment(tmp_path / "stacks-0.raw", [part(1, START_NS, "thread (1);\udc80 (/t.py:1)")])[0]
    assert b"\\udc80 (/t.py:1) 2" in (tmp_path / "stacks-0.raw").read_bytes()


def test_too_many_stretches_leave_the_stacks_without_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspy_stacks, "MOST_STRETCHES", 1)
    parts = [part(1, START_NS, "thread (1);a (/t.py:1)", "thread (1);b (/t.py:2)")]
    assert write_segment(tmp_path / "stacks-0.raw", parts) == (True, None)
    assert [path.name for path in tmp_path.iterdir()] == ["stacks-0.raw"]


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    assert write_segment(tmp_path / "gone" / "stacks-0.raw", [part(1, START_NS, "thread (1)")]) == (False, None)
