"""The compiled loops that the capture of compilations is measured on; needs the recorder's agent in its process.

    python compile_loop.py '{"backend": B, "rounds": R, "block_ms": M, "often_rounds": O, "out": FILE}'

`steady` trains a compiled model that never compiles again; `often` does nothing but compile: after a reset of Dynamo
one function to `VERSIONS` versions, with the backend "eager", which leaves the least work that a capture could hide in.
Parts of recording are taken out (A, C) and put in (B) between blocks of the same loop, in another order every round.
The result in `out` is {part: [{"A": {clock: ns}, "B": …, "C": …}, …]}: nanoseconds per step or per compilation, by the
"wall" clock and by the processor time of the training thread ("cpu"; without a GPU it runs the backward pass too).
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from loop import SETTLING_NS, batches
from torch import nn

from stepscope.record.agent import core

WIDTH, BATCH, LAYERS = 256, 32, 3
VERSIONS = 8  # as many as Dynamo compiles by default
CAPTURE = "compiles"  # the probe that is taken out and put in
Cost = dict[str, float]


class Capture:
    """The probe of compilations alone, the rest of recording stays as it is."""

    def __init__(self, agent: core.Agent) -> None:
        self._agent = agent
        probe = agent.probes.get(CAPTURE)
        if probe is None:
            raise SystemExit(f"the agent has no probe {CAPTURE!r}")
        self._probe = probe

    def turn(self, on: bool) -> None:
        """On or off, after both, so that every block begins alike."""
        self._probe.install(self._agent)
        self._probe.uninstall()
        if on:
            self._probe.install(self._agent)


class Everything:
    """All hooks of the recorder."""

    def __init__(self, agent: core.Agent) -> None:
        self._probes = agent.probes

    def turn(self, on: bool) -> None:
        """On or off, after both, so that every block begins alike."""
        self._probes.resume()
        self._probes.suspend("benchmark")
        if on:
            self._probes.resume()


def steady_step(backend: str) -> Callable[[], None]:
    """A training step of a compiled model, its forward and its loss; the batch never changes its shape."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss_of = torch.compile(lambda x: model(x).square().mean(), backend=backend)
    source: Iterator[torch.Tensor] = batches(WIDTH, BATCH)

    def step() -> None:
        loss = loss_of(next(source))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def compile_often() -> None:
    """`VERSIONS` versions of one function."""
    torch._dynamo.reset()
    layer = nn.Linear(8, 8)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(layer(x)).square().mean()

    compiled = torch.compile(forward, backend="eager", dynamic=False)
    for rows in range(2, 2 + VERSIONS):
        compiled(torch.ones(rows, 8))


def cost_of(step: Callable[[], None], count: int) -> Cost:
    """Mean nanoseconds of `count` calls by either clock."""
    wall, cpu = time.monotonic_ns(), time.thread_time_ns()
    for _ in range(count):
        step()
    cpu, wall = time.thread_time_ns() - cpu, time.monotonic_ns() - wall
    return {"wall": wall / count, "cpu": cpu / count}


def switched(
    part: str, step: Callable[[], None], turn: Callable[[bool], None], rounds: int, block: int, settling: int
) -> list[dict[str, Cost]]:
    """Blocks of `block` steps with (B) and without (A, C), each after `settling` steps that are not timed."""
    shuffle = random.Random(0)
    result = []
    for number in range(rounds):
        costs: dict[str, Cost] = {}
        for arm in shuffle.sample("ABC", 3):
            turn(arm == "B")
            cost_of(step, settling)
            costs[arm] = cost_of(step, block)
        result.append(costs)
        if number % 20 == 19:
            print(f"  {part}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    turn(True)
    return result


def run(config: dict[str, Any], agent: core.Agent) -> dict[str, list[dict[str, Cost]]]:
    """All parts."""
    step = steady_step(config["backend"])
    cost_of(step, 20)  # compiles
    step_ns = cost_of(step, 200)["wall"]
    block, settling = (max(10, round(share / step_ns)) for share in (config["block_ms"] * 1e6, SETTLING_NS))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    capture, everything = Capture(agent), Everything(agent)
    result = {
        "capture": switched("capture", step, capture.turn, config["rounds"], block, settling),
        "everything": switched("everything", step, everything.turn, config["everything_rounds"], block, settling),
    }
    after = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if after != before:
        raise SystemExit(f"the steady loop compiled {after - before} graphs while it was measured")
    compile_often()
    often = switched("often", compile_often, capture.turn, config["often_rounds"], 1, 1)
    result["often"] = [
        {arm: {k: ns / VERSIONS for k, ns in cost.items()} for arm, cost in arms.items()} for arms in often
    ]
    return result


def main() -> None:
    """Run as the JSON argument says and write the result."""
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    agent = core.current()
    if agent is None:
        raise SystemExit("the agent is not in this process, so there is nothing to switch")
    result = run(config, agent)
    with open(config["out"], "w") as out:
        json.dump(result, out)


if __name__ == "__main__":
    main()
