"""A training loop that loses time in many ways: decoding, a loop over items, Python, files, collections."""

from __future__ import annotations

import gc
import json
import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset

COLLECT_EVERY = 16  # steps


class Decoded(Dataset[torch.Tensor]):
    """Items that are made of text, number by number."""

    def __len__(self) -> int:
        return 16384

    def __getitem__(self, index: int) -> torch.Tensor:
        text = " ".join(str((index * 31 + number) % 97) for number in range(64))
        return torch.tensor([float(word) for word in text.split()])


def norms(hidden: torch.Tensor) -> torch.Tensor:
    """Item by item."""
    total = hidden.new_zeros(())
    for row in hidden:
        total = total + row.norm() * row.mean()
    return total


def describe(step: int, batch: torch.Tensor) -> str:
    """What is logged of a step."""
    return json.dumps([[round(value, 3) for value in row] for row in batch.tolist()])[: 80 + step % 3]


def main(steps: int, log: str) -> None:
    """Train."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Decoded(), batch_size=64)
    batches = iter(loader)
    with open(log, "w", encoding="utf-8") as file:
        for step in range(steps):
            batch = next(batches)
            loss = norms(model(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            file.write(describe(step, batch) + "\n")
            file.flush()
            os.fsync(file.fileno())
            if step % COLLECT_EVERY == 0:
                gc.collect()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
