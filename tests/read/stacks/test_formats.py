"""Which file is which, by its first bytes alone, and what is said of files that hold no stacks."""

from __future__ import annotations

import cProfile
import gzip
import json
from pathlib import Path

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.read import read_paths
from stepscope.read.sampled_files import is_stack_file, open_stacks, read_stack_files
from tests.read.stack_text import read_all

TRACES = Path(__file__).parents[3] / ".." / "shared" / "traces"
DEEP = ";".join(["a_function_of_some_length (/a/path/of/some/length/module.py:17)"] * 4000)
KNOWN = {
    "py-spy raw": [
        'process 5:"a";thread (5): M;f (x.py:1) 3\n',
        "thread (5): M;f (x.py:1) 3\n",
        "f (x.py:1);g (<string>:2) 3\n",
        "<module> (train.py);0x7f (?) 3\n",
        " 59\n",
        '\n\nprocess 5:"never ends',
        'rest of a record 7\nprocess 5:"a";f (x.py:1) 3\n',
        f"{DEEP} 3\n",
        f'process 5:"a";{DEEP} 3\n',
    ],
    "collapsed": ["a;b;c 12\na;b 3\n", "main 4\nmain;f 2.5\n"],
    "collapsed, Python's sampler": ["tid:123;a.py:f:4 6\n"],
    "austin": ["# austin: 3.7.0\n# mode: wall\n", "P1;T0:1;a.py:f:3 7\n"],
    "speedscope": [
        '{"$schema":"https://www.speedscope.app/file-format-schema.json"}',
        ' {"shared": {"frames": [{"name": "f"}]}, "profiles": []}',
        '{"profiles":[{"name":"p","type":"evented"',
    ],
}
NOTHING = {
    "log": "2026-11-21 epoch 3\nloss 0.5\nstep (train) 100\nstep (train) 200\n",
    "sentences": "thread (5) started, step 3\nand so on, 4\nmore text\nmore\nmore\nmore\n",
    "table": "name;value\na;1\nb;2\n",
    "code": "for (;;) x = 1;\nint y 3;\n",
    "json": "{}",
    "numbers": "1 2\n3 4\n",
    "trace": json.dumps({"traceEvents": [{"ph": "X", "name": "f (a.py:1);g", "ts": 1, "dur": 2}]}),
    "chrome": json.dumps([{"ph": "B", "cat": "py-spy", "name": "f", "ts": 1, "pid": 1, "tid": 1}]),
}


@pytest.mark.parametrize(("format", "text"), [(name, text) for name, texts in KNOWN.items() for text in texts])
def test_known_by_the_first_bytes(tmp_path: Path, format: str, text: str):
    path = tmp_path / "trace.json"
    for content in (text.encode(), gzip.compress(text.encode())):
        path.write_bytes(content)
        assert is_stack_file(path)
        assert open_stacks(path).format == format
    read_all(open_stacks(path))


@pytest.mark.parametrize("name", NOTHING)
def test_not_taken_for_stacks(tmp_path: Path, name: str):
    path = tmp_path / "stacks.raw"
    path.write_text(NOTHING[name])
    assert not is_stack_file(path)
    with pytest.raises(UnreadableInputError):
        open_stacks(path)


@pytest.mark.parametrize(
    ("content", "say"),
    [
        (b"", "empty file"),
        (b'<?xml version="1.0"?>\n<!DOCTYPE svg>\n<svg width="1200">', "SVG flame graph holds pictures.*--format raw"),
        (b"<!DOCTYPE html><html>", "HTML page"),
        (b"PERFILE2\x00\x01", "perf script"),
        (b"MOJ\x03\x00", "mojo2austin"),
        (b"\x00\x01\x02" * 50, "binary"),
        (gzip.compress(b"\x0a\x04\x08\x00\x10\x00", mtime=0), "binary"),
        (gzip.compress(b"a;b 3\n", mtime=0)[:-20], "cannot be unpacked"),
        (b"some text\n", "no sampled stacks"),
        (b"[1, 2]", "JSON without stacks"),
        (NOTHING["trace"].encode(), "stepscope analyze"),
        (NOTHING["chrome"].encode(), "stepscope analyze"),
    ],
)
def test_what_is_said_of_other_files(tmp_path: Path, content: bytes, say: str):
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    with pytest.raises(UnreadableInputError, match=say) as error:
        open_stacks(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_file_of_cprofile(tmp_path: Path):
    profile = cProfile.Profile()
    profile.runcall(sorted, [2, 1])
    profile.dump_stats(tmp_path / "x")
    with pytest.raises(UnreadableInputError, match="cProfile"):
        open_stacks(tmp_path / "x")


def test_absent_files_and_folders(tmp_path: Path):
    assert not is_stack_file(tmp_path / "none")
    assert not is_stack_file(tmp_path)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UnreadableInputError):
            open_stacks(path)


# ---- files of stacks and folders of them as a run, and how paths are told apart

RAW = 'process 5:"python train.py --token abc";thread (5): MainThread;f (x.py:1) 3\n'
TRACE_TEXT = json.dumps({"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]})


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


def test_traces_and_stacks_in_one_call(tmp_path: Path):
    (tmp_path / "t.json").write_text(TRACE_TEXT)
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
