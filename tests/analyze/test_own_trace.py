"""Lines of a CPU trace that our own recorder makes: the forward pass directly, the backward pass by its operators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stepscope import api
from stepscope.model import DeviceLines
from tests.records import some

pytestmark = [pytest.mark.process, pytest.mark.torch]

SCRIPT = """\
import torch


def widen(x, weight):
    return torch.relu(x @ weight)  # WIDEN


def loss_of(y):
    return (y * y).mean()  # LOSS


def train():
    weight = torch.full((256, 512), 0.01, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    for _ in range(30):
        x = torch.randn(128, 256)  # INPUT
        loss = loss_of(widen(x, weight))
        optimizer.zero_grad()
        loss.backward()  # BACKWARD
        optimizer.step()  # UPDATE


train()
"""


def line_of(mark: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if f"# {mark}" in line)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> DeviceLines:
    folder = tmp_path_factory.mktemp("own")
    (folder / "train.py").write_text(SCRIPT)
    line = [sys.executable, "-m", "stepscope", "run", "--out", "run", "--window", "skip_first=10,active=3", "--quiet"]
    done = subprocess.run(
        [*line, "--", sys.executable, "train.py"], cwd=folder, capture_output=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return some(api.open_run(folder / "run").analysis.device_lines)


def test_nothing_is_lost(found: DeviceLines) -> None:
    assert found.basis == "cpu_op"
    assert found.steps is not None
    assert sum(line.ns for line in found.lines) + sum(found.unattributed.values()) == found.total_ns
    assert found.attributed_share is not None
    assert found.attributed_share > 0.9
    assert found.guessed_share == 0


@pytest.mark.parametrize(
    ("mark", "ways"),
    [
        *(("WIDEN", {"direct", "sequence"}), ("LOSS", {"direct", "sequence"})),
        *(("INPUT", {"direct"}), ("UPDATE", {"direct"})),  # what needs no gradient has one direction
    ],
)
def test_a_line_is_charged_in_both_directions(found: DeviceLines, mark: str, ways: set[str]) -> None:
    (line,) = [line for line in found.lines if line.exact_line and line.place.line == line_of(mark)]
    assert Path(line.place.file).name == "train.py"
    assert {way for way, ns in line.via.items() if ns > 0} == ways


def test_the_call_of_backward_keeps_only_what_no_operator_explains(found: DeviceLines) -> None:
    backward = sum(ns for line in found.lines for way, ns in line.via.items() if way == "sequence")
    own = sum(line.ns for line in found.lines if line.place.line == line_of("BACKWARD"))
    assert own < 0.2 * backward
