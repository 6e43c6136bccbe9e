"""A classifier on a small data set: epochs of eight batches, workers started anew for each. `--fixed`: they persist."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, BATCHES, FEATURES, CLASSES = 128, 8, 512, 10


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=480), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    labels = torch.randint(CLASSES, (BATCH * BATCHES,))
    data = TensorDataset(torch.randn(CLASSES, FEATURES)[labels] + torch.randn(len(labels), FEATURES), labels)
    loader = DataLoader(data, batch_size=BATCH, num_workers=1, persistent_workers=options.fixed)  # planted
    model = nn.Sequential(nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(options.steps // BATCHES):
        for inputs, targets in loader:
            with watch.step(model):
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
