"""A classifier that is validated in every step, gradients recorded. `--fixed`: every 50 steps, without gradients."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, FEATURES, CLASSES = 64, 256, 10
VALIDATION = 512
EVERY = 50


def accuracy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of (items, FEATURES) that are told right."""
    scores = model(inputs)  # planted
    return (scores.argmax(1) == labels).float().mean().item()


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=600), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    centres = torch.randn(CLASSES, FEATURES)
    held_labels = torch.randint(CLASSES, (VALIDATION,))
    held_out = centres[held_labels] + torch.randn(VALIDATION, FEATURES)
    model = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in watch.steps(options.steps):
        with watch.step(model):
            labels = torch.randint(CLASSES, (BATCH,))
            loss = F.cross_entropy(model(centres[labels] + torch.randn(BATCH, FEATURES)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not options.fixed:
                accuracy(model, held_out, held_labels)
            elif step % EVERY == 0:
                with torch.no_grad():
                    accuracy(model, held_out, held_labels)
    watch.report()


if __name__ == "__main__":
    main()
