"""The loss of every step: the very values the script sees, kept without what they were computed from."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stepscope.record.agent.losses import Losses

from stepscope.record.agent import losses

from .agent.fake_agent import FakeAgent, row
from .knobs.recorded import recorded

pytestmark = pytest.mark.torch

SCRIPT = """
import torch
from plain_sgd import PlainSGD
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = PlainSGD(model.parameters(), lr=0.1)
step = 0
while True:
    loss = model(torch.randn(8, 4)).pow(2).mean()
    if step == 3:
        loss = loss * float("inf")
    loss.backward()
    if step == 3:
        optimizer.zero_grad()
    print(loss.item(), flush=True)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
"""


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def kept(agent: FakeAgent) -> Iterator[Losses]:
    import torch

    before = torch.autograd.backward
    found = Losses(agent)  # type: ignore[arg-type]
    found.install()
    assert torch.autograd.backward is not before
    yield found
    found.uninstall()
    assert torch.autograd.backward is before
    assert agent.errors == []


@pytest.mark.process
def test_they_are_read_out_when_the_steps_allowed_are_over(tmp_path: Path) -> None:
    done = recorded(tmp_path, SCRIPT, options=("--max-steps", "6", "--losses"))
    printed = [float(line) for line in done.stdout.split()]
    (event,) = done.events("loss")
    values = [float(value) for value in event["values"]]
    assert 6 <= len(values) <= len(printed)
    assert values == pytest.approx(printed[: len(values)], abs=0.0, nan_ok=True)
    assert event["values"][3] == "inf"
    assert event["steps"] == sorted(event["steps"])
    assert event["steps"][-1] == 5


def test_values_steps_and_accumulation(agent: FakeAgent, kept: Losses) -> None:
    import torch

    weight = torch.ones(3, requires_grad=True)
    expected = []
    for step in range(3):
        for micro in range(2):
            agent.now = step * 100 + micro * 10 + 5
            loss = (weight * (step + micro)).sum() / 3
            expected.append(loss.item())
            loss.backward()
        kept(row(step, step * 100), 0)
    agent.now = 305
    torch.autograd.backward([weight.sum()])
    kept.write()
    (event,) = agent.written
    assert event["values"] == [*expected, 3.0]
    assert event["steps"] == [0, 0, 1, 1, 2, 2, 3]


def test_what_is_no_scalar_or_is_given_up_is_not_kept(agent: FakeAgent, kept: Losses) -> None:
    import torch

    weight = torch.ones(3, requires_grad=True)
    (weight * 2).backward(torch.ones(3))
    torch.autograd.backward([weight.sum(), weight.prod()])
    with pytest.raises(RuntimeError, match="grad can be implicitly created"):
        (weight * 2).backward()
    for factor in (1.0, math.nan, math.inf, -math.inf, 0.0):
        (weight.prod() * factor).backward()
    kept.write()
    weight.sum().backward()
    kept.write()
    assert [event["values"] for event in agent.written] == [[1.0, "nan", "inf", "-inf", 0.0]]


def test_neither_the_graph_nor_a_larger_storage_is_kept_alive(kept: Losses) -> None:
    import torch

    class Node(torch.autograd.Function):  # type: ignore[misc]  # one that can be referred to weakly
        @staticmethod
        def forward(context: Any, values: Any) -> Any:
            context.save_for_backward(values)
            return values.clone()

        @staticmethod
        def backward(_context: Any, gradient: Any) -> Any:
            return gradient

    weight = torch.ones(1000, requires_grad=True)
    activations = weight * 2
    each = Node.apply(activations)
    node, saved = weakref.ref(each.grad_fn), weakref.ref(activations)
    each[7].backward(retain_graph=True)
    assert node() is not None
    del each, activations
    gc.collect()
    assert (node(), saved()) == (None, None)
    ((_, tensor),) = kept._kept
    assert tensor.untyped_storage().nbytes() == 4


def test_the_value_before_a_gradscaler_counts(agent: FakeAgent, kept: Losses) -> None:
    import torch

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weight = torch.tensor([0.1], requires_grad=True)
    loss = weight.sum()
    scaler.scale(loss).backward()
    assert weight.grad is not None
    assert weight.grad.item() == 1024.0
    other = weight.sum() * 3
    other.backward()
    kept.write()
    assert agent.written[0]["values"] == [loss.item(), other.item()]


def test_no_more_are_kept_than_the_limit_and_events_stay_small(
    agent: FakeAgent, kept: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(losses, "LIMIT", 7)
    monkeypatch.setattr(losses, "CHUNK", 3)
    weight = torch.ones(1, requires_grad=True)
    assert kept.wants_each()
    for _ in range(10):
        weight.sum().backward()
    assert not kept.wants_each()
    kept.write()
    assert [len(event["values"]) for event in agent.written] == [3, 3, 1]


def test_a_backward_pass_inside_another_and_other_threads_are_not_losses(agent: FakeAgent, kept: Losses) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    weight = torch.ones(3, requires_grad=True)
    checkpoint(lambda x: (x * 2).sum(), weight, use_reentrant=True).backward()
    agent.training_thread = -1
    weight.sum().backward()
    kept.write()
    assert agent.written[0]["values"] == [6.0]


def test_a_device_that_never_finishes_is_not_waited_for(
    agent: FakeAgent, kept: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    torch.ones(1, requires_grad=True).sum().backward()
    agent.device.in_use = True
    monkeypatch.setattr(losses, "PATIENCE_S", 0.01)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=lambda: False))
    kept.write()
    assert agent.written == []
