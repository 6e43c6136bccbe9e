"""How much longer a training step takes on a CPU behind a call of the model on other data.

    python benchmarks/cold_caches.py [--blocks 20]

The call fills caches and the heap with its own data, so that leaving it out saves more than its own time. A ceiling has
to allow for that (`PIPELINE.cold_tensors` and, behind a copy of the model, which also leaves the allocator other
blocks, `PIPELINE.cold_copies` in stepscope/diagnose/gains.py). In one process, blocks of training steps with
and without the call take turns; the training part is timed by itself. The result goes into RESULTS.md.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from results import RESULTS, machine, put_between_markers
from torch import nn
from torch.nn import functional as F

BATCH, CLASSES = 32, 10
COPY = 0  # in place of a call: a copy of the model that replaces the one before
TIMES = (1, 4, 8, COPY)  # the call's batch, in training batches
STEPS, DROPPED = 30, 5  # of a block; the first ones still find the caches of the block before
WARMUP = 30


class Encoder(nn.Module):
    """One layer of attention over 16 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(items, 16, 128) to (items, CLASSES)."""
        scores: torch.Tensor = self.head(self.layer(inputs).mean(1))
        return scores


def mlp(width: int, hidden: int) -> nn.Module:
    """Two hidden layers."""
    layers = [nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, CLASSES))


def cnn() -> nn.Module:
    """Two convolutions."""
    first, second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3, 2)
    rest = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)]
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *rest)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP, 64 to 128": (lambda: mlp(64, 128), (64,)),
    "MLP, 256 to 512": (lambda: mlp(256, 512), (256,)),
    "MLP, 512 to 1024": (lambda: mlp(512, 1024), (512,)),
    "CNN, 24 x 24": (cnn, (3, 24, 24)),
    "transformer, 16 x 128": (Encoder, (16, 128)),
}


@dataclass(frozen=True)
class Block:
    """Means of the training part without and behind the call, and of the call, in ms."""

    without_ms: float
    behind_ms: float
    call_ms: float

    @property
    def slower(self) -> float:
        """By which share of its time without the call the training part is longer behind it."""
        return self.behind_ms / self.without_ms - 1.0

    @property
    def saved(self) -> float:
        """What the training part gains without the call, as a share of the shorter of both."""
        return (self.behind_ms - self.without_ms) / min(self.call_ms, self.behind_ms)


def blocks(name: str, times: int, count: int) -> list[Block]:
    """Pairs of blocks, in alternating order."""
    make, shape = MODELS[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs, labels = torch.randn(BATCH, *shape), torch.randint(CLASSES, (BATCH,))
    others, answers = torch.randn(BATCH * times, *shape), torch.randint(CLASSES, (BATCH * times,))
    kept = [model]

    def train() -> None:
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def call() -> None:
        if times == COPY:
            kept[0] = copy.deepcopy(model)
            return
        with torch.no_grad():
            (model(others).argmax(1) == answers).float().mean().item()

    def timed(extra: bool, steps: int = STEPS) -> tuple[float, float]:
        trained, called = [], []
        for _ in range(steps):
            start = time.perf_counter()
            train()
            middle = time.perf_counter()
            if extra:
                call()
            trained.append((middle - start) * 1e3)
            called.append((time.perf_counter() - middle) * 1e3)
        return statistics.mean(trained[DROPPED:]), statistics.mean(called[DROPPED:])

    timed(True, WARMUP)
    found = []
    for number in range(count):
        means = {extra: timed(extra) for extra in ((False, True) if number % 2 else (True, False))}
        found.append(Block(means[False][0], *means[True]))
    return found


def row(name: str, times: int, found: list[Block]) -> str:
    """A line of the table: medians, and quartiles of what is compared within a pair of blocks."""
    middle = [
        statistics.median(getattr(block, key) for block in found) for key in ("without_ms", "behind_ms", "call_ms")
    ]
    slower = statistics.quantiles([block.slower for block in found], n=4)
    saved = statistics.quantiles([block.saved for block in found], n=4)
    shares = [" | ".join([f"{each[1]:+.0%}", f"{each[0]:+.0%} to {each[2]:+.0%}"]) for each in (slower, saved)]
    return f"| {name} | {times or 'copy'} | " + " | ".join(f"{ms:.2f}" for ms in middle) + f" | {' | '.join(shares)} |"


def main() -> None:
    """Measure, print, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks for each row (20)")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lines = [
        f"Made with `python benchmarks/cold_caches.py`: medians and quartiles of {options.blocks} pairs of blocks.",
        "",
        *(f"- {key}: {value}" for key, value in machine("torch").items()),
        "",
        "| model | call's batch, in training batches | training, without, ms | behind the call, ms | call, ms "
        "| slower | quartiles | of the shorter of both | quartiles |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        for times in TIMES:
            lines.append(row(name, times, blocks(name, times, options.blocks)))
            print(lines[-1], flush=True)
    put_between_markers(RESULTS, "cold_caches", "\n".join(lines))


if __name__ == "__main__":
    main()
