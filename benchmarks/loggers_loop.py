"""One loop, with one way of learning something from it switched on and off: `python loggers_loop.py CONFIG`.

CONFIG is JSON: {"way": NAME, "rounds": R, "steps": S, "out": FILE}. A block with the way (B) and two without (A, C)
in another order every round; what `out` gets is {"rounds": [{"A": ns, "B": ns, "C": ns}, …], "waits": N}, processor
time of the training thread per step, and calls per step that read a tensor back, beyond those of the plain loop.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

LAYERS, WIDTH, BATCH = 24, 512, 16
# What a device would have to be waited for.
READS = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__")


class Loop:
    """Steps of a network of 6.3 million parameters; `after` is called between backward and optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.data = torch.randn(BATCH, WIDTH)
        self.after: Callable[[torch.Tensor], object] | None = None
        self.around: Callable[[], Any] = contextlib.nullcontext

    def step(self) -> None:
        """One training step."""
        with self.around():
            self.optimizer.zero_grad()
            loss = self.model(self.data).square().mean()
            loss.backward()
            if self.after is not None:
                self.after(loss)
            self.optimizer.step()


Way = Callable[[bool], None]  # puts it in or takes it out


def with_item(loop: Loop) -> Way:
    """`loss.item()` in each step."""

    def turn(on: bool) -> None:
        loop.after = (lambda loss: loss.item()) if on else None

    return turn


def with_wandb_log(loop: Loop) -> Way:
    """W&B offline: loss and four numbers in each step."""
    run = _wandb_run()

    def turn(on: bool) -> None:
        def log(loss: torch.Tensor) -> None:
            run.log({"loss": loss.item(), "lr": 1e-5, "a": 1.0, "b": 2.0, "c": 3.0})

        loop.after = log if on else None

    return turn


def with_wandb_watch(loop: Loop) -> Way:
    """W&B offline: `watch` of gradients in every tenth step, the loss logged in each."""
    run = _wandb_run()

    def turn(on: bool) -> None:
        if on:
            run.watch(loop.model, log="gradients", log_freq=10)
        else:
            run.unwatch(loop.model)
        loop.after = (lambda loss: run.log({"loss": loss.item()})) if on else None

    return turn


def _wandb_run() -> Any:
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=tempfile.mkdtemp())
    return importlib.import_module("wandb").init(project="benchmark")


def with_lightning(loop: Loop) -> Way:
    """Lightning's `grad_norm` of all parameters in each step."""
    norms = importlib.import_module("lightning.pytorch.utilities").grad_norm

    def turn(on: bool) -> None:
        loop.after = (lambda _loss: norms(loop.model, 2)) if on else None

    return turn


def with_traceml(loop: Loop) -> Way:
    """TraceML's `trace_step` around each step."""
    traceml = importlib.import_module("traceml_ai")
    traceml.init(mode="auto")

    def turn(on: bool) -> None:
        loop.around = (lambda: traceml.trace_step(loop.model)) if on else contextlib.nullcontext

    return turn


def with_stepscope(_loop: Loop) -> Way:
    """stepscope: everything that it keeps, in and out with its hooks; what it was started with decides what."""
    from stepscope.record.agent import core

    agent = core.current()
    if agent is None:
        raise SystemExit("the agent is not in this process, so there is nothing to switch")

    def turn(on: bool) -> None:
        agent.probes.resume()
        agent.probes.suspend("benchmark")
        if on:
            agent.probes.resume()

    return turn


WAYS: dict[str, Callable[[Loop], Way]] = {
    "item": with_item,
    "wandb.log": with_wandb_log,
    "wandb.watch": with_wandb_watch,
    "lightning.grad_norm": with_lightning,
    "traceml": with_traceml,
    "stepscope": with_stepscope,
    "stepscope --watch": with_stepscope,
}


def waits(loop: Loop, steps: int) -> float:
    """Calls per step that read a tensor's value."""
    calls = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*args, **kwargs)

        return call

    originals = {name: getattr(torch.Tensor, name) for name in READS}
    for name, original in originals.items():
        setattr(torch.Tensor, name, counted(original))
    try:
        for _ in range(steps):
            loop.step()
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)
    return calls / steps


def main() -> None:
    """Run as the JSON argument says and write the result."""
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    loop = Loop()
    turn = WAYS[config["way"]](loop)
    shuffle, rounds = random.Random(0), []
    for _ in range(config["rounds"]):
        costs = {}
        for arm in shuffle.sample("ABC", 3):
            turn(arm == "B")
            for _ in range(5):
                loop.step()
            begin = time.thread_time_ns()
            for _ in range(config["steps"]):
                loop.step()
            costs[arm] = (time.thread_time_ns() - begin) / config["steps"]
        rounds.append(costs)
    turn(False)
    plain = waits(loop, 200)
    turn(True)
    found = {"rounds": rounds, "waits": waits(loop, 200) - plain}
    with open(config["out"], "w") as out:
        json.dump(found, out)


if __name__ == "__main__":
    main()
