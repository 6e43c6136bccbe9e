"""The training loop that overhead is measured on: a DataLoader, small layers, backward, an optimizer.

    python loop.py '{"mode": "calibrate", "threads": N, "out": FILE}'
    python loop.py '{"mode": "mixed", "threads": N, "repeats": {...}, "seconds": S, "out": FILE}'
    python loop.py '{"mode": "switched", "threads": N, "repeats": {...}, "rounds": R, "block_ms": M, "clock": CLOCK,
                     "beside": FILE or null, "metrics": BOOL, "out": FILE}'

`mixed` goes round steps of several lengths, giving each length the same time, so that one process measures all of
them under the same conditions. A step's length is set by how often one layer is applied, which is calibrated once and
then the same for every arm. The result in `out` is {"<length>": [[start_ns, end_ns], …]} on the monotonic clock.
`switched` needs the recorder's agent in this process and takes its hooks out and in again between blocks of the same
loop: {"<length>": [{"A": ns, "B": ns, "C": ns}, …]}, the mean step of each block of a round, hooks in for B, by the
"wall" clock or by this "thread"'s processor time. `beside` will hold the number of a process that A and C stop. With
`metrics` it is these alone that go in and out, and a step clips its gradients.
There the length "noop" trains a single weight: what is left of a step is what PyTorch, and a recorder, cost; "unfed"
is the shortest length on a batch that no loader was asked for.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 256
BATCH = 32
LENGTHS_MS = (1, 10, 100)
WARM_UP_SECONDS = 1.0
NOOP, UNFED = "noop", "unfed"
# A block holds several of the recorder's batches of steps, so that what these cost is in every block in equal parts;
# the steps before it are for the caches, and for the agent to find its way into the loop again.
SETTLING_NS = 120_000_000
BESIDE_SECONDS = 20.0  # to wait for the process beside


def batches(width: int, batch: int) -> Iterator[torch.Tensor]:
    """Endless batches from a loader in this process."""
    loader = DataLoader(TensorDataset(torch.randn(batch * 500, width)), batch_size=batch, shuffle=True)
    while True:
        for (inputs,) in loader:
            yield inputs


class Trainer:
    """One layer, applied as often as the step is long."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=1e-3)
        self.batches = batches(WIDTH, BATCH)
        self.batch = torch.randn(BATCH, WIDTH)

    def step(self, repeats: int, fed: bool = True) -> None:
        """One training step."""
        x = next(self.batches) if fed else self.batch
        for _ in range(repeats):
            x = torch.relu(self.layer(x))
        loss = x.square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def calibrate(trainer: Trainer) -> dict[str, int]:
    """How often the layer must be applied for each length: a line through two measured step times."""
    few, many = 2, 60
    times_ms = {}
    for repeats in (few, many):
        samples = []
        for _ in range(60):
            begin = time.monotonic_ns()
            trainer.step(repeats)
            samples.append(time.monotonic_ns() - begin)
        times_ms[repeats] = sorted(samples)[len(samples) // 2] / 1e6
    slope = (times_ms[many] - times_ms[few]) / (many - few)
    fixed = times_ms[few] - few * slope
    return {str(length): max(1, round((length - fixed) / slope)) for length in LENGTHS_MS}


def mixed(trainer: Trainer, repeats: dict[str, int], seconds: float) -> dict[str, list[list[int]]]:
    """Steps of all lengths in turn for `seconds`, after a warm-up."""
    longest = max(int(length) for length in repeats)
    rows: dict[str, list[list[int]]] = {length: [] for length in repeats}
    warm = time.monotonic() + WARM_UP_SECONDS
    end = warm + seconds
    while time.monotonic() < end:
        keep = time.monotonic() >= warm
        for length, count in repeats.items():
            begin = time.monotonic_ns()
            for _ in range(longest // int(length)):
                trainer.step(count)
                now = time.monotonic_ns()
                if keep:
                    rows[length].append([begin, now])
                begin = now
    return rows


def noop(clips: bool) -> Callable[[], None]:
    """A step that trains a single weight."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    source = batches(1, 1)

    def step() -> None:
        next(source)
        optimizer.zero_grad()
        weight.sum().backward()
        if clips:
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()

    return step


class Switch:
    """Recording of this process, and a process beside it, on and off."""

    def __init__(self, beside: str | None, metrics: bool) -> None:
        from stepscope.record.agent import core

        agent = core.current()
        if agent is None:
            raise SystemExit("the agent is not in this process, so there is nothing to switch")
        self._probes = agent.probes
        self._metrics = agent.guard.pair("metrics", print).switch if metrics else None
        self._beside = _number_in(beside) if beside else None

    def turn(self, on: bool) -> None:
        """On or off, after both, so that every block begins alike."""
        self._probes.resume()
        self._probes.suspend("benchmark")
        if self._metrics is not None:
            self._metrics.off = not on
        if on or self._metrics is not None:
            self._probes.resume()
        if self._beside is not None:
            os.kill(self._beside, signal.SIGCONT if on else signal.SIGSTOP)


def _number_in(path: str) -> int:
    end = time.monotonic() + BESIDE_SECONDS
    while time.monotonic() < end:
        try:
            with open(path) as file:
                return int(file.read())
        except (OSError, ValueError):
            time.sleep(0.05)
    raise SystemExit(f"no process beside was named in {path}")


def switched(trainer: Trainer, config: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """Blocks with (B) and without (A, C) recording, in another order every round."""
    switch = Switch(config["beside"], config.get("metrics", False))
    clock = time.monotonic_ns if config["clock"] == "wall" else time.thread_time_ns
    steps: dict[str, Callable[[], None]] = (
        {NOOP: noop(config.get("metrics", False))} if config["clock"] == "thread" else {}
    )
    for length, count in config["repeats"].items():
        steps[length] = partial(trainer.step, count)
    if config["clock"] == "thread" and config["repeats"]:
        steps[UNFED] = partial(trainer.step, config["repeats"][min(config["repeats"], key=int)], fed=False)
    shuffle = random.Random(0)
    result: dict[str, list[dict[str, float]]] = {}
    for length, step in steps.items():
        warm = max(10, round(200 / int(length))) if length.isdigit() else 100
        time_steps(step, warm, clock)
        step_ns = time_steps(step, warm, clock)
        block, settling = (max(5, round(share / step_ns)) for share in (config["block_ms"] * 1e6, SETTLING_NS))
        result[length] = []
        for number in range(config["rounds"]):
            costs = {}
            for arm in shuffle.sample("ABC", 3):
                switch.turn(arm == "B")
                time_steps(step, settling, clock)
                costs[arm] = time_steps(step, block, clock)
            result[length].append(costs)
            if number % 20 == 19:
                print(f"  {length}: round {number + 1} of {config['rounds']}", file=sys.stderr, flush=True)
    switch.turn(True)
    return result


def time_steps(step: Callable[[], None], count: int, clock: Callable[[], int]) -> float:
    """Mean nanoseconds of `count` steps."""
    begin = clock()
    for _ in range(count):
        step()
    return (clock() - begin) / count


def main() -> None:
    """Run as the JSON argument says and write the result."""
    config = json.loads(sys.argv[1])
    torch.set_num_threads(config["threads"])
    print("ready", flush=True)
    if config["mode"] == "calibrate":
        result: object = calibrate(Trainer())
    elif config["mode"] == "switched":
        result = switched(Trainer(), config)
    else:
        result = mixed(Trainer(), config["repeats"], config["seconds"])
    with open(config["out"], "w") as out:
        json.dump(result, out)


if __name__ == "__main__":
    main()
