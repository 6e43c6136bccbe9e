"""Knobs of the model, the optimizer and torch's settings: what the training process itself sees of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.record.agent.processes import line_of

from .recorded import Recorded, recorded

pytestmark = [pytest.mark.torch, pytest.mark.process]

SCRIPT = """
import json, os, pickle, sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x):
        self.seen = self.first(x).relu()
        return self.head(self.second(self.seen).mean((2, 3)))

torch.manual_seed(0)
model, kept = Net(), torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # line A
plain = torch.optim.SGD([{"params": kept.parameters()}], lr=0.1)
odd = torch.optim.Adam(iter([nn.Parameter(torch.ones(2))]), differentiable=True)
torch.set_float32_matmul_precision("highest")
inputs, targets = torch.randn(8, 3, 9, 9), torch.randint(0, 4, (8,))
losses, after_zero = [], []
for step in range(4):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets) + kept.weight.sum() * 0
    loss.backward()
    optimizer.step()
    plain.step()
    losses.append(loss.item())
    if step == 2:
        optimizer.zero_grad(set_to_none=False)
        after_zero.append(model.head.weight.grad is None)
        model.zero_grad(True)
        after_zero.append(model.head.weight.grad is None)
restored = pickle.loads(pickle.dumps(model))
watching = {**nn.modules.module._global_forward_pre_hooks, **nn.modules.module._global_forward_hooks}
print(json.dumps({
    "losses": losses,
    "sum": sum(p.double().sum().item() for p in model.parameters()),
    "keys": list(model.state_dict()),
    "last": model.first.weight.is_contiguous(memory_format=torch.channels_last),
    "output_last": model.seen.is_contiguous(memory_format=torch.channels_last),
    "fused": [group.get("fused") for o in (optimizer, plain, odd) for group in o.param_groups],
    "foreach": [group.get("foreach") for o in (optimizer, plain, odd) for group in o.param_groups],
    "odd_parameters": len(odd.param_groups[0]["params"]),
    "after_zero": after_zero,
    "precision": torch.get_float32_matmul_precision(),
    "benchmark": torch.backends.cudnn.benchmark,
    "conf": [os.environ.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")],
    "watching": len(watching),  # the recorder's own hook for loops without a loader waits there
    "hooks": len(model._forward_pre_hooks) + len(model._forward_hooks) + len(restored._forward_pre_hooks),
}))
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded(tmp_path_factory.mktemp("plain"), SCRIPT)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    knobs = (
        "memory_format=channels_last", "optimizer.fused=true", "zero_grad.set_to_none=false",
        "matmul_precision=high", "cudnn.benchmark=true", "cudnn.allow_tf32=false", "cuda.linalg_library=magma",
        "allocator.conf=expandable_segments:True",
    )  # fmt: skip
    return recorded(tmp_path_factory.mktemp("changed"), SCRIPT, *knobs)


def test_a_run_without_knobs_is_left_alone(plain: Recorded) -> None:
    seen = plain.printed()
    assert (plain.status, seen["last"], seen["precision"], seen["hooks"]) == (0, False, "highest", 0)
    assert (seen["fused"], seen["after_zero"], seen["conf"]) == ([None, None, None], [False, True], [None, None])
    assert plain.events("knob") == []
    assert plain.kept("train/loss") == seen["losses"]


def test_the_process_is_as_wished_and_nothing_of_ours_is_left_in_it(plain: Recorded, changed: Recorded) -> None:
    before, after = plain.printed(), changed.printed()
    assert changed.status == 0
    assert (before["output_last"], after["last"], after["output_last"]) == (False, True, True)
    assert (after["keys"], after["hooks"], after["watching"]) == (before["keys"], 0, before["watching"])
    assert (after["fused"], after["odd_parameters"]) == ([True, True, None], 1)
    assert (after["after_zero"], after["precision"]) == ([False, False], "high")
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-4)
    assert after["conf"] == ["expandable_segments:True"] * 2


@pytest.mark.parametrize(
    ("knob", "applied", "words", "line"),
    [
        ("memory_format", True, "(8, 3, 3, 3) has its channels last, and Conv2d returns the same", None),
        ("optimizer.fused", True, "AdamW has fused=True", "line A"),
        ("optimizer.fused", False, "Adam refuses it", None),
        ("zero_grad.set_to_none", True, "gradients are a tensor of zeros after zero_grad", None),
        ("matmul_precision", True, "is high", "set_float32_matmul_precision("),
        ("cudnn.benchmark", False, "no CUDA device is in use", None),
        ("cudnn.allow_tf32", False, "no CUDA device is in use", None),
        ("cuda.linalg_library", False, "CUDA", None),
        ("allocator.conf", False, "no CUDA device is in use", None),
    ],
)
def test_what_became_of_a_knob_is_said(
    changed: Recorded, knob: str, applied: bool, words: str, line: str | None
) -> None:
    rows = [row for row in changed.knobs(knob) if words in f"{row['observed']} {row['reason']}"]
    assert {row["applied"] for row in rows} == {applied}
    assert line is None or line_of(SCRIPT, line) in {row["line"] for row in rows}


def test_foreach_and_letting_go_of_gradients_change_no_result(tmp_path: Path, plain: Recorded) -> None:
    done = recorded(tmp_path, SCRIPT, "optimizer.foreach=true", "zero_grad.set_to_none=true", "compile=false")
    before, seen = plain.printed(), done.printed()
    assert seen["foreach"] == [True, True, True]
    assert seen["after_zero"] == [True, True]
    assert seen["losses"] == pytest.approx(before["losses"], rel=1e-6)
    assert seen["sum"] == pytest.approx(before["sum"], rel=1e-6)
    assert all(row["applied"] for row in done.knobs("optimizer.foreach"))
    row = done.knob("compile")
    assert (row["applied"], row["reason"]) == (False, "the script compiles nothing")


EMPTY = """
import torch
class Plain(torch.nn.Module):
    def forward(self, x):
        return x
print(sum(Plain()(batch).sum().item() for batch in torch.utils.data.DataLoader(torch.ones(2))))
"""


def test_a_script_that_does_not_train_leaves_every_knob_without_occasion(tmp_path: Path) -> None:
    knobs = {
        "memory_format": "channels_last", "optimizer.fused": "true", "zero_grad.set_to_none": "true",
        "amp.dtype": "bf16", "compile": "true", "compile.mode": "default", "cudnn.benchmark": "true",
    }  # fmt: skip
    done = recorded(tmp_path, EMPTY, *(f"{name}={value}" for name, value in knobs.items()))
    assert (done.status, done.stdout.strip()) == (0, "2.0")
    rows: dict[str, Any] = {row["knob"]: row for row in done.events("knob")}
    assert {name for name, row in rows.items() if not row["applied"] and row["reason"]} == set(knobs)
