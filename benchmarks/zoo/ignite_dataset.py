"""An ignite trainer whose data set reads numbers from text for each item. `--fixed`: it read them once."""

from __future__ import annotations

import torch
from common import Watch, parse
from ignite.engine import create_supervised_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH, FEATURES, CLASSES = 64, 512, 10


class Table(Dataset):
    """Rows of comma-separated numbers."""

    def __init__(self, items: int, ready: bool) -> None:
        rows = torch.randn(512, FEATURES)
        self.lines = [",".join(f"{value:.6f}" for value in row) for row in rows.tolist()]
        self.items, self.ready = items, rows if ready else None

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = self.read(self.lines[index % 512]) if self.ready is None else self.ready[index % 512]
        return row, index % CLASSES

    def read(self, line: str) -> torch.Tensor:
        return torch.tensor([float(value) for value in line.split(",")])  # planted


def main() -> None:
    options, watch = parse(steps=200), Watch()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch.after(optimizer)
    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
    trainer.run(DataLoader(Table(options.steps * BATCH, options.fixed), batch_size=BATCH, shuffle=True), max_epochs=1)
    watch.report()


if __name__ == "__main__":
    main()
