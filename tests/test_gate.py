"""The performance gate for CI: `scripts/gate.sh`, which the action and the snippet of docs/ci.md run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.builders import MS, T0, step_rows
from tests.run_folders import make_run_folder

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
GATE = ROOT / "scripts" / "gate.sh"
TRAIN = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(40):
    model(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def gate(folder: Path, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The script in `folder`, for the checkouts `base` and `head` there."""
    program = folder / "bin" / "stepscope"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m stepscope "$@"\n')
    program.chmod(0o755)
    for name in ("base", "head"):
        (folder / name).mkdir(exist_ok=True)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "GATE_OUT": "out", **settings}
    line = ["bash", str(GATE), "base", "head", "--", *command]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=170, check=False)


def sides(folder: Path, *, head_ms: float) -> None:
    """Three runs of each side, made in turns, that differ a little among themselves."""
    for number in range(3):
        for side, ms in (("base", 20.0), ("head", head_ms)):
            started = T0 + (2 * number + (side == "head")) * 60_000 * MS
            steps = step_rows(40, wall_ns=int((ms + 0.01 * number) * MS), start_ns=started)
            manifest = {"started_ns": started}
            make_run_folder(folder / "out" / side, name=str(number), steps=steps, manifest=manifest)


@pytest.mark.parametrize(
    ("head_ms", "settings", "status"),
    [(22.0, {}, 1), (20.0, {}, 0), (22.0, {"GATE_LIMIT": "20"}, 0)],
    ids=["slower", "the same", "slower by less than the limit"],
)
def test_a_head_that_is_slower_fails(tmp_path: Path, head_ms: float, settings: dict[str, str], status: int) -> None:
    sides(tmp_path, head_ms=head_ms)
    done = gate(tmp_path, "true", GATE_RUNS="0", **settings)
    assert done.returncode == status, done.stdout + done.stderr
    comment = (tmp_path / "out" / "comment.md").read_text()
    assert comment.startswith("### Step time of the training\n\n")
    assert f"slower={settings.get('GATE_LIMIT', '3')}%" in comment.splitlines()[2]
    assert comment.count("``````") == 2
    assert "Step time" in comment
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["candidates"]
    assert (tmp_path / "out" / "compare.html").exists()


@pytest.mark.torch
@pytest.mark.process
def test_it_records_both_sides_and_one_run_of_each_is_no_verdict(tmp_path: Path) -> None:
    for name in ("base", "head"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(TRAIN)
    done = gate(tmp_path, sys.executable, "train.py", GATE_RUNS="1", GATE_UNDECIDED="fail")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "cannot be judged" in (tmp_path / "out" / "comment.md").read_text()
    recorded = {path.name: (path / "1" / "rank-0" / "steps.jsonl").exists() for path in (tmp_path / "out").glob("*/")}
    assert recorded == {"base": True, "head": True}


def test_a_training_that_fails_fails_the_gate(tmp_path: Path) -> None:
    done = gate(tmp_path, sys.executable, "-c", "raise SystemExit(7)", GATE_RUNS="1")
    assert done.returncode == 7
    assert not (tmp_path / "out" / "comment.md").exists()


def test_the_action_hands_texts_of_others_over_as_variables_alone() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps: list[dict[str, Any]] = action["runs"]["steps"]
    assert all("${{" not in step["run"] for step in steps)
    assert any("scripts/gate.sh" in step["run"] for step in steps)
    for step in steps:
        subprocess.run(["bash", "-n", "-c", step["run"]], check=True)
    used = {name for step in steps for name in re.findall(r"inputs\.(\w+)", json.dumps(step))}
    assert used == set(action["inputs"])


def test_the_documented_jobs_are_yaml_and_give_inputs_that_exist() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "ci.md").read_text(), re.DOTALL)
    github, gitlab = map(yaml.safe_load, blocks)
    given = github["jobs"]["speed"]["steps"][-1]["with"]
    assert set(given) <= set(yaml.safe_load((ROOT / "action.yml").read_text())["inputs"])
    for line in [*gitlab["speed"]["script"], *gitlab["speed"]["after_script"]]:
        subprocess.run(["bash", "-n", "-c", line], check=True)
    assert {"verify", "pythons", "package", "agent"} == set(
        yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    )
