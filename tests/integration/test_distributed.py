"""Jobs of several processes and nodes: one run folder, a host folder per launcher, every rank under its name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import stepscope
from tests.integration.conftest import free_port
from tests.integration.harness import (
    PYTHON,
    SCRIPTS,
    TIMEOUT_S,
    command,
    end_session,
    environment,
    line_of,
    run_to_end,
    step_rows,
)

pytestmark = [pytest.mark.process]

SRUN = [PYTHON, str(SCRIPTS / "srun.py")]
STRAGGLER = SCRIPTS / "straggler.py"
RUN = [PYTHON, "-m", "stepscope", "run"]


def job(cwd: Path, line: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    """Run a whole job to its end."""
    network = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    return run_to_end(line, cwd, environment(network))


def manifests(run: Path) -> dict[str, dict[str, Any]]:
    """The manifest of each host folder."""
    return {path.parent.name: json.loads(path.read_text()) for path in run.glob("host-*/manifest.json")}


def only_run(cwd: Path) -> Path:
    """The one run folder there is."""
    (run,) = (cwd / "stepscope-runs").iterdir()
    return run


def assert_two_ranks(run: Path, steps: int) -> None:
    assert sorted(path.name for path in run.glob("rank-*")) == ["rank-0", "rank-1"]
    opened = stepscope.open_run(run)
    report = json.loads((run / "report.json").read_text())
    assert report["run"]["ranks"] == [0, 1]
    assert report["run"]["world_size"] == 2
    rows = opened.tables.steps
    for rank in (0, 1):
        assert len(step_rows(run / f"rank-{rank}")) >= steps - 2
        assert rows.filter(rows["rank"] == rank).height >= steps - 2
    assert {rank.rank for rank in opened.tables.ranks} == {0, 1}


@pytest.mark.torch
def test_two_nodes_of_a_step_record_into_one_folder(tmp_path: Path) -> None:
    """Both start in the same moment, without a name for the folder; the last rank is the slow one."""
    train = [PYTHON, str(STRAGGLER), "--steps", "30", "--busy", "0.1"]
    done = job(tmp_path, [*SRUN, "--nodes", "2", *RUN, "--no-window", "--", *train])
    assert done.returncode == 0, done.stderr.decode()
    run = only_run(tmp_path)
    assert run.name == "slurm-17.0-straggler"
    found = manifests(run)
    assert sorted(found) == ["host-node1", "host-node2"]
    assert [found[name]["scheduler"]["index"] for name in sorted(found)] == [0, 1]
    assert {rank.host: rank.rank for rank in stepscope.open_run(run).tables.ranks} == {"node1": 0, "node2": 1}
    assert_two_ranks(run, 30)
    assert_one_report(done.stderr)
    stacks = stepscope.open_run(run).tables.stacks
    assert {"rank-0", "rank-1"} <= set(stacks["process"])
    assert_hotspots_of_the_slow_rank(run)


def assert_one_report(stderr: bytes) -> None:
    assert stderr.decode(errors="replace").count("report.html") == 1, stderr.decode(errors="replace")


def assert_hotspots_of_the_slow_rank(run: Path) -> None:
    """Its 30 steps of a tenth of a second each are some 60 samples at that line; the other rank never stands there."""
    busy = line_of(STRAGGLER, "features = features.sin().cos()")
    samples = {}
    for rank in (0, 1):
        done = command("hotspots", str(run), "--rank", str(rank), "--rows", "all", "--json", "-")
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)["rows"]
        samples[rank] = sum(row["samples"] for row in rows if row["library_function_line"] == busy)
    assert samples[1] >= 15, samples
    assert samples[0] == 0, samples


def test_statuses_and_signals_pass_through_every_recorder(tmp_path: Path) -> None:
    program = "import os, sys; sys.exit(3 if os.environ['SLURM_PROCID'] == '1' else 0)"
    done = job(tmp_path, [*SRUN, "--nodes", "3", *RUN, "--no-window", "--", PYTHON, "-c", program])
    assert done.returncode == 3
    ends = {name: found["exit"]["shell_status"] for name, found in manifests(only_run(tmp_path)).items()}
    assert ends == {"host-node1": 0, "host-node2": 3, "host-node3": 0}


def test_a_cancelled_step_ends_as_it_would_without_us(tmp_path: Path) -> None:
    program = (
        f"import pathlib, os, time; pathlib.Path('{tmp_path}', os.environ['SLURM_PROCID']).touch(); time.sleep(99)"
    )
    line = [*SRUN, "--tasks-per-node", "2", *RUN, "--no-window", "--", PYTHON, "-c", program]
    process = subprocess.Popen(line, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, start_new_session=True)
    try:
        wait_for(tmp_path / "0", tmp_path / "1")
        os.kill(process.pid, signal.SIGTERM)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    finally:
        end_session(process)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in stderr
    found = manifests(only_run(tmp_path))
    assert [one["exit"]["signal"] for one in found.values()] == [signal.SIGTERM] * 2


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not appear"
        time.sleep(0.1)
