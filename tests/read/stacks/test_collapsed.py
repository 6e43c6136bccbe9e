"""Collapsed stacks of every writer: bare names, Python's own sampler, Austin."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.read.raw import Frame, StackSource
from stepscope.read.sampled_files import open_stacks
from stepscope.read.stack_lines import Austin, Collapsed, Tachyon
from tests.read.stack_text import read_all


def opened(path: Path, text: str) -> StackSource:
    path.write_text(text)
    return open_stacks(path)


def test_names_prefixes_and_equal_lines(tmp_path: Path):
    source = opened(
        tmp_path / "x", "py-77;main;[libc.so.6];do_[k] 12\npy-77;run_[j] 3\npy-77;main;[libc.so.6];do_[k] 5\n"
    )
    parsed = read_all(source)
    assert source.format == "collapsed"
    assert [([frame.function for frame in stack.frames], stack.samples, stack.record) for stack in parsed.stacks] == [
        (["py-77", "main", "[libc.so.6]", "do_[k]"], 17, 0),
        (["py-77", "run_[j]"], 3, 1),
    ]
    assert {(stack.pids, stack.thread) for stack in parsed.stacks} == {((), None)}
    assert all(frame.file == "" and frame.line is None for stack in parsed.stacks for frame in stack.frames)
    assert read_all(Collapsed(tmp_path / "none")).stacks == []
    (tmp_path / "x").write_text('process 5:"python -c a;b --token abc";thread (6): M;main (a.py:3);f 12.6\n')
    (stack,) = read_all(Collapsed(tmp_path / "x")).stacks
    assert stack[:3] == ((5,), "6", "M")
    assert (stack.frames, stack.samples) == ((Frame("main", "a.py", 3), Frame("f", "", None)), 13)


def test_pythons_own_sampler(tmp_path: Path):
    text = "tid:12100288;<frozen runpy>:_run_module_as_main:201;repro.py:hot_b:6;C:\\a b\\t.py:f:7 42\n"
    first, second = read_all(opened(tmp_path / "x", text + "tid:7;a.py:<module>:1 3\n")).stacks
    assert (first.thread, first.samples, second.thread) == ("12100288", 42, "7")
    assert first.frames == (
        Frame("_run_module_as_main", "<frozen runpy>", 201),
        Frame("hot_b", "repro.py", 6),
        Frame("f", "C:\\a b\\t.py", 7),
    )


AUSTIN = """# austin: 3.7.0
# interval: 10000
# mode: wall

P4317;T0:4317;/home/u/train.py:<module>:70;/home/u/train.py:main:64 10012
P4317;T0:4317;/home/u/train.py:<module>:70;/home/u/train.py:main:64 9988
P4317;T0:4390;/usr/lib/threading.py:_bootstrap:1002;:GC: 10000
P4317;T0:4391 10000
# duration: 30500
"""


def test_austin(tmp_path: Path):
    source = opened(tmp_path / "x", AUSTIN)
    assert (source.idle, source.unit, source.tool) == (True, "us", "austin")
    parsed = read_all(source)
    assert [(stack.pids, stack.thread, stack.samples) for stack in parsed.stacks] == [
        ((4317,), "4317", 20000),
        ((4317,), "4390", 10000),
        ((4317,), "4391", 10000),
    ]
    assert parsed.stacks[0].frames[1] == Frame("main", "/home/u/train.py", 64)
    assert parsed.stacks[1].frames[1] == Frame(":GC:", "", None)
    assert (source.rate_hz, source.wall_ns) == (pytest.approx(100.0), 30_500_000)
    assert not parsed.losses.counts


@pytest.mark.parametrize(
    ("mode", "idle", "unit"),
    [("wall", True, "us"), ("cpu", False, "us"), ("memory", None, "bytes"), ("odd", None, "us")],
)
def test_modes_of_austin(tmp_path: Path, mode: str, idle: bool | None, unit: str):
    source = opened(tmp_path / "x", f"# austin: 3.7.0\n# mode: {mode}\nP1;T0:1;a.py:f:3 7\n")
    assert (source.idle, source.unit) == (idle, unit)


def test_all_metrics_of_austin_and_an_older_one(tmp_path: Path):
    text = "# austin: 3.7.0\n# mode: full\nP1;T0:1;a.py:f:3 700,1,-4096\nP1;T0:1;a.py:f:3 300,0,8\n"
    assert [stack.samples for stack in read_all(opened(tmp_path / "x", text)).stacks] == [1000]
    (stack,) = read_all(opened(tmp_path / "x", "P12;T0x7f45;a.py:f:3 100\n")).stacks
    assert (stack.pids, stack.thread) == ((12,), "0x7f45")


@pytest.mark.parametrize("reader", [Collapsed, Tachyon, Austin])
def test_bad_lines_are_counted(tmp_path: Path, reader: type[Collapsed]):
    (tmp_path / "x").write_text(
        "a;b 3\nno count\na;b -3\na;b nan\nword\n\n 5\n" + "9" * 400 + "\na;c " + "9" * 400 + "\n"
    )
    parsed = read_all(reader(tmp_path / "x"))
    assert sorted(stack.samples for stack in parsed.stacks) == [3, 5]
    assert parsed.skipped_records == 6
