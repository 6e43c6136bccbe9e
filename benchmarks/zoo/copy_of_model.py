"""A regression that keeps a copy of the model from every step. `--fixed`: from every fiftieth."""

from __future__ import annotations

import copy

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, FEATURES, WIDTH, OUTPUTS = 16, 64, 1024, 32
EVERY = 50


def keep(model: nn.Module) -> nn.Module:
    """A copy that no later step changes."""
    return copy.deepcopy(model)  # planted


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=2000), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mixing = torch.randn(FEATURES, OUTPUTS)
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUTPUTS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    kept = keep(model)
    for step in watch.steps(options.steps):
        with watch.step(model):
            inputs = torch.randn(BATCH, FEATURES)
            loss = F.mse_loss(model(inputs), torch.tanh(inputs @ mixing))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not options.fixed or step % EVERY == 0:
                kept = keep(model)
    watch.report()
    assert kept is not model


if __name__ == "__main__":
    main()
