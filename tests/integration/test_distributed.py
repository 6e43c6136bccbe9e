"""Jobs of several processes and nodes: one run folder, a host folder per launcher, every rank by its name, one report.

Nodes are this machine under the names that SLURM would give. "Many" launchers, of which each machine reduces its own,
are more than two here, and more than sixteen in the test that is marked thorough.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import stepscope
from stepscope.analyze.ranks import judge
from stepscope.tables.reduced import LABELS, load
from tests.integration.conftest import SHORT_WINDOW
from tests.integration.harness import (
    PYTHON,
    REPOSITORY,
    SCRIPTS,
    TIMEOUT_S,
    Recorded,
    command,
    end_session,
    environment,
    line_of,
    record,
    run_to_end,
    step_rows,
)

pytestmark = [pytest.mark.process]

SRUN = [PYTHON, str(SCRIPTS / "srun.py")]
SLOW_LINE = SCRIPTS / "slow_line.py"
SLOW, RANKS = 2, 3
STEPS = 140  # some ten seconds: a whole segment of stacks lies in them, whenever the first one begins
RUN = [PYTHON, "-m", "stepscope", "run"]


def manifests(run: Path) -> dict[str, dict[str, Any]]:
    """The manifest of each host folder."""
    return {path.parent.name: json.loads(path.read_text()) for path in run.glob("host-*/manifest.json")}


def only_run(cwd: Path) -> Path:
    """The one run folder there is."""
    (run,) = (cwd / "stepscope-runs").iterdir()
    return run


def test_statuses_and_signals_pass_through_every_recorder(tmp_path: Path) -> None:
    """All start in the same moment, without a name for the folder."""
    program = "import os, sys; sys.exit(3 if os.environ['SLURM_PROCID'] == '1' else 0)"
    (tmp_path / "train.py").write_text(program)
    line = [*SRUN, "--nodes", "3", *RUN, "--no-window", "--", PYTHON, "train.py"]
    done = run_to_end(line, tmp_path, environment())
    assert done.returncode == 3
    run = only_run(tmp_path)
    assert run.name == "slurm-17.0-train"
    found = manifests(run)
    ends = {name: each["exit"]["shell_status"] for name, each in found.items()}
    assert ends == {"host-node1": 0, "host-node2": 3, "host-node3": 0}
    assert [found[name]["scheduler"]["index"] for name in sorted(found)] == [0, 1, 2]


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


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    folder = tmp_path_factory.mktemp("three") / "run"
    done = record(folder, [*torchrun, str(SLOW_LINE), "--slow", str(SLOW), "--steps", str(STEPS)], options=SHORT_WINDOW)
    assert done.status == 0, done.text
    return done


@pytest.fixture(scope="module")
def run(recorded: Recorded) -> Path:
    reduced = command("reduce", str(recorded.folder))
    assert reduced.returncode == 0, reduced.stderr
    return recorded.folder


@pytest.mark.torch
def test_torchrun_records_every_rank(recorded: Recorded) -> None:
    ranks = list(range(RANKS))
    assert sorted(path.name for path in recorded.folder.glob("rank-*")) == [f"rank-{rank}" for rank in ranks]
    for rank in ranks:
        assert len(step_rows(recorded.folder / f"rank-{rank}")) in {STEPS - 1, STEPS}
    run = recorded.report["run"]
    assert (run["ranks"], run["world_size"]) == (ranks, RANKS)
    assert recorded.report["steps"]["ranks"] == ranks
    assert {rank.rank for rank in stepscope.open_run(recorded.folder).tables.ranks} == set(ranks)


@pytest.mark.torch
def test_hotspots_of_the_slow_rank_alone_hold_its_line(recorded: Recorded) -> None:
    """140 steps of 0.06 s each are some 160 samples at that line; the others never stand there."""
    busy = line_of(SLOW_LINE, "features = features.sin().cos()")
    samples = {}
    for rank in (0, SLOW):
        done = command("hotspots", str(recorded.folder), "--rank", str(rank), "--rows", "all", "--json", "-")
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)["rows"]
        samples[rank] = sum(row["samples"] for row in rows if row["library_function_line"] == busy)
    assert samples[SLOW] >= 15, samples
    assert samples[0] == 0, samples


@pytest.mark.torch
def test_the_reduced_tables_alone_name_rank_and_line(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "reduced", tmp_path / "copy" / "reduced")
    found = judge(load(tmp_path / "copy" / "reduced")).stragglers[0]
    assert (found.kind, found.ranks) == ("rank", (SLOW,))
    assert found.place is not None, found.cause_source
    assert (Path(found.place.file).name, found.place.function) == (SLOW_LINE.name, "augment")
    busy = line_of(SLOW_LINE, "features = features.sin().cos()")
    assert found.place.line in (busy - 1, busy)
    shown = command("analyze", str(tmp_path / "copy"))
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert f"rank {SLOW} keeps the others waiting" in text
    assert f"{SLOW_LINE.name}:{found.place.line}" in text


@pytest.mark.torch
def test_where_both_are_there_the_run_is_read_in_full_and_says_the_same(run: Path) -> None:
    shown = command("analyze", str(run))
    assert shown.returncode == 0, shown.stderr
    assert f"Rank {SLOW} works" in " ".join(shown.stdout.split())
    windows = load(run / "reduced").scan("steps").filter(label=LABELS.index("window")).collect().to_dicts()
    assert {row["rank"] for row in windows} <= {0, 1, 2}
    assert any(row["collective_us"] for row in windows)


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
