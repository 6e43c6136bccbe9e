"""A multilayer perceptron and a DataLoader whose worker is always ahead: making a batch costs less than using it."""

from __future__ import annotations

import torch
from common import Watch, parse
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

BATCH, FEATURES = 192, 256


class Table(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of a table in memory, taken by whole batches."""

    def __init__(self, rows: int) -> None:
        self.features = torch.randn(rows, FEATURES)
        self.labels = torch.randint(0, 10, (rows,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.features[rows], self.labels[rows]


def main() -> None:
    options, watch = parse(steps=140), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    table = Table(BATCH * options.steps)
    batches = BatchSampler(RandomSampler(table), BATCH, drop_last=True)
    loader = DataLoader(table, batch_size=None, sampler=batches, num_workers=1, prefetch_factor=4)
    model = nn.Sequential(
        *(nn.Linear(FEATURES, 1536), nn.ReLU()),
        *(nn.Linear(1536, 1536), nn.ReLU()),
        nn.Linear(1536, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for features, labels in loader:
        with watch.step(model):
            loss = F.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watch.report()


if __name__ == "__main__":
    main()
