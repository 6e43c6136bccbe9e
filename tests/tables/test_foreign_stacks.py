"""Files of stacks that something else recorded: who is who, from chains of processes and frames alone."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from stepscope import tables
from stepscope.read.raw import Frame, FrameNames, Losses, RawHost, RawRun, RawSegment
from stepscope.read.stack_lines import PySpyRaw
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
