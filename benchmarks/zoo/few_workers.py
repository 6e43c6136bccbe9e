"""A classifier on items that a remote store serves after some milliseconds each, with one worker. `--fixed`: six."""

from __future__ import annotations

import time

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH, FEATURES, CLASSES = 16, 256, 4
ANSWER_S = 0.002  # how long the store takes for an item; waiting needs no core


class RemoteItems(Dataset):
    """Vectors around one centre per class."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.centres = torch.randn(CLASSES, FEATURES)

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(ANSWER_S)
        label = index % CLASSES
        return self.centres[label] + torch.randn(FEATURES), label


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=130), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    workers = 6 if options.fixed else 1
    loader = DataLoader(RemoteItems(options.steps * BATCH), batch_size=BATCH, num_workers=workers)  # planted
    model = nn.Sequential(
        nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for items, labels in loader:
        with watch.step(model):
            loss = F.cross_entropy(model(items), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
