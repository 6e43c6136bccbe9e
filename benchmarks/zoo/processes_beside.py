"""A small network, and beside it three processes of the script that prepare something for later. `--fixed`: none."""

from __future__ import annotations

import subprocess
import sys

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, FEATURES, CLASSES = 128, 512, 10
PREPARE = "for _ in range(10_000_000): sorted(range(1000), key=lambda number: -number)"


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=400), Watch()
    torch.manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES)
    layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.LayerNorm(FEATURES)) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    beside = []
    for _ in range(0 if options.fixed else 3):
        beside.append(subprocess.Popen([sys.executable, "-c", PREPARE]))  # planted
    try:
        for _ in watch.steps(options.steps):
            with watch.step(model):
                labels = torch.randint(CLASSES, (BATCH,))
                loss = F.cross_entropy(model(centres[labels] + torch.randn(BATCH, FEATURES)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    finally:
        for process in beside:
            process.kill()
            process.wait()
    watch.report()


if __name__ == "__main__":
    main()
