"""Jobs of several processes and nodes: one run folder, a host folder per launcher, every rank under its name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import stepscope
from stepscope.analyze.ranks import judge
from stepscope.tables.reduced import LABELS, load
from tests.integration.harness import (
    PYTHON,
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
    assert done.stderr.decode(errors="replace").count("report.html") == 1, done.stderr.decode(errors="replace")


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
    done = record(tmp_path_factory.mktemp("three") / "run", [*torchrun, str(SLOW_LINE), "--slow", str(SLOW)])
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
        assert len(step_rows(recorded.folder / f"rank-{rank}")) in {119, 120}
    run = recorded.report["run"]
    assert (run["ranks"], run["world_size"]) == (ranks, RANKS)
    assert recorded.report["steps"]["ranks"] == ranks
    assert {rank.rank for rank in stepscope.open_run(recorded.folder).tables.ranks} == set(ranks)


@pytest.mark.torch
def test_hotspots_of_the_slow_rank_alone_hold_its_line(recorded: Recorded) -> None:
    """120 steps of 0.06 s each are some 140 samples at that line; the others never stand there."""
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
    assert found.place is not None
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
