"""A classifier that logs norms of its parameters in every step, each line forced to disk. `--fixed`: every 50 steps."""

from __future__ import annotations

import os
import tempfile
from typing import TextIO

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, FEATURES, CLASSES = 64, 256, 10
EVERY = 50


def write(log: TextIO, step: int, model: nn.Module) -> None:
    """A line for each parameter, safe on disk before the next one."""
    for name, parameter in model.named_parameters():
        print(step, name, parameter.norm().item(), file=log, flush=True)
        os.fsync(log.fileno())  # planted


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=450), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    centres = torch.randn(CLASSES, FEATURES)
    layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with tempfile.NamedTemporaryFile("w", suffix=".log", dir=".") as log:
        for step in watch.steps(options.steps):
            with watch.step(model):
                labels = torch.randint(CLASSES, (BATCH,))
                loss = F.cross_entropy(model(centres[labels] + torch.randn(BATCH, FEATURES)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if not options.fixed or step % EVERY == 0:
                    write(log, step, model)
    watch.report()


if __name__ == "__main__":
    main()
