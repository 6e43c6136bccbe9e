"""Wide layers on small batches, updated tensor by tensor. `--fixed`: by a fused optimizer."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F

BATCH, FEATURES, WIDTH, CLASSES = 32, 512, 1024, 10


def main() -> None:
    options, watch = parse(steps=400), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    hidden = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=options.fixed)  # planted
    inputs, labels = torch.randn(32 * BATCH, FEATURES), torch.randint(0, CLASSES, (32 * BATCH,))
    for step in watch.steps(options.steps):
        rows = slice(step % 32 * BATCH, (step % 32 + 1) * BATCH)
        with watch.step(model):
            loss = F.cross_entropy(model(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
