"""`stepscope batch` on the command line: a real run with a poisoned sample, and what a run folder may hold."""

from __future__ import annotations

import json
from array import array
from base64 import b64encode
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
from plain_sgd import PlainSGD
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
    optimizer = PlainSGD(model.parameters(), lr=0.01)
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
    after = json_of(capfd, "batch", recorded.folder, "--step", step + 1)
    assert after["alarms"] == []
    assert [batch["indices"] for batch in after["data"][0]["batches"][:2]] == [
        batch["indices"] for batch in alarm["batches"][1:]
    ]
    assert main(recorded.folder, "--step", 80) == 2
    shown = capfd.readouterr().err
    assert shown.count("\n") == 1
    assert f"those of steps {step - 2}, {step - 1}, {step} were" in shown


EPOCHS = """
import torch
from plain_sgd import PlainSGD
from torch.utils.data import DataLoader

if __name__ == "__main__":
    torch.manual_seed(1)
    loader = DataLoader([(torch.zeros(2), i) for i in range(70_000, 70_030)], 4, shuffle=True, num_workers={workers})
    model = torch.nn.Linear(2, 1)
    optimizer = PlainSGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        for at, (rows, numbers) in enumerate(loader):
            print(*(numbers - 70_000).tolist(), end=" ")
            (model(rows).pow(2).mean() / 2).backward()
            if at % {parts} == {parts} - 1:
                print()
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.torch
@pytest.mark.parametrize(("workers", "parts"), [pytest.param(0, 1, marks=pytest.mark.thorough), (2, 1), (0, 2)])
def test_the_samples_of_a_healthy_step_are_named(
    workers: int, parts: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(EPOCHS.format(workers=workers, parts=parts))
    recorded = record(tmp_path / "run", [PYTHON, "train.py"], options=["--no-window", "--no-report"], cwd=tmp_path)
    truth = [[*map(int, line.split())] for line in recorded.stdout.splitlines()]
    assert len(truth) == 24 // parts
    for step, used in [*enumerate(truth)][:: 5 // parts]:
        (data,) = json_of(capfd, "batch", recorded.folder, "--step", step)["data"]
        own = [index for batch in data["batches"] if batch["suspect"] for index in batch["indices"]]
        assert own == used
        assert [batch["step"] for batch in data["batches"] if not batch["suspect"]] == (
            [step - 2, step - 1] if parts == 1 else [step - 1] * 2
        )[-step * parts or 2 :]
    assert main(recorded.folder, "--step", 3) == 0
    assert "no loss and no norm went wrong" in capfd.readouterr().out


LOSS = {"name": "train/loss", "source": "backward", "start_ns": T0, "after_ns": [0], "values": [0.5], "updates": [0]}
LOSSES = {"kind": "metrics", "series": [LOSS]}


def made(tmp_path: Path, *events: dict[str, Any]) -> Path:
    return make_run_folder(tmp_path, events=[LOSSES, *events])


def test_a_run_without_an_alarm_and_one_without_losses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    healthy = made(tmp_path)
    assert main(healthy) == 0
    assert "No alarm" in capfd.readouterr().out
    assert main(healthy, "--step", 3) == 2
    assert "no batch of it was kept" in capfd.readouterr().err
    bare = make_run_folder(tmp_path, name="bare")
    assert main(bare) == 3
    (bare / "rank-0" / "batches.jsonl").write_text(json.dumps({"uses": [[0, 1, 0, 1, 4]], "lists": LISTS}))
    assert main(bare, "--step", 0) == 0  # what was trained on is known without a loss, as of torch.func
    assert "1 2" in capfd.readouterr().out
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
    assert (main(run, "--rank", 1), "there are 0" in capfd.readouterr().err) == (2, True)
    out = tmp_path / "found.json"
    assert main(run, "--json", out) == 0
    assert json.loads(out.read_text())["alarms"][0]["batches"][0]["indices"] == [1, 3]
    assert main(run, "--json", out) == 2  # never overwritten unasked


def packed(code: str, *indices: int) -> str:
    return b64encode(array(code, indices).tobytes()).decode()


LISTS = [
    {"iterator": 1, "first": 0, "sizes": 2, "code": "H", "indices": packed("H", 1, 2, 3, 4), "loader": 9, "epoch": 0},
    {"iterator": 1, "first": 2, "sizes": [1, 3], "code": "q", "indices": packed("q", -5, 6, 7, 8)},
    {"iterator": 2, "first": 0, "reason": "an iterable data set has no indices"},
]


@pytest.mark.parametrize(
    ("uses", "lists", "step", "indices"),
    [
        ([[0, 1, 0, 1, 4]], LISTS, 3, [[3, 4], [-5], [6, 7, 8]]),
        ([[0, 1, 0, 2, 2]], LISTS, 0, [[1, 2], [3, 4]]),
        ([[0, 1, 0, 1, 2], [5, 2, 0, 1, 1]], LISTS, 5, [[1, 2], [3, 4], None]),
        ([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], LISTS, 1, [[3, 4]]),  # one batch, twice
        ([[0, 1, 3, 1, 9]], LISTS, 1, [[6, 7, 8], None]),  # beyond the lists
        ([[0, 1, 0, 1, 2**62], [0, 1, 0, 0, 5], [True, 1, 0, 1, 1], "x", [0, 1], None], LISTS, 1, None),
        ([[0, 1, 0, 10**9, 1]], LISTS, 0, None),
        ([[0, 1, 0, 1, 1]], [{**LISTS[0], "code": "d"}], 0, [None]),
        ([[0, 1, 0, 1, 1]], [{**LISTS[0], "indices": "%"}], 0, [None]),
        ([[0, 1, 0, 1, 1]], [{**LISTS[0], "sizes": [-1]}, {**LISTS[0], "sizes": 10**9}, 3, {}], 0, [None]),
        ({"step": 0}, "none", 0, None),
    ],
)
def test_a_log_of_batches_is_read_as_far_as_it_makes_sense(
    uses: Any, lists: Any, step: int, indices: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path)
    (run / "rank-0" / "batches.jsonl").write_text(json.dumps({"uses": uses, "lists": lists}) + "\n[1]\nhalf a li")
    assert main(run, "--step", step, "--json", "-") == (2 if indices is None else 0)
    told = capfd.readouterr().out
    if indices is not None:
        assert [batch["indices"] for batch in json.loads(told)["data"][0]["batches"]] == indices
