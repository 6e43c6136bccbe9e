"""The manifest of a real run: what is in it, and what must not be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.record.host.manifest import git_root, git_state
from tests.record.host.launching import manifest, record

pytestmark = pytest.mark.process


def test_manifest_names_the_run_and_hides_secrets(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("import sys\nprint(len(sys.argv))\n")
    git = ["git", "-C", str(work), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q", "-b", "trunk"], check=True)
    subprocess.run([*git, "add", "train.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "2", "MY_API_TOKEN": "s3cret", "SLURM_JOB_ID": ""}
    arguments = ["--wandb-key", "s3cret", "--lr=0.1", "password=s3cret"]
    done = record(tmp_path / "run", sys.executable, "train.py", *arguments, cwd=work, env=environ)
    assert (done.returncode, done.stdout) == (0, b"5\n")  # the command itself got them
    value = manifest(tmp_path / "run")
    assert "s3cret" not in str(value)
    assert value["schema"] == "stepscope.run/1"
    assert value["command"][:3] == [sys.executable, "train.py", "--wandb-key"]
    assert value["script"] == {"kind": "script", "path": str(work / "train.py")}
    assert value["user_roots"] == [str(work)]
    assert value["environment"]["OMP_NUM_THREADS"] == "2"
    assert "MY_API_TOKEN" not in value["environment"]
    assert (value["git"]["root"], value["git"]["branch"], value["git"]["dirty"]) == (str(work), "trunk", False)
    assert len(value["git"]["commit"]) == 40
    assert value["scheduler"] is None
    assert value["started_ns"] < value["ended_ns"]
    assert value["hardware"]["affinity"] == sorted(os.sched_getaffinity(0))
    assert value["sampler"]["source"] in ("py-spy", "agent")
    assert value["page_faults"]["cost"] is None  # measured beside training alone


def test_what_a_fault_costs_is_measured_where_something_trained(tmp_path: Path) -> None:
    rank = "import json, os, pathlib; run = pathlib.Path(json.loads(os.environ['STEPSCOPE_RECORD'])['run']);" + (
        "host = pathlib.Path(json.loads(os.environ['STEPSCOPE_RECORD'])['host_dir']); (run / 'rank-0').mkdir();"
        "(run / 'rank-0' / 'rank.json').write_text(json.dumps({'threads': 1}));"
        "(host / 'agents.jsonl').write_text(json.dumps({'folder': 'rank-0'}) + '\\n')"
    )
    assert record(tmp_path / "trained", sys.executable, "-c", rank, cwd=tmp_path).returncode == 0
    assert manifest(tmp_path / "trained")["page_faults"]["cost"]["threads"] == 1


def test_git_leaves_the_repository_untouched_and_unknowns_are_null(tmp_path: Path) -> None:
    assert git_state(git_root(tmp_path)) is None or git_root(tmp_path) != tmp_path
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    state = git_state(git_root(tmp_path / "deeper" / "still"))
    assert state is not None
    assert (state["root"], state["commit"], state["branch"]) == (str(tmp_path), None, None)
    assert not (tmp_path / ".git/index.lock").exists()
