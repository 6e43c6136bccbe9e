"""The same tables from every engine, also where a worker, or all of the reduction, is killed in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope import reduce_run
from tests.cli.calls import call
from tests.reduction.jobs import contents, make_job, trace

pytest.importorskip("distributed", reason="needs stepscope[cluster]")

TRACES = 5  # of each of four ranks
PATIENCE_S = 60


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    return make_job(folder, traces={f"trace-{number}.pt.trace.json.gz": trace(0) for number in range(TRACES)})


@pytest.fixture(scope="module")
def expected(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the process itself makes of the run."""
    out = tmp_path_factory.mktemp("inline")
    assert call("reduce", run, "--out", out, "--engine", "inline") == 0
    return contents(out / "reduced")


@contextmanager
def once_begun(out: Path, do: Callable[[], None]) -> Iterator[list[int]]:
    """Call `do` when the first trace has been reduced and the last has not; appends how many there were then."""
    met: list[int] = []

    def look() -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            done = sum(1 for _ in (out / "reduced").glob(".traces-*/?-*"))
            if done:
                do()
                met.append(done)
                return
            time.sleep(0.002)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield met
    finally:
        watcher.join()


@pytest.mark.parametrize("engine", ["pool", "dask"])
def test_a_killed_process_costs_what_it_was_at(
    engine: str, run: Path, expected: dict[str, bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def kill() -> None:
        workers = [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
        workers[0].kill()

    with once_begun(tmp_path, kill) as met:
        assert call("reduce", run, "--out", tmp_path, "--engine", engine, "--jobs", "2") == 0
    assert 0 < met[0] < 4 * TRACES
    assert ("done again after a worker was lost" in capfd.readouterr().err) is (engine == "pool")  # dask does it itself
    assert contents(tmp_path / "reduced") == expected


class Broken(Executor):
    """Takes no task."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        raise BrokenExecutor


def test_what_an_engine_does_not_take_is_done_here(tmp_path: Path) -> None:
    run = make_job(tmp_path, {"a": (0,)})
    (made,) = reduce_run(run, executor=Broken())
    assert (made.ranks, made.problem, made.left_out) == (1, None, ())
    assert made.lost > 0
    (again,) = reduce_run(run, out=tmp_path / "inline")
    assert contents(again.folder) == contents(made.folder)


def test_jobs_of_slurm_make_the_same_bytes(
    run: Path, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for `sbatch` starts each job on this machine at once, and `scancel` ends it."""
    pytest.importorskip("dask_jobqueue", reason="needs stepscope[cluster]")
    programs = {
        # the script is gone once `sbatch` has ended
        "sbatch": f'cp "$1" {tmp_path}/job\nsh {tmp_path}/job >/dev/null 2>&1 &\n'
        f'echo $! >>{tmp_path}/jobs\necho "Submitted batch job $!"',
        "scancel": "exit 0",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    try:
        words = ("--engine", "dask", "--scheduler", "slurm", "--jobs", "1")
        assert call("reduce", run, "--out", tmp_path / "out", *words) == 0
        jobs = [int(line) for line in (tmp_path / "jobs").read_text().split()]
        assert len(jobs) == 1
        assert contents(tmp_path / "out" / "reduced") == expected
    finally:
        for job in (int(line) for line in (tmp_path / "jobs").read_text().split()):
            for process in processes_below(job):
                process.kill()


def processes_below(pid: int) -> list[psutil.Process]:
    try:
        return [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []


def test_a_scheduler_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_job(tmp_path, {"a": (0,)})
    assert call("reduce", run, "--engine", "dask", "--scheduler", "nowhere") == 4
    assert "--scheduler nowhere" in capfd.readouterr().err.splitlines()[-1]


def reduction(run: Path, out: Path) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-m", "stepscope", "reduce", str(run), "--out", str(out), "--engine", "inline", "--force"]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_reduction_that_is_killed_leaves_nothing_half(run: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    process = reduction(run, tmp_path)
    with once_begun(tmp_path, process.kill) as met:
        assert process.wait() < 0
    assert 0 < met[0] < 4 * TRACES
    left = list((tmp_path / "reduced").iterdir())
    assert [path.name.startswith(".traces-") for path in left] == [True]
    assert call("analyze", tmp_path) == 3  # nothing of a run is there
    os.utime(left[0], (0, 0))  # of long ago: the next one clears it away
    assert call("reduce", run, "--out", tmp_path) == 0
    assert contents(tmp_path / "reduced") == expected


def test_several_at_once_do_not_disturb_each_other(run: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    together = [reduction(run, tmp_path) for _ in range(2)]
    assert [process.wait() for process in together] == [0, 0]
    assert contents(tmp_path / "reduced") == expected
