"""amp.dtype on real processes: the types modules compute in, where autocast is on, and what becomes of results."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.record.agent.processes import line_of

from .recorded import Recorded, recorded

pytestmark = [pytest.mark.torch, pytest.mark.process]

# Plain SGD: an update of gradients that are still scaled, or were unscaled twice, would show at once.
SCRIPT = """
import contextlib, json, pickle, sys, torch
from plain_sgd import PlainSGD
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OWN, SCALED, OVERFLOW = "own" in sys.argv, "scaled" in sys.argv, "overflow" in sys.argv
torch.manual_seed(0)
seen = {name: [] for name in ("out", "loss", "gradient", "eval", "data", "norm", "losses", "inside", "scaled")}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.second(self.first(x).tanh())

class Products(TensorDataset):  # computes in the training process, as a transform would
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        seen["data"].append(str((x @ torch.eye(16)).dtype))
        return x, y

def state(*_):
    seen["inside"].append(torch.is_autocast_enabled("cpu"))

model = Net()
optimizer = PlainSGD(model.parameters(), lr=0.5)
optimizer.register_step_pre_hook(state)
scaler = torch.amp.GradScaler("cpu", enabled=SCALED)
loader = DataLoader(Products(torch.randn(96, 16), torch.randint(0, 4, (96,))), batch_size=8)
step = 0

def inside_backward(gradient):
    seen["scaled"].append(gradient.norm().item())
    return gradient * float("inf") if OVERFLOW and step == 5 else gradient

model.first.weight.register_hook(inside_backward)
for step, (x, y) in enumerate(loader):
    with torch.no_grad():
        teacher = model(x)  # the same weights, no gradient
    with torch.autocast("cpu", dtype=torch.bfloat16) if OWN else contextlib.nullcontext():
        out = model(x)
        loss = nn.functional.cross_entropy(out, y) / 2
    out.register_hook(state)
    scaler.scale(loss).backward()
    seen["out"].append(str(out.dtype))
    seen["loss"].append(str(loss.dtype))
    seen["gradient"].append(str(model.first.weight.grad.dtype))
    seen["losses"].append(loss.item())
    if step % 2 == 0:
        seen["scaled"][-1] /= model.first.weight.grad.norm().item()
    if step % 2:
        scaler.unscale_(optimizer)
        seen["norm"].append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen["eval"].append(str(model(x).dtype))
        model.train()
pickle.dumps((model, optimizer))
seen["final"] = [p.double().sum().item() for p in model.parameters()]
print(json.dumps(seen))
"""


def steps_cut(done: Recorded) -> int:
    return len((done.run / "rank-0" / "steps.jsonl").read_text().splitlines()) - 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded(tmp_path_factory.mktemp("plain"), SCRIPT)


def test_bfloat16_is_around_forward_and_loss_and_nothing_else(tmp_path: Path, plain: Recorded) -> None:
    done = recorded(tmp_path, SCRIPT, "amp.dtype=bf16")
    seen, before = done.printed(), plain.printed()
    assert set(before["out"]) == set(before["eval"]) == {"torch.float32"}
    assert (set(seen["out"]), set(seen["eval"])) == ({"torch.bfloat16"}, {"torch.bfloat16"})
    assert (set(seen["loss"]), set(seen["gradient"]), set(seen["data"])) == ({"torch.float32"},) * 3
    assert set(seen["inside"]) == {False}  # of backward passes and of optimizer steps
    assert seen["losses"] == pytest.approx(before["losses"], abs=0.02)
    assert seen["final"] == pytest.approx(before["final"], abs=0.2)
    row = done.knob("amp.dtype")
    assert (row["applied"], row["observed"]) == (True, "Linear returns torch.bfloat16")
    assert row["line"] == line_of(SCRIPT, "teacher = model(x)")
    assert done.kept("train/loss") == seen["losses"]


def test_float16_scales_gradients_and_nobody_sees_it(tmp_path: Path, plain: Recorded) -> None:
    done = recorded(tmp_path, SCRIPT, "amp.dtype=fp16")
    seen, before = done.printed(), plain.printed()
    assert set(seen["out"]) == {"torch.float16"}
    assert before["scaled"][::2] == pytest.approx([1.0] * 6)
    assert seen["scaled"][::2] == pytest.approx([65536] * 6, rel=1e-3)
    assert seen["losses"] == pytest.approx(before["losses"], abs=0.01)
    assert seen["norm"] == pytest.approx(before["norm"], rel=0.01)  # the second of two passes is in it as well
    assert seen["final"] == pytest.approx(before["final"], abs=0.05)
    row = done.knob("amp.dtype")
    assert row["applied"]
    assert row["observed"] == "Linear returns torch.float16; gradients are scaled, by 65536 at first"
    assert done.kept("train/loss") == seen["losses"]


def test_an_overflow_leaves_the_update_out_and_halves_the_scale(tmp_path: Path) -> None:
    done = recorded(tmp_path, SCRIPT, "amp.dtype=fp16", arguments=("overflow",))
    seen = done.printed()
    assert (len(done.events("scaler_skip")), steps_cut(done)) == (1, 6)
    assert [math.isfinite(norm) for norm in seen["norm"]] == [True, True, False, True, True, True]
    assert all(map(math.isfinite, seen["losses"] + seen["final"]))
    assert seen["scaled"][::2] == pytest.approx([65536] * 3 + [32768] * 3, rel=1e-3)


def test_the_scripts_own_autocast_gets_the_type_and_its_own_scaler_stays(tmp_path: Path) -> None:
    done = recorded(tmp_path, SCRIPT, "amp.dtype=fp16", arguments=("own", "scaled"))
    seen = done.printed()
    assert set(seen["out"]) == {"torch.float16"}
    row = done.knob("amp.dtype")
    assert row["applied"]
    assert "the script's own autocast got the type" in row["observed"]
    assert "scaled by the script's own GradScaler" in row["observed"]
    assert row["line"] == line_of(SCRIPT, "with torch.autocast(")
    assert done.kept("train/loss") == seen["losses"]  # before scaling


def test_the_scripts_own_autocast_is_turned_off(tmp_path: Path, plain: Recorded) -> None:
    done = recorded(tmp_path, SCRIPT, "amp.dtype=off", arguments=("own",))
    seen = done.printed()
    assert set(seen["out"]) == {"torch.float32"}
    assert seen["losses"] == plain.printed()["losses"]
    row = done.knob("amp.dtype")
    assert row["applied"]
    assert row["observed"] == "Linear returns torch.float32; the script's own autocast is turned off"


CLOSURE = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
x = torch.randn(8, 4)

def closure():
    optimizer.zero_grad()
    out = model(x)
    loss = out.float().pow(2).mean()
    loss.backward()
    return loss

first = optimizer.step(closure).item()
for _ in range(3):
    last = optimizer.step(closure).item()
print("types", model(x).dtype, last < first)
"""


def test_where_gradients_cannot_be_scaled_float16_is_not_used(tmp_path: Path) -> None:
    done = recorded(tmp_path, CLOSURE, "amp.dtype=fp16")
    assert (done.status, done.stdout.strip()) == (0, "types torch.float32 True")
    row = done.knob("amp.dtype")
    assert not row["applied"]
    assert "closure" in row["reason"]


LOOPS = """
import json, torch
from torch import nn
from torch.utils.checkpoint import checkpoint

def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))

def squares(x):
    return x.float().pow(2).mean()

def two_optimizers():  # both backward passes first, and gradients that stay for the next iteration
    first, second = mlp(8, 4), mlp(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (first, second)]
    for step in range(8):
        hidden = first(torch.randn(16, 8))
        squares(hidden).backward()
        squares(second(hidden.detach())).backward()
        for optimizer in optimizers:
            optimizer.step()
            if step % 3 == 2:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
    return first, second

def steps_inside_backward():
    model = mlp(8, 1)
    optimizers = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(6):
        squares(model(torch.randn(16, 8))).backward()
    return (model,)

def checkpoints_first():
    first, second = mlp(8, 8), mlp(8, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    for step in range(6):
        x = torch.randn(16, 8, requires_grad=True)
        squares(second(checkpoint(first, x, use_reentrant=step % 2 == 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return first, second

def gradient_penalty():
    model = mlp(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        x = torch.randn(16, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        squares(slope.float().norm(dim=1) - 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (model,)

def own_autocast_around_everything():
    model = mlp(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(4):
            squares(model(torch.randn(16, 8))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return (model,)

ends = {}
loops = [two_optimizers, steps_inside_backward, checkpoints_first, gradient_penalty, own_autocast_around_everything]
for loop in loops:
    torch.manual_seed(0)
    ends[loop.__name__] = [p.double().sum().item() for model in loop() for p in model.parameters()]
    ends["on after " + loop.__name__] = torch.is_autocast_enabled("cpu")
print(json.dumps(ends))
"""


@pytest.mark.thorough
def test_unusual_loops_end_where_they_end_without_it(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = recorded(tmp_path / "plain", LOOPS).printed()
    done = recorded(tmp_path, LOOPS, "amp.dtype=fp16")
    ends = done.printed()
    for name, values in plain.items():
        tolerance = 0.03 if "own" in name else 0.003  # the script's own is bfloat16
        assert ends[name] == pytest.approx(values, abs=tolerance), name
    assert done.events("probe_error") == []
    assert done.knob("amp.dtype")["applied"]


DEFECT = """
import sys, torch
from plain_sgd import PlainSGD
model = torch.nn.Linear(4, 1)
optimizer = PlainSGD(model.parameters(), lr=0.1)
types = []
for step in range(6):
    if step == 2:
        agent = sys.modules["stepscope.record.agent.core"].current()
        knob = agent.knobs._knobs[0]
        knob._leave = lambda: 1 / 0
    out = model(torch.ones(2, 4))
    types.append(str(out.dtype))
    out.float().sum().backward()
    if step == 2:
        del knob._leave
    optimizer.step()
    optimizer.zero_grad()
print(types[0], types[-1], torch.is_autocast_enabled("cpu"))
"""


def test_a_defect_of_ours_does_not_leave_autocast_on(tmp_path: Path) -> None:
    done = recorded(tmp_path, DEFECT, "amp.dtype=bf16")
    assert (done.status, done.stdout.split()) == (0, ["torch.bfloat16", "torch.float32", "False"])
    assert [row["applied"] for row in done.knobs("amp.dtype")] == [True, False]
    assert "ZeroDivisionError" in done.knobs("amp.dtype")[1]["reason"]


WITHOUT = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    with torch.autocast("cpu", enabled=False):
        model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(model(torch.ones(2, 4)).dtype)
"""


def test_a_script_that_turns_autocast_off_keeps_it_off_and_the_report_says_so(tmp_path: Path) -> None:
    done = recorded(tmp_path, WITHOUT, "amp.dtype=bf16")
    row = done.knob("amp.dtype")
    assert not row["applied"]
    assert "enabled=False" in row["reason"]
    assert row["line"] == line_of(WITHOUT, "with torch.autocast(")
