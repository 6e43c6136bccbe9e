"""Commands that an agent starts: where, how long, how many, and that nothing of them is left; and its whole way over
standard input and output, from the list of runs to the verdict on the fix."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import sys
import time
from pathlib import Path

import psutil
import pytest
from mcp import StdioServerParameters

from stepscope.agents.jobs import Limits
from tests.agents.asking import Asked, ask, runs_of
from tests.builders import MS, PID, T0, step_rows
from tests.integration.harness import PYTHON, environment
from tests.run_folders import make_run_folder

pytestmark = pytest.mark.process
# ignores what asks it to end, and has a child in a session of its own that does so too
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
    print("ready", flush=True)
time.sleep(300)
"""
GONE_S = 20.0


def left(script: Path) -> list[int]:
    """Processes that run the script."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(script) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def wait_until_gone(script: Path) -> None:
    deadline = time.monotonic() + GONE_S
    while left(script) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left(script) == []


@pytest.fixture
def stubborn(tmp_path: Path) -> Path:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    return script


async def started(asked: Asked, script: Path) -> str:
    job: str = (await asked.tool("start_run", argv=[sys.executable, str(script)]))["job"]
    while "ready" not in (await asked.tool("job", job=job))["output"]:
        time.sleep(0.1)
    assert len(left(script)) >= 2
    return job


def test_what_may_be_started_is_limited(tmp_path: Path, stubborn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.agents.jobs.Job.stop.__defaults__", (0.5,))  # its grace
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "out").symlink_to(tmp_path)
    runs = runs_of(tmp_path / "project", limits=Limits(60, 1))

    async def questions(asked: Asked) -> None:
        offered = {tool.name: tool for tool in (await asked.client.list_tools()).tools}
        assert offered["start_run"].annotations is not None
        assert not offered["start_run"].annotations.read_only_hint
        for cwd in ("..", "/", "out", "nowhere", "a\0b"):
            assert "cwd" in await asked.error("start_run", argv=["true"], cwd=cwd) or "\0" in cwd
        assert "argv" in await asked.error("start_run", argv=[])
        assert "max_seconds" in await asked.error("start_run", argv=["true"], max_seconds=61)
        assert "no such job" in await asked.error("job", job="x")
        job = await started(asked, stubborn)
        assert job in await asked.error("start_run", argv=["true"])
        cancelled = await asked.tool("cancel_job", job=job)
        assert cancelled["state"] == "cancelled"
        wait_until_gone(stubborn)
        # and another may be started: an option is none of ours, and no shell reads it
        job = (await asked.tool("start_run", argv=["--out=/", "; true"]))["job"]
        assert (await asked.tool("job", job=job, wait_seconds=60))["state"] == "failed"

    ask(runs, questions)


def test_it_ends_in_time_and_then_nothing_of_it_is_left(
    tmp_path: Path, stubborn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.agents.jobs.Job.stop.__defaults__", (0.5,))  # its grace

    async def questions(asked: Asked) -> None:
        job = await asked.tool("start_run", argv=[sys.executable, str(stubborn)], max_seconds=2)
        ended = await asked.tool("job", job=job["job"], wait_seconds=60)
        assert ended["state"] == "timed out"
        assert ended["seconds"] >= 2
        wait_until_gone(stubborn)

    ask(runs_of(tmp_path, limits=Limits(60, 1)), questions)


def test_jobs_end_with_the_server(tmp_path: Path, stubborn: Path) -> None:
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "stepscope", "mcp", str(tmp_path), "--allow-run"],
        env={**environment(), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
    )

    async def questions(asked: Asked) -> None:
        await started(asked, stubborn)

    ask(server, questions)
    wait_until_gone(stubborn)


TRAIN = """import stub_torch
DataLoader = dict(batch_size=8)
for _ in stub_torch.steps(4_000, 0.02):
    pass
"""


def recorded(script: Path) -> Path:
    """A run of the script whose loader keeps every step waiting."""
    place = {"what": "DataLoader", "file": str(script), "line": 2}
    return make_run_folder(
        script.parent / "stepscope-runs",
        name="slow",
        steps=step_rows(40, data_wait_ms=60, forward_ms=20),
        stacks_raw=f'process {PID}:"python";thread ({PID}): MainThread;<module> ({script}:4) 40\n',
        events=[
            {"kind": "site", "id": 1, **place, "arguments": {"batch_size": "8"}},
            {"kind": "loader", "id": 1, "epoch": 0, "num_workers": 0, "batch_size": 8, "time_ns": T0 - MS},
            {"kind": "sources", "hashes": {str(script): hashlib.sha256(script.read_bytes()).hexdigest()}},
        ],
        manifest={
            "command": [PYTHON, "train.py"],
            "cwd": str(script.parent),
            "user_roots": [str(script.parent)],
            "hardware": {"logical_cores": 8, "affinity": list(range(8))},
        },
    )


@pytest.mark.timeout(600)  # the command runs five times
def test_list_findings_source_prove_verdict(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    recorded(tmp_path / "train.py")
    server = StdioServerParameters(
        command=PYTHON,
        args=["-m", "stepscope", "mcp", "--allow-run"],
        env={**environment(), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
    )

    async def questions(asked: Asked) -> None:
        (run,) = (await asked.tool("list_runs"))["runs"]
        finding = (await asked.tool("findings", run=run["name"]))["findings"][0]
        assert finding["rule"] == "input.loader_bound"
        detail = (await asked.tool("findings", run=run["name"], finding=finding["id"], detail=True))["findings"][0]
        source = await asked.tool("source", run=run["name"], finding=finding["id"])
        line = source["lines"][source["line"] - source["first_line"]]
        assert line.strip() == finding["code"]
        assert finding["at"].endswith(f"train.py:{source['line']}")
        lines = (await asked.tool("hot_lines", run=run["name"], file="train.py"))["lines"]
        assert [(row["line"], row["samples"]) for row in lines] == [(4, 40)]
        words = shlex.split(finding["prove"])
        assert words[:2] == ["stepscope", "experiment"]
        tries = [words[at + 1] for at, word in enumerate(words) if word == "--try"]
        assert (tries, "--together" in words) == (detail["try"], len(tries) > 1)
        argv = words[words.index("--") + 1 :]
        # a loader of a stub has no workers: what is proved here is the way to a verdict
        job = await asked.tool("start_experiment", argv=argv, tries=["env:X=1"], pairs="2:2", steps=10)
        while job["state"] == "running":
            job = await asked.tool("job", job=job["job"], wait_seconds=20)
        assert job["state"] == "finished", job
        verdict = await asked.tool("verdict", experiment=job["made"])
        (candidate,) = verdict["candidates"]
        assert verdict["finished"]
        assert candidate["verdict"] in ("faster", "slower", "no_difference", "undecided")
        assert candidate["applied"][0]["applied"]
        assert candidate["change"]
        assert asked.largest <= 4_000

    ask(server, questions)
