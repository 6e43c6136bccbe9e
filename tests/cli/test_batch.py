"""`stepscope batch` on the command line: a real run with a poisoned sample, and what a run folder may hold."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.builders import T0
from tests.cli.calls import call, json_of
from tests.integration.harness import PYTHON, record
from tests.run_folders import make_run_folder

main = partial(call, "batch")

SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset

class Pictures(Dataset):
    def __init__(self):
        self.samples = [(f"cats/{i}.png", i % 3) for i in range(320)]
    def __len__(self):
        return 320
    def __getitem__(self, i):
        row = torch.full((4,), float(i % 5)) / 5
        return (row * float("nan") if i == 77 else row), i

if __name__ == "__main__":
    torch.manual_seed(1)
    data = Pictures()
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (rows, numbers) in enumerate(loader):
        if 77 in numbers.tolist():
            print(step, *numbers.tolist())
        loss = model(rows).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.torch
def test_a_poisoned_sample_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    recorded = record(tmp_path / "run", [PYTHON, "train.py"], options=["--no-window", "--no-report"], cwd=tmp_path)
    step, *used = map(int, recorded.stdout.split())
    assert main(recorded.folder) == 0
    shown = capfd.readouterr().out
    assert f"step {step}, rank 0: train/loss is nan" in shown
    lines = SCRIPT.splitlines()
    made, backward = (
        next(n for n, line in enumerate(lines, 1) if text in line) for text in ("DataLoader(", "backward")
    )
    assert f", train.py:{backward}\n" in shown
    assert f"batch {step} of epoch 0, loader at train.py:{made}, 4 samples" in shown
    assert f"--step {step}" in shown
    assert main(recorded.folder, "--step", step) == 0
    shown = capfd.readouterr().out
    assert f"before, step {step - 2}: batch {step - 2}" in shown
    for index in used:
        assert f"  {index}  cats/{index}.png  target {index % 3}\n" in shown
    (alarm,) = json_of(capfd, "batch", recorded.folder, "--step", step)["alarms"]
    assert [(batch["step"], batch["suspect"]) for batch in alarm["batches"]] == [
        (step - 2, False),
        (step - 1, False),
        (step, True),
    ]
    assert alarm["batches"][-1]["indices"] == used
    (before,) = json_of(capfd, "batch", recorded.folder, "--step", step - 1)["alarms"]
    assert before["batches"] == alarm["batches"][:2]
    assert main(recorded.folder, "--step", step + 1) == 2
    shown = capfd.readouterr().err
    assert shown.count("\n") == 1
    assert f"those of steps {step - 2}, {step - 1}, {step} were" in shown


LOSS = {"name": "train/loss", "source": "backward", "start_ns": T0, "after_ns": [0], "values": [0.5], "updates": [0]}
LOSSES = {"kind": "metrics", "series": [LOSS]}


def made(tmp_path: Path, *events: dict[str, Any]) -> Path:
    return make_run_folder(tmp_path, events=[LOSSES, *events])


def test_a_run_without_an_alarm_and_one_without_losses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    healthy = made(tmp_path)
    assert main(healthy) == 0
    assert "0 alarms" in capfd.readouterr().out
    assert main(healthy, "--step", 3) == 2
    assert "no loss and no norm went wrong" in capfd.readouterr().err
    assert main(make_run_folder(tmp_path, name="bare")) == 3
    assert main(tmp_path / "nothing") == 3


def test_what_others_wrote_is_shown_as_far_as_it_makes_sense(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    batch = {"step": 5, "suspect": True, "batch": 5, "indices": [1, "2", None, 3], "samples": 9_000, "files": "all"}
    odd = {"step": 4, "indices": None, "reason": "\x1b[2Jgone"}
    run = made(
        tmp_path,
        {"kind": "alarm", "series": "\x1b[31mloss", "value": "inf", "step": 5, "batches": [batch, odd, 7, {}, None]},
        {"kind": "alarm", "series": "train/loss", "value": "twelve", "step": 6},
        {"kind": "alarm", "series": "train/grad_norm", "value": 41.0, "low": 0.5, "high": 2, "step": None},
    )
    assert main(run) == 0
    assert main(run, "--step", 5) == 0
    shown = capfd.readouterr().out
    assert "2 alarms" in shown
    assert "unfinished step, rank 0: train/grad_norm is 41.0 (before: 0.500 to 2.00)" in shown
    assert "  1 3\n  8,998 more samples of the batch were not kept" in shown
    assert "\x1b" not in shown
    assert main(run, "--rank", 1, "--step", 5) == 2
    out = tmp_path / "found.json"
    assert main(run, "--json", out) == 0
    assert json.loads(out.read_text())["alarms"][0]["batches"][0]["indices"] == [1, 3]
    assert main(run, "--json", out) == 2  # never overwritten unasked
