"""The raw stack format: everything that is unescaped in it, damage, and real files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.read.raw import Frame
from stepscope.read.stacks.pyspy_raw import PySpyRaw
from tests.read.stack_text import Parsed, parse, read_all

SHARED = Path(__file__).parents[3] / ".." / "shared" / "traces" / "py_spy"


def parse_text(text: str) -> Parsed:
    return parse(text.splitlines(keepends=True))


def one(text: str):
    parsed = parse_text(text)
    assert (parsed.skipped_records, parsed.skipped_samples) == (0, 0)
    assert len(parsed.stacks) == 1
    return parsed.stacks[0]


def test_plain_record():
    stack = one('process 7:"python train.py";thread (7): MainThread;<module> (train.py:70);main (train.py:64) 12\n')
    assert stack.pids == (7,)
    assert (stack.thread, stack.thread_name) == ("7", "MainThread")
    assert stack.frames == (Frame("<module>", "train.py", 70), Frame("main", "train.py", 64))
    assert stack.samples == 12


def test_chain_of_processes_and_semicolons_in_command_lines():
    stack = one(
        'process 1:"torchrun";process 2:"python -c from m import a; a(fd=6) "q";x" --fork";'
        "thread (0x7f21): Thread-1 (_serve);run (threading.py:982) 3\n"
    )
    assert stack.pids == (1, 2)
    assert (stack.thread, stack.thread_name) == ("0x7f21", "Thread-1 (_serve)")
    assert [frame.function for frame in stack.frames] == ["run"]


def test_command_lines_are_not_kept():
    parsed = parse_text('process 1:"train --api-key abc-secret";thread (1): MainThread;f (a.py:1) 1\n')
    assert "secret" not in repr(parsed)


def test_no_process_and_no_thread_prefix():
    stack = one("<module> (a.py:1);f (a.py:2) 4\n")
    assert (stack.pids, stack.thread, stack.samples) == ((), None, 4)
    bare = one('process 5:"a; b";<module> (a.py:1) 4\n')
    assert (bare.pids, len(bare.frames)) == ((5,), 1)


def test_empty_stacks_are_kept():
    assert one(" 59\n").frames == ()
    stack = one('process 5:"a";thread (5): MainThread 77\n')
    assert (stack.thread_name, stack.frames, stack.samples) == ("MainThread", (), 77)


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        ("main (train.py:3)", Frame("main", "train.py", 3)),
        ("main (train.py)", Frame("main", "train.py", None)),
        ("main", Frame("main", "", None)),
        ("0x7f02422b6109 (libc.so.6)", Frame("0x7f02422b6109", "libc.so.6", None)),
        ("Q name with space; and (paren:3) (edge.py:9)", Frame("Q name with space; and (paren:3)", "edge.py", 9)),
        ("sem (/tmp/a;b/c d (e:f).py:2)", Frame("sem", "/tmp/a;b/c d (e:f).py", 2)),
        ("spin (/home/u/odd (copy) dir/mod.py:4)", Frame("spin", "/home/u/odd (copy) dir/mod.py", 4)),
        ("cell (<ipython-input-3-abc; x>:2)", Frame("cell", "<ipython-input-3-abc; x>", 2)),
        ("nl (/tmp/weird\nname.py:2)", Frame("nl", "/tmp/weird\nname.py", 2)),
        ("f (C:\\a b\\t.py:12)", Frame("f", "C:\\a b\\t.py", 12)),
        ("f(int, (anonymous namespace)::X) (c.so)", Frame("f(int, (anonymous namespace)::X)", "c.so", None)),
        ("naïve (päck/mod.py:4)", Frame("naïve", "päck/mod.py", 4)),
        ("f (a.py:-1)", Frame("f", "a.py", -1)),
        ("f (odd).py:1)", Frame("f", "odd).py", 1)),
    ],
)  # fmt: skip
def test_frames(text: str, frame: Frame):
    prefix = 'process 5:"a";thread (5): MainThread;<module> (x.py:1);'
    assert one(f"{prefix}{text} 8\n").frames[1:] == (frame,)


def test_thread_name_with_everything():
    stack = one('process 5:"a";thread (6): my; thread\nname "q" 7;Thread._bootstrap (threading.py:1) 42\n')
    assert stack.thread_name == 'my; thread\nname "q" 7'
    assert (len(stack.frames), stack.samples) == (1, 42)


def test_newline_in_a_command_line_joins_records():
    text = 'process 5:"a\nb 7\nc";thread (5): MainThread;f (x.py:1) 3\nprocess 5:"a\nb 7\nc";thread (5);g (x.py:2) 4\n'
    parsed = parse_text(text)
    assert [stack.samples for stack in parsed.stacks] == [3, 4]
    assert parsed.skipped_records == 0


def test_cut_off_last_record_is_skipped_and_counted():
    parsed = parse_text('process 5:"a";thread (5): M;f (x.py:1) 3\nprocess 5:"a";thread (5): M;f (x.p')
    assert len(parsed.stacks) == 1
    assert (parsed.skipped_records, parsed.skipped_samples) == (1, 0)


def test_unreadable_prefix_counts_its_samples():
    parsed = parse_text('process 5:"never closed;f (x.py:1) 9\n')
    assert parsed.stacks == []
    assert (parsed.skipped_records, parsed.skipped_samples) == (1, 9)


def test_absurd_counts_are_skipped():
    parsed = parse_text("f (a.py:1) " + "9" * 5000 + "\nf (a.py:1) 2\n")
    assert [stack.samples for stack in parsed.stacks] == [2]
    assert parsed.skipped_records == 1


def test_deep_stack():
    deep = ";".join(["deep (edge.py:17)"] * 3000)
    assert len(one(f"{deep} 1\n").frames) == 3000


def test_hostile_parentheses_do_not_hang():
    text = 'process 1:"a";thread (1): M;' + " (" * 200_000 + ") 1\n"
    assert len(parse_text(text).stacks) == 1


def test_bytes_that_are_no_text(tmp_path: Path):
    path = tmp_path / "stacks-0.raw"
    path.write_bytes(b'process 1:"a";thread (1): \xff\xfe;f (/tmp/\xe9.py:1) 5\n')
    (stack,) = read_all(PySpyRaw(path)).stacks
    assert stack.thread_name == "\\xff\\xfe"
    assert stack.frames[0].file == "/tmp/\\xe9.py"


def test_absent_and_empty_files(tmp_path: Path):
    (tmp_path / "empty.raw").write_bytes(b"")
    for name in ("none.raw", "empty.raw"):
        parsed = read_all(PySpyRaw(tmp_path / name))
        assert (parsed.stacks, dict(parsed.losses.counts)) == ([], {})


pieces = st.sampled_from(
    ["process 1:", '"', ";", "thread (1)", ": ", "Main", " (", ")", ":", "a.py", " 7", "\n", " ", "7", "é", "\udcff"]
)


@given(st.lists(st.one_of(pieces, st.text(max_size=5)), max_size=60).map("".join))
def test_never_raises_and_loses_no_record(text: str):
    parsed = parse_text(text)
    assert all(stack.samples >= 0 for stack in parsed.stacks)
    for stack in parsed.stacks:
        repr(stack).encode()  # storable text
    if re.search(r"\S", text):
        assert parsed.stacks or parsed.skipped_records


@pytest.mark.skipif(not SHARED.exists(), reason="the folder of recorded traces is not here")
@pytest.mark.parametrize("path", sorted(SHARED.glob("*.txt")), ids=lambda path: path.name)
def test_real_files_add_up(path: Path):
    with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        text = file.read()
    parsed = parse(text.split("\n"))
    own = sum(int(count) for count in re.findall(r"(?m) (\d+)$", text))
    assert sum(stack.samples for stack in parsed.stacks) + parsed.skipped_samples == own
    assert parsed.skipped_records == 0
    assert all(line is None or line > 0 for stack in parsed.stacks for _, _, line in stack.frames)
