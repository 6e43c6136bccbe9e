"""py-spy's raw format: everything that is unescaped in it, damage, and real files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.read.raw import Frame, FrameNames, Losses
from stepscope.read.stack_lines import PySpyRaw, hint_of
from tests.read.stack_text import Stack, parse, read_all

SHARED = Path(__file__).parents[3] / ".." / "shared" / "traces" / "py_spy"
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


FORK_SERVER = "python -B -c from multiprocessing.forkserver import main; main(8, 9, ['__main__'])"


def test_chains_of_processes_and_what_they_are():
    source = PySpyRaw(Path("x"))
    lines = [
        'process 1:"/usr/bin/python3 /opt/bin/torchrun --nproc_per_node 2 t.py";thread (1): MainThread;r (run.py:1) 1',
        'process 1:"/usr/bin/python3 /opt/bin/torchrun --nproc_per_node 2 t.py";process 2:"python -u --key abc-secret";'
        "thread (2): MainThread;f (t.py:1) 2",
        f'process 2:"python -u t.py";process 3:"{FORK_SERVER}";thread (3): MainThread;f (t.py:1) 3',
        f'process 2:"python -u t.py";process 3:"{FORK_SERVER}";process 4:"{FORK_SERVER}";thread (4): M;f (t.py:1) 4',
        'process 2:"python -u t.py";process 5:"python -c from multiprocessing.resource_tracker import main;main(5)";'
        "thread (5): MainThread;f (t.py:1) 5",
    ]
    found = list(source.parse([lines], FrameNames(), Losses()))
    assert [stack.pids for stack in found] == [(1,), (1, 2), (2, 3), (2, 3, 4), (2, 5)]
    assert source.hints == {1: "launcher", 3: "helper", 4: "spawned", 5: "helper"}
    assert "secret" not in repr(found)


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
