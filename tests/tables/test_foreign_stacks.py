"""Files of stacks that something else recorded: who is who, from chains of processes and frames alone."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope import tables
from stepscope.read.raw import Frame, FrameNames, Losses, RawHost, RawRun, RawSegment
from stepscope.read.stacks.pyspy_raw import PySpyRaw
from stepscope.tables import call_paths
from stepscope.tables.call_paths import CallPaths
from stepscope.tables.schema import Tables

SHARED = Path(__file__).parents[2] / ".." / "shared" / "traces" / "py_spy"
shared = pytest.mark.skipif(not SHARED.exists(), reason="the folder of recorded traces is not here")
TRAIN = "<module> (train.py:70);main (train.py:64)"
BACKWARD = f"{TRAIN};Tensor.backward (torch/_tensor.py:600)"
LOOP = f"{TRAIN};BaseProcess.run (multiprocessing/process.py:108);_worker_loop (torch/utils/data/_utils/worker.py:349)"


def build(*paths: Path) -> Tables:
    segments = tuple(
        RawSegment(number=number, file=path.name, source="py-spy", status="ok", stacks=PySpyRaw(path, path.name))
        for number, path in enumerate(paths)
    )
    host = RawHost("", None, (), (), (), segments)
    return tables.build(RawRun(paths[0].parent, (host,), (), Losses()))


def written(tmp_path: Path, *texts: str) -> Tables:
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / f"stacks-{number}.txt")
        paths[-1].write_text(text)
    return build(*paths)


def roles(built: Tables) -> dict[int, tuple[str, str | None]]:
    rows = built.stacks.filter(pl.col("pid").is_not_null()).select("pid", "role", "process").unique().rows()
    found = {pid: (role, process) for pid, role, process in rows}
    assert len(found) == len(rows)
    return found


def test_children_of_a_launcher_are_ranks_in_the_order_of_their_pids(tmp_path: Path):
    head = 'process 10:"python /venv/bin/torchrun --nproc_per_node 2 train.py";'
    text = f"{head}thread (10): MainThread;<module> (torchrun:3) 9\n"
    for pid in (31, 12):
        text += f'{head}process {pid}:"python train.py";thread ({pid}): MainThread;{BACKWARD} 4\n'
    helper = 'process 13:"python -c from multiprocessing.resource_tracker import main;main(5)";'
    text += f"{head}{helper}thread (13): MainThread;<module> (<string>:1) 1\n"
    built = written(tmp_path, text)
    assert roles(built) == {
        10: ("launcher", None), 12: ("rank", "rank-0"), 31: ("rank", "rank-1"), 13: ("helper", None),
    }  # fmt: skip
    assert [info.rank for info in built.ranks] == [0, 1]
    assert any("numbered by file and process id" in note.text for note in built.quality.notes)


def test_a_parent_that_does_not_train_has_launched_the_child_that_does(tmp_path: Path):
    text = 'process 5:"python sweep.py";thread (5): MainThread;<module> (sweep.py:3) 9\n'
    text += f'process 5:"python sweep.py";process 6:"python train.py";thread (6): MainThread;{BACKWARD} 4\n'
    assert roles(written(tmp_path, text)) == {5: ("launcher", None), 6: ("rank", "rank-0")}


def test_workers_belong_to_the_process_that_started_them(tmp_path: Path):
    head = 'process 5:"python train.py";'
    text = f"{head}thread (5): MainThread;{BACKWARD} 9\n"
    text += f'{head}process 6:"python train.py";thread (6): MainThread;{LOOP};augment (train.py:9) 5\n'
    feeder = "Thread._bootstrap (threading.py:1002);Queue._feed (multiprocessing/queues.py:231)"
    text += f'{head}process 6:"python train.py";thread (8): QueueFeederThread;{feeder} 5\n'
    spawn = "python -c from multiprocessing.spawn import spawn_main; spawn_main() --multiprocessing-fork"
    text += f'{head}process 7:"{spawn}";thread (7): MainThread;<module> (<string>:1) 2\n'
    built = written(tmp_path, text)
    assert roles(built) == {
        5: ("rank", "rank-0"), 6: ("loader_worker", "rank-0"), 7: ("loader_worker", "rank-0"),
    }  # fmt: skip
    worker = built.stacks.filter((pl.col("pid") == 6) & pl.col("main_thread"))
    assert worker["phase"].to_list() == [None]
    assert built.nodes[worker[0, "node"], "depth"] == 1  # the parent's frames are gone


def test_files_without_processes_or_threads_are_a_rank_each(tmp_path: Path):
    text = f"{BACKWARD} 7\nThread._bootstrap (threading.py:1002);wait (threading.py:324) 3\n 5\n"
    built = written(tmp_path, text, text)
    assert built.stacks["process"].to_list() == ["rank-0"] * 3 + ["rank-1"] * 3
    assert built.stacks["main_thread"].to_list() == [True, False, None] * 2
    assert built.stacks["phase"].to_list() == ["backward", None, None] * 2
    assert built.stacks["waiting"].to_list() == [False, True, False] * 2
    assert built.segments["samples"].to_list() == [15, 15]


def test_a_thread_is_the_main_one_before_its_name_was_known(tmp_path: Path):
    built = written(
        tmp_path, f"thread (7);{BACKWARD} 2\nthread (7): MainThread;{BACKWARD} 3\nthread (8);f (a.py:1) 1\n"
    )
    assert built.stacks["main_thread"].to_list() == [True, True, False]


def test_samples_of_damaged_records_are_counted(tmp_path: Path):
    head = 'process 5:"python train.py";thread (5): MainThread;'
    built = written(tmp_path, f'{head}{BACKWARD} 7\nprocess 5:"never closed;f (x.py:1) 9\n')
    assert built.segments["samples"].to_list() == [7]
    assert built.segments["skipped_samples"].to_list() == [9]


@shared
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("spawn.txt", {"rank": 1, "loader_worker": 2, "helper": 1}),
        ("forkserver.txt", {"rank": 1, "loader_worker": 2, "helper": 2}),
        ("pin.txt", {"rank": 1, "loader_worker": 2}),
        ("ddp_idle.txt", {"launcher": 1, "rank": 2}),
    ],
)
def test_real_files(name: str, expected: dict[str, int]):
    counted: dict[str, int] = {}
    for role, _ in roles(build(SHARED / name)).values():
        counted[role] = counted.get(role, 0) + 1
    assert counted == expected


# ------------------------------------------------------------------------------------------------------ call paths


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=30))
def test_every_path_is_one_node(stacks: list[list[int]]):
    names = FrameNames()
    numbers = [names.number(Frame(f"f{value}", "/u/a.py", value)) for value in range(6)]
    paths = CallPaths(names)
    found = [paths.add([numbers[value] for value in stack])[0] for stack in stacks]
    nodes = paths.nodes_table()
    for stack, node in zip(stacks, found, strict=True):
        walked: list[int] = []
        at: int | None = node if node >= 0 else None
        while at is not None:
            walked.append(nodes[at, "frame"])
            parent = nodes[at, "parent"]
            assert parent is None or parent < at
            at = parent
        assert walked[::-1] == stack
    assert nodes.height == len({tuple(stack[:end]) for stack in stacks for end in range(1, len(stack) + 1)})


def test_paths_beyond_the_limit_stand_under_one_name():
    names = FrameNames()
    paths = CallPaths(names, most=3)
    numbers = [names.number(Frame(f"f{value}", "/u/a.py", value)) for value in range(6)]
    kept = paths.add(numbers[:3])
    assert not kept[1] & call_paths.LEFT_OUT
    late = [paths.add([number]) for number in numbers[3:]]
    assert len({node for node, _ in late}) == 1
    assert all(bits & call_paths.LEFT_OUT for _, bits in late)
    assert paths.add(numbers[:3]) == kept
    frame = paths.frames_table().row(paths.nodes_table()[late[0][0], "frame"], named=True)
    assert "too many" in frame["function"]


def test_native_frames_below_a_wait_wait(tmp_path: Path):
    native = "accept4 (libc.so.6);0x7f1 (libc.so.6)"
    text = f"{TRAIN};Condition.wait (threading.py:324);{native} 2\n{TRAIN};f (train.py:3);{native} 3\n{native} 1\n"
    assert written(tmp_path, text).stacks["waiting"].to_list() == [True, False, False]
