"""Attaching to jobs that run already: real training with workers, jobs that end, and everything that can be refused."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import EnvironmentRefusal, StepscopeError, UnreadableInputError
from stepscope.record.host import attach as attaching
from stepscope.record.host.attach import Attached, AttachOptions, attach, find_ranks, look_at_tree, refusal
from stepscope.record.host.processes import Process, ProcessTree
from stepscope.record.host.pyspy import Rights, find_pyspy, rights
from tests.record.host.launching import host_dir, is_alive, manifest, rows

pytestmark = pytest.mark.process
needs_pyspy = pytest.mark.skipif(
    find_pyspy() is None or os.geteuid() != 0, reason="needs py-spy and the right to attach"
)
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")

BUSY = """
import sys, time
def hot_line(end):
    while time.time() < end:
        sum(range(2000))
print(flush=True)
hot_line(time.time() + float(sys.argv[1]))
"""
TRAINING = """
import sys, time, torch
from plain_sgd import PlainSGD
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self):
        return 10**9
    def __getitem__(self, index):
        end = time.perf_counter() + 0.002
        while time.perf_counter() < end:
            pass
        return torch.zeros(8)
def train():
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 8)
    optimizer = PlainSGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(DataLoader(Rows(), batch_size=8, num_workers=1)):
        model(batch).sum().backward()
        optimizer.step()
        if number == 3:
            print(flush=True)
if __name__ == "__main__":
    train()
"""


@contextmanager
def running(
    folder: Path, text: str, *arguments: str, environ: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A job that has said that it is under way; gone at the end, whatever happened."""
    (folder / "job.py").write_text(text)
    job = subprocess.Popen(
        [sys.executable, "job.py", *arguments],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **(environ or {})},
    )  # fmt: skip
    try:
        assert job.stdout is not None
        job.stdout.readline()
        yield job
    finally:
        job.terminate()
        job.communicate()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Attached, int, bool]:
    """A training with a loader worker, sampled for some seconds: folder, result, its pid, whether it went on."""
    folder = tmp_path_factory.mktemp("attach")
    with running(folder, TRAINING, "--api-key", "hunter2", environ={"RANK": "3", "WORLD_SIZE": "8"}) as job:
        found = attach(AttachOptions(pid=job.pid, seconds=3.0, rate_hz=50.0, out=folder / "run"))
        return folder, found, job.pid, is_alive(job.pid)


@needs_pyspy
@needs_torch
def test_training_and_worker_are_sampled_and_go_on(trained: tuple[Path, Attached, int, bool]) -> None:
    folder, found, pid, alive = trained
    assert alive
    assert (found.ended, found.problem) == ("time", None)
    assert found.run == folder / "run"
    last = {row["pid"]: row for row in rows(host_dir(found.run) / "processes.jsonl") if "role" in row}
    assert last[pid]["role"] == "rank"
    (worker,) = [row["pid"] for row in last.values() if row["role"] == "loader_worker"]
    segments = rows(host_dir(found.run) / "stacks.jsonl")
    text = "".join((host_dir(found.run) / row["file"]).read_text() for row in segments)
    assert f"thread ({pid}): MainThread;<module> ({folder}/job.py:" in text
    assert any(f"thread ({worker})" in line and "Rows.__getitem__" in line for line in text.splitlines())
    assert all((host_dir(found.run) / row["times"]).is_file() for row in segments)
    assert not list(host_dir(found.run).glob("*.part"))


@needs_pyspy
@needs_torch
def test_manifest_and_rank_say_what_can_be_seen_from_outside(trained: tuple[Path, Attached, int, bool]) -> None:
    folder, found, pid, _ = trained
    facts = manifest(found.run)
    assert (facts["kind"], facts["pid"], facts["cwd"], facts["user_roots"]) == (
        "attach",
        pid,
        str(folder),
        [str(folder)],
    )
    assert facts["attach"] == {"seconds": 3.0, "native": False, "ended": "time"}
    assert facts["command"][1:] == ["job.py", "--api-key", "***"]
    assert facts["script"] == {"kind": "script", "path": str(folder / "job.py")}
    assert facts["started_ns"] < facts["ended_ns"]
    assert facts["exit"]["status"] is None
    rank = json.loads((found.run / "rank-3" / "rank.json").read_text())
    assert (rank["rank"], rank["world_size"], rank["pid"]) == (3, 8, pid)
    assert "hunter2" not in "".join(path.read_text() for path in found.run.rglob("*") if path.is_file())


@needs_pyspy
def test_a_job_that_ends_is_no_error(tmp_path: Path) -> None:
    with running(tmp_path, BUSY, "2.5") as job:
        waiting = threading.Thread(target=job.wait)
        waiting.start()  # or it would stay as a zombie
        began = time.monotonic()
        found = attach(AttachOptions(pid=job.pid, seconds=60.0, out=tmp_path / "run"))
        waiting.join()
    assert found.ended == "job"
    assert time.monotonic() - began < 50
    assert any(row["samples"] > 0 for row in rows(host_dir(found.run) / "stacks.jsonl"))


@needs_pyspy
def test_an_interrupt_ends_the_sampling_and_keeps_it(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with running(tmp_path, BUSY, "60") as job:
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        found = attach(AttachOptions(pid=job.pid, seconds=60.0, out=tmp_path / "run"))
        assert is_alive(job.pid)
    assert found.ended == "interrupt"
    assert sum(row["samples"] for row in rows(host_dir(found.run) / "stacks.jsonl")) > 0
    assert signal.getsignal(signal.SIGINT) is before


def refused(error: type[StepscopeError], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match) as caught:
        attach(AttachOptions(**options))
    assert "\n" not in str(caught.value)


def test_a_process_that_is_not_there(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    refused(UnreadableInputError, f"no process {child.pid}.*pgrep", pid=child.pid, out=tmp_path / "run")
    refused(UnreadableInputError, "no process", pid=os.getpid(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_process_without_python(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        refused(UnreadableInputError, r"\(sleep\) is no Python process.*pgrep", pid=child.pid, out=tmp_path / "run")
    finally:
        child.kill()
        child.wait()
    assert not (tmp_path / "run").exists()


def fake_spy(folder: Path, message: str) -> str:
    program = folder / "py-spy"
    program.write_text(f'#!/bin/sh\necho "{message}" >&2\nexit 1\n')
    program.chmod(0o755)
    return str(program)


def test_py_spy_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_PYSPY", str(tmp_path / "nothing"))
    refused(EnvironmentRefusal, "pip install py-spy", pid=os.getppid(), out=tmp_path / "run")


def test_a_refusal_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_PYSPY", fake_spy(tmp_path, "Error: Permission Denied: Try running again with sudo"))
    with running(tmp_path, BUSY, "60") as job:
        refused(EnvironmentRefusal, f"process {job.pid} cannot be sampled", pid=job.pid, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


DENIED = "Error: Permission Denied: Try running again with sudo"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Rights(owner=0, user=1000, capability=False, yama=None), ["belongs to user root", "sudo"]),
        (Rights(owner=123456, user=1000, capability=False, yama=1), ["belongs to user 123456", "sudo"]),
        (
            Rights(owner=1000, user=1000, capability=False, yama=1),
            ["ptrace_scope is 1", "ptrace_scope=0", "stepscope run"],
        ),
        (Rights(owner=1000, user=1000, capability=False, yama=2), ["ptrace_scope is 2", "sudo", "stepscope run"]),
        (Rights(owner=0, user=0, capability=True, yama=3), ["ptrace_scope is 3", "stepscope run"]),
        (Rights(owner=0, user=0, capability=False, yama=None), ["--cap-add SYS_PTRACE", "Permission Denied"]),
        (Rights(owner=1000, user=1000, capability=None, yama=0), ["--cap-add SYS_PTRACE", "sudo"]),
    ],
)
def test_what_is_missing_is_said_with_what_to_do(asked: Rights, words: list[str]) -> None:
    error = refusal(os.getpid(), DENIED, asked)
    assert isinstance(error, EnvironmentRefusal)
    assert [word for word in words if word not in str(error)] == []


@pytest.mark.parametrize(
    ("program", "words"), [("python3.13t", "free-threaded"), ("pypy3.10", "PyPy"), ("python3.15", "upgrade py-spy")]
)
def test_interpreters_without_a_sampler_are_named(program: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attaching, "read_executable", lambda _: f"/opt/bin/{program}")
    said = "Error: Failed to find python version from target process"
    assert words in str(refusal(os.getpid(), said, rights(os.getpid())))


def test_ranks_below_a_launcher_are_told_by_their_environment(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text(
        "import os, subprocess, sys, time\n"
        "sleeper = [sys.executable, '-c', 'import time; print(flush=True); time.sleep(60)']\n"
        "for rank in (1, 0):\n"
        "    child = subprocess.Popen(sleeper, env={**os.environ, 'RANK': str(rank)}, stdout=subprocess.PIPE)\n"
        "    child.stdout.readline()\n"
        "    print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    launcher = subprocess.Popen([sys.executable, str(tmp_path / "torchrun")], stdout=subprocess.PIPE)
    children: list[int] = []
    try:
        assert launcher.stdout is not None
        children += [int(launcher.stdout.readline()), int(launcher.stdout.readline())]
        tree = look_at_tree(launcher.pid)
        assert tree.members[launcher.pid].role == "launcher"
        assert find_ranks(tree) == {}  # none of them has torch
        for pid in children:
            tree.members[pid].torch = True
        assert find_ranks(tree) == {0: children[1], 1: children[0]}
    finally:
        launcher.kill()
        launcher.communicate()
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def tree_of(*members: Process) -> ProcessTree:
    tree = ProcessTree(members[0].pid)
    tree.members = {member.pid: member for member in members}
    return tree


def process(pid: int, ppid: int, *argv: str, role: str = "other") -> Process:
    return Process(pid, ppid, pid, 0, argv=argv, python=True, torch=True, role=role)


BEYOND = 2**22  # no process has a number above this, so none has an environment


def test_children_that_may_be_ranks_are_not_taken_for_workers() -> None:
    spawned = [process(BEYOND + number, BEYOND, "python", "-c", "spawn_main()") for number in (1, 2)]
    assert find_ranks(tree_of(process(BEYOND, 1, "python", "t.py", role="root"), *spawned)) == {}
