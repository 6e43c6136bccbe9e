"""A classifier that collects garbage every fourth step, walking all objects there are. `--fixed`: when Python does."""

from __future__ import annotations

import gc

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, FEATURES, CLASSES = 128, 256, 10
EVERY = 4


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=120), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    centres = torch.randn(CLASSES, FEATURES)
    model = nn.Sequential(
        nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in watch.steps(options.steps):
        with watch.step(model):
            labels = torch.randint(CLASSES, (BATCH,))
            loss = F.cross_entropy(model(centres[labels] + torch.randn(BATCH, FEATURES)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not options.fixed and step % EVERY == 0:
                gc.collect()  # planted
    watch.report()


if __name__ == "__main__":
    main()
