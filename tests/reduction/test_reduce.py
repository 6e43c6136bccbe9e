"""`stepscope reduce`: what is kept of a run, that it alone is enough, and what happens to damaged and changed files."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.tables.reduced import LABELS, Reduced, load
from tests.builders import MS, T0, step_rows
from tests.cli.calls import call
from tests.gpu_traces import host
from tests.gpu_traces import write as write_trace
from tests.reduction.jobs import (
    CLOCK_SET_AT,
    COLLECTIVE_US,
    GEMM_US,
    STEP_MS,
    STEPS,
    WINDOW,
    WORLD,
    contents,
    make_job,
    trace,
)
from tests.run_folders import make_run_folder


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Reduced:
    """The tables of two hosts."""
    return reduce_all(make_job(tmp_path_factory.mktemp("job")))


def reduce_all(run: Path) -> Reduced:
    assert call("reduce", run) == 0
    return load(run / "reduced")


def rows(reduced: Reduced, name: str, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of a table with these values."""
    frame = reduced.scan(name).filter(*(pl.col(column) == value for column, value in wanted.items()))
    return frame.collect().to_dicts()


def test_hosts_ranks_and_groups(reduced: Reduced) -> None:
    assert [one.host for one in reduced.hosts] == ["a", "b"]
    assert reduced.ranks == (0, 1, 2, 3)
    assert reduced.world_size == WORLD
    assert reduced.missing == ()
    for one in reduced.hosts:
        (group,) = one.groups
        assert (group.ranks, group.description) == ((0, 1, 2, 3), "default_pg")
        assert [rank.device for rank in one.ranks] == [f"gpu:{rank.rank}" for rank in one.ranks]
        assert one.ranks[0].samples_per_second == 100
        assert one.ranks[1].samples_per_second is None
        assert one.run["command"] == ["python", "train.py"]
        assert one.left_out == ()
    first, second = reduced.hosts
    assert first.groups == second.groups


def test_steps_carry_phases_collections_device_time_and_why_they_do_not_count(reduced: Reduced) -> None:
    steps = {row["step"]: row for row in rows(reduced, "steps", rank=2)}
    assert len(steps) == STEPS
    expected: dict[str, Any] = {"rank": 2, "step": 7, "host": "b", "label": LABELS.index("steady"), "samples": 8}
    expected |= {"start_us": (T0 + 7 * STEP_MS * MS) // 1000, "wall_us": 10_000, "data_wait_us": 1000, "gc_us": 0}
    expected |= {"forward_us": 3000, "backward_us": 4000, "optimizer_us": 1000, "other_us": 1000}
    unknown = ("before_forward_us", "device_us", "compute_us", "collective_us", "tokens")
    assert steps[7] == expected | dict.fromkeys(unknown)
    assert steps[3]["gc_us"] == 14_000
    assert [LABELS[steps[step]["label"]] for step in (0, 1, 20)] == ["warmup", "steady", "window"]
    profiled = [steps[step] for step in WINDOW]
    assert {(row["compute_us"], row["collective_us"]) for row in profiled} == {(GEMM_US, COLLECTIVE_US)}


def test_telemetry_lines_metrics_and_events(reduced: Reduced) -> None:
    clock = rows(reduced, "telemetry", metric="gpu_sm_clock_mhz", rank=3)
    assert [(row["count"], row["least"], row["most"], row["mean"]) for row in clock] == [
        (10, 1000, 1009, 1004.5),
        (2, 1010, 1011, 1010.5),
    ]
    assert {row["metric"] for row in rows(reduced, "telemetry")} == {
        *("busy_cores", "clock_set_ns", "gpu_sm_clock_mhz", "rss_bytes")
    }
    lines = rows(reduced, "lines", rank=0)
    assert [(row["line"], row["function"], row["samples"], row["waiting"]) for row in lines] == [
        (5, "main", 90, False),
        (9, "main", 10, False),
    ]
    (loss,) = rows(reduced, "metrics", rank=0)
    assert (loss["name"], loss["count"], loss["not_finite"], loss["mean"]) == ("train/loss", STEPS, 1, STEPS / 2)
    found = rows(reduced, "events", rank=0)
    assert [(row["kind"], row["step"], row["duration_us"], row["line"]) for row in found] == [
        ("gc", 3, 12_000, 8),
        ("checkpoint", 5, 3_000, 8),
    ]
    (jump,) = rows(reduced, "events", kind="clock", host="a")
    assert (jump["rank"], jump["start_us"]) == (None, T0 // 1000 + CLOCK_SET_AT * 10**6)
    assert "+5.000 ms" in jump["text"]


def test_the_tables_alone_are_judged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 2 is late in its forward pass in every step; the others wait for it in their backward passes."""
    for rank in range(WORLD):
        late = {"forward_ms": 8, "backward_ms": 2} if rank == 2 else {"forward_ms": 3, "backward_ms": 7}
        site = {"kind": "site", "what": "DistributedDataParallel", "arguments": {}, "file": "a.py", "line": 1}
        make_run_folder(tmp_path, host="ab"[rank // 2], rank=rank, steps=step_rows(60, **late), events=[site])
    assert call("reduce", tmp_path / "run") == 0
    shutil.move(tmp_path / "run" / "reduced", tmp_path / "copy" / "reduced")
    shutil.rmtree(tmp_path / "run")
    capfd.readouterr()
    assert call("analyze", tmp_path / "copy") == 0
    assert "rank 2 keeps the others waiting" in " ".join(capfd.readouterr().out.split())


def test_pieces_of_a_pipeline_keep_their_micro_batches(tmp_path: Path) -> None:
    at = WINDOW[0] * STEP_MS * 1000
    named = [
        ("PP:1F0", 100),
        ("PP:3F0", 200),
        ("PP:1B0", 300),
        ("PP:1F1", 400),
        ("DistributedDataParallel.forward", 110),
    ]
    more = [host(name, at + start, 50, "user_annotation") for name, start in named]
    more += [host("PP:1F0", at + 160, 70, "gpu_user_annotation", stream=7, device=0)]
    run = make_job(tmp_path, {"a": (0,)}, more=more)
    found = rows(reduce_all(run), "work", step=WINDOW[0])
    began = T0 + at * 1000
    assert [
        (row["kind"], row["microbatch"], row["chunk"], row["start_ns"] - began, row["end_ns"] - began) for row in found
    ] == [
        ("forward", 0, 0, 160_000, 230_000),  # as long as on the device
        ("forward", 0, 1, 200_000, 250_000),
        ("backward", 0, 0, 300_000, 350_000),
        ("forward", 1, 0, 400_000, 450_000),
    ]


def test_what_has_not_changed_is_not_reduced_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_job(tmp_path)
    assert call("reduce", run) == 0
    before = contents(run / "reduced")
    capfd.readouterr()
    assert call("reduce", run) == 0
    assert capfd.readouterr().err.count("unchanged") == 2
    table = run / "reduced" / "host-a" / "steps.parquet"
    table.write_bytes(table.read_bytes()[:-1])
    assert call("reduce", run) == 0
    told = capfd.readouterr().err
    assert (told.count("unchanged"), told.count("reduced, ")) == (1, 1)
    assert contents(run / "reduced") == before
    with (run / "rank-3" / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "mark", "name": "x", "time_ns": T0, "duration_ns": None, "step": 1}) + "\n")
    assert call("reduce", run, "--host", "b") == 0
    assert "host-b: reduced" in capfd.readouterr().err
    assert call("reduce", run, "--force", "--quiet") == 0
    assert capfd.readouterr().err == ""
    assert [path.name for path in sorted((run / "reduced").iterdir())] == ["host-a", "host-b"]


DAMAGE = {
    "empty": b"",
    "garbage": os.urandom(1000),
    "cut off": trace(1)[:200],
    "a bomb": gzip.compress(b'{"traceEvents": [' + b" " * 100_000_000),
    "a list": gzip.compress(b"[1, 2, 3]"),
}


@pytest.mark.parametrize("damaged", DAMAGE)
def test_a_damaged_trace_is_named_and_costs_itself_alone(
    tmp_path: Path, damaged: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_job(tmp_path, {"a": (0, 1)})
    (run / "rank-1" / "trace-0.pt.trace.json.gz").write_bytes(DAMAGE[damaged])
    assert call("reduce", run) == 0
    assert "host-a: left out: rank-1/trace-0.pt.trace.json" in capfd.readouterr().err
    found = load(run / "reduced")
    assert "rank-1/trace-0" in found.hosts[0].left_out[0]
    assert len(rows(found, "collectives", rank=0)) == len(WINDOW)
    assert len(rows(found, "steps", rank=1)) == STEPS


def test_torn_journals_are_counted_and_the_rest_is_kept(tmp_path: Path) -> None:
    run = make_job(tmp_path)
    for name in ("steps.jsonl", "events.jsonl"):
        with (run / "rank-0" / name).open("ab") as file:
            file.write(b'\xff{"kind": "torn\nnonsense\n[1,')
    (run / "rank-1" / "steps.jsonl").write_bytes(b"")
    shutil.rmtree(run / "rank-2")
    (run / "host-b" / "system.jsonl").write_bytes(b"\0" * 1000)
    (run / "host-b" / "manifest.json").write_bytes(b"[]")
    found = reduce_all(run)
    assert len(rows(found, "steps", rank=0)) == STEPS
    assert rows(found, "steps", rank=1) == []
    assert found.ranks == (0, 1, 3)
    assert found.missing == (2,)
    assert any("rank-0/steps.jsonl" in text for text in found.hosts[0].left_out)
    assert any("host-b/manifest.json" in text for text in found.hosts[1].left_out)


def test_numbers_of_ranks_that_cannot_be(tmp_path: Path) -> None:
    run = make_job(tmp_path, {"a": (0, 1, 2, 3)})
    for rank, told in ((1, 0), (2, 2**30)):
        path = run / f"rank-{rank}" / "rank.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rank": told, "world_size": 2**40}))
    found = reduce_all(run)
    assert found.ranks == (0, 3)
    assert len(rows(found, "steps", rank=0)) == STEPS
    assert {row["rank"] for row in rows(found, "collectives")} == {0, 3}
    assert [text.partition(":")[0] for text in found.hosts[0].left_out] == ["rank-1", "rank-2"]


def test_a_host_of_which_nothing_can_be_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_job(tmp_path)
    for part in ("host-b", "rank-2", "rank-3"):
        for file in (run / part).iterdir():
            file.write_bytes(b"")
    (run / "host-b" / "agents.jsonl").write_text('{"pid": 102, "folder": "rank-2"}\n')
    assert call("reduce", run, "--host", "b") == 3
    assert "nothing of host b can be read" in capfd.readouterr().err
    assert call("reduce", run) == 0  # the other one is there
    assert [one.host for one in load(run / "reduced").hosts] == ["a"]


def test_launchers_of_one_machine_are_one_host(tmp_path: Path) -> None:
    run = make_job(tmp_path, {"node1": (0,), "node1.2": (1,), "node2": (2,), "node2.2": (3,)})
    assert call("reduce", run, "--host", "node1.2") == 0
    assert [one.host for one in load(run / "reduced").hosts] == ["node1"]
    assert reduce_all(run).host_of == {0: "node1", 1: "node1", 2: "node2", 3: "node2"}


def test_of_a_rank_that_was_started_again_the_longer_part_counts(tmp_path: Path) -> None:
    """Rank 1 went on on the other host after five steps."""
    run = make_job(tmp_path, {"a": (0, 1)}, traces={})
    make_run_folder(tmp_path, host="b", rank=7, steps=step_rows(50))
    (run / "rank-7").rename(run / "rank-1.2")
    info = json.loads((run / "rank-1.2" / "rank.json").read_text())
    (run / "rank-1.2" / "rank.json").write_text(json.dumps({**info, "rank": 1}))
    agents = run / "host-b" / "agents.jsonl"
    agents.write_text(agents.read_text().replace("rank-7", "rank-1.2"))
    found = reduce_all(run)
    assert found.problems == ()
    assert found.host_of == {0: "a", 1: "b"}
    assert len(rows(found, "steps", rank=1)) == 50
    assert any("rank-1: rank-1.2 is the longer part" in text for text in found.hosts[0].left_out)


def test_traces_of_others_are_reduced_beside_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        write_trace(tmp_path / "logs" / f"node{rank}_{900 + rank}.170000000{rank}.pt.trace.json", steps=3)
    before = contents(tmp_path / "logs")
    monkeypatch.chdir(tmp_path)
    assert call("reduce", tmp_path / "logs") == 0
    assert contents(tmp_path / "logs") == before
    found = load(tmp_path / "logs-reduced" / "reduced")
    assert found.host_of == {0: "node0", 1: "node1"}
    steps = rows(found, "steps", rank=1)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert {row["compute_us"] for row in steps} == {400}
    assert {row["gc_us"] for row in steps} == {None}  # nobody listened
    assert call("reduce", tmp_path / "logs", "--out", tmp_path / "there", "--host", "node1") == 0
    assert load(tmp_path / "there" / "reduced").ranks == (1,)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["nothing"], 3, "no such folder"),
        (["."], 3, "no trace in it"),
        ([".."], 3, "holds 1 runs, name one of them"),
        (["run", "--host", "c"], 2, "recorded nothing of"),
        (["run", "--engine", "spark"], 2, "there are inline, pool, dask"),
        (["run", "--scheduler", "slurm"], 2, "add --engine dask"),
        (["run", "--jobs", "0"], 2, "from 1 on"),
        (["run", "--engine", "inline", "--jobs", "2"], 2, "not with --engine inline"),
        (["run", "--out", "run/rank-0/rank.json"], 4, "name a folder with --out"),
    ],
)
def test_refusals_say_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    said: str,
) -> None:
    (tmp_path / "place").mkdir()
    make_job(tmp_path / "place", {"a": (0,)})
    monkeypatch.chdir(tmp_path / "place" if words[0][0] != "." else tmp_path / "place" / "run" / "host-a")
    words = [str(tmp_path / "place") if word == ".." else word for word in words]  # a folder of runs
    capfd.readouterr()
    assert call("reduce", *words) == status
    error = capfd.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


def task(monkeypatch: pytest.MonkeyPatch, node: str, *, local: int = 0, tasks: int = 3) -> None:
    """The environment of a task of a job step of SLURM on that node."""
    told = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "4", "SLURM_STEP_NUM_TASKS": tasks, "SLURM_PROCID": 1}
    told |= {"SLURM_LOCALID": local, "SLURMD_NODENAME": node}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


def test_tasks_of_a_job_step_reduce_what_their_node_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_job(tmp_path)
    task(monkeypatch, "c")
    assert call("reduce", run) == 0
    assert "c recorded nothing of" in capfd.readouterr().err
    task(monkeypatch, "a", local=1)
    assert call("reduce", run) == 0
    assert not (run / "reduced").exists()
    task(monkeypatch, "b")
    assert call("reduce", run) == 0
    assert [one.host for one in load(run / "reduced").hosts] == ["b"]
    task(monkeypatch, "c", tasks=1)  # a step of its own, on whatever node
    assert reduce_all(run).ranks == (0, 1, 2, 3)
