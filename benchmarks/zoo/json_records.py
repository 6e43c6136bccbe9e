"""A regression that keeps what it predicted as JSON lines, made in every step. `--fixed`: the mean alone is kept."""

from __future__ import annotations

import json

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, FEATURES, OUTPUTS = 256, 64, 32


def describe(step: int, outputs: torch.Tensor, targets: torch.Tensor) -> list[str]:
    """A line for every item."""
    lines = []
    for output, target in zip(outputs.tolist(), targets.tolist(), strict=True):  # planted
        rounded = {"output": [round(x, 4) for x in output], "target": [round(x, 4) for x in target]}
        lines.append(json.dumps({"step": step, **rounded}))
    return lines


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=300), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mixing = torch.randn(FEATURES, OUTPUTS)
    model = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, OUTPUTS))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    lines: list[str] = []
    for step in watch.steps(options.steps):
        with watch.step(model):
            inputs = torch.randn(BATCH, FEATURES)
            targets = torch.tanh(inputs @ mixing)
            outputs = model(inputs)
            loss = F.mse_loss(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if options.fixed:
                lines.append(json.dumps({"step": step, "loss": loss.item()}))
            else:
                lines += describe(step, outputs, targets)
    watch.report()


if __name__ == "__main__":
    main()
