"""A classifier whose `collate_fn` normalises items one at a time as batches of one. `--fixed`: the batch at once."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH, FEATURES, CLASSES = 256, 256, 4
Item = tuple[torch.Tensor, int]


class Vectors(Dataset):
    """Vectors around one centre per class."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.stored = torch.randn(1024, FEATURES) + 0.3 * torch.randn(CLASSES, FEATURES).repeat(256, 1)

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Item:
        return self.stored[index % 1024], index % CLASSES


def normalise(vectors: torch.Tensor) -> torch.Tensor:
    """Zero mean and unit length in each row of (rows, FEATURES)."""
    return F.normalize(vectors - vectors.mean(dim=1, keepdim=True), dim=1)


def collate_each(items: list[Item]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [normalise(vector.unsqueeze(0)) for vector, _ in items]  # planted
    return torch.cat(rows), torch.tensor([label for _, label in items])


def collate_stacked(items: list[Item]) -> tuple[torch.Tensor, torch.Tensor]:
    return normalise(torch.stack([vector for vector, _ in items])), torch.tensor([label for _, label in items])


def main() -> None:
    """Train for the given number of steps."""
    options, watch = parse(steps=600), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    collate = collate_stacked if options.fixed else collate_each
    loader = DataLoader(Vectors(options.steps * BATCH), batch_size=BATCH, shuffle=True, collate_fn=collate)
    model = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    for vectors, labels in loader:
        with watch.step(model):
            loss = F.cross_entropy(model(vectors), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
