"""A CNN whose data set corrects each picture pixel by pixel in Python. `--fixed`: the same by a table of 256 values."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH, SIZE, CLASSES = 16, 48, 4
GAMMA = 0.8


class Corrected(Dataset):
    """Grey pictures of bytes, brighter the higher the class."""

    def __init__(self, items: int, *, table: bool) -> None:
        self.items = items
        self.pictures = torch.stack([torch.randint(40 * c, 40 * c + 130, (SIZE, SIZE)) for c in range(CLASSES)])
        self.table = (torch.arange(256) / 255) ** GAMMA if table else None

    def __len__(self) -> int:
        return self.items

    def correct(self, picture: torch.Tensor) -> torch.Tensor:
        if self.table is not None:
            return self.table[picture]
        return torch.tensor([[(value / 255) ** GAMMA for value in row] for row in picture.tolist()])  # planted

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % CLASSES
        return self.correct(self.pictures[label]).unsqueeze(0), label


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=350), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Flatten(), nn.Linear(16 * 3 * 3, CLASSES)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dataset = Corrected(options.steps * BATCH, table=options.fixed)
    for pictures, labels in DataLoader(dataset, batch_size=BATCH, shuffle=True):
        with watch.step(model):
            loss = F.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
