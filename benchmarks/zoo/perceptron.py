"""What the healthy scripts of frameworks train: a perceptron, on vectors that are in memory.

The batch is large enough that gradients, which glibc gives back to the system and gets anew, take little of a step.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

BATCH, FEATURES, WIDTH, CLASSES = 512, 512, 1024, 10


class Vectors(Dataset):
    """Vectors in memory, handed out one by one."""

    def __init__(self, items: int) -> None:
        self.stored, self.items = torch.randn(1024, FEATURES), items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.stored[index % 1024], index % CLASSES


def network() -> nn.Module:
    """Three hidden layers."""
    return nn.Sequential(
        *(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)),
    )
