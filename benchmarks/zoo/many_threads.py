"""A small network with sixteen threads to each operator, whatever the machine has. `--fixed`: one."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, FEATURES, CLASSES = 128, 256, 10


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=250), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1 if options.fixed else 16)  # planted
    centres = torch.randn(CLASSES, FEATURES)
    layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.LayerNorm(FEATURES)) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in watch.steps(options.steps):
        with watch.step(model):
            labels = torch.randint(CLASSES, (BATCH,))
            loss = F.cross_entropy(model(centres[labels] + torch.randn(BATCH, FEATURES)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
