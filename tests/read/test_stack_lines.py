"""Sampled stacks as lines, of every writer; which file is which, by its first bytes alone; and what stays bounded.

What falls to a bound is said or still counted.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stepscope.errors import UnreadableInputError
from stepscope.read import read_paths, sampled_files, stack_lines
from stepscope.read.raw import Frame, FrameNames, Losses, StackSource
from stepscope.read.sampled_files import is_stack_file, open_stacks, read_stack_files
from stepscope.read.stack_lines import Austin, Collapsed, PySpyRaw, Tachyon, hint_of
from tests.read.stack_text import Stack, parse, read_all

SHARED = Path(__file__).parents[2] / ".." / "shared" / "traces" / "py_spy"
HEAD = 'process 5:"python train.py";thread (5): MainThread;'
F = Frame("f", "x.py", 1)


def stacks(text: str) -> list[Stack]:
    parsed = parse(text.split("\n"))
    assert (parsed.skipped_records, parsed.skipped_samples) == (0, 0)
    return parsed.stacks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # semicolons and quotes in command lines, and in a thread's name
        (
            'process 1:"python -c import a; b(fd=6) "q";x";process 2:"sh -c x; y";thread (3): name; of a thread;'
            "f (x.py:1) 4\n",
            [((1, 2), "3", "name; of a thread", (F,), 4)],
        ),
        # newlines in command lines, names and files
        (
            'process 5:"a\nb 7\nc";thread (5): my\nname;nl (/tmp/weird\nname.py:2) 3\n'
            'process 5:"a\nb 7\nc";thread (5): my\nname;f (x.py:1) 4\n',
            [((5,), "5", "my\nname", (Frame("nl", "/tmp/weird\nname.py", 2),), 3), ((5,), "5", "my\nname", (F,), 4)],
        ),
        (
            "nl (/tmp/weird\nname.py:2) 3\nf (x.py:1) 4\n",
            [((), None, None, (Frame("nl", "/tmp/weird\nname.py", 2),), 3), ((), None, None, (F,), 4)],
        ),
        ('process 5:"a; b";f (x.py:1) 4\n', [((5,), None, None, (F,), 4)]),
        # stacks without Python frames
        (" 59\n", [((), None, None, (), 59)]),
        ('process 5:"a";thread (10355): MainThread 77\n', [((5,), "10355", "MainThread", (), 77)]),
        # names of threads that come late or are odd, and hexadecimal ids
        (
            'process 5:"a";thread (0x7F02aB);f (x.py:1) 1\nprocess 5:"a";thread (0x7F02aB): T-1 (_serve);f (x.py:1) 2\n'
            'process 5:"a";thread (7): "q"; (x)\n y 7;f (x.py:1) 3\n',
            [
                ((5,), "0x7F02aB", None, (F,), 1),
                ((5,), "0x7F02aB", "T-1 (_serve)", (F,), 2),
                ((5,), "7", '"q"; (x)\n y 7', (F,), 3),
            ],
        ),
        # a native frame, and a large count
        ("0x7f02 (?);f (x.py:1) 999999999999999\n", [((), None, None, (Frame("0x7f02", "?", None), F), 10**15 - 1)]),
    ],
)
def test_what_is_not_escaped(text: str, expected: list[tuple[Any, ...]]):
    assert [stack[:5] for stack in stacks(text)] == expected


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        ("main (train.py)", Frame("main", "train.py", None)),
        ("main", Frame("main", "", None)),
        ("<lambda> (<frozen importlib._bootstrap>:2)", Frame("<lambda>", "<frozen importlib._bootstrap>", 2)),
        ("A.m.<locals>.<listcomp> (a.py:2)", Frame("A.m.<locals>.<listcomp>", "a.py", 2)),
        ("0x7f02422b6109 (libc.so.6)", Frame("0x7f02422b6109", "libc.so.6", None)),
        ("at::{lambda()#7}::operator()(long) (c.so)", Frame("at::{lambda()#7}::operator()(long)", "c.so", None)),
        ("f(int, (anonymous namespace)::X) (c.so)", Frame("f(int, (anonymous namespace)::X)", "c.so", None)),
        ("Q name with space; and (paren:3) (edge.py:9)", Frame("Q name with space; and (paren:3)", "edge.py", 9)),
        ("sem (/tmp/a;b/c d (e:f).py:2)", Frame("sem", "/tmp/a;b/c d (e:f).py", 2)),
        ("cell (<ipython-input-3-abc; x>:2)", Frame("cell", "<ipython-input-3-abc; x>", 2)),
        ("f (C:\\Users\\a b\\train (1).py:12)", Frame("f", "C:\\Users\\a b\\train (1).py", 12)),
        ("step 12 of  3 (a b 4.py:5)", Frame("step 12 of  3", "a b 4.py", 5)),
        ("naïve (päck/mod.py:4)", Frame("naïve", "päck/mod.py", 4)),
        ("f (a.py:-1)", Frame("f", "a.py", -1)),
        ("f (odd).py:1)", Frame("f", "odd).py", 1)),
    ],
)
def test_frames_are_read_from_the_right(text: str, frame: Frame):
    assert stacks(f"{HEAD}<module> (x.py:1);{text} 8\n")[0].frames[1:] == (frame,)


def test_deep_stacks_and_hostile_parentheses():
    (stack,) = stacks(f"{HEAD}{';'.join(['deep (edge.py:17)'] * 3000)} 1\n")
    assert len(stack.frames) == 3000
    assert len(stacks('process 1:"a";thread (1): M;' + " (" * 200_000 + ") 1\n")) == 1


@pytest.mark.parametrize(
    ("text", "samples", "skipped"),
    [
        (f"{HEAD}f (x.py:1) 3\n{HEAD}f (x.p", [3], (1, 0)),
        ('process 5:"never closed;f (x.py:1) 9\n', [], (1, 9)),
        ("f (a.py:1) " + "9" * 5000 + "\nf (a.py:1) 2\n", [2], (1, 0)),
    ],
)
def test_damage_is_counted(text: str, samples: list[int], skipped: tuple[int, int]):
    parsed = parse(text.split("\n"))
    assert [stack.samples for stack in parsed.stacks] == samples
    assert (parsed.skipped_records, parsed.skipped_samples) == skipped


def test_bytes_of_files(tmp_path: Path):
    path = tmp_path / "stacks-0.raw"
    path.write_bytes(b'\xef\xbb\xbfprocess 1:"a";thread (1): \xff\xfe;f (/tmp/\xe9.py:1) 5\r\n')
    (stack,) = read_all(PySpyRaw(path)).stacks
    assert (stack.thread_name, stack.frames[0].file, stack.samples) == ("\\xff\\xfe", "/tmp/\\xe9.py", 5)
    path.write_bytes(b"")
    for name in ("none.raw", path.name):
        parsed = read_all(PySpyRaw(tmp_path / name))
        assert (parsed.stacks, dict(parsed.losses.counts)) == ([], {})


PIECES = st.sampled_from(
    ["process 1:", '"', ";", "thread (1)", ": ", "Main", " (", ")", ":", "a.py", " 7", "\n", " ", "7", "é", "\udcff"]
)


@given(st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=60).map("".join))
def test_any_text_is_read_or_counted(text: str):
    parsed = parse(text.splitlines(keepends=True))
    assert all(stack.samples >= 0 for stack in parsed.stacks)
    repr(parsed.stacks).encode()  # storable text
    if re.search(r"\S", text):
        assert parsed.stacks or parsed.skipped_records


FRAMES = ("<module> (train.py:3)", "f; g (/tmp/a;b.py:2)", "0x7f02 (?)", "h (a.py)", "bare", "é (ü.py:1)")
COMMANDS = ("python train.py", "python -c import a; b(1)", 'sh "quoted"; x')


@st.composite
def files(draw: st.DrawFn) -> tuple[list[str], int]:
    """Lines of a file, of which no two neighbours were damaged, and the sum of their counts."""
    dialect = draw(st.sampled_from(["", "s", "t", "st"]))
    lines: list[str] = []
    total = 0
    damaged = True  # the first line tells the dialect of a short file
    for _ in range(draw(st.integers(1, 8))):
        parts: list[str] = []
        if "s" in dialect:
            pids = draw(st.lists(st.integers(1, 99999), min_size=1, max_size=3))
            parts += [f'process {pid}:"{draw(st.sampled_from(COMMANDS))}"' for pid in pids]
        if "t" in dialect:
            name = draw(st.sampled_from(["", ": MainThread", ": Thread-1 (_serve)", ": a; b"]))
            parts.append(f"thread ({draw(st.sampled_from(['12', '0x7f']))}){name}")
        text = ";".join(parts + draw(st.lists(st.sampled_from(FRAMES), max_size=5)))
        damaged = not damaged and draw(st.booleans())
        if damaged and text:
            position = draw(st.integers(0, len(text) - 1))
            more = draw(st.text('abc 1;:"()\\x00é\r', max_size=6))
            text = text[:position] + more + text[position + draw(st.integers(0, 12)) :]
        count = draw(st.integers(0, 10**15 - 1))
        total += count
        lines.append(f"{text} {count}")
    return lines, total


@given(files())
def test_every_legible_count_is_kept_or_counted_as_skipped(file: tuple[list[str], int]):
    lines, total = file
    parsed = parse(lines)
    assert sum(stack.samples for stack in parsed.stacks) + parsed.skipped_samples == total
    assert len(parsed.stacks) + parsed.skipped_records <= len(lines)


@pytest.mark.skipif(not SHARED.exists(), reason="the folder of recorded traces is not here")
def test_real_files_add_up():
    for path in sorted(SHARED.glob("*.txt")):
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        parsed = parse(text.split("\n"))
        own = sum(int(count) for count in re.findall(r"(?m) (\d+)$", text))
        assert sum(stack.samples for stack in parsed.stacks) + parsed.skipped_samples == own, path
        assert parsed.skipped_records == 0, path
        assert all(line is None or line > 0 for stack in parsed.stacks for _, _, line in stack.frames), path


# ---- what command lines say of their processes

SPAWNED = "python -B -c from multiprocessing.spawn import spawn_main; spawn_main(11) --multiprocessing-fork"
SERVER = "python -B -c from multiprocessing.forkserver import main; main(8, 9)"
LAUNCHERS = (
    "torchrun --nproc_per_node 2 train.py",
    "/opt/venv/bin/python3 /opt/venv/bin/torchrun --nproc_per_node 2 train.py",
    "python3.11 -u -X dev -m torch.distributed.run train.py",
    "python -Im torch.distributed.launch train.py",
    "/usr/bin/python /usr/lib/python3/site-packages/torch/distributed/run.py train.py",
    "python -m accelerate.commands.launch train.py",
    "deepspeed --num_gpus 2 train.py",
    "srun --mpi=pmix python train.py",
    "python.exe C:\\venv\\Scripts\\torchrun train.py",
)
PROGRAMS = (
    "",
    "python",
    "python train.py --deepspeed ds.json",
    "python -u train.py torchrun",
    "python -X torchrun train.py",
    "python -m mypackage.train accelerate",
    "python -c import torchrun",
    "python /home/u/deepspeed_examples/train.py",
    "./train.sh torchrun",
)


@pytest.mark.parametrize(
    ("command", "above", "hint"),
    [
        *((command, "", "launcher") for command in LAUNCHERS),
        *((command, "", None) for command in PROGRAMS),
        ("python -B -c from multiprocessing.resource_tracker import main;main(5)", "python train.py", "helper"),
        ("python -B -c from multiprocessing.semaphore_tracker import main", "python train.py", "helper"),
        (SERVER, "python train.py", "helper"),
        (SERVER, SERVER, "spawned"),
        (SPAWNED, "", "spawned"),
        ("torchrun train.py", "torchrun train.py", None),  # a fork of a launcher
    ],
)
def test_hints(command: str, above: str, hint: str | None):
    assert hint_of(command, above) == hint


def test_hostile_command_lines_do_not_hang():
    for text in ("python" + " -X" * 5000, "python" + " -m" * 5000, "/" * 5000, "python -" + "m" * 5000):
        assert hint_of(text) is None


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
    (tmp_path / "x").write_text('process 5:"python -c a;b --token secret";thread (6): M;main (a.py:3);f 12.6\n')
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


@pytest.mark.parametrize("reader", [Collapsed, Tachyon, Austin])
def test_bad_lines_are_counted(tmp_path: Path, reader: type[Collapsed]):
    (tmp_path / "x").write_text(
        "a;b 3\nno count\na;b -3\na;b nan\nword\n\n 5\n" + "9" * 400 + "\na;c " + "9" * 400 + "\n"
    )
    parsed = read_all(reader(tmp_path / "x"))
    assert sorted(stack.samples for stack in parsed.stacks) == [3, 5]
    assert parsed.skipped_records == 6


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
        (b"some text\n", "neither sampled stacks nor a trace"),
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


def test_absent_files_and_folders(tmp_path: Path):
    assert not is_stack_file(tmp_path / "none")
    assert not is_stack_file(tmp_path)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UnreadableInputError):
            open_stacks(path)


# ---- files of stacks and folders of them as a run, and how paths are told apart

RAW = 'process 5:"python train.py --token secret";thread (5): MainThread;f (x.py:1) 3\n'
TRACE_TEXT = json.dumps({"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]})


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


def raw(count: int) -> list[str]:
    """Records of as many different threads and frames."""
    return [f'process 5:"a;{n}";thread ({n}): T{n};f{n} (x.py:{n + 1}) {n + 1}' for n in range(count)]


def test_too_many_different_frames(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_lines, "MAX_DISTINCT_FRAMES", 10)
    parsed = parse(raw(50))
    assert sum(stack.samples for stack in parsed.stacks) == 50 * 51 // 2
    functions = [stack.frames[0].function for stack in parsed.stacks]
    assert functions[:10] == [f"f{n}" for n in range(10)]
    assert set(functions[10:]) == {stack_lines.MORE_FRAMES.function}


def test_too_much_text_of_different_frames(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_lines, "MAX_FRAME_CHARS", 100)
    assert parse(raw(50)).stacks[-1].frames == (stack_lines.MORE_FRAMES,)


def test_too_many_different_threads_are_still_told_apart(monkeypatch: pytest.MonkeyPatch):
    expected = parse(raw(50) * 2).stacks
    monkeypatch.setattr(stack_lines, "MAX_PREFIX_PIECES", 10)
    assert parse(raw(50) * 2).stacks == expected
    assert [stack.thread_name for stack in expected[:2]] == ["T0", "T1"]


def test_hints_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_lines, "MAX_PROCESSES", 3)
    stacks = PySpyRaw(Path("x"))
    lines = [f'process {n}:"torchrun t.py {n}";f (x.py:1) 1' for n in range(9)]
    assert len(list(stacks.parse([lines], FrameNames(), Losses()))) == 9
    assert len(stacks.hints) == 3


def test_records_and_lines_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_lines, "MAX_RECORD_CHARS", 500)
    long = ";".join(["f (x.py:1)"] * 100)
    parsed = parse([f"{long} 3", "f (x.py:1) 4"])
    assert ([stack.samples for stack in parsed.stacks], parsed.skipped_samples) == ([4], 3)
    monkeypatch.setattr(stack_lines, "LINES", replace(stack_lines.LINES, longest=2**20))
    path = tmp_path / "x"
    path.write_bytes(b"f (x.py:1) 1\n" + b"x" * (3 * 2**20) + b" 7\nf (x.py:1) 2\n")
    parsed = read_all(PySpyRaw(path))
    assert ([stack.samples for stack in parsed.stacks], parsed.skipped_records) == ([1, 2], 1)
    path.write_bytes(b"f (x.py:1) 1\n" + b"x" * (3 * 2**20))
    assert read_all(PySpyRaw(path)).skipped_records == 1


def test_records_of_too_many_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_lines, "MAX_RECORD_LINES", 10)
    parsed = parse(['process 5:"a', *["b"] * 100, 'c";thread (5): M;f (x.py:1) 3', 'process 5:"x";f (x.py:1) 4'])
    assert [stack.samples for stack in parsed.stacks] == [4]
    assert (parsed.skipped_records >= 10, parsed.skipped_samples) == (True, 3)


def test_too_many_frames_in_a_stack(tmp_path: Path):
    assert parse([";".join(["f (x.py:1)"] * 20_001) + " 3"]).skipped_samples == 3
    (tmp_path / "x").write_text(";".join(["f"] * 20_001) + " 3\n")
    assert read_all(Collapsed(tmp_path / "x")).skipped_samples == 3


def test_stacks_that_wait_for_equal_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_lines, "MAX_MERGED_STACKS", 3)
    (tmp_path / "x").write_text("".join(f"P1;T0:1;a.py:f:{n % 7 + 1} {n}\n" for n in range(100)))
    parsed = read_all(Austin(tmp_path / "x"))
    assert sum(stack.samples for stack in parsed.stacks) == 99 * 100 // 2
    assert len(parsed.stacks) > 7


def test_samples_of_speedscope_that_wait_for_equal_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampled_files, "MAX_DISTINCT_BYTES", 10)
    samples = ",".join(f"[{n % 5}]" for n in range(50))
    weights = ",".join(["2"] * 50)
    path = tmp_path / "x"
    path.write_text(
        '{"shared":{"frames":[{"name":"a"},{"name":"b"},{"name":"c"},{"name":"d"},{"name":"e"}]},"profiles":'
        f'[{{"type":"sampled","name":"p","unit":"none","samples":[{samples}],"weights":[{weights}]}}]}}'
    )
    assert sum(stack.samples for stack in read_all(open_stacks(path)).stacks) == 100


def test_paths_of_events_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampled_files, "MAX_PATHS", 4)
    events = ",".join(f'{{"type":"O","frame":0,"at":{n}}}' for n in range(10))
    path = tmp_path / "x"
    path.write_text(
        '{"shared":{"frames":[{"name":"a"}]},"profiles":[{"type":"evented","name":"p","unit":"none",'
        f'"startValue":0,"endValue":10,"events":[{events}]}}]}}'
    )
    parsed = read_all(open_stacks(path))
    assert sum(stack.samples for stack in parsed.stacks) == 10
    assert parsed.skipped_records == 7


def test_files_of_speedscope_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sampled_files, "MAX_BYTES", 100)
    path = tmp_path / "x"
    path.write_text('{"shared":{"frames":[]},"profiles":[' + " " * 200 + "]}")
    assert read_all(open_stacks(path)).losses.counts == {"oversized_files": 1}


def test_packed_files_that_are_cut_off(tmp_path: Path):
    lines = "".join(f"f (x.py:{n + 1}) 1\n" for n in range(50_000)).encode()
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(lines)[:-2000])
    parsed = read_all(open_stacks(path))
    assert 0 < len(parsed.stacks) < 50_000
    assert parsed.losses.counts["cut_off_files"] == 1


def test_progress_says_the_bytes_that_were_read(tmp_path: Path):
    path = tmp_path / "x"
    path.write_text("f (x.py:1) 1\n" * 100_000)
    said: list[tuple[int, int]] = []
    stacks = PySpyRaw(path).read(FrameNames(), Losses(), lambda done, size: said.append((done, size)))
    assert sum(stack.samples for stack in stacks) == 100_000
    assert len(said) > 2
    assert said == sorted(said)
    assert said[-1] == (path.stat().st_size, path.stat().st_size)
