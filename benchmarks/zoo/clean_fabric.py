"""A loop of one's own with Lightning Fabric, data in memory."""

from __future__ import annotations

import lightning
import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH, FEATURES, CLASSES = 128, 512, 10


class Vectors(Dataset):
    """Vectors in memory, handed out by the batch."""

    def __init__(self, items: int) -> None:
        self.stored, self.items = torch.randn(1024, FEATURES), items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.stored[index % 1024], index % CLASSES


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()),
        *(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)),
    )


def main() -> None:
    options, watch = parse(steps=150), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = DataLoader(Vectors(options.steps * BATCH), batch_size=BATCH, shuffle=True)
    for inputs, labels in fabric.setup_dataloaders(loader):
        with watch.step(model):
            loss = F.cross_entropy(model(inputs), labels)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    watch.report()


if __name__ == "__main__":
    main()
