"""Sampled stacks: whose they are, their phase, whether they wait, and which frames are nobody's business."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope import tables
from stepscope.read import read_run
from stepscope.read.raw import Frame, FrameNames, Losses, RawHost, RawRun, RawSegment
from stepscope.read.stack_lines import PySpyRaw
from stepscope.tables import stacks
from stepscope.tables.schema import SCHEMAS, Tables
from stepscope.tables.stacks import CallPaths
from tests.builders import T0, step_rows
from tests.run_folders import make_run_folder

SHARED = Path(__file__).parents[2] / ".." / "shared" / "traces" / "py_spy"
ROOT = "<module> (/home/u/train.py:70);main (/home/u/train.py:64)"
NEXT = "_BaseDataLoaderIter.__next__ (/v/torch/utils/data/dataloader.py:700)"
CALL = "Module._call_impl (/v/torch/nn/modules/module.py:1500)"
BACKWARD = "Tensor.backward (/v/torch/_tensor.py:600);backward (/v/torch/autograd/__init__.py:300)"
STEP = "Optimizer.profile_hook_step.<locals>.wrapper (/v/torch/optim/optimizer.py:500)"
IMPORT = "_find_and_load (<frozen importlib._bootstrap>:1176)"
WAIT = "Condition.wait (/usr/lib/python3.11/threading.py:324)"
SELECT = "select (/usr/lib/python3.11/selectors.py:415)"
WORKER_LOOP = "_worker_loop (/v/torch/utils/data/_utils/worker.py:349)"
RUN = "BaseProcess.run (/usr/lib/python3.11/multiprocessing/process.py:108)"
AGENT = "fetch (/opt/x/stepscope/record/agent/probes/loader.py:12)"


def record(*frames: str, pid: int = 100, tid: int | None = None, name: str = "MainThread", count: int = 1) -> str:
    chain = 'process 100:"python train.py --api-key k";'
    if pid != 100:
        chain += f'process {pid}:"python train.py --api-key k";'
    return f"{chain}thread ({tid or pid}): {name};{';'.join(frames)} {count}\n"


def build(tmp_path: Path, raw: str | list[str], index: list[dict[str, Any]] | None = None, **more: Any) -> Tables:
    return tables.build(read_run(make_run_folder(tmp_path, stacks_raw=raw, stacks_index=index, **more)))


def path(built: Tables, row: int = 0) -> list[dict[str, Any]]:
    """The frames of a row of `stacks`, root first."""
    found: list[dict[str, Any]] = []
    node = built.stacks[row, "node"]
    while node is not None:
        here = built.nodes.row(node, named=True)
        assert here["node"] == node
        frame = built.frames.row(here["frame"], named=True)
        assert frame.pop("frame") == here["frame"]
        found.append(frame)
        node = here["parent"]
        assert (node is None) == (here["depth"] == 0)
    return found[::-1]


def one(tmp_path: Path, *frames: str, **more: Any) -> dict[str, Any]:
    stacks = build(tmp_path, record(*frames), **more).stacks
    assert dict(stacks.schema) == SCHEMAS["stacks"]
    assert stacks.height == 1
    return stacks.row(0, named=True)


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([ROOT], "other"),
        ([ROOT, NEXT], "data_wait"),
        ([ROOT, NEXT.replace("_BaseDataLoaderIter.", "").replace("/v/", "")], "data_wait"),
        ([ROOT, NEXT, CALL, "f (/home/u/transform.py:3)"], "data_wait"),
        ([ROOT, CALL, "f (/home/u/model.py:3)"], "forward"),
        ([ROOT, BACKWARD], "backward"),
        ([ROOT, BACKWARD, CALL], "backward"),
        ([ROOT, BACKWARD, STEP], "optimizer"),
        ([ROOT, STEP, BACKWARD], "backward"),
        ([ROOT, STEP, "LBFGS.step (/v/torch/optim/lbfgs.py:3)", CALL], "optimizer"),
        ([ROOT, "Adam.step (/v/torch/optim/adam.py:200)"], "optimizer"),
        ([ROOT, "LRScheduler.step (/v/torch/optim/lr_scheduler.py:200)"], "other"),
        ([ROOT, "backward (/home/u/mytorch/autograd/__init__.py.txt:3)"], "other"),
        ([ROOT, "__next__ (/home/u/dataloader.py:3)"], "other"),
        ([ROOT, "backward (/home/u/xtorch/_tensor.py:3)"], "other"),
        ([ROOT, IMPORT, "<module> (/v/x.py:1)"], "startup"),
        ([ROOT, CALL, IMPORT], "forward"),
        # optimizers are decorated while torch is imported
        ([ROOT, IMPORT, STEP.replace("Optimizer.profile_hook_step", "_disable_dynamo_if_unsupported")], "startup"),
    ],
)
def test_phase_of_the_main_thread(tmp_path: Path, frames: list[str], phase: str):
    row = one(tmp_path, *frames)
    assert (row["role"], row["rank"], row["process"], row["main_thread"]) == ("rank", 0, "rank-0", True)
    assert row["phase"] == phase


CLOSURE = "Closure.__call__ (/v/site-packages/lightning/pytorch/loops/automatic.py:139)"
WRAPPER = "stepscope_wrapper (/opt/x/stepscope/record/agent/probes/wrapper_importlib_bootstrap.py:38)"
SGD = "SGD.step (/v/torch/optim/sgd.py:120)"


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([STEP, SGD, CLOSURE, "M.training_step (/home/u/train.py:8)"], "forward"),
        ([STEP, SGD, "closure (/home/u/train.py:12)", CALL], "forward"),
        ([STEP, SGD, CLOSURE, BACKWARD], "backward"),
        ([STEP, SGD, "sgd (/v/torch/optim/sgd.py:340)"], "optimizer"),
        ([STEP, "Lion.step (/home/u/lion.py:30)", WRAPPER, "closure (/home/u/train.py:12)"], "forward"),
        ([STEP, "Lion.step (/home/u/lion.py:30)", "update (/home/u/lion.py:9)"], "optimizer"),  # the user's own
    ],
)
def test_a_closure_is_the_forward_pass_as_in_the_journal(tmp_path: Path, frames: list[str], phase: str):
    assert one(tmp_path, ROOT, *frames)["phase"] == phase


def timed_lines(tmp_path: Path, *more: str, rate_hz: float = 20.0, **step: Any) -> dict[str, str]:
    """function -> phase of two functions, 350 ms and 950 ms into each step of a second."""
    steps = step_rows(4, **{"data_wait_ms": 100, "forward_ms": 400, "backward_ms": 300, "fetches": 1, **step})
    raw = "".join(
        record(ROOT, *frames) for frames in (["loss (/home/u/train.py:20)"], ["log (/home/u/train.py:30)"], more)
    )
    folder = make_run_folder(tmp_path, stacks_raw=raw, steps=steps, stacks_index=[{"rate_hz": rate_hz}])
    at = [(n, (row["start_ns"] - T0) // 1000 + us) for row in steps for n, us in ((0, 350_000), (1, 950_000))]
    stretches = {
        "record": [n for n, _ in at],
        "start_us": [us for _, us in at],
        "end_us": [us + 40_000 for _, us in at],
    }
    times = {"schema": "stepscope.times/1", "start_ns": T0, "stretches": stretches}
    (folder / "host-a" / "stacks-0.times.json").write_text(json.dumps(times))
    built = tables.build(read_run(folder))
    return {path(built, row)[-1]["function"]: built.stacks[row, "phase"] for row in range(built.stacks.height)}


AFTER = {"optimizer_ms": 100, "other_ms": 100}


def test_a_line_before_the_backward_pass_is_the_journals_forward(tmp_path: Path):
    """No module runs: only the time of the samples tells the loss from what follows the update."""
    assert timed_lines(tmp_path, **AFTER) == {"loss": "forward", "log": "other", "main": "other"}


def test_around_a_closure_a_line_stays_other(tmp_path: Path):
    """An optimizer's step then begins before the forward pass."""
    found = timed_lines(tmp_path, STEP, SGD, CLOSURE, **AFTER)
    assert found == {"loss": "other", "log": "other", "Closure.__call__": "forward"}


@pytest.mark.parametrize(
    ("frames", "waiting"),
    [
        ([ROOT, NEXT, WAIT], True),
        ([ROOT, SELECT], True),
        ([ROOT, WAIT, "f (/home/u/a.py:3)"], False),
        ([ROOT, "wait (/home/u/a.py:3)"], False),
        ([ROOT, "_engine_run_backward (/v/torch/autograd/graph.py:979)"], False),
    ],
)
def test_waiting_by_leaf(tmp_path: Path, frames: list[str], waiting: bool):
    assert one(tmp_path, *frames)["waiting"] is waiting


def test_our_own_thread_is_left_out(tmp_path: Path):
    threading = "Thread._bootstrap (/usr/lib/python3.11/threading.py:1002)"
    raw = record(threading, AGENT, tid=107, name="sampler", count=5) + record(ROOT, count=2)
    result = build(tmp_path, raw)
    assert result.stacks["samples"].to_list() == [2]
    assert result.quality.counts["own_stack_samples"] == 5


def test_what_we_call_in_the_standard_library_is_nobodys_line(tmp_path: Path):
    journal = "write (/opt/x/stepscope/record/agent/journal.py:90)"
    encode = "JSONEncoder.iterencode (/usr/lib/python3.11/json/encoder.py:257)"
    join = "Thread.join (/usr/lib/python3.11/threading.py:1119)"
    raw = record(ROOT, journal, encode, count=5) + record(ROOT, journal, join, count=3) + record(ROOT, encode)
    result = build(tmp_path, raw + record(ROOT, journal))
    assert result.stacks["samples"].to_list() == [1]
    assert path(result)[-1]["function"] == "JSONEncoder.iterencode"  # the user's own
    assert result.quality.counts["own_stack_samples"] == 9


def test_what_our_wrappers_hand_over_to_is_the_runs_own(tmp_path: Path):
    dumps = "dumps (/usr/lib/python3.11/json/__init__.py:231)"
    result = build(tmp_path, record(ROOT, WRAPPER, dumps) + record(ROOT, AGENT, BACKWARD))
    ends = {path(result, row)[-1]["function"] for row in range(result.stacks.height)}
    assert ends == {"dumps", "backward"}


def test_fork_worker_drops_its_parents_frames(tmp_path: Path):
    own = "D.__getitem__ (/home/u/train.py:12)"
    raw = record(ROOT, "DataLoader.__iter__ (/v/torch/utils/data/dataloader.py:505)", RUN, WORKER_LOOP, own, pid=200)
    raw += record(
        "Thread._bootstrap (/usr/lib/python3.11/threading.py:1)", SELECT, pid=200, tid=205, name="QueueFeeder"
    )
    built = build(tmp_path, raw)
    table = built.stacks
    assert table["main_thread"].to_list() == [True, False]
    assert table["role"].to_list() == ["loader_worker", "loader_worker"]
    assert [frame["function"] for frame in path(built)] == ["_worker_loop", "D.__getitem__"]
    assert table["process"].to_list() == ["rank-0", "rank-0"]
    assert table["phase"].to_list() == [None, None]
    assert table["waiting"].to_list() == [False, True]


def test_torn_stacks_are_left_out_and_counted(tmp_path: Path):
    raw = record("main (/home/u/train.py:64)", CALL, count=3) + record(ROOT, CALL, count=4)
    result = build(tmp_path, raw)
    assert result.stacks["samples"].to_list() == [4]
    assert result.quality.counts["torn_stack_samples"] == 3
    assert any("torn" in note.text for note in result.quality.notes)
    blocking = build(tmp_path, raw, index=[{"blocking": True}], name="other")
    assert sorted(blocking.stacks["samples"].to_list()) == [3, 4]


def test_stack_without_frames_is_kept(tmp_path: Path):
    built = build(tmp_path, 'process 100:"a";thread (100): MainThread 77\n')
    row = built.stacks.row(0, named=True)
    assert (path(built), row["samples"], row["phase"]) == ([], 77, "other")


def test_secrets_of_command_lines_stay_out(tmp_path: Path):
    result = build(tmp_path, record(ROOT))
    assert "--api-key" not in result.stacks.write_json()


def test_process_that_never_reported_is_a_rank_from_stacks_alone(tmp_path: Path):
    folder = make_run_folder(tmp_path, stacks_raw=record(ROOT, BACKWARD), agents=[], steps=[], rank_json={"pid": 999})
    shutil.rmtree(folder / "rank-0")
    result = tables.build(read_run(folder))
    row = result.stacks.row(0, named=True)
    assert (row["role"], row["rank"], row["process"], row["phase"]) == ("rank", None, None, "backward")
    note = next(note for note in result.quality.notes if "never reported" in note.text)
    assert note.level == "warning"
    assert "-I" in note.text
    assert "PYTHONPATH" in note.text


@pytest.mark.skipif(not SHARED.exists(), reason="the folder of recorded traces is not here")
@pytest.mark.parametrize(
    ("name", "pid"), [("databound_idle.txt", 26221), ("spawn.txt", 13310), ("forkserver.txt", 13493)]
)
def test_real_samples_keep_their_sum(tmp_path: Path, name: str, pid: int):
    text = (SHARED / name).read_text(encoding="utf-8", errors="surrogateescape")
    result = build(tmp_path, text, pid=pid)
    own = sum(int(count) for count in re.findall(r"(?m) (\d+)$", text))
    counts = result.quality.counts
    assert counts["stack_samples"] == own
    kept = int(result.stacks["samples"].sum())
    assert kept + counts["torn_stack_samples"] + counts["own_stack_samples"] == own
    assert counts["torn_stack_samples"] < own * 0.01
    by_role = dict(result.stacks.group_by("role").agg(pl.col("samples").sum()).iter_rows())
    assert by_role["loader_worker"] > 100
    main = result.stacks.filter(pl.col("main_thread") & (pl.col("role") == "rank"))
    assert {"data_wait", "forward", "backward", "optimizer"} <= set(main["phase"].to_list())
    first = result.stacks.with_row_index().filter(pl.col("main_thread") & (pl.col("role") == "loader_worker"))
    roots = [frames[0]["file"] for row in first["index"] if (frames := path(result, row))]
    assert any(file.endswith("worker.py") for file in roots)


shared = pytest.mark.skipif(not SHARED.exists(), reason="the folder of recorded traces is not here")
TRAIN = "<module> (train.py:70);main (train.py:64)"
TRAINS = f"{TRAIN};Tensor.backward (torch/_tensor.py:600)"
LOOP = f"{TRAIN};BaseProcess.run (multiprocessing/process.py:108);_worker_loop (torch/utils/data/_utils/worker.py:349)"


def build_files(*paths: Path) -> Tables:
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
    return build_files(*paths)


def roles(built: Tables) -> dict[int, tuple[str, str | None]]:
    rows = built.stacks.filter(pl.col("pid").is_not_null()).select("pid", "role", "process").unique().rows()
    found = {pid: (role, process) for pid, role, process in rows}
    assert len(found) == len(rows)
    return found


def test_a_parent_that_does_not_train_has_launched_the_child_that_does(tmp_path: Path):
    text = 'process 5:"python sweep.py";thread (5): MainThread;<module> (sweep.py:3) 9\n'
    text += f'process 5:"python sweep.py";process 6:"python train.py";thread (6): MainThread;{TRAINS} 4\n'
    assert roles(written(tmp_path, text)) == {5: ("launcher", None), 6: ("rank", "rank-0")}


def test_workers_belong_to_the_process_that_started_them(tmp_path: Path):
    head = 'process 5:"python train.py";'
    text = f"{head}thread (5): MainThread;{TRAINS} 9\n"
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
    text = f"{TRAINS} 7\nThread._bootstrap (threading.py:1002);wait (threading.py:324) 3\n 5\n"
    built = written(tmp_path, text, text)
    assert built.stacks["process"].to_list() == ["rank-0"] * 3 + ["rank-1"] * 3
    assert built.stacks["main_thread"].to_list() == [True, False, None] * 2
    assert built.stacks["phase"].to_list() == ["backward", None, None] * 2
    assert built.stacks["waiting"].to_list() == [False, True, False] * 2
    assert built.segments["samples"].to_list() == [15, 15]


def test_samples_of_damaged_records_are_counted(tmp_path: Path):
    head = 'process 5:"python train.py";thread (5): MainThread;'
    built = written(tmp_path, f'{head}{TRAINS} 7\nprocess 5:"never closed;f (x.py:1) 9\n')
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
    for role, _ in roles(build_files(SHARED / name)).values():
        counted[role] = counted.get(role, 0) + 1
    assert counted == expected


def test_paths_beyond_the_limit_stand_under_one_name():
    names = FrameNames()
    paths = CallPaths(names, most=3)
    numbers = [names.number(Frame(f"f{value}", "/u/a.py", value)) for value in range(6)]
    kept = paths.add(numbers[:3])
    assert not kept[1] & stacks.LEFT_OUT
    late = [paths.add([number]) for number in numbers[3:]]
    assert len({node for node, _ in late}) == 1
    assert all(bits & stacks.LEFT_OUT for _, bits in late)
    assert paths.add(numbers[:3]) == kept
    frame = paths.frames_table().row(paths.nodes_table()[late[0][0], "frame"], named=True)
    assert "too many" in frame["function"]
