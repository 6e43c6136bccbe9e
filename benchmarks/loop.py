"""The training loop that overhead is measured on: a DataLoader, small layers, backward, an optimizer.

    python loop.py '{"mode": "calibrate" | "mixed" | "noop", "threads": N, "seconds": S, "repeats": {...}, "out": FILE}'

`mixed` goes round steps of several lengths, giving each length the same time, so that one process measures all of
them under the same conditions. A step's length is set by how often one layer is applied, which is calibrated once and
then the same for every arm. The result in `out` is {"<length>": [[start_ns, end_ns], …]} on the monotonic clock.
`noop` trains a single weight: what is left of a step is what PyTorch, and a recorder, cost by themselves.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 256
BATCH = 32
LENGTHS_MS = (1, 10, 100)
WARM_UP_SECONDS = 1.0
NOOP = "noop"


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

    def step(self, repeats: int) -> None:
        """One training step."""
        x = next(self.batches)
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


def noop(seconds: float) -> dict[str, list[list[int]]]:
    """Steps of a single weight; a row is a block of 100 of them divided by 100."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    source = batches(1, 1)
    rows = []
    end = time.monotonic() + WARM_UP_SECONDS + seconds
    warm = end - seconds
    while time.monotonic() < end:
        begin = time.monotonic_ns()
        for _ in range(100):
            next(source)
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
        now = time.monotonic_ns()
        if time.monotonic() >= warm:
            rows.append([begin, begin + (now - begin) // 100])
    return {NOOP: rows}


def main() -> None:
    """Run as the JSON argument says and write the result."""
    config = json.loads(sys.argv[1])
    torch.set_num_threads(config["threads"])
    print("ready", flush=True)
    if config["mode"] == "calibrate":
        result: object = calibrate(Trainer())
    elif config["mode"] == NOOP:
        result = noop(config["seconds"])
    else:
        result = mixed(Trainer(), config["repeats"], config["seconds"])
    with open(config["out"], "w") as out:
        json.dump(result, out)


if __name__ == "__main__":
    main()
