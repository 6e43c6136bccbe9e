"""What the raw format of py-spy does to those who read it, one case each. Most text is as real programs left it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.errors import UnreadableInputError
from stepscope.read.raw import Frame, FrameNames, Losses
from stepscope.read.stacks.pyspy_raw import PySpyRaw
from stepscope.read.stacks.sampled_files import open_stacks, read_stack_files
from tests.read.stack_text import Stack, parse, read_all

HEAD = 'process 5:"python train.py";thread (5): MainThread;'


def stacks(text: str) -> list[Stack]:
    parsed = parse(text.split("\n"))
    assert (parsed.skipped_records, parsed.skipped_samples) == (0, 0)
    return parsed.stacks


def functions(stack: Stack) -> list[str]:
    return [frame.function for frame in stack.frames]


def test_01_semicolons_everywhere():
    (stack,) = stacks(
        'process 1:"python -c import a; import b";process 2:"sh -c x; y";thread (3): name; of a thread;'
        "run (t.py:9);f; g (/tmp/a;b/c.py:1);cell (<ipython-input-3-abc; x>:2);h (z.py:3) 4\n"
    )
    assert (stack.pids, stack.thread, stack.thread_name) == ((1, 2), "3", "name; of a thread")
    assert stack.frames == (
        Frame("run", "t.py", 9),
        Frame("f; g", "/tmp/a;b/c.py", 1),
        Frame("cell", "<ipython-input-3-abc; x>", 2),
        Frame("h", "z.py", 3),
    )


def test_02_newlines_in_command_lines_names_and_files():
    head = 'process 5:"python a\nb 7\nc";thread (5): my\nname;'
    first, second = stacks(f"{head}nl (/tmp/weird\nname.py:2) 3\n{head}f (x.py:1) 4\n")
    assert (first.samples, second.samples) == (3, 4)
    assert first.thread_name == second.thread_name == "my\nname"
    assert first.frames == (Frame("nl", "/tmp/weird\nname.py", 2),)


def test_02_newlines_without_any_prefix():
    first, second = stacks("nl (/tmp/weird\nname.py:2) 3\nf (x.py:1) 4\n")
    assert first.frames == (Frame("nl", "/tmp/weird\nname.py", 2),)
    assert second.samples == 4


def test_03_stacks_without_python_frames_are_kept():
    assert [(stack.frames, stack.samples) for stack in stacks(" 59\n")] == [((), 59)]
    (stack,) = stacks('process 5:"a";thread (10355): MainThread 77\n')
    assert (stack.thread, stack.thread_name, stack.frames, stack.samples) == ("10355", "MainThread", (), 77)
    assert stacks('process 5:"a";thread (10355) 7\n')[0].thread_name is None


def test_04_the_count_is_the_last_word():
    (stack,) = stacks(f"{HEAD}step 12 of  3 (a b 4.py:5) 999999999999999\n")
    assert stack.frames == (Frame("step 12 of  3", "a b 4.py", 5),)
    assert stack.samples == 999_999_999_999_999


def test_05_names_that_come_late_or_are_odd():
    text = 'process 5:"a";thread (7);f (x.py:1) 1\nprocess 5:"a";thread (7): Thread-1 (_serve);f (x.py:1) 2\n'
    text += 'process 5:"a";thread (7): "q"; (x)\n y;f (x.py:1) 3\n'
    assert [(stack.thread, stack.thread_name, stack.samples) for stack in stacks(text)] == [
        ("7", None, 1),
        ("7", "Thread-1 (_serve)", 2),
        ("7", '"q"; (x)\n y', 3),
    ]


def test_06_thread_ids_are_decimal_or_hexadecimal():
    text = 'process 5:"a";thread (0x7F02aB): X;f (x.py:1) 1\nprocess 6:"a";thread (11): X;f (x.py:1) 2\n'
    assert [(stack.pids, stack.thread) for stack in stacks(text)] == [((5,), "0x7F02aB"), ((6,), "11")]


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        ("0x7f02422b6109 (libc.so.6)", Frame("0x7f02422b6109", "libc.so.6", None)),
        ("at::native::{lambda()#7}::operator()(at::Tensor const&, long) (libtorch_cpu.so)",
         Frame("at::native::{lambda()#7}::operator()(at::Tensor const&, long)", "libtorch_cpu.so", None)),
        ("(anonymous namespace)::run(int) (libc10.so)", Frame("(anonymous namespace)::run(int)", "libc10.so", None)),
        ("f (C:\\Users\\a b\\train (1).py:12)", Frame("f", "C:\\Users\\a b\\train (1).py", 12)),
        ("Q name with space, and (paren:3) (edge.py:9)", Frame("Q name with space, and (paren:3)", "edge.py", 9)),
        ("f (/home/u/odd (copy) dir/d (e:f).py:2)", Frame("f", "/home/u/odd (copy) dir/d (e:f).py", 2)),
        ("f (a.py:-1)", Frame("f", "a.py", -1)),
    ],
)  # fmt: skip
def test_07_frames_are_read_from_the_right(text: str, frame: Frame):
    assert stacks(f"{HEAD}{text};g (x.py:1) 8\n")[0].frames == (frame, Frame("g", "x.py", 1))


def test_08_qualified_and_plain_names_stay_as_they_are():
    (stack,) = stacks(f"{HEAD}_BaseDataLoaderIter.__next__ (d.py:1);A.m.<locals>.<listcomp> (a.py:2);next (d.py:3) 1\n")
    assert functions(stack) == ["_BaseDataLoaderIter.__next__", "A.m.<locals>.<listcomp>", "next"]


def test_09_special_functions_and_files_are_kept():
    names = ("<module>", "<lambda>", "<listcomp>", "<genexpr>", "forward", "f")
    files = ("<string>", "<stdin>", "<frozen importlib._bootstrap>", "<frozen runpy>", "<eval_with_key>.12",
             "/tmp/torchinductor_u/ab/cab.py")  # fmt: skip
    (stack,) = stacks(HEAD + ";".join(f"{n} ({f}:2)" for n, f in zip(names, files, strict=True)) + " 6\n")
    assert [(frame.function, frame.file) for frame in stack.frames] == list(zip(names, files, strict=True))


def test_10_short_and_full_paths_are_different_files():
    text = f"{HEAD}f (train.py:1) 1\n{HEAD}f (/home/u/a/train.py:1) 2\n{HEAD}f (/home/u/b/train.py:1) 3\n"
    assert {stack.frames[0].file for stack in stacks(text)} == {
        "train.py",
        "/home/u/a/train.py",
        "/home/u/b/train.py",
    }


FORK_SERVER = "python -B -c from multiprocessing.forkserver import main; main(8, 9, ['__main__'])"


def test_11_chains_of_processes_and_what_they_are():
    source = PySpyRaw(Path("x"))
    lines = [
        'process 1:"/usr/bin/python3 /opt/bin/torchrun --nproc_per_node 2 t.py";thread (1): MainThread;r (run.py:1) 1',
        'process 1:"/usr/bin/python3 /opt/bin/torchrun --nproc_per_node 2 t.py";process 2:"python -u t.py";'
        "thread (2): MainThread;f (t.py:1) 2",
        f'process 2:"python -u t.py";process 3:"{FORK_SERVER}";thread (3): MainThread;f (t.py:1) 3',
        f'process 2:"python -u t.py";process 3:"{FORK_SERVER}";process 4:"{FORK_SERVER}";thread (4): M;f (t.py:1) 4',
        'process 2:"python -u t.py";process 5:"python -c from multiprocessing.resource_tracker import main;main(5)";'
        "thread (5): MainThread;f (t.py:1) 5",
    ]
    found = list(source.parse([lines], FrameNames(), Losses()))
    assert [stack.pids for stack in found] == [(1,), (1, 2), (2, 3), (2, 3, 4), (2, 5)]
    assert source.hints == {1: "launcher", 3: "helper", 4: "spawned", 5: "helper"}


def test_12_forked_workers_keep_their_parents_frames():
    (stack,) = stacks(f"{HEAD}<module> (t.py:9);__iter__ (d.py:1);_worker_loop (w.py:2);fetch (f.py:3) 20\n")
    assert functions(stack) == ["<module>", "__iter__", "_worker_loop", "fetch"]


def test_13_deep_recursion():
    deep = ";".join(["Module._call_impl_of_a_deeply_nested_block (/site-packages/torch/nn/modules/m.py:17)"] * 3000)
    (stack,) = stacks(f"{HEAD}{deep} 1\n")
    assert len(stack.frames) == 3000
    assert len(set(stack.frames)) == 1


def test_14_other_alphabets_and_bytes_that_are_no_text(tmp_path: Path):
    path = tmp_path / "x"
    path.write_bytes("naïve (päck/mod.py:4) 1\n".encode() + b"f (/tmp/\xe9\xff.py:1) 2\ncr\rin name (a.py:1) 3\n")
    frames = [stack.frames for stack in read_all(PySpyRaw(path)).stacks]
    assert frames == [
        (Frame("naïve", "päck/mod.py", 4),),
        (Frame("f", "/tmp/\\xe9\\xff.py", 1),),
        (Frame("cr\rin name", "a.py", 1),),
    ]


def test_14_lines_that_end_as_on_windows(tmp_path: Path):
    path = tmp_path / "x"
    path.write_bytes(b"\xef\xbb\xbff (C:\\a.py:1) 2\r\ng (C:\\a.py:2) 3\r\n")
    assert [stack.samples for stack in read_all(PySpyRaw(path)).stacks] == [2, 3]


def test_15_whether_waiting_was_sampled_is_unknown(tmp_path: Path):
    path = tmp_path / "x"
    path.write_text(f"{HEAD}wait (threading.py:1) 3\n")
    (segment,) = read_stack_files([path]).hosts[0].segments
    assert segment.idle is None


def test_16_blocked_leaves_are_kept():
    names = ("Condition.wait", "_PollLikeSelector.select", "accept", "_recv", "Thread._wait_for_tstate_lock")
    found = stacks("".join(f"{HEAD}{name} (x.py:1) 2\n" for name in names))
    assert [functions(stack)[-1] for stack in found] == list(names)


def test_17_native_frames():
    (stack,) = stacks(
        f"{HEAD}0x7f024224524a (libc.so.6);<module> (t.py:1);mkl_blas_avx512_sgemm (libtorch_cpu.so);0x7f02 (?);"
        f"{'x' * 900} (libtorch_cpu.so);do_syscall_64 (?) 13\n"
    )
    assert [frame.file for frame in stack.frames] == [
        "libc.so.6",
        "t.py",
        "libtorch_cpu.so",
        "?",
        "libtorch_cpu.so",
        "?",
    ]
    assert stack.samples == 13


def test_18_empty_files_cut_ends_and_other_formats(tmp_path: Path):
    parsed = parse([f"{HEAD}f (x.py:1) 3", f"{HEAD}f (x.p"])
    assert ([stack.samples for stack in parsed.stacks], parsed.skipped_records) == ([3], 1)
    path = tmp_path / "stacks.txt"
    path.write_text("")
    with pytest.raises(UnreadableInputError, match="an empty file"):
        open_stacks(path)
    path.write_text('{"$schema":"https://www.speedscope.app/file-format-schema.json","profiles":[]}')
    assert open_stacks(path).format == "speedscope"


def test_19_counts_are_samples_of_threads_and_no_time(tmp_path: Path):
    path = tmp_path / "x"
    path.write_text(f"{HEAD}f (x.py:1) 3\n")
    source = open_stacks(path)
    read_all(source)
    assert (source.unit, source.rate_hz, source.wall_ns) == ("samples", None, None)


def test_20_torn_stacks_are_handed_on():
    (stack,) = stacks(f"{HEAD}forward (model.py:3);relu (functional.py:1) 1\n")
    assert functions(stack) == ["forward", "relu"]
