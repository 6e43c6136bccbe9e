"""Jobs of more launchers than one of them can read the recordings of: each machine reduces its own, the last reports.

The launchers are real processes on this machine, with the names of nodes that SLURM would give; what they record is
made of plain values, by the command that they start. "Many" is more than two here, and more than sixteen in the test
that is marked thorough.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stepscope
from tests.integration.harness import PYTHON, SCRIPTS, environment, run_to_end

pytestmark = [pytest.mark.process]

REPOSITORY = Path(__file__).resolve().parents[2]
SRUN = [PYTHON, str(SCRIPTS / "srun.py")]
LAUNCHER = """
import sys
from stepscope import cli
from stepscope.record.host import folder as members
members.LARGEST_READ_JOB = int(sys.argv[1])
cli.main(["run", *sys.argv[2:]])
"""
# a rank of each node, as a training leaves it: the third waits longer for its data. All begin together, so that
# whoever ends sees who is still there.
TRAINS = f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(REPOSITORY)!r})
from tests.builders import step_rows
from tests.run_folders import make_run_folder
run, rank, nodes, killed = Path(sys.argv[1]), int(os.environ["SLURM_PROCID"]), int(sys.argv[2]), int(sys.argv[3])
late = 6 if rank == 2 else 0
steps = step_rows(60, data_wait_ms=1 + late, backward_ms=10 - late)
make_run_folder(run.parent, name=run.name, host=f"node{{rank + 1}}", rank=rank, pid=os.getpid(), steps=steps,
    rank_json={{"world_size": nodes}})
while len(list(run.glob("rank-*/steps.jsonl"))) < nodes:
    time.sleep(0.05)
if rank == killed:
    os.kill(os.getppid(), signal.SIGKILL)
"""


def job(folder: Path, nodes: int, *, most: int, killed: int = -1) -> subprocess.CompletedProcess[bytes]:
    run = folder / "run"
    train = [sys.executable, "-c", TRAINS, str(run), str(nodes), str(killed)]
    launch = [sys.executable, "-c", LAUNCHER, str(most), "--out", str(run), "--no-window"]
    return run_to_end([*SRUN, "--nodes", str(nodes), *launch, "--", *train], folder, environment())


def reduced(run: Path) -> list[str]:
    return sorted(path.parent.name for path in run.glob("reduced/host-*/reduced.json"))


def test_each_machine_reduces_its_own_and_the_last_reports(tmp_path: Path) -> None:
    done = job(tmp_path, 3, most=2)
    said = done.stderr.decode()
    assert done.returncode == 0, said
    run = tmp_path / "run"
    assert reduced(run) == [f"host-node{number}" for number in range(1, 4)]
    assert said.count("report.html") == 1, said
    assert "not reduced" not in said
    report = json.loads((run / "report.json").read_text())
    assert report["run"]["world_size"] == 3
    (topology,) = {tuple(report["run"]["job"]["topology"].items())}
    assert dict(topology)["node3"] == "node3"
    assert report["run"]["job"]["nodes"] == ["node1", "node2", "node3"]


def test_one_that_is_killed_leaves_the_others_right(tmp_path: Path) -> None:
    done = job(tmp_path, 3, most=2, killed=2)
    said = done.stderr.decode()
    run = tmp_path / "run"
    assert reduced(run) == ["host-node1", "host-node2"]
    assert not (run / "report.json").exists(), "nobody can know that it was the last"
    assert "stepscope analyze" in said
    found = stepscope.open_run(run).report()
    assert found.run["ranks"] == [0, 1, 2]
    assert any("node3 never ended" in note["text"] for note in found.quality["notes"])


@pytest.mark.thorough
def test_a_job_of_eighteen_launchers(tmp_path: Path) -> None:
    done = job(tmp_path, 18, most=16)
    said = done.stderr.decode()
    assert done.returncode == 0, said
    assert len(reduced(tmp_path / "run")) == 18
    assert said.count("report.html") == 1, said
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    verdict = report["views"]["many_ranks"]
    assert (verdict["ranks"], verdict["missing"]) == (18, [])
    assert verdict["stragglers"][0]["ranks"] == [2]
    assert report["views"]["ranks_read"]["not_reduced"] == 0
    assert os.listdir(tmp_path) == ["run"]
